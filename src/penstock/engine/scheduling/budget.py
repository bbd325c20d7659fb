"""The limits that planning keeps: rows, tokens and time per step, promises of blocks. No clock: what takes
how long is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.engine.scheduling.residency import Division

SHAPE_TOKENS = 512  # chunks are padded to a multiple of it where a GPU's fused attention runs


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of every step."""

    max_batch: int  # requests that run at once
    prefill_chunk: int  # prompt tokens per step
    overcommit: float = 1.0  # how many times available blocks may be promised
    # how much later a request may arrive and still start first; 0: first come, first served
    max_overtaken_s: float = 0.0
    # what the prompts of one step may take while others get tokens from it; 0: as long as they like
    chunk_s: float = 0.0
    # tokens of the first prompt of a step, whatever they take: every prompt gets on, at a rate near the best
    min_chunk: int = 0
    # a request that may need more is deep: only its last blocks are on the device; 0: there are none
    deep_blocks: int = 0
    resident_blocks: int = 0  # that a deep request has there at most
    # of those, for requests that attend to a part of their context; None: there are none
    division: Division | None = None


class PrefillTimes(Protocol):
    """How long computing prompts takes, by what was measured. None where nothing was."""

    def seconds(self, num_tokens: int, depth: float) -> float | None:
        """For so many tokens behind `depth` others on average."""

    def tokens(self, seconds: float, start: int) -> int | None:
        """How many tokens, the first of them behind `start` others, take no longer than that."""


class Room:
    """What prompts may still take of one step, in order of their admission.

    Tokens always count. Time counts as soon as a request gets a token from the step: all that decode do, and
    a prompt that ends in it does. Until then a longer step delays no request.
    """

    def __init__(self, budget: Budget, block_tokens: int, times: PrefillTimes | None, decodes: bool) -> None:
        """`decodes`: some request decodes in this step. `times` None: tokens are all that counts."""
        self.tokens = budget.prefill_chunk  # 0: the step is full
        self._left_s = budget.chunk_s
        self._min_chunk = budget.min_chunk
        self._block_tokens = block_tokens
        self._times = times if budget.chunk_s > 0.0 else None
        self._gives_tokens = decodes
        self._unused = True

    def size(self, start: int, num_left: int) -> int:
        """How many tokens of the next prompt to compute, which has `num_left` behind the first `start`. Where
        time cuts it short, it ends with a block, a long one where attention is called with whole shapes.
        Where not even one block fits, the step is full."""
        most = min(num_left, self.tokens)
        if most <= 1 or self._times is None or not self._gives_tokens:
            return most
        num_tokens = self._times.tokens(max(0.0, self._left_s), start)
        if num_tokens is None or num_tokens >= most:
            return most
        step = self._block_tokens
        if num_tokens >= 3 * SHAPE_TOKENS and SHAPE_TOKENS % step == 0:
            step = SHAPE_TOKENS
        end = (start + num_tokens) // step * step
        if self._unused:
            end = max(
                end, blocks_for(start + max(1, self._min_chunk), self._block_tokens) * self._block_tokens
            )
        if end <= start:
            self.tokens = 0
            return 0
        return min(most, end - start)

    def spend(self, start: int, num_tokens: int, num_left: int) -> None:
        """So many tokens of that prompt are computed in this step. One that time has cut short is the
        last."""
        self.tokens = self.tokens - num_tokens if num_tokens == min(num_left, self.tokens) else 0
        self._gives_tokens |= num_tokens == num_left
        self._unused = False
        if self._times is not None:
            self._left_s -= self._times.seconds(num_tokens, start + num_tokens / 2) or 0.0


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_tokens)
