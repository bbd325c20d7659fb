"""How long steps take. Owns the times of those that are on the lane; what is made of them is the business of `kv/tiers/policy.py` and of
`speculation/length.py`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from penstock.contract import StepPlan

_MIN_TOKENS = 32  # fewer say more about launching a step than about computing it
_MIN_SHARE = 0.9  # of a step's tokens that are prefill, for its time to count as prefill's


class Prefill(NamedTuple):
    """One step's worth of prompt tokens."""

    num_tokens: int
    depth: float  # tokens before them, on average
    seconds: float
    at_most: bool = False  # the step did much else as well


class Decoded(NamedTuple):
    """A step that did nothing but decode."""

    num_rows: int
    seconds: float  # from the end of the step before, where there was one: what the host did in between counts


class Pace:
    """Steps are read in the order of their launch, and each runs from its launch or the end of the one before, whichever is later."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._launched: deque[tuple[Prefill | None, int, float]] = deque()  # what it computes, where that is of interest; and when
        self._last_end_s = 0.0
        self.decoded: Decoded | None = None  # the step read last, where it was one

    def launched(self, plan: StepPlan) -> None:
        chunks = plan.chunks[plan.num_decodes :]
        num = sum(chunk.num_tokens for chunk in chunks)
        prefill = None
        if num >= _MIN_TOKENS and not plan.loads:
            depth = sum(chunk.num_tokens * (chunk.start + chunk.num_tokens / 2) for chunk in chunks) / num
            prefill = Prefill(num, depth, 0.0, at_most=num < _MIN_SHARE * plan.num_tokens)
        self._launched.append((prefill, plan.num_rows if plan.is_decode else 0, self._clock()))

    def read(self) -> Prefill | None:
        """The oldest step is over; None where it says nothing about prefills."""
        prefill, num_rows, launched_s = self._launched.popleft()
        before_s = self._last_end_s
        started_s, self._last_end_s = max(launched_s, before_s), self._clock()
        took_s = self._last_end_s - started_s
        idle_s = started_s - before_s
        self.decoded = Decoded(num_rows, took_s + (idle_s if idle_s < took_s else 0.0)) if num_rows else None
        return None if prefill is None else prefill._replace(seconds=self._last_end_s - started_s)
