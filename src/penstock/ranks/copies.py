"""Copies between device and host memory on all ranks. Owns when one counts as over: when every rank has made
it.

A copy is one op of rank 0's lane: it orders the copy from the other ranks, makes its own, and waits for
theirs. So its fence, its ticket and its error speak for all ranks. The other ranks begin it behind all steps
that were announced before.
"""

from __future__ import annotations

from typing import Protocol

from penstock.contract import Arrival
from penstock.kv.transfer import Copier, Layers, Mover, Slots, Transfer

DIRECTIONS = ("load", "save")  # lanes of the movers


class Ordered(Protocol):
    """A copy that other ranks were asked for."""

    def wait(self) -> None:
        """Block until they have made it. Raises TransferFailed if one could not."""


class Orders(Protocol):
    """The other ranks, as copies of rank 0 see them."""

    def order_copy(
        self, direction: int, source_slots: Slots, dest_slots: Slots, layers: Layers
    ) -> Ordered: ...


class LedCopier:
    """On rank 0."""

    def __init__(self, own: Copier, direction: str, others: Orders) -> None:
        self._own, self._others = own, others
        self._direction = DIRECTIONS.index(direction)

    def copy(self, source_slots: Slots, dest_slots: Slots, layers: Layers) -> None:
        ordered = self._others.order_copy(self._direction, source_slots, dest_slots, layers)
        try:
            self._own.copy(source_slots, dest_slots, layers)
        finally:  # their copies end before either end is given back
            ordered.wait()


class LedMover(Mover):
    """On rank 0. A transfer's arrivals are known when they have landed: no step begins over one that another
    rank may still fail to make."""

    def _enqueue(self, transfer: Transfer, arrivals: list[Arrival]) -> None:
        super()._enqueue(transfer, arrivals)
        for arrival in arrivals:
            arrival.fence.wait_passed()
