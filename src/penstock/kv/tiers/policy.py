"""Load or recompute: whether fetching blocks is faster than computing them. Owns the measured rates, which
chunks are sized by as well.

Computing n tokens behind a prefix of d takes n * (a + b * d): attention makes late tokens dearer. Loading
takes what is ahead on the lane, and the bytes over the tier's rate. Loading a part of what one tier has saves
the cheap tokens and leaves the dear ones, so that a choice is made where another tier begins, and nowhere
else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.config import AdmissionName

_FORGET = 0.95  # weight of what was known before, at each measurement
_MIN_S = 1e-6
_FAST = 0.5  # of the expected time: a step that took less says that what is known is wrong
_UNSURE = 0.25  # of a transfer's time at most, for it to count
STALE_S = 30.0  # a rate that was measured longer ago may have changed
HOPE = 4.0  # how much faster it may have become


@dataclass(slots=True)
class PrefillRate:
    """Seconds per token as a straight line over depth, fitted to the steps seen, newer ones counting more.

    Much can hold a step up, once; nothing makes it compute faster than it can. So one that was fast counts as
    much as all before it.
    """

    # of xx, xd, dd, xs, ds with x = n, d = n * depth, s = seconds
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    def add(self, num_tokens: int, depth: float, seconds: float, at_most: bool = False) -> None:
        """`at_most`: the step did much else in that time. So it counts where it took less than was expected,
        or nothing is known."""
        x, d, keep = float(num_tokens), num_tokens * depth, _FORGET
        known_s = self.seconds(num_tokens, depth)
        if known_s is not None:
            if at_most and seconds >= known_s:
                return
            if seconds < _FAST * known_s:
                keep = min(keep, x * x / self._sums[0])
        new = (x * x, x * d, d * d, x * seconds, d * seconds)
        # at once: other threads read it
        self._sums = [old * keep + value for old, value in zip(self._sums, new, strict=True)]

    def seconds(self, num_tokens: int, depth: float) -> float | None:
        """For so many tokens behind `depth` others on average. None: nothing was measured."""
        line = self._line()
        return None if line is None else num_tokens * (line[0] + line[1] * depth)

    def tokens(self, seconds: float, start: int) -> int | None:
        """How many tokens, the first of them behind `start` others, take no longer than that. None: nothing
        was measured."""
        if (line := self._line()) is None:
            return None
        # n tokens from `start` on lie behind start + n / 2 others on average: n * (first + slope / 2 * n) =
        # seconds, solved for n.
        first, slope = line[0] + line[1] * start, line[1]
        twice = first + math.sqrt(first * first + 2.0 * slope * seconds)
        return None if twice <= 0.0 else int(2.0 * seconds / twice)

    def _line(self) -> tuple[float, float] | None:
        """Seconds of a token at depth 0, and what each token before it adds."""
        xx, xd, dd, xs, ds = self._sums
        if xx <= 0.0:
            return None
        determinant = xx * dd - xd * xd
        per_token, per_depth = xs / xx, 0.0
        if determinant > 1e-9 * xx * dd:
            slope = (xx * ds - xd * xs) / determinant
            base = (dd * xs - xd * ds) / determinant
            # a fit through noise may have either below zero; then the mean is the better guess
            if slope >= 0.0 and base >= 0.0:
                per_token, per_depth = base, slope
        return per_token, per_depth


@dataclass(slots=True)
class LinkRate:
    """Bytes per second of a tier, as its transfers had it.

    It knows how old that is. A tier that was slow once is not asked, hence not measured: without a second try
    it would be slow for ever. So a stale rate counts as `HOPE` times faster, for the first who comes; and
    what he meets replaces it.
    """

    bytes_per_s: float | None = None
    clock: Callable[[], float] = time.monotonic
    _measured_s: float = field(init=False)
    _tried: bool = False  # a load is finding out

    def __post_init__(self) -> None:
        self._measured_s = self.clock()

    @property
    def stale(self) -> bool:
        return self.bytes_per_s is not None and self.clock() - self._measured_s > STALE_S

    def add(self, num_bytes: int, seconds: float, unsure_s: float = 0.0) -> None:
        """`unsure_s`: how long it was not looked at before it was seen to be over. An engine with long steps
        looks rarely, and what that says about a link is nothing."""
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
        """Something is being loaded at this rate: no other load need find out."""
        if self.stale:
            self._tried = True
            self._measured_s = self.clock()


@dataclass(frozen=True, slots=True)
class TierLimits:
    """What depends on the device and on the configuration."""

    # a step over at least so many tokens starts on the first layers of a load; shorter ones wait for all of
    # it
    overlap_tokens: int
    load_deadline_s: float
    load_always: bool = False  # also where computing seems faster
    postpones: bool = False  # blocks that the device keeps need not be in a full host memory as well
    admission: AdmissionName = "always"  # when the first cold tier gets a block


class TierRun(NamedTuple):
    """Consecutive blocks of a hit that one tier has."""

    num_blocks: int
    load_s: float | None  # None: never measured


def choose(pieces: Sequence[TierRun], compute: Callable[[int, int], float | None]) -> int:
    """How many of the first blocks to load, so that loading them and computing the others takes the least
    time. It ends where a piece does. `compute(first, num)`: seconds for `num` blocks from number `first` of
    the hit on, None where nothing was measured.

    A time that is not known is found out: loading then counts as free, computing as endless. Between equals
    more is loaded."""
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
