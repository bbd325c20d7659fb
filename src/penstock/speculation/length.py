"""How many drafts of each request a step verifies. Owns what was learned of each request, and the account that bounds what it can lose.

A draft is worth the probability that it and all before it survive. A step costs what its padded number of tokens costs, measured; rows up
to the next padded size are free. Drafts are taken by worth, and as many as give the most tokens per second.

Estimates may be wrong, and a request's luck may turn. So each request has an account: what its steps took, and what plain decoding would
have taken for its tokens. A step may cost more than a plain one only where, should every draft fail, no account in the batch would end
more than `MAX_LOSS` behind.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_LOSS = 0.03
LOOK_STEPS = 8  # in which it is seen what proposing, or not proposing, gives
KEPT_STEPS, MOST_KEPT_STEPS = 512, 8192  # in which the better one of the two goes on
SETTLING_STEPS = 2  # behind a change that do not count
_DECAY = 0.97  # of what was learned, with every step: a request that has changed is tried again
_PRIOR_TRIES = 2.0  # how many observations the prior is worth
_PRIOR_RATE = 0.6
_LEAST_WORTH = 0.02  # drafts that hardly ever survive take KV slots, even where their rows are free


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Measured seconds of a step, by its padded number of tokens."""

    sizes: tuple[int, ...]  # ascending
    seconds: tuple[float, ...]
    draft_s: float = 0.0  # of drafting one token more for the whole batch; 0: proposals cost nothing

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds) or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError("costs need one time for each of their ascending sizes")

    def padded(self, num_tokens: int) -> int | None:
        """None: no step is as large."""
        at = bisect_left(self.sizes, num_tokens)
        return self.sizes[at] if at < len(self.sizes) else None

    def of(self, num_tokens: int) -> float:
        """A step beyond the table grows with its tokens."""
        at = bisect_left(self.sizes, num_tokens)
        return self.seconds[at] if at < len(self.sizes) else self.seconds[-1] * num_tokens / self.sizes[-1]


@dataclass(slots=True)
class DraftTrack:
    """One request: how its drafts fared, by their place, and its account."""

    max_drafts: int
    spent_s: float = 0.0  # of all steps that it took part in
    plain_s: float = 0.0  # that plain decoding would have taken for the same tokens
    hits: NDArray[np.float64] = field(init=False)
    tries: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        self.hits, self.tries = np.zeros(self.max_drafts), np.zeros(self.max_drafts)

    def survival(self) -> NDArray[np.float64]:
        """For each place, the probability that it and all before it are kept. A place that was seldom reached is taken to be like the
        average of all."""
        mean = (self.hits.sum() + _PRIOR_RATE * _PRIOR_TRIES) / (self.tries.sum() + _PRIOR_TRIES)
        rates = (self.hits + mean * _PRIOR_TRIES) / (self.tries + _PRIOR_TRIES)
        return np.cumprod(rates)

    def saw(self, num_drafts: int, num_kept: int) -> None:
        """A step's outcome; places behind the first that was rejected say nothing."""
        self.hits *= _DECAY
        self.tries *= _DECAY
        reached = min(num_kept + 1, num_drafts)
        self.hits[:num_kept] += 1
        self.tries[:reached] += 1


class Trial:
    """Whether proposing pays at all with so many requests: tokens per second with it and without, both as they really were. What proposing
    itself costs, and what the host does besides, is in no table. The better one goes on for long; then the other is looked at for a few
    steps, ever more seldom as long as it stays the worse one."""

    def __init__(self) -> None:
        self.is_on = False
        self.is_look = False  # for a few steps
        self._other: float | None = None  # tokens per second of the one that does not run, when it ran last
        self._num_kept = KEPT_STEPS
        self._left, self._num_unsettled = LOOK_STEPS, SETTLING_STEPS
        self._seconds = self._tokens = 0.0

    def add(self, seconds: float, num_tokens: int) -> None:
        """A step has been read."""
        if self._num_unsettled:  # it was planned before the last change
            self._num_unsettled -= 1
            return
        self._seconds += seconds
        self._tokens += num_tokens
        self._left -= 1
        if self._left == 0:
            self._end_turn(self._tokens / max(self._seconds, 1e-9))

    def _end_turn(self, rate: float) -> None:
        if self._other is None or not self.is_look:
            self._other = rate
            self._begin_turn(not self.is_on, LOOK_STEPS, is_look=True)
        elif rate > self._other:
            self._num_kept = KEPT_STEPS
            self._begin_turn(self.is_on, self._num_kept, is_look=False)
        else:
            self._begin_turn(not self.is_on, self._num_kept, is_look=False)
            self._num_kept = min(2 * self._num_kept, MOST_KEPT_STEPS)

    def _begin_turn(self, is_on: bool, num_steps: int, is_look: bool) -> None:
        self.is_on, self._left, self.is_look = is_on, num_steps, is_look
        self._num_unsettled = SETTLING_STEPS
        self._seconds = self._tokens = 0.0


class Row(NamedTuple):
    """A request in the next step."""

    track: DraftTrack
    most: int  # drafts that there are, or that it can still use


class DraftChoice(NamedTuple):
    drafts: list[int]  # by row
    step_s: float
    plain_s: float  # of the same step without drafts


def choose(rows: Sequence[Row], costs: StepCosts, budget: int, other_tokens: int = 0, is_bounded: bool = True) -> DraftChoice:
    """Drafts for each row: `budget` in all at most, beside `other_tokens` of prompts in the same step. Not bounded by accounts while it is
    looked at whether proposing pays."""
    base = len(rows) + other_tokens
    plain_s = costs.of(base)
    best = DraftChoice([0] * len(rows), plain_s, plain_s)
    if not rows or budget <= 0:
        return best
    worth = _worth(rows)
    order = np.argsort(-worth, axis=None, kind="stable")  # of equal worth the lower place first, so that no place is skipped
    order = order[worth.ravel()[order] >= _LEAST_WORTH]
    places = order % worth.shape[1]
    best_rate, room_s = len(rows) / plain_s, _room_s(rows, plain_s) if is_bounded else float("inf")
    for depth in _depths(worth.shape[1], costs):
        taken = order[places < depth][:budget]
        gains = np.cumsum(worth.ravel()[taken])
        for num in _sizes(base, len(taken), costs):
            step_s = costs.of(base + num) + costs.draft_s * (int((taken[:num] % worth.shape[1]).max()) + 1)
            rate = (len(rows) + gains[num - 1]) / step_s
            if rate > best_rate and step_s <= room_s:
                best_rate = rate
                best = DraftChoice(np.bincount(taken[:num] // worth.shape[1], minlength=len(rows)).tolist(), step_s, plain_s)
    return best


def begin(rows: Sequence[Row], choice: DraftChoice) -> None:
    """The step is launched: accounts take it as if no draft were kept, until `settle` says more."""
    for row in rows:
        row.track.spent_s += choice.step_s
        row.track.plain_s += choice.plain_s


def settle(track: DraftTrack, num_drafts: int, num_kept: int, plain_s: float) -> None:
    """The step has been read; `plain_s` as its choice had it."""
    track.saw(num_drafts, num_kept)
    track.plain_s += num_kept * plain_s


def _worth(rows: Sequence[Row]) -> NDArray[np.float64]:
    """[rows, places]: falls from place to place in every row; 0 where there is no draft."""
    width = max(1, max(min(row.most, row.track.max_drafts) for row in rows))
    worth = np.zeros((len(rows), width))
    for at, row in enumerate(rows):
        most = min(row.most, row.track.max_drafts)
        if most > 0:
            worth[at, :most] = row.track.survival()[:most]
    return worth


def _room_s(rows: Sequence[Row], plain_s: float) -> float:
    """What a step may take so that no account is too far behind if it keeps nothing."""
    return min((1 + MAX_LOSS) * (row.track.plain_s + plain_s) - row.track.spent_s for row in rows)


def _depths(width: int, costs: StepCosts) -> Sequence[int]:
    """Where drafting costs by depth, every depth is tried; else the deepest alone, which includes the others."""
    return range(1, width + 1) if costs.draft_s else (width,)


def _sizes(base: int, most: int, costs: StepCosts) -> list[int]:
    """Numbers of drafts that fill a step up to a padded size, and all of them: between two of these a draft more costs nothing."""
    filled = [size - base for size in costs.sizes if 0 < size - base < most]
    return [*filled, most] if most else []
