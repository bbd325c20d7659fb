"""Load or recompute: whether loading blocks is faster than computing them. Owns the measured rates, which
also size prompt chunks.

Computing n tokens after a prefix of d takes n * (a + b * d): attention makes later tokens dearer. Loading
takes the time of the transfers queued before it, plus the bytes over the tier's rate. A partial load of one
tier's blocks saves the cheap tokens and leaves the dear ones, so the load ends only where a tier's run ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.config import AdmissionName

_FORGET = 0.95  # weight of the old value at each measurement
_MIN_S = 1e-6
_FAST = 0.5  # of the expected time: a faster step shows that the estimate is wrong
_UNSURE = 0.25  # largest uncertain share of a transfer's time for it to count
STALE_S = 30.0  # an older rate may have changed
HOPE = 4.0  # how much faster a stale rate may be


@dataclass(slots=True)
class PrefillRate:
    """Seconds per token as a linear function of depth, fitted to past steps; newer ones weigh more.

    A step can be delayed once by many causes, but it never computes faster than it can. So a fast step counts
    as much as all before it.
    """

    # of xx, xd, dd, xs, ds with x = n, d = n * depth, s = seconds
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    def add(self, num_tokens: int, depth: float, seconds: float, at_most: bool = False) -> None:
        """`at_most`: the step did much else in that time. It counts only if it took less than expected, or if
        nothing is known."""
        x, d, keep = float(num_tokens), num_tokens * depth, _FORGET
        known_s = self.seconds(num_tokens, depth)
        if known_s is not None:
            if at_most and seconds >= known_s:
                return
            if seconds < _FAST * known_s:
                keep = min(keep, x * x / self._sums[0])
        new = (x * x, x * d, d * d, x * seconds, d * seconds)
        # in one assignment: other threads read it
        self._sums = [old * keep + value for old, value in zip(self._sums, new, strict=True)]

    def seconds(self, num_tokens: int, depth: float) -> float | None:
        """For `num_tokens` tokens after `depth` others on average. None: nothing was measured."""
        line = self._line()
        return None if line is None else num_tokens * (line[0] + line[1] * depth)

    def tokens(self, seconds: float, start: int) -> int | None:
        """How many tokens, the first after `start` others, take no longer than that. None: nothing was
        measured."""
        if (line := self._line()) is None:
            return None
        # n tokens from `start` on come after start + n / 2 others on average: n * (first + slope / 2 * n) =
        # seconds, solved for n.
        first, slope = line[0] + line[1] * start, line[1]
        twice = first + math.sqrt(first * first + 2.0 * slope * seconds)
        return None if twice <= 0.0 else int(2.0 * seconds / twice)

    def _line(self) -> tuple[float, float] | None:
        """Seconds of a token at depth 0, and seconds added per preceding token."""
        xx, xd, dd, xs, ds = self._sums
        if xx <= 0.0:
            return None
        determinant = xx * dd - xd * xd
        per_token, per_depth = xs / xx, 0.0
        if determinant > 1e-9 * xx * dd:
            slope = (xx * ds - xd * xs) / determinant
            base = (dd * xs - xd * ds) / determinant
            # a fit through noise may make either negative; then the mean is better
            if slope >= 0.0 and base >= 0.0:
                per_token, per_depth = base, slope
        return per_token, per_depth


@dataclass(slots=True)
class LinkRate:
    """Bytes per second of a tier, measured from its transfers, and the age of that figure.

    A tier that was slow once is not used, hence not measured again: it would count as slow forever. So a
    stale rate counts as `HOPE` times faster for one load, and its measurement replaces the rate.
    """

    bytes_per_s: float | None = None
    clock: Callable[[], float] = time.monotonic
    _measured_s: float = field(init=False)
    _tried: bool = False  # a load is measuring it

    def __post_init__(self) -> None:
        self._measured_s = self.clock()

    @property
    def stale(self) -> bool:
        return self.bytes_per_s is not None and self.clock() - self._measured_s > STALE_S

    def add(self, num_bytes: int, seconds: float, unsure_s: float = 0.0) -> None:
        """`unsure_s`: time between the last look and the one that saw the end. With long steps the engine
        looks rarely; such a measurement says nothing about the link."""
        if unsure_s > _UNSURE * seconds:
            return
        rate = num_bytes / max(seconds, _MIN_S)
        known = None if self.stale or self._tried else self.bytes_per_s
        self.bytes_per_s = rate if known is None else _FORGET * known + (1.0 - _FORGET) * rate
        self._measured_s = self.clock()
        self._tried = False

    def seconds(self, num_bytes: int) -> float | None:
        """None: nothing was measured."""
        if self.bytes_per_s is None:
            return None
        return num_bytes / (self.bytes_per_s * (HOPE if self.stale else 1.0))

    def note_try(self) -> None:
        """A load uses this rate now; no other load need try."""
        if self.stale:
            self._tried = True
            self._measured_s = self.clock()


@dataclass(frozen=True, slots=True)
class TierLimits:
    """Limits that depend on the device and on the configuration."""

    # A step over at least this many tokens starts on the first layers of a load; shorter ones wait for all of
    # it.
    overlap_tokens: int
    load_deadline_s: float
    load_always: bool = False  # even if computing seems faster
    postpones: bool = False  # blocks that the device keeps need not also be in a full host memory
    admission: AdmissionName = "always"  # when the first cold tier gets a block


class TierRun(NamedTuple):
    """Consecutive blocks of a hit that one tier has."""

    num_blocks: int
    load_s: float | None  # None: never measured


def choose(pieces: Sequence[TierRun], compute: Callable[[int, int], float | None]) -> int:
    """How many leading blocks to load, so that loading them and computing the rest takes the least time. The
    load ends at the end of a piece. `compute(first, num)`: seconds for `num` blocks from number `first` of
    the hit on, or None if not measured.

    An unknown time is explored: loading then counts as free, computing as endless. On a tie more is loaded.
    """
    num_blocks = sum(piece.num_blocks for piece in pieces)
    chosen, first, load_s, best_s = 0, 0, 0.0, _endless(compute(0, num_blocks))
    for piece in pieces:
        first += piece.num_blocks
        load_s += piece.load_s or 0.0
        rest_s = load_s + (_endless(compute(first, num_blocks - first)) if first < num_blocks else 0.0)
        if rest_s <= best_s:
            chosen, best_s = first, rest_s
    return chosen


def _endless(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds
