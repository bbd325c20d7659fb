"""The users of a replay: what each of them asks, token by token. Owns the making of tokens from ids; sends nothing.

All prompts are made before the clock starts. A token depends on the seed, its block's id, its place in the block, and whose block it is;
equal blocks are equal tokens, and prompts share what the recorded ones shared. The tokens behind a prompt's last full block are its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from penstock.bench.trace_files import RecordedConversation
from penstock.errors import ConfigError

Tokens = NDArray[np.int32]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's step and its two multipliers
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


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
    """What is replayed, and how; lengths are in tokens of the trace."""

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
    subagents: str = "apart"  # a sub-agent's ids are its own; "shared": they are its parent's, as they were recorded

    def users_of(self, conversations: list[RecordedConversation], vocab: int) -> list[User]:
        return [self._user(conversation, vocab) for conversation in conversations]

    def longest(self, conversations: list[RecordedConversation]) -> int:
        """The most tokens that one request has, prompt and output together."""
        return max(self._prompt_tokens(c, one.num_tokens) + self._output(one.num_output) for c in conversations for one in c.requests)

    def _user(self, conversation: RecordedConversation, vocab: int) -> User:
        owner = conversation.id if self.subagents == "apart" else conversation.family
        ids, places = np.unique(np.concatenate([one.blocks for one in conversation.requests]), return_inverse=True)
        content = _tokens(("block", owner, self.seed), ids, self._block_tokens(conversation), vocab)
        asks: list[Question] = []
        at = 0
        for number, one in enumerate(conversation.requests):
            blocks = content[places[at : at + len(one.blocks)]].reshape(-1)
            at += len(one.blocks)
            num_tail = self._prompt_tokens(conversation, one.num_tokens) - len(blocks)
            tail = _tokens(("tail", conversation.id, self.seed), np.array([number]), num_tail, vocab)[0]
            think_s = self._think_s(one.think_s) if asks else 0.0
            asks.append(Question(np.concatenate([blocks, tail]), self._output(one.num_output), think_s))
        return User(conversation.id, tuple(asks))

    def _block_tokens(self, conversation: RecordedConversation) -> int:
        size, rest = divmod(conversation.block_tokens, self.scale)
        if rest:
            raise ConfigError(f"--scale {self.scale} does not divide the trace's blocks of {conversation.block_tokens} tokens")
        return size

    def _prompt_tokens(self, conversation: RecordedConversation, num_tokens: int) -> int:
        blocks, tail = divmod(num_tokens, conversation.block_tokens)
        return max(1, blocks * self._block_tokens(conversation) + tail // self.scale)

    def _think_s(self, recorded_s: float) -> float:
        return min(recorded_s * self.think, float("inf") if self.max_think_s is None else self.max_think_s)

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
    """How many tokens of each an infinite cache would have had, if they were asked one after the other: the full blocks that an earlier one
    began with, too, but never the last token."""
    seen: set[bytes] = set()
    found: list[int] = []
    for prompt in prompts:
        key, num, leading = b"", 0, True
        for first in range(0, len(prompt) // block_tokens * block_tokens, block_tokens):
            key = blake2b(key + prompt[first : first + block_tokens].tobytes(), digest_size=16).digest()
            leading = leading and key in seen
            num += leading * block_tokens
            seen.add(key)
        found.append(min(num, len(prompt) - 1))
    return found
