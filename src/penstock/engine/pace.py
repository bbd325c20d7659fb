"""How long steps take. Owns the times of those that are on the lane; what is made of them is the business of
`kv/tiers/policy.py` and of `speculation/length.py`."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from penstock.contract import StepPlan
from penstock.engine.scheduling.residency import FIRST_TAU

_MIN_TOKENS = 32  # fewer say more about launching a step than about computing it
_MIN_SHARE = 0.9  # of a step's tokens that are prefill, for its time to count as prefill's


# Of decode steps' time that scoring may take, and the tokens between two scorings that follow: more of them
# see too little, and fewer than a fetch takes to land see nothing new.
SCORING_SHARE = 0.05
LEAST_TAU = 4
MOST_TAU = 256
_NEWEST = 0.2  # weight of the newest time


class Prefill(NamedTuple):
    """One step's worth of prompt tokens."""

    num_tokens: int
    depth: float  # tokens before them, on average
    seconds: float
    at_most: bool = False  # the step did much else as well


class Decoded(NamedTuple):
    """A step that did nothing but decode."""

    num_requests: int
    num_rows: int  # drafts included
    # from the end of the step before, where this one was waited for: what the host did in between counts
    seconds: float
    num_ahead: int  # drafts made behind it for each request
    catches_up: bool = False  # what makes drafts has passed over earlier tokens behind it
    # the step behind it, launched meanwhile, does any of this: what the host did for that is in its time
    leads: bool = False


class _LaunchedStep(NamedTuple):
    """A step on the lane."""

    prefill: Prefill | None  # what it computes, where that is of interest
    plan: StepPlan
    at_s: float
    scores: bool | None  # of a step that only decodes, whether it scores


class ScoringCost:
    """What scoring takes beside decoding, and how often it may be done so that this stays a small share."""

    def __init__(self) -> None:
        self.seconds = 0.0  # that steps took longer for it, all together
        self._plain_s: float | None = None  # of a decode step, lately
        self._extra_s: float | None = None  # of one that scores, on top of that

    def add(self, seconds: float, scores: bool) -> None:
        """A decode step has taken so long."""
        if not scores:
            self._plain_s = (
                seconds if self._plain_s is None else self._plain_s + _NEWEST * (seconds - self._plain_s)
            )
        elif self._plain_s is not None:
            extra = max(0.0, seconds - self._plain_s)
            self.seconds += extra
            self._extra_s = (
                extra if self._extra_s is None else self._extra_s + _NEWEST * (extra - self._extra_s)
            )

    @property
    def tau(self) -> int:
        """Tokens between two scorings of one request."""
        if not self._plain_s or self._extra_s is None:
            return FIRST_TAU
        return max(LEAST_TAU, min(MOST_TAU, math.ceil(self._extra_s / (SCORING_SHARE * self._plain_s))))


class Pace:
    """Steps are read in the order of their launch, and each runs from its launch or the end of the one
    before, whichever is later."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.scoring = ScoringCost()
        self._launched: deque[_LaunchedStep] = deque()
        self._last_end_s = 0.0
        self.decoded: Decoded | None = None  # the step read last, where it was one

    def launched(self, plan: StepPlan) -> None:
        chunks = plan.chunks[plan.num_decodes :]
        num = sum(chunk.num_tokens for chunk in chunks)
        prefill = None
        if num >= _MIN_TOKENS and not plan.loads:
            depth = sum(chunk.num_tokens * (chunk.start + chunk.num_tokens / 2) for chunk in chunks) / num
            prefill = Prefill(num, depth, 0.0, at_most=num < _MIN_SHARE * plan.num_tokens)
        decodes = plan.is_decode and not plan.loads and not plan.reads_host
        scores = plan.scores if decodes else None
        self._launched.append(_LaunchedStep(prefill, plan, self._clock(), scores))

    def read(self) -> Prefill | None:
        """The oldest step is over; None where it says nothing about prefills."""
        prefill, plan, launched_s, scores = self._launched.popleft()
        before_s = self._last_end_s
        started_s, self._last_end_s = max(launched_s, before_s), self._clock()
        took_s = self._last_end_s - started_s
        if scores is not None:
            self.scoring.add(took_s, scores)
        idle_s = started_s - before_s
        was_read_first = self.decoded is not None and self.decoded.num_rows > self.decoded.num_requests
        took_s += idle_s if idle_s < took_s or was_read_first else 0.0
        self.decoded = None
        if plan.is_decode:
            leads = bool(self._launched) and _drafts(self._launched[0].plan)
            self.decoded = Decoded(
                len(plan.chunks), plan.num_rows, took_s, plan.num_ahead, bool(plan.missed), leads
            )
        return None if prefill is None else prefill._replace(seconds=self._last_end_s - started_s)


def _drafts(plan: StepPlan) -> bool:
    """Whether it makes drafts, verifies some, or catches up with what makes them."""
    return plan.num_ahead > 0 or bool(plan.missed) or plan.num_rows > len(plan.chunks)
