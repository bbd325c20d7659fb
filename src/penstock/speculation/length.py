"""How many drafts of each request a step verifies. Owns measured costs of steps and the acceptance of drafts.

The worth of a draft is the probability that it and all drafts before it are accepted. Drafts are taken in
order of worth, as many as give the most tokens per second.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import numpy as np

_PRIOR_TRIES = 2.0  # weight of the prior, in observations
_LEAST_WORTH = 0.02  # drafts that are hardly ever accepted take KV slots, even if their rows are free


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Measured seconds of a step, by its padded number of rows."""

    sizes: tuple[int, ...]  # ascending
    seconds: tuple[float, ...]
    # Extra time of a step with drafts: of the passes that make them on the device, or of reading the step
    # before it first.
    making_s: float = 0.0  # with one request
    making_row_s: float = 0.0  # of each further one

    def __post_init__(self) -> None:
        if (
            not self.sizes
            or len(self.sizes) != len(self.seconds)
            or list(self.sizes) != sorted(set(self.sizes))
        ):
            raise ValueError("costs need one time for each of their ascending sizes")

    def of(self, num_rows: int) -> float:
        """Beyond the table, the time grows in proportion to rows."""
        at = bisect_left(self.sizes, num_rows)
        return self.seconds[at] if at < len(self.sizes) else self.seconds[-1] * num_rows / self.sizes[-1]

    def making(self, num_requests: int) -> float:
        return self.making_s + self.making_row_s * (num_requests - 1)


class DraftRecord:
    """Acceptance of drafts by position; old observations fade."""

    __slots__ = ("_fade", "_hits", "_tries")

    def __init__(self, max_drafts: int, num_remembered: int) -> None:
        """`num_remembered`: outcomes that count, about."""
        self._fade = 1 - 1 / num_remembered
        self._hits, self._tries = [0.0] * max_drafts, [0.0] * max_drafts

    def survival(self, prior: float) -> list[float]:
        """For each position, the probability that it and all before it are accepted. A rarely reached
        position is estimated by the average of all; without observations each has the rate `prior`."""
        mean = self.rate(prior)
        rates = (
            (hits + mean * _PRIOR_TRIES) / (tries + _PRIOR_TRIES)
            for hits, tries in zip(self._hits, self._tries, strict=True)
        )
        return list(accumulate(rates, mul))

    def rate(self, prior: float) -> float:
        return (sum(self._hits) + prior * _PRIOR_TRIES) / (sum(self._tries) + _PRIOR_TRIES)

    def saw(self, num_drafts: int, num_kept: int) -> None:
        """The outcome of one proposal; positions after the first rejected draft say nothing."""
        reached, fade = min(num_kept + 1, num_drafts), self._fade
        self._hits = [fade * hits + (place < num_kept) for place, hits in enumerate(self._hits)]
        self._tries = [fade * tries + (place < reached) for place, tries in enumerate(self._tries)]


class Row(NamedTuple):
    """A request with drafts."""

    survival: Sequence[float]
    most: int  # available drafts


def choose(
    rows: Sequence[Row], num_requests: int, costs: StepCosts, budget: int, extra_s: float = 0.0
) -> list[int]:
    """Number of drafts for each row, at most `budget` in all, in a step of `num_requests` that takes
    `extra_s` longer if it has any."""
    worth = np.array([row.survival for row in rows])
    worth[np.arange(worth.shape[1]) >= np.array([row.most for row in rows])[:, None]] = 0.0
    # ties: lower position first, so that no position is skipped
    order = np.argsort(-worth, axis=None, kind="stable")
    order = order[worth.ravel()[order] >= _LEAST_WORTH][: max(0, budget)]
    gains = np.cumsum(worth.ravel()[order])
    # between two padded sizes a further draft is free
    filled = [size - num_requests for size in costs.sizes if 0 < size - num_requests < len(order)]
    best, best_rate = 0, num_requests / costs.of(num_requests)
    for size in (*filled, len(order)) if len(order) else ():
        rate = (num_requests + gains[size - 1]) / (costs.of(num_requests + size) + extra_s)
        if rate > best_rate:
            best, best_rate = size, rate
    return np.bincount(order[:best] // worth.shape[1], minlength=len(rows)).tolist()
