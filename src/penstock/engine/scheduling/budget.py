"""The limits of a plan: rows, tokens and time per step, promised blocks. Reads no clock: `PrefillTimes`
estimates durations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.engine.scheduling.residency import Division

LEAST_CHUNK_S = 0.012  # with shorter chunks, a step's own time would be most of it
SHAPE_TOKENS = 512  # chunks are padded to a multiple of it where a GPU's fused attention runs


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of every step."""

    max_batch: int  # requests that run at once
    prefill_chunk: int  # prompt tokens per step
    overcommit: float = 1.0  # factor on available blocks that may be promised
    # how much later a request may arrive and still start first; 0: first come, first served
    max_overtaken_s: float = 0.0
    # seconds that the prompts of a step may take if the step also yields tokens; 0: no limit
    chunk_s: float = 0.0
    # tokens of a step's first prompt, however long they take: prompts always make progress, near the best
    # rate
    min_chunk: int = 0
    # a request that may need more blocks is deep: only its last ones are on the device; 0: no deep requests
    deep_blocks: int = 0
    resident_blocks: int = 0  # blocks that a deep request has on the device at most
    # how scored requests divide them; None: no scored requests
    division: Division | None = None
    # As `chunk_s`, times the requests that decode in the step: few of them wait for long chunks, which
    # compute fastest, and many for short ones. 0: no such limit
    delay_s: float = 0.0
    # tokens after which a state of recurrent layers is kept; 0: only before the end of a prompt
    state_every: int = 0


@dataclass(slots=True)
class Promises:
    """Blocks that running requests may still draw."""

    num: int = 0


class PrefillTimes(Protocol):
    """Measured prefill times. None before the first measurement."""

    def seconds(self, num_tokens: int, depth: float) -> float | None:
        """Time of `num_tokens` tokens that have `depth` tokens before them on average."""

    def tokens(self, seconds: float, start: int) -> int | None:
        """How many tokens from position `start` on take at most `seconds`."""


class Room:
    """What is left of a step for prompts, in order of admission.

    Tokens are always limited. Time is limited once a request gets a token from the step: a decoding one, or
    one whose prompt ends in it. Until then a longer step delays no request.
    """

    def __init__(
        self, budget: Budget, block_tokens: int, times: PrefillTimes | None, num_decoding: int
    ) -> None:
        """`num_decoding`: requests that decode in this step. `times` None: only tokens are limited."""
        self.tokens = budget.prefill_chunk  # 0: the step is full
        self._left_s = budget.chunk_s
        if num_decoding and budget.delay_s:
            self._left_s = min(budget.chunk_s, max(LEAST_CHUNK_S, budget.delay_s / num_decoding))
        self._min_chunk = budget.min_chunk
        self._block_tokens = block_tokens
        self._times = times if budget.chunk_s > 0.0 else None
        self._gives_tokens = num_decoding > 0
        self._unused = True

    def size(self, start: int, num_left: int) -> int:
        """How many tokens of the next prompt to compute; it has `num_left` from position `start` on. A chunk
        that the time limit cuts ends at a block boundary; a long one ends at a multiple of SHAPE_TOKENS. If
        not even one block fits, the step is full."""
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

    def spend(self, start: int, num_tokens: int, num_left: int, ends_prompt: bool = True) -> None:
        """`num_tokens` of that prompt are computed in this step. A prompt that the time limit cuts is the
        last of the step. `ends_prompt`: nothing of it is left after `num_left`."""
        self.tokens = self.tokens - num_tokens if num_tokens == min(num_left, self.tokens) else 0
        self._gives_tokens |= ends_prompt and num_tokens == num_left
        self._unused = False
        if self._times is not None:
            self._left_s -= self._times.seconds(num_tokens, start + num_tokens / 2) or 0.0


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_tokens)
