"""The observer protocol: events that lanes and pools report. Owns no state; without an observer it costs one
`is None` test.

An observer is passed to a lane or pool at construction; observed code never imports its observer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from penstock.contract import Access, Fence


class LaneObserver(Protocol):
    """Sees the order in which work is given to lanes, from the submitting thread, before the work can run."""

    def submitted(self, lane: str, ticket: int, label: str, accesses: Sequence[Access]) -> None:
        """Work `ticket` was put on `lane`."""

    def waited(self, lane: str, on_lane: str, fence: int) -> None:
        """Work submitted to `lane` from now on runs after that fence of `on_lane`, which covers everything
        submitted there before it. The wait takes a number on `lane`, as work does."""

    def host_waited(self, on_lane: str, fence: int, seconds: float) -> None:
        """The calling thread knows that this fence has passed: it blocked for `seconds`, or polled (0)."""

    def touched(self, label: str, accesses: Sequence[Access]) -> None:
        """The calling thread itself touches these bytes, outside any lane."""

    def started(self, lane: str, ticket: int) -> None:
        """The work begins, on the calling thread. Work that it submits happens after all that its lane knew
        (CPU lanes only)."""

    def finished(self, lane: str, ticket: int, error: BaseException | None) -> None:
        """The work has run (CPU, from the lane's own thread) or has been launched (CUDA, from the submitting
        thread)."""


class PoolObserver(Protocol):
    """Sees slots change state, from the thread that owns the pool, or under the pool's lock where several
    share it. Either way what one call sees happens after what the calls before it saw."""

    def opened(self, pool: str, num_slots: int) -> None:
        """A pool was made; all its slots are free. Accesses name its arena by the same name."""

    def moved(self, pool: str, slots: Sequence[int], old: str, new: str, owner: str) -> None:
        """`slots` went from state `old` to state `new` on behalf of `owner`."""

    def lent(self, pool: str, slots: Sequence[int], owner: str) -> None:
        """`owner` got a handle over `slots` that other handles may share, so their state need not change."""

    def returned(self, pool: str, slots: Sequence[int], owner: str, fence: Fence | None) -> None:
        """A handle over `slots` ends. Any state change comes after this call. `fence` covers its use of them;
        None: that use is over."""

    def sealed(self, pool: str, slot: int, key: bytes) -> None:
        """`slot` became immutable under `key`."""

    def evicted(self, pool: str, slot: int, key: bytes) -> None:
        """The copy of `key` in `slot` was forgotten."""

    def closed(self, pool: str, left: Sequence[str]) -> None:
        """The pool is closed, unless handles are `left`: then it stays open."""


class BothPools:
    """Two observers of the same pools."""

    def __init__(self, first: PoolObserver, second: PoolObserver) -> None:
        self._all = (first, second)

    def opened(self, pool: str, num_slots: int) -> None:
        for one in self._all:
            one.opened(pool, num_slots)

    def moved(self, pool: str, slots: Sequence[int], old: str, new: str, owner: str) -> None:
        for one in self._all:
            one.moved(pool, slots, old, new, owner)

    def lent(self, pool: str, slots: Sequence[int], owner: str) -> None:
        for one in self._all:
            one.lent(pool, slots, owner)

    def returned(self, pool: str, slots: Sequence[int], owner: str, fence: Fence | None) -> None:
        for one in self._all:
            one.returned(pool, slots, owner, fence)

    def sealed(self, pool: str, slot: int, key: bytes) -> None:
        for one in self._all:
            one.sealed(pool, slot, key)

    def evicted(self, pool: str, slot: int, key: bytes) -> None:
        for one in self._all:
            one.evicted(pool, slot, key)

    def closed(self, pool: str, left: Sequence[str]) -> None:
        for one in self._all:
            one.closed(pool, left)


class EngineObserver(Protocol):
    """Sees the turns of the engine's loop, from its thread."""

    def turn(self) -> AbstractContextManager[None]:
        """Around one turn. Inside it the thread must not wait, except inside `may_wait`."""

    def may_wait(self, where: str) -> AbstractContextManager[None]:
        """Around an allowed wait, such as that for a step's result."""

    def balanced(self, pool: str, counts: Mapping[str, int]) -> None:
        """Between two turns: the pool's own count of slots by state. Under the pool's lock if several threads
        share it."""


class Unwatched:
    """An `EngineObserver` that does nothing."""

    _NOTHING = nullcontext()

    def turn(self) -> AbstractContextManager[None]:
        return self._NOTHING

    def may_wait(self, where: str) -> AbstractContextManager[None]:
        return self._NOTHING

    def balanced(self, pool: str, counts: Mapping[str, int]) -> None:
        """Does nothing."""


class ContentObserver(Protocol):
    """Checked mode: sees the content of blocks that leave the device and that come back, from any thread."""

    def demoted(self, tier: str, slot: int, key: bytes, digest: int) -> None:
        """A block with these bytes on the device was copied to `slot` of `tier`. Called before it can be
        found there."""

    def promoted(self, tier: str, slot: int, key: bytes, digest: int) -> None:
        """The copy of `key` in `slot` of `tier` was copied to the device, and these bytes landed there."""


class ByteGuard(Protocol):
    """Checked mode: poisons and reads bytes. Called inside ops, which have declared the access to `slots` of
    `arena`."""

    def poison(self, arena: str, slots: Sequence[int]) -> None:
        """Fill with values that spoil any computation. An op of the slots' new owner, on the lane that will
        write them, after its waits."""

    def digests(self, arena: str, slots: Sequence[int]) -> list[int]:
        """A number per block that differs if the bytes differ."""
