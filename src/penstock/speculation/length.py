"""Whether drafts pay, and how many of each request a step verifies. Owns measured costs and acceptance, and
the accounts that bound the loss of a request.

The worth of a draft is the probability that it and all drafts before it are accepted. The time of a step has
three parts: the measured time of the same step without drafts; the time of further rows, from a table; and
the measured cost of drafting, which is draft passes, or reading results before the next step is planned.
Drafts are taken in order of worth, as many as give the most tokens per second.

Estimates may be wrong, and acceptance may change. So each request has an account. It earns `MAX_LOSS` of its
decode time, and the time that its accepted drafts save. It pays the extra time of all steps with drafts, also
of drafts of other requests, and the bookkeeping of every step. A step has drafts only if every account of the
batch can pay for it even if all drafts fail. So a request is never more than `MAX_LOSS` behind plain
decoding, as long as steps take no longer than estimated.
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

# share of a request's time that drafts may cost; trial lookups have a share of their own
MAX_LOSS = 0.025
LEAST_GAIN = 1.05  # least factor of tokens per second: less is within the error of estimates
FIRST_PLAIN_STEPS = 4  # plain steps measured per batch size before drafts start, and again after STALE_STEPS
STALE_STEPS = 256  # steps with drafts after which plain steps are measured again
RETRY_STEPS, MOST_RETRY_STEPS = 512, 8192  # steps before drafts that did not pay are tried again
SURE = 1.25  # safety factor on the expected extra time of a step with drafts
_LEARNS = 0.2  # weight of the newest plain step
_NUM_EXTRAS, _BURST = 5, 8  # measurements of drafting cost kept, and steps per measurement
_DECAY = 0.97  # of old observations, per step: a request that has changed is tried again
_PRIOR_TRIES = 2.0  # weight of the prior, in observations
_LEAST_WORTH = 0.02  # drafts that are hardly ever accepted take KV slots, even if their rows are free


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Measured seconds of a step, by its padded number of tokens."""

    sizes: tuple[int, ...]  # ascending
    seconds: tuple[float, ...]
    # of making drafts on the device after a step of one request; None: not measured, or not made there
    ahead_s: float | None = None
    ahead_row_s: float = 0.0  # of each further request
    follow_s: float = 0.0  # of a draft model's later pass over one token of one request
    follow_row_s: float = 0.0  # of each further request
    bookkeeping_s: float = 0.0  # per step on the engine thread, with or without drafts

    def __post_init__(self) -> None:
        if (
            not self.sizes
            or len(self.sizes) != len(self.seconds)
            or list(self.sizes) != sorted(set(self.sizes))
        ):
            raise ValueError("costs need one time for each of their ascending sizes")

    def of(self, num_tokens: int) -> float:
        """Beyond the table, the time grows in proportion to tokens."""
        at = bisect_left(self.sizes, num_tokens)
        return self.seconds[at] if at < len(self.sizes) else self.seconds[-1] * num_tokens / self.sizes[-1]


class DraftRecord:
    """Acceptance of drafts by position."""

    __slots__ = ("hits", "max_drafts", "tries")

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self.forget()

    def forget(self) -> None:
        self.hits, self.tries = [0.0] * self.max_drafts, [0.0] * self.max_drafts

    def survival(self, prior: float) -> list[float]:
        """For each position, the probability that it and all before it are accepted. A rarely reached
        position is estimated by the average of all; without observations each has the rate `prior`."""
        mean = self.rate(prior)
        rates = (
            (hits + mean * _PRIOR_TRIES) / (tries + _PRIOR_TRIES)
            for hits, tries in zip(self.hits, self.tries, strict=True)
        )
        return list(accumulate(rates, mul))

    def rate(self, prior: float) -> float:
        return (sum(self.hits) + prior * _PRIOR_TRIES) / (sum(self.tries) + _PRIOR_TRIES)

    def saw(self, num_drafts: int, num_kept: int) -> None:
        """A step's outcome; positions after the first rejected draft say nothing."""
        reached = min(num_kept + 1, num_drafts)
        self.hits = [_DECAY * hits + (place < num_kept) for place, hits in enumerate(self.hits)]
        self.tries = [_DECAY * tries + (place < reached) for place, tries in enumerate(self.tries)]


class Account(NamedTuple):
    """The clocks of `Books` when a request began."""

    plain_s: float
    extra_s: float


@dataclass(slots=True)
class _Batch:
    """Steps of one batch size class."""

    plain_s: float = 0.0  # recent time of a step without drafts
    num_plain: int = 0  # plain steps since the last complete measurement
    num_drafting: int = STALE_STEPS  # steps with drafts since then
    is_new: bool = True
    # cost of drafting, without its rows
    extras: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_EXTRAS))

    @property
    def is_known(self) -> bool:
        """True if plain steps were measured recently."""
        return self.num_drafting < STALE_STEPS

    def saw_plain(self, seconds: float) -> None:
        """Of the first steps the fastest counts: the others include effects of earlier work. Outliers are
        clipped."""
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
    """Estimated times of the next step."""

    plain_s: float  # without drafts
    extra_s: float  # expected cost of drafting, without its rows
    most_extra_s: float  # upper bound of it


class Books:
    """Times of steps with and without drafts, and the two clocks of all accounts: the time that all steps
    would have taken without drafts, and their extra time with drafts."""

    def __init__(self, costs: StepCosts, on_device: bool) -> None:
        """`on_device`: the device makes drafts after one step, and the next step verifies them. Otherwise
        drafting needs the results of the step before."""
        self.costs = costs
        self._on_device = on_device
        self._batches: dict[int, _Batch] = {}
        self._plain_s = self._extra_s = 0.0  # the two clocks
        self.is_drafting = False  # the step read last made or verified drafts
        # extra time of the current run of steps with drafts, and how many of them drafted
        self._burst_s, self._num_burst = 0.0, 0

    @property
    def plain_s(self) -> float:
        return self._plain_s

    def opened(self) -> Account:
        return Account(self._plain_s, self._extra_s)

    def balance_s(self, account: Account, gained_s: float) -> float:
        """Time that a request may lose now; `gained_s`: time saved by its accepted drafts."""
        return MAX_LOSS * (self._plain_s - account.plain_s) + gained_s - (self._extra_s - account.extra_s)

    def charge(self, seconds: float) -> None:
        """Cost of drafts outside the time of a step."""
        self._extra_s += seconds

    def is_known(self, num_requests: int) -> bool:
        return self._batch(num_requests).is_known

    def plain_step_s(self, num_requests: int) -> float:
        return self._batch(num_requests).plain_s or self.costs.of(num_requests)

    def rows_s(self, num_requests: int, num_drafts: int) -> float:
        """Extra time for the rows of `num_drafts` drafts."""
        return max(0.0, self.costs.of(num_requests + num_drafts) - self.costs.of(num_requests))

    def follow_s(self, num_requests: int) -> float:
        """Time of draft-model passes over one token per request, while no drafts are made."""
        return self.costs.follow_s + self.costs.follow_row_s * (num_requests - 1)

    def estimate(self, num_requests: int) -> Estimate:
        """Before drafting is measured, uses the warm-up times of passes. Reading results first costs at most
        the time of a step, since host and device then wait for each other. The expected cost is taken as 0,
        so that drafting is tried and measured."""
        batch, plain_s = self._batch(num_requests), self.plain_step_s(num_requests)
        if batch.extras:
            extra_s = statistics.median(batch.extras)
            return Estimate(plain_s, extra_s, SURE * extra_s)
        if self._on_device and self.costs.ahead_s is not None:
            extra_s = self.costs.ahead_s + self.costs.ahead_row_s * (num_requests - 1)
            return Estimate(plain_s, extra_s, SURE * extra_s)
        return Estimate(plain_s, 0.0, plain_s)

    def forget(self, num_requests: int) -> None:
        """Drop measurements: the cost of drafting may have changed."""
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
        """A decode-only step took `seconds`. The first plain step after steps with drafts counts as one of
        them: it refills the pipeline. So does the step that `leads` to them: they are planned and launched
        while it runs, and if the host is the bottleneck, its time includes their cost. `catches_up`: the
        draft model processed tokens of earlier steps after it."""
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
        """`num_steps` steps without drafts took `seconds` each."""
        batch = self._batch(num_requests)
        batch.saw_plain(seconds)
        self._plain_s += num_steps * min(seconds, 2 * batch.plain_s)
        self._extra_s += num_steps * self.costs.bookkeeping_s

    def earned_share(self, num_requests: int) -> float:
        """Share of plain-step time that an account gains."""
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
    most: int  # available drafts


def choose(rows: Sequence[Row], books: Books, budget: int, room_s: float, is_paid: bool = False) -> list[int]:
    """Number of drafts for each row, at most `budget` in all. The step may take `room_s` longer than without
    drafts. `is_paid`: the drafts exist already, so only the cost of their rows counts."""
    num = len(rows)
    none = [0] * num
    if not rows or budget <= 0:
        return none
    worth = _worth(rows)
    # ties: lower position first, so that no position is skipped
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
    """[rows, positions]: falls along every row; 0 if there is no draft."""
    worth = np.array([row.survival for row in rows])
    most = np.array([row.most for row in rows])
    worth[np.arange(worth.shape[1]) >= most[:, None]] = 0.0
    return worth


def _sizes(base: int, most: int, costs: StepCosts) -> list[int]:
    """Numbers of drafts that fill a step up to a padded size, and `most`: between two of them a further draft
    is free."""
    filled = [size - base for size in costs.sizes if 0 < size - base < most]
    return [*filled, most] if most else []
