"""The observer protocol: what lanes and pools tell to whoever listens. Owns no state and costs one `is None` test when nobody does.

An observer is passed to a lane or pool at construction; nothing that is observed imports its observer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from penstock.contract import Access


class LaneObserver(Protocol):
    """Sees the order in which work is given to lanes, from the submitting thread, before the work can run."""

    def submitted(self, lane: str, ticket: int, label: str, accesses: Sequence[Access]) -> None:
        """Work `ticket` was put on `lane`."""

    def recorded(self, lane: str, fence: int) -> None:
        """Fence number `fence` was placed on `lane`; it covers everything submitted there before."""

    def waited(self, lane: str, on_lane: str, fence: int) -> None:
        """What is submitted to `lane` from now on runs after that fence of `on_lane`. The wait takes a number on `lane`, as work does."""

    def wait_ignored(self, lane: str, on_lane: str, fence: int) -> None:
        """A wait was placed inside a capture, where no wait on an outside fence is honoured."""

    def host_waited(self, on_lane: str, fence: int, seconds: float) -> None:
        """The calling thread knows that this fence has passed: it blocked for `seconds`, or it looked and saw (0)."""

    def finished(self, lane: str, ticket: int, error: BaseException | None) -> None:
        """The work has run (CPU, from the lane's own thread) or has been launched (CUDA, from the submitting thread)."""


class PoolObserver(Protocol):
    """Sees slots change state, from the thread that owns the pool."""

    def opened(self, pool: str, num_slots: int) -> None:
        """A pool was made; all its slots are free. Accesses name its arena by the same name."""

    def moved(self, pool: str, slots: Sequence[int], old: str, new: str, owner: str) -> None:
        """`slots` went from state `old` to state `new` on behalf of `owner`."""

    def sealed(self, pool: str, slot: int, key: bytes) -> None:
        """`slot` became immutable under `key`."""

    def evicted(self, pool: str, slot: int, key: bytes) -> None:
        """The copy of `key` in `slot` was forgotten."""
