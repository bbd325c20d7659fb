"""Whether drafts pay, and how many of each request a step verifies. Owns what was learned of steps and of
requests, and the accounts that bound what a request can lose.

A draft is worth the probability that it and all before it survive. A step takes what the same step took
without drafts, measured; what its further rows take, by a table; and what drafting itself takes, measured as
well: passes that make drafts, or results that are read before the next step is planned. Drafts are taken by
worth, and as many as give the most tokens per second.

Estimates may be wrong, and a request's luck may turn. So each request has an account. It earns `MAX_LOSS` of
the time that it decodes, and what its accepted drafts save. It pays what steps with drafts take longer,
whoever the drafts are of, and in every step what keeping these books takes. A step has drafts only where
every account of the batch could pay for it though all drafts failed. So a request is at no time more than
`MAX_LOSS` behind plain decoding, as long as a step takes no longer than was expected of it.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# of a request's time, by drafts; looking for drafts that nobody verifies has a share of its own
MAX_LOSS = 0.025
LEAST_GAIN = 1.05  # times as many tokens per second: less is within what estimates miss
FIRST_PLAIN_STEPS = 4  # that are seen with so many requests before one has drafts, and again after
STALE_STEPS = 256  # with drafts: what plain ones take is measured again
RETRY_STEPS, MOST_RETRY_STEPS = 512, 8192  # for which what does not pay is not tried again
SURE = 1.25  # times what a step with drafts is expected to take longer is put aside for it
_LEARNS = 0.2  # share of a step in what its like are taken to take
_NUM_EXTRAS, _BURST = 5, 8  # measurements of what drafting takes, and steps of one
_DECAY = 0.97  # of what was learned, with every step: a request that has changed is tried again
_PRIOR_TRIES = 2.0  # how many observations the prior is worth
_LEAST_WORTH = 0.02  # drafts that hardly ever survive take KV slots, even where their rows are free


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Measured seconds of a step, by its padded number of tokens."""

    sizes: tuple[int, ...]  # ascending
    seconds: tuple[float, ...]
    # of making drafts on the device behind a step of one request; None: not measured, or not made there
    ahead_s: float | None = None
    ahead_row_s: float = 0.0  # of each further request
    follow_s: float = 0.0  # of passing over a token of one request later, by what makes drafts
    follow_row_s: float = 0.0  # of each further request
    bookkeeping_s: float = 0.0  # of the engine's thread for all of this, whether there are drafts or not

    def __post_init__(self) -> None:
        if (
            not self.sizes
            or len(self.sizes) != len(self.seconds)
            or list(self.sizes) != sorted(set(self.sizes))
        ):
            raise ValueError("costs need one time for each of their ascending sizes")

    def of(self, num_tokens: int) -> float:
        """A step beyond the table grows with its tokens."""
        at = bisect_left(self.sizes, num_tokens)
        return self.seconds[at] if at < len(self.sizes) else self.seconds[-1] * num_tokens / self.sizes[-1]


class DraftRecord:
    """How drafts fared, by their place."""

    __slots__ = ("hits", "max_drafts", "tries")

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self.forget()

    def forget(self) -> None:
        self.hits, self.tries = [0.0] * self.max_drafts, [0.0] * self.max_drafts

    def survival(self, prior: float) -> list[float]:
        """For each place, the probability that it and all before it are kept. A place that was seldom reached
        is taken to be like the average of all, and where nothing was seen each is kept at the rate
        `prior`."""
        mean = self.rate(prior)
        rates = (
            (hits + mean * _PRIOR_TRIES) / (tries + _PRIOR_TRIES)
            for hits, tries in zip(self.hits, self.tries, strict=True)
        )
        return list(accumulate(rates, mul))

    def rate(self, prior: float) -> float:
        return (sum(self.hits) + prior * _PRIOR_TRIES) / (sum(self.tries) + _PRIOR_TRIES)

    def saw(self, num_drafts: int, num_kept: int) -> None:
        """A step's outcome; places behind the first that was rejected say nothing."""
        reached = min(num_kept + 1, num_drafts)
        self.hits = [_DECAY * hits + (place < num_kept) for place, hits in enumerate(self.hits)]
        self.tries = [_DECAY * tries + (place < reached) for place, tries in enumerate(self.tries)]


class Account(NamedTuple):
    """Of one request: what the clocks of `Books` showed when it began."""

    plain_s: float
    extra_s: float


@dataclass(slots=True)
class _Batch:
    """Steps of about so many requests."""

    plain_s: float = 0.0  # of one without drafts, lately
    num_plain: int = 0  # of these, since the last time that enough of them were seen
    num_drafting: int = STALE_STEPS  # steps with drafts since then
    is_new: bool = True
    # what drafting took, its rows aside
    extras: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_EXTRAS))

    @property
    def is_known(self) -> bool:
        """Whether it was measured what plain steps take, and not long ago."""
        return self.num_drafting < STALE_STEPS

    def saw_plain(self, seconds: float) -> None:
        """Of the first ones the least counts: they have to do with what came before. A step that took very
        long had another reason."""
        before = self.plain_s
        if self.is_new:
            self.plain_s = min(seconds, before or seconds)
        else:
            self.plain_s += _LEARNS * (min(seconds, 2 * before) - before)
        self.num_plain += 1
        if self.num_plain >= FIRST_PLAIN_STEPS:
            self.num_plain = self.num_drafting = 0
            self.is_new = False


class Estimate(NamedTuple):
    """Of the next step."""

    plain_s: float  # without drafts
    extra_s: float  # what drafting takes, its rows aside: as expected,
    most_extra_s: float  # and at most


class Books:
    """What steps took with drafts and without, and two clocks that every account is read from: what all steps
    would have taken without drafts, and what they took longer with them."""

    def __init__(self, costs: StepCosts, on_device: bool) -> None:
        """`on_device`: steps that make drafts are followed by those that verify them. Else drafting means to
        read results first."""
        self.costs = costs
        self._on_device = on_device
        self._batches: dict[int, _Batch] = {}
        self._plain_s = self._extra_s = 0.0  # the two clocks
        self.is_drafting = False  # the step read last had to do with drafts
        # steps with drafts whose like are not known yet, and how many made some
        self._burst_s, self._num_burst = 0.0, 0

    @property
    def plain_s(self) -> float:
        return self._plain_s

    def opened(self) -> Account:
        return Account(self._plain_s, self._extra_s)

    def balance_s(self, account: Account, gained_s: float) -> float:
        """What a request may lose now; `gained_s` is what its accepted drafts have saved."""
        return MAX_LOSS * (self._plain_s - account.plain_s) + gained_s - (self._extra_s - account.extra_s)

    def charge(self, seconds: float) -> None:
        """What drafts took that is not in the time of a step."""
        self._extra_s += seconds

    def is_known(self, num_requests: int) -> bool:
        return self._batch(num_requests).is_known

    def plain_step_s(self, num_requests: int) -> float:
        return self._batch(num_requests).plain_s or self.costs.of(num_requests)

    def rows_s(self, num_requests: int, num_drafts: int) -> float:
        """What the rows of so many drafts take."""
        return max(0.0, self.costs.of(num_requests + num_drafts) - self.costs.of(num_requests))

    def follow_s(self, num_requests: int) -> float:
        """What passes take for a token of each, while no drafts are made."""
        return self.costs.follow_s + self.costs.follow_row_s * (num_requests - 1)

    def estimate(self, num_requests: int) -> Estimate:
        """Where drafting was not measured yet: what warming up has measured of passes. To read results first
        takes at most as long as the step, since host and device then wait for each other; how much less is
        worth finding out."""
        batch, plain_s = self._batch(num_requests), self.plain_step_s(num_requests)
        if batch.extras:
            extra_s = statistics.median(batch.extras)
            return Estimate(plain_s, extra_s, SURE * extra_s)
        if self._on_device and self.costs.ahead_s is not None:
            extra_s = self.costs.ahead_s + self.costs.ahead_row_s * (num_requests - 1)
            return Estimate(plain_s, extra_s, SURE * extra_s)
        return Estimate(plain_s, 0.0, plain_s)

    def forget(self, num_requests: int) -> None:
        """What drafting takes may have changed."""
        self._batch(num_requests).extras.clear()

    def took(
        self,
        num_requests: int,
        num_rows: int,
        seconds: float,
        num_ahead: int,
        catches_up: bool = False,
        leads: bool = False,
    ) -> None:
        """A step that did nothing but decode. The first one after steps with drafts belongs to them: it has
        to fill the pipe again. So does the one that `leads` to them: they are planned and launched while it
        runs, and where the host is what steps wait for, its time is theirs. `catches_up`: what makes drafts
        has passed over tokens of earlier steps behind it."""
        has_drafts = num_rows > num_requests or num_ahead > 0
        if not has_drafts and not catches_up and not leads and not self.is_drafting:
            self.took_plain(num_requests, seconds)
            return
        batch, plain_s = self._batch(num_requests), self.plain_step_s(num_requests)
        self._plain_s += plain_s
        self._extra_s += seconds - plain_s + self.costs.bookkeeping_s
        self.is_drafting = has_drafts
        self._burst_s += seconds - plain_s - self.rows_s(num_requests, num_rows - num_requests)
        made = num_ahead > 0 if self._on_device else num_rows > num_requests
        self._num_burst += made
        batch.num_drafting += made
        if (not has_drafts and not leads) or self._num_burst >= _BURST:
            if self._num_burst:
                batch.extras.append(max(0.0, self._burst_s / self._num_burst))
            self._burst_s, self._num_burst = 0.0, 0

    def took_plain(self, num_requests: int, seconds: float, num_steps: int = 1) -> None:
        """Steps without drafts took so long each."""
        batch = self._batch(num_requests)
        batch.saw_plain(seconds)
        self._plain_s += num_steps * min(seconds, 2 * batch.plain_s)
        self._extra_s += num_steps * self.costs.bookkeeping_s

    def earned_share(self, num_requests: int) -> float:
        """Of the time of plain steps, that an account has more after them."""
        return MAX_LOSS - self.costs.bookkeeping_s / self.plain_step_s(num_requests)

    def _batch(self, num_requests: int) -> _Batch:
        at = bisect_left(self.costs.sizes, num_requests)
        found = self._batches.get(at)
        if found is None:
            found = self._batches[at] = _Batch()
        return found


class Row(NamedTuple):
    """A request in the next step."""

    survival: Sequence[float]
    most: int  # drafts that there are


def choose(rows: Sequence[Row], books: Books, budget: int, room_s: float, is_paid: bool = False) -> list[int]:
    """Drafts for each row, `budget` in all at most. The step may take `room_s` longer than without any.
    `is_paid`: what drafting takes is spent already, and drafts are there; what counts is the rows."""
    num = len(rows)
    none = [0] * num
    if not rows or budget <= 0:
        return none
    worth = _worth(rows)
    # of equal worth the lower place first, so that no place is skipped
    order = np.argsort(-worth, axis=None, kind="stable")
    order = order[worth.ravel()[order] >= _LEAST_WORTH][:budget]
    gains = np.cumsum(worth.ravel()[order])
    plain_s, extra_s, most_extra_s = books.estimate(num)
    if is_paid:
        extra_s = most_extra_s = 0.0
    best, best_rate = 0, (1.0 if is_paid else LEAST_GAIN) * num / plain_s
    for size in _sizes(num, len(order), books.costs):
        rows_s = books.rows_s(num, size)
        rate = (num + gains[size - 1]) / (plain_s + extra_s + rows_s)
        if rate > best_rate and most_extra_s + SURE * rows_s <= room_s:
            best, best_rate = size, rate
    return np.bincount(order[:best] // worth.shape[1], minlength=num).tolist() if best else none


def _worth(rows: Sequence[Row]) -> NDArray[np.float64]:
    """[rows, places]: falls from place to place in every row; 0 where there is no draft."""
    worth = np.array([row.survival for row in rows])
    most = np.array([row.most for row in rows])
    worth[np.arange(worth.shape[1]) >= most[:, None]] = 0.0
    return worth


def _sizes(base: int, most: int, costs: StepCosts) -> list[int]:
    """Numbers of drafts that fill a step up to a padded size, and all of them: between two of these a draft
    more costs nothing."""
    filled = [size - base for size in costs.sizes if 0 < size - base < most]
    return [*filled, most] if most else []
