"""Reads recorded conversations of coding agents: one per line, its prompts as ids of blocks. Owns the format; replays nothing.

    {"id": "trace_0003.0", "parent": "trace_0003", "block_tokens": 64,
     "requests": [[t, prompt tokens, output tokens, think seconds, blocks shared with the request before, [ids of the new blocks]], ...]}

`t` is seconds since the conversation began, and `think` the pause before a request is sent. A prompt is the first blocks of the one before
and then new ones; only full blocks have an id. Equal ids stand for equal tokens, within a conversation and its sub-agents.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import dropwhile, islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from penstock.bench.mooncake import UNREADABLE, is_whole, numbered_lines
from penstock.errors import ConfigError

LEAST_REQUESTS = 3  # of a conversation that is replayed: with fewer there is little that could come back
_FIELDS = ("t", "prompt tokens", "output tokens", "think seconds", "blocks shared", "ids of new blocks")


class Recorded(NamedTuple):
    """One request of a conversation."""

    at_s: float  # since the conversation began
    num_tokens: int  # of its prompt
    num_output: int
    think_s: float  # between the answer before and this request
    blocks: NDArray[np.int64]  # ids of the prompt's full blocks


@dataclass(frozen=True, slots=True)
class Conversation:
    """What one agent, or sub-agent, asked."""

    id: str
    parent: str | None  # whose sub-agent it is
    block_tokens: int
    requests: tuple[Recorded, ...]

    @property
    def family(self) -> str:
        """Conversations of one family share their ids."""
        return self.parent or self.id

    def cut(self, context: int, most: int) -> Conversation:
        """Its first `most` requests of up to `context` tokens that follow one another: longer ones at the start are left out, and the first
        longer one after them ends it."""
        fits = takewhile(lambda one: one.num_tokens <= context, dropwhile(lambda one: one.num_tokens > context, self.requests))
        return replace(self, requests=tuple(islice(fits, most)))


def is_agentic(path: Path) -> bool:
    """Whether the file's first line looks like a conversation. Says no where it cannot be read: whoever reads it says why."""
    try:
        _, first = next(numbered_lines(path), (0, ""))
        fields = json.loads(first)
    except (*UNREADABLE, ValueError):
        return False
    return isinstance(fields, dict) and "requests" in fields


def read_conversations(path: Path) -> list[Conversation]:
    try:
        found = [_parse(line, f"{path}, line {number}") for number, line in numbered_lines(path)]
    except UNREADABLE as error:
        raise ConfigError(f"the trace {path} cannot be read: {error}") from None
    ids = [conversation.id for conversation in found]
    if len(set(ids)) != len(ids):
        raise ConfigError(f"the trace {path} has two conversations with the same id")
    return found


def select(conversations: list[Conversation], users: int, context: int, most: int) -> list[Conversation]:
    """The first `users` of them that have enough requests of up to `context` tokens, each cut to `most` of those. Where the trace has too
    few, they come again as conversations of their own, which share nothing with the first."""
    cut = (conversation.cut(context, most) for conversation in conversations)
    enough = [one for one in cut if len(one.requests) >= min(LEAST_REQUESTS, most)]
    if not enough:
        raise ConfigError(f"the trace has no conversation with {LEAST_REQUESTS} requests of at most {context} tokens; raise --context")
    return [_again(enough[number % len(enough)], 1 + number // len(enough)) for number in range(users)]


def _again(conversation: Conversation, time: int) -> Conversation:
    if time == 1:
        return conversation
    parent = None if conversation.parent is None else f"{conversation.parent}#{time}"
    return replace(conversation, id=f"{conversation.id}#{time}", parent=parent)


def _parse(line: str, where: str) -> Conversation:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("requests"), list):
        raise ConfigError(f"{where}: expected an object with id, block_tokens and a list of requests")
    name, parent, block_tokens = fields.get("id"), fields.get("parent"), fields.get("block_tokens")
    if not isinstance(name, str) or not name or not (parent is None or isinstance(parent, str)):
        raise ConfigError(f"{where}: id must be text, and parent text or null")
    if not is_whole(block_tokens) or block_tokens < 1:
        raise ConfigError(f"{where}: block_tokens must be a positive whole number")
    requests: list[Recorded] = []
    blocks = np.empty(0, np.int64)
    for number, one in enumerate(fields["requests"], 1):
        requests.append(_recorded(one, blocks, block_tokens, f"{where}, request {number}"))
        blocks = requests[-1].blocks
    return Conversation(name, parent, block_tokens, tuple(requests))


def _recorded(one: Any, before: NDArray[np.int64], block_tokens: int, where: str) -> Recorded:
    """`before`: blocks of the request before."""
    if not isinstance(one, list) or len(one) != len(_FIELDS):
        raise ConfigError(f"{where}: expected a list of {len(_FIELDS)}: {', '.join(_FIELDS)}")
    at_s, num_tokens, num_output, think_s, shared, new = one
    if not _is_time(at_s) or not _is_time(think_s):
        raise ConfigError(f"{where}: t and think seconds must be numbers, none negative")
    if not is_whole(num_tokens) or not is_whole(num_output) or not is_whole(shared) or num_tokens < 1:
        raise ConfigError(f"{where}: tokens and blocks shared must be whole numbers, none negative, and a prompt has at least one token")
    if not isinstance(new, list) or not all(map(is_whole, new)) or max(new, default=0) >= 1 << 63:
        raise ConfigError(f"{where}: the ids of new blocks must be a list of whole numbers below 2**63, none negative")
    if shared > len(before):
        raise ConfigError(f"{where}: it shares {shared} blocks with the request before, which has {len(before)}")
    if shared + len(new) != num_tokens // block_tokens:
        raise ConfigError(f"{where}: {shared + len(new)} blocks for {num_tokens} tokens; one stands for {block_tokens}")
    return Recorded(at_s, num_tokens, num_output, think_s, np.concatenate([before[:shared], np.array(new, np.int64)]))


def _is_time(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
