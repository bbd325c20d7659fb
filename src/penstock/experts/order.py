"""Which expert leaves the device first. Owns a score per expert, the lowest leaves; knows nothing of slots.

An expert's number is layer * experts + expert, over the layers that have experts. A step passes the layers in
order, so of equal scores the layer that comes again last leaves first.

A step with so many tokens that nearly every expert is hit says nothing about which ones are used often. It
changes no score, and what it brings leaves first: experts that stay go on to be hits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]

BULK = 4  # times as many tokens' experts as there are: nearly every expert is hit, however they are routed
_HALF_LIFE = 256  # steps after which a use counts half
_LARGEST = 1e100


def is_bulk(num_tokens: int, top_k: int, num_experts: int) -> bool:
    """Whether a step's tokens hit nearly every expert of a layer."""
    return num_tokens * top_k >= BULK * num_experts


class ExpertOrder(Protocol):
    """`scores` by expert. `tie`: less than what differs between two scores that count as different."""

    scores: NDArray[np.float64]

    @property
    def tie(self) -> float: ...

    def begin(self) -> None:
        """A step begins."""

    def used(self, experts: Numbers) -> None:
        """A step runs tokens through these."""

    def admitted(self, experts: Numbers) -> None:
        """They get a slot; `used` may follow."""


class FrequencyOrder:
    """Uses, of which older ones count less (lfu with ageing)."""

    def __init__(self, num_experts: int) -> None:
        self.scores = np.zeros(num_experts)
        self._one = 1.0  # what a use counts now: it grows instead of all scores shrinking

    @property
    def tie(self) -> float:
        return self._one * 1e-3

    def begin(self) -> None:
        self._one *= 2 ** (1 / _HALF_LIFE)
        if self._one > _LARGEST:
            self.scores /= self._one
            self._one = 1.0

    def used(self, experts: Numbers) -> None:
        self.scores[experts] += self._one

    def admitted(self, experts: Numbers) -> None:
        """Its earlier uses still count."""


class RecentOrder:
    """The step of the last use (lru)."""

    tie = 0.5

    def __init__(self, num_experts: int) -> None:
        self.scores = np.zeros(num_experts)
        self._step = 0

    def begin(self) -> None:
        self._step += 1

    def used(self, experts: Numbers) -> None:
        self.scores[experts] = self._step

    def admitted(self, experts: Numbers) -> None:
        """The score of its last use is older than that of any expert that stayed since."""


class FirstOrder:
    """What came first stays (none): the last to come leaves."""

    tie = 0.5

    def __init__(self, num_experts: int) -> None:
        self.scores = np.zeros(num_experts)
        self._num = 0

    def begin(self) -> None:
        """Steps do not count."""

    def used(self, experts: Numbers) -> None:
        """Uses do not count."""

    def admitted(self, experts: Numbers) -> None:
        self.scores[experts] = -self._num - np.arange(len(experts))
        self._num += len(experts)


ORDERS: dict[str, Callable[[int], ExpertOrder]] = {
    "lfu": FrequencyOrder,
    "lru": RecentOrder,
    "none": FirstOrder,
}
