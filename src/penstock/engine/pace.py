"""How long steps take. Owns the times of launched steps; `kv/tiers/policy.py` uses them."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from penstock.contract import StepPlan
from penstock.engine.scheduling.residency import FIRST_TAU

_MIN_TOKENS = 32  # the time of fewer tokens is mostly launch overhead
_MIN_SHARE = 0.9  # least share of prefill tokens for a step's time to count as prefill time


# Share of decode time that scoring may take, and limits of the tokens between two scorings. A longer interval
# misses too much; one shorter than a fetch finds nothing new.
SCORING_SHARE = 0.05
LEAST_TAU = 4
MOST_TAU = 256
_NEWEST = 0.2  # weight of the newest time


class Prefill(NamedTuple):
    """One step's worth of prompt tokens."""

    num_tokens: int
    depth: float  # tokens before each of them, on average
    seconds: float
    at_most: bool = False  # an upper bound: the step also did much other work


class _LaunchedStep(NamedTuple):
    """A step on the lane."""

    prefill: Prefill | None  # its prompt tokens, if their time is measured
    at_s: float
    scores: bool | None  # of a decode-only step: whether it scores


class ScoringCost:
    """The extra time of scoring, and the interval that keeps it a small share."""

    def __init__(self) -> None:
        self.seconds = 0.0  # total extra time
        self._plain_s: float | None = None  # of a recent decode step
        self._extra_s: float | None = None  # extra time of one that scores

    def add(self, seconds: float, scores: bool) -> None:
        """A decode step took `seconds`."""
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

    def __init__(self, scoring: ScoringCost, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.scoring = scoring
        self._launched: deque[_LaunchedStep] = deque()
        self._last_end_s = 0.0

    def launched(self, plan: StepPlan) -> None:
        chunks = plan.chunks[plan.num_decodes :]
        num = sum(chunk.num_tokens for chunk in chunks)
        prefill = None
        if num >= _MIN_TOKENS and not plan.loads:
            depth = sum(chunk.num_tokens * (chunk.start + chunk.num_tokens / 2) for chunk in chunks) / num
            prefill = Prefill(num, depth, 0.0, at_most=num < _MIN_SHARE * plan.num_tokens)
        decodes = plan.is_decode and not plan.loads and not plan.reads_host
        scores = plan.scores if decodes else None
        self._launched.append(_LaunchedStep(prefill, self._clock(), scores))

    def read(self) -> Prefill | None:
        """The oldest step is over; None if its time is no measure of prefill."""
        prefill, launched_s, scores = self._launched.popleft()
        started_s, self._last_end_s = max(launched_s, self._last_end_s), self._clock()
        took_s = self._last_end_s - started_s
        if scores is not None:
            self.scoring.add(took_s, scores)
        return None if prefill is None else prefill._replace(seconds=took_s)
