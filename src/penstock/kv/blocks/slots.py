"""The state of every slot of a pool and how many hold and pin it. Owns the table of legal transitions;
decides nothing.

    FREE      no content, no holder
    RESERVED  taken by one reservation; its content is undefined (a transfer's destination, a draw that may be
              rolled back)
    ACTIVE    held by at least one table, whether or not a transfer pins it as well
    PINNED    held by no table, pinned by at least one transfer
    IDLE      sealed, without holds and pins: matchable and evictable

So the state follows from four facts: is it reserved, number of holds, number of pins, is it sealed. It is
stored nevertheless, because its counts are asked for all the time, and because a state that disagrees with
the facts is how a defect shows. Slots that are booked together are a run: an array of distinct slots.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import IllegalTransition, InvariantBroken
from penstock.observe import PoolObserver


class SlotState(enum.IntEnum):
    FREE = 0
    RESERVED = 1
    ACTIVE = 2
    PINNED = 3
    IDLE = 4


class SlotEvent(enum.IntEnum):
    RESERVE = 0
    COMMIT = 1
    SHARE = 2
    PIN = 3
    SEAL = 4
    GIVE_BACK = 5
    EVICT = 6


Run = NDArray[np.integer[Any]]


def as_run(slots: Sequence[int] | Run) -> Run:
    """`slots` as the books take them; an array is returned unchanged."""
    return slots if isinstance(slots, np.ndarray) else np.array(slots, np.intp)


_FREE, _RESERVED, _ACTIVE, _PINNED, _IDLE = SlotState

# From which states an event is legal, and what it may lead to.
TRANSITIONS: dict[SlotEvent, dict[SlotState, frozenset[SlotState]]] = {
    SlotEvent.RESERVE: {_FREE: frozenset({_RESERVED})},
    SlotEvent.COMMIT: {_RESERVED: frozenset({_ACTIVE})},
    SlotEvent.SHARE: {
        _IDLE: frozenset({_ACTIVE}),
        _PINNED: frozenset({_ACTIVE}),
        _ACTIVE: frozenset({_ACTIVE}),
    },
    SlotEvent.PIN: {
        _IDLE: frozenset({_PINNED}),
        _PINNED: frozenset({_PINNED}),
        _ACTIVE: frozenset({_ACTIVE}),
        _RESERVED: frozenset({_RESERVED}),
    },
    SlotEvent.SEAL: {_ACTIVE: frozenset({_ACTIVE}), _PINNED: frozenset({_PINNED})},
    SlotEvent.GIVE_BACK: {
        _RESERVED: frozenset({_PINNED, _FREE}),
        _ACTIVE: frozenset({_PINNED, _IDLE, _FREE}),
        _PINNED: frozenset({_PINNED, _IDLE, _FREE}),
    },
    SlotEvent.EVICT: {_IDLE: frozenset({_FREE})},
}


class SlotCounts(NamedTuple):
    """How many slots are in each state; the fields sum to the pool."""

    free: int
    reserved: int
    active: int
    pinned: int
    idle: int


class SlotBook:
    """States, holds and pins of one pool's slots, with a running count per state."""

    def __init__(self, num_slots: int, pool: str, observer: PoolObserver | None) -> None:
        self.state = np.zeros(num_slots, np.uint8)  # a SlotState each
        self.holds = np.zeros(num_slots, np.int32)  # by tables; a reservation counts as one
        self.num_holds = 0  # their sum
        self.pins = np.zeros(num_slots, np.int32)
        self.num_in = [num_slots, 0, 0, 0, 0]  # by state
        self._pool = pool
        self._observer = observer

    def add_holds(self, run: Run) -> None:
        self.holds[run] += 1
        self.num_holds += len(run)

    @property
    def num_shared(self) -> int:
        """Slots that the holders of shared slots would need in addition if each had its own."""
        return self.num_holds - self.num_in[SlotState.ACTIVE] - self.num_in[SlotState.RESERVED]

    def those_in(self, state: SlotState, slots: Run) -> Run:
        those: Run = slots[self.state[slots] == state]
        return those

    def require(self, slots: Run, event: SlotEvent) -> None:
        """Raise unless `event` is legal for every one of the distinct `slots`; changes nothing."""
        if not len(slots):
            return
        ordered = np.sort(slots)
        if ordered[0] < 0 or ordered[-1] >= len(self.state):
            raise InvariantBroken(
                f"pool {self._pool!r} has slots 0 to {len(self.state) - 1}, got {ordered[0]} to {ordered[-1]}"
            )
        if (ordered[1:] == ordered[:-1]).any():
            raise InvariantBroken(f"pool {self._pool!r}: a run of slots to {event.name} names a slot twice")
        for old in self._num_by_state(slots):
            if old not in TRANSITIONS[event]:
                raise self._illegal(slots, old, event)

    def move(self, slots: Run, event: SlotEvent, new: SlotState, owner: str) -> None:
        """Move `slots` to state `new` if `event` allows that for each of them; else change nothing and
        raise."""
        if not len(slots):
            return
        found = self._num_by_state(slots)
        for old in found:
            if new not in TRANSITIONS[event].get(old, ()):
                raise self._illegal(slots, old, event)
        left: dict[SlotState, list[int]] = {}
        if self._observer is not None:
            left = {old: self.those_in(old, slots).tolist() for old in found if old != new}
        self.state[slots] = new
        for old, num in found.items():
            self.num_in[old] -= num
            self.num_in[new] += num
        if self._observer is not None:
            for old, moved in left.items():
                self._observer.moved(self._pool, moved, old.name.lower(), new.name.lower(), owner)

    def _num_by_state(self, slots: Run) -> dict[SlotState, int]:
        """Number of `slots` in each state that occurs."""
        counts = np.bincount(self.state[slots]).tolist()
        return {state: num for state, num in zip(SlotState, counts, strict=False) if num}

    def _illegal(self, slots: Run, state: SlotState, event: SlotEvent) -> IllegalTransition:
        slot = int(self.those_in(state, slots)[0])
        return IllegalTransition(f"slot {slot} of pool {self._pool!r}", state.name, event.name)
