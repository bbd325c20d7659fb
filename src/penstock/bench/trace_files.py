"""Traces of two forms, gzipped or not, and the users who replay one of them. Owns the forms, the order of
requests, and the making of tokens from ids; replays nothing.

Mooncake's has one request per line, its prompt as ids of blocks of 512 tokens:

    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, ...]}

An id stands for the content of its block and of all before it, as a key does here. Only full blocks have a
key, so the id of a prompt's unfinished last block is left out. Times and output lengths are not used.

That of coding agents has one conversation per line:

    {"id": "trace_0003.0", "parent": "trace_0003", "block_tokens": 64,
     "requests": [[t, prompt tokens, output tokens, think seconds, blocks shared with the request before, [ids
     of the new blocks]], ...]}

`t` is seconds since the conversation began, and `think` the pause before a request is sent. A prompt is the
first blocks of the one before and then new ones; only full blocks have an id. Equal ids stand for equal
tokens, within a conversation and its sub-agents.

Users send prompts of tokens, all made before the clock starts. A token depends on the seed, its block's id,
its place in the block, and whose block it is; equal blocks are equal tokens, and prompts share what the
recorded ones shared. The tokens behind a prompt's last full block are its own.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from itertools import dropwhile, islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError

BLOCK_TOKENS = 512  # of Mooncake's blocks
LEAST_REQUESTS = 3  # of a conversation that is replayed: with fewer there is little that could come back
INTERLEAVES = ("time", "turns")
# what reading a file may raise, packed or not
_UNREADABLE = (OSError, EOFError, zlib.error, UnicodeDecodeError)
_GZIP = b"\x1f\x8b"
Tokens = NDArray[np.int32]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's step and its two multipliers
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_FIELDS = ("t", "prompt tokens", "output tokens", "think seconds", "blocks shared", "ids of new blocks")


@dataclass(frozen=True, slots=True)
class Trace:
    """The prompts of one file, in order, as keys of full blocks. One-off documents among them are no part of
    its figures."""

    name: str
    prompts: list[list[bytes]]
    num_tokens: int  # of recorded prompts, unfinished blocks included
    num_scans: int = 0  # one-off documents among the prompts, of `scan_blocks` blocks each
    scan_blocks: int = 0
    # how conversations were put in order; None: there are none, and the order is the file's
    interleave: str | None = None

    @property
    def num_requests(self) -> int:
        return len(self.prompts) - self.num_scans

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.prompts)) - self.num_scans * self.scan_blocks

    @property
    def num_distinct(self) -> int:
        return len({key for keys in self.prompts for key in keys}) - self.num_scans * self.scan_blocks


def read_any(path: Path, num_requests: int | None = None, interleave: str | None = None) -> Trace:
    """A Mooncake trace in file order, or conversations of agents, which all begin at once. `interleave`
    orders their requests: by recorded times, or in turns."""
    if is_agentic(path):
        return _agentic_trace(path, num_requests, interleave or INTERLEAVES[0])
    if interleave is not None:
        raise ConfigError(
            "--interleave is for traces of conversations; a Mooncake trace has an order of its own"
        )
    return read_trace(path, num_requests)


def with_scan(trace: Trace, num: int, num_blocks: int) -> Trace:
    """The same trace with `num` documents of `num_blocks` blocks, none of which comes back, spread evenly
    over it."""
    prompts = list(trace.prompts)
    for number in reversed(range(num)):
        document = [_key("scan", number, depth) for depth in range(num_blocks)]
        prompts.insert((2 * number + 1) * len(trace.prompts) // (2 * num), document)
    return replace(trace, prompts=prompts, num_scans=num, scan_blocks=num_blocks)


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    """The position and content of each non-empty line."""
    try:
        with path.open("rb") as raw:
            packed = raw.peek(len(_GZIP))[: len(_GZIP)] == _GZIP
            for number, line in enumerate(gzip.GzipFile(fileobj=raw) if packed else raw, 1):
                where, text = f"{path}, line {number}", line.decode("utf-8")
                try:
                    if text.strip():
                        yield where, json.loads(text)
                except ValueError as error:
                    raise ConfigError(f"{where}: not JSON: {error}") from None
    except _UNREADABLE as error:
        raise ConfigError(f"the trace {path} cannot be read: {error}") from None


def _require(condition: object, where: str, expected: str) -> None:
    if not condition:
        raise ConfigError(f"{where}: {expected}")


def _require_blocks(prompts: Iterable[list[bytes]], path: Path) -> None:
    if not any(prompts):
        raise ConfigError(
            f"the trace {path} has no prompt with a full block of {BLOCK_TOKENS} tokens: there is nothing "
            "to keep"
        )


def _are_whole(*values: object) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values)


# --------------------------------------------------------------------------------------------------- Mooncake


def read_trace(path: Path, num_requests: int | None = None) -> Trace:
    """The first `num_requests` of them, or all."""
    prompts: list[list[bytes]] = []
    num_tokens = 0
    for where, fields in islice(_lines(path), num_requests):
        length, ids = _mooncake_prompt(fields, where)
        num_tokens += length
        prompts.append([_key(i) for i in ids[: length // BLOCK_TOKENS]])
    _require_blocks(prompts, path)
    return Trace(path.name, prompts, num_tokens)


def _mooncake_prompt(fields: Any, where: str) -> tuple[int, list[int]]:
    _require(isinstance(fields, dict), where, "expected an object with input_length and hash_ids")
    length, ids = fields.get("input_length"), fields.get("hash_ids")
    _require(
        isinstance(ids, list) and _are_whole(length, *ids),
        where,
        "input_length must be a whole number and hash_ids a list of them, none negative",
    )
    _require(
        len(ids) == -(-length // BLOCK_TOKENS),
        where,
        f"{len(ids)} hash_ids for an input_length of {length}; one stands for {BLOCK_TOKENS} tokens",
    )
    _require(
        len(set(ids)) == len(ids),
        where,
        "hash_ids names a block twice; an id stands for its block and all before it",
    )
    return length, ids


# ----------------------------------------------------------------------------------------------------- agents


class RecordedRequest(NamedTuple):
    """One request of a conversation."""

    at_s: float  # since the conversation began
    num_tokens: int  # of its prompt
    num_output: int
    think_s: float  # between the answer before and this request
    blocks: NDArray[np.int64]  # ids of the prompt's full blocks


@dataclass(frozen=True, slots=True)
class RecordedConversation:
    """The requests of one agent or sub-agent."""

    id: str
    parent: str | None  # whose sub-agent it is
    block_tokens: int
    requests: tuple[RecordedRequest, ...]

    @property
    def family(self) -> str:
        """Conversations of one family share their ids."""
        return self.parent or self.id

    def cut(self, context: int, most: int) -> RecordedConversation:
        """Its first `most` requests of up to `context` tokens that follow one another: longer ones at the
        start are left out, and the first longer one after them ends it."""
        fits = takewhile(
            lambda one: one.num_tokens <= context,
            dropwhile(lambda one: one.num_tokens > context, self.requests),
        )
        return replace(self, requests=tuple(islice(fits, most)))


def is_agentic(path: Path) -> bool:
    """Whether the file's first line looks like a conversation. False if it cannot be read: the reader reports
    why."""
    try:
        _, fields = next(_lines(path), ("", None))
    except ConfigError:
        return False
    return isinstance(fields, dict) and "requests" in fields


def read_conversations(path: Path) -> list[RecordedConversation]:
    found = [_conversation(fields, where) for where, fields in _lines(path)]
    ids = [conversation.id for conversation in found]
    if len(set(ids)) != len(ids):
        raise ConfigError(f"the trace {path} has two conversations with the same id")
    return found


def select(
    conversations: list[RecordedConversation], users: int, context: int, most: int
) -> list[RecordedConversation]:
    """The first `users` of them that have enough requests of up to `context` tokens, each cut to `most` of
    those. Where the trace has too few, they come again as conversations of their own, which share nothing
    with the first."""
    cut = (conversation.cut(context, most) for conversation in conversations)
    enough = [one for one in cut if len(one.requests) >= min(LEAST_REQUESTS, most)]
    if not enough:
        raise ConfigError(
            f"the trace has no conversation with {LEAST_REQUESTS} requests of at most {context} tokens; "
            "raise --context"
        )
    return [_again(enough[number % len(enough)], 1 + number // len(enough)) for number in range(users)]


def _again(conversation: RecordedConversation, time: int) -> RecordedConversation:
    if time == 1:
        return conversation
    parent = None if conversation.parent is None else f"{conversation.parent}#{time}"
    return replace(conversation, id=f"{conversation.id}#{time}", parent=parent)


def _conversation(fields: Any, where: str) -> RecordedConversation:
    _require(
        isinstance(fields, dict) and isinstance(fields.get("requests"), list),
        where,
        "expected an object with id, block_tokens and a list of requests",
    )
    name, parent, block_tokens = fields.get("id"), fields.get("parent"), fields.get("block_tokens")
    named = isinstance(name, str) and name and isinstance(parent, str | None)
    _require(named, where, "id must be text, and parent text or null")
    _require(_are_whole(block_tokens) and block_tokens, where, "block_tokens must be a positive whole number")
    requests: list[RecordedRequest] = []
    blocks = np.empty(0, np.int64)
    for number, one in enumerate(fields["requests"], 1):
        requests.append(_recorded(one, blocks, block_tokens, f"{where}, request {number}"))
        blocks = requests[-1].blocks
    return RecordedConversation(name, parent, block_tokens, tuple(requests))


def _recorded(one: Any, before: NDArray[np.int64], block_tokens: int, where: str) -> RecordedRequest:
    """`before`: blocks of the request before."""
    is_list = isinstance(one, list) and len(one) == len(_FIELDS)
    _require(is_list, where, f"expected a list of {len(_FIELDS)}: {', '.join(_FIELDS)}")
    at_s, num_tokens, num_output, think_s, shared, new = one
    for value in (at_s, think_s):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_time = is_number and 0 <= value < float("inf")
        _require(is_time, where, "t and think seconds must be numbers, none negative")
    _require(
        _are_whole(num_tokens, num_output, shared) and num_tokens,
        where,
        "tokens and blocks shared must be whole numbers, none negative, and a prompt has at least one token",
    )
    _require(
        isinstance(new, list) and _are_whole(*new) and max(new, default=0) < 1 << 63,
        where,
        "the ids of new blocks must be a list of whole numbers below 2**63, none negative",
    )
    _require(
        shared <= len(before),
        where,
        f"it shares {shared} blocks with the request before, which has {len(before)}",
    )
    num_blocks = shared + len(new)
    _require(
        num_blocks == num_tokens // block_tokens,
        where,
        f"{num_blocks} blocks for {num_tokens} tokens; one stands for {block_tokens}",
    )
    blocks = np.concatenate([before[:shared], np.array(new, np.int64)])
    return RecordedRequest(at_s, num_tokens, num_output, think_s, blocks)


def _agentic_trace(path: Path, num_requests: int | None, interleave: str) -> Trace:
    requests: list[tuple[float, RecordedRequest, list[bytes]]] = []
    for conversation in read_conversations(path):
        keys = _keys(conversation)
        for number, (one, its) in enumerate(zip(conversation.requests, keys, strict=True)):
            requests.append((one.at_s if interleave == "time" else number, one, its))
    requests.sort(key=lambda each: each[0])  # stable: at the same time in the order of the file
    requests = requests[:num_requests]
    prompts, num_tokens = [keys for _, _, keys in requests], sum(one.num_tokens for _, one, _ in requests)
    _require_blocks(prompts, path)
    return Trace(path.name, prompts, num_tokens, interleave=interleave)


def _keys(conversation: RecordedConversation) -> list[list[bytes]]:
    """Of full blocks of Mooncake's size. Sub-agents share their parent's."""
    step, rest = divmod(BLOCK_TOKENS, conversation.block_tokens)
    _require(
        step and not rest,
        conversation.id,
        f"blocks of {conversation.block_tokens} tokens do not make up blocks of {BLOCK_TOKENS}",
    )
    owner = conversation.family.encode()
    return [_chain(one.blocks, step, owner) for one in conversation.requests]


def _chain(ids: NDArray[Any], size: int, key: bytes = b"") -> list[bytes]:
    """A key for each `size` ids, which stands for them and all before."""
    keys, width, raw = [], size * ids.itemsize, ids.tobytes()
    for end in range(width, len(raw) + 1, width):
        key = blake2b(key + raw[end - width : end], digest_size=16).digest()
        keys.append(key)
    return keys


@cache
def _key(*parts: str | int) -> bytes:
    return blake2b(repr(parts).encode(), digest_size=16).digest()


# ------------------------------------------------------------------------------------------------------ users


@dataclass(frozen=True, slots=True)
class Question:
    """One request as it is sent."""

    prompt: Tokens
    max_tokens: int
    think_s: float  # after the answer before


@dataclass(frozen=True, slots=True)
class User:
    """One conversation, replayed."""

    conversation: str
    asks: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class Asking:
    """The requests to replay, and how; lengths are in tokens of the trace."""

    trace: str
    users: int = 20
    context: int = 65536
    requests: int = 16  # of a conversation at most
    tokens: int = 200  # output at most
    think: float = 0.0  # factor of the recorded pauses
    max_think_s: float | None = None  # that a pause has then; the longest that were recorded are hours
    limit_s: float | None = None
    scale: int = 1  # all lengths are divided by this
    seed: int = 0
    # a sub-agent's ids are its own; "shared": they are its parent's, as they were recorded
    subagents: str = "apart"

    def users_of(self, conversations: list[RecordedConversation], vocab: int) -> list[User]:
        return [self._user(conversation, vocab) for conversation in conversations]

    def longest(self, conversations: list[RecordedConversation]) -> int:
        """The most tokens that one request has, prompt and output together."""
        return max(
            self._prompt_tokens(c, one.num_tokens) + self._output(one.num_output)
            for c in conversations
            for one in c.requests
        )

    def _user(self, conversation: RecordedConversation, vocab: int) -> User:
        owner = conversation.id if self.subagents == "apart" else conversation.family
        ids, places = np.unique(
            np.concatenate([one.blocks for one in conversation.requests]), return_inverse=True
        )
        content = _tokens(("block", owner, self.seed), ids, self._block_tokens(conversation), vocab)
        asks: list[Question] = []
        at = 0
        for number, one in enumerate(conversation.requests):
            blocks = content[places[at : at + len(one.blocks)]].reshape(-1)
            at += len(one.blocks)
            num_tail = self._prompt_tokens(conversation, one.num_tokens) - len(blocks)
            tail = _tokens(("tail", conversation.id, self.seed), np.array([number]), num_tail, vocab)[0]
            longest_s = float("inf") if self.max_think_s is None else self.max_think_s
            think_s = min(one.think_s * self.think, longest_s) if asks else 0.0
            asks.append(Question(np.concatenate([blocks, tail]), self._output(one.num_output), think_s))
        return User(conversation.id, tuple(asks))

    def _block_tokens(self, conversation: RecordedConversation) -> int:
        size, rest = divmod(conversation.block_tokens, self.scale)
        if rest:
            raise ConfigError(
                f"--scale {self.scale} does not divide the trace's blocks of {conversation.block_tokens} "
                "tokens"
            )
        return size

    def _prompt_tokens(self, conversation: RecordedConversation, num_tokens: int) -> int:
        blocks, tail = divmod(num_tokens, conversation.block_tokens)
        return max(1, blocks * self._block_tokens(conversation) + tail // self.scale)

    def _output(self, num_tokens: int) -> int:
        return max(1, min(num_tokens, self.tokens) // self.scale)


def _tokens(owner: tuple[str, str, int], ids: NDArray[np.int64], size: int, vocab: int) -> Tokens:
    """[len(ids), size], by splitmix64 over id and place."""
    salt = blake2b(repr(owner).encode(), digest_size=8).digest()
    x = ids.astype(np.uint64)[:, None] << np.uint64(16) | np.arange(size, dtype=np.uint64)
    x = (x ^ np.frombuffer(salt, "<u8")) + _GOLDEN  # wraps, as unsigned numbers in arrays do
    x = (x ^ (x >> np.uint64(30))) * _MIX[0]
    x = (x ^ (x >> np.uint64(27))) * _MIX[1]
    return ((x ^ (x >> np.uint64(31))) % np.uint64(vocab)).astype(np.int32)


def reusable(prompts: list[Tokens], block_tokens: int) -> list[int]:
    """How many tokens of each an infinite cache would have had, if they were asked one after the other: the
    full blocks that an earlier one began with, too, but never the last token."""
    seen: set[bytes] = set()
    found: list[int] = []
    for prompt in prompts:
        keys = block_keys(prompt, block_tokens)
        num = block_tokens * sum(1 for _ in takewhile(seen.__contains__, keys))
        found.append(min(num, len(prompt) - 1))
        seen.update(keys)
    return found


def block_keys(prompt: Tokens, block_tokens: int) -> list[bytes]:
    """Of its full blocks, each standing for its own tokens and all before it."""
    return _chain(prompt, block_tokens)
