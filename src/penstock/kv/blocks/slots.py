"""The state of every slot of a pool and how many hold and pin it. Owns the table of legal transitions; decides nothing.

    FREE      no content, no holder
    RESERVED  taken by one reservation; its content belongs to nobody yet (a transfer's destination, a draw that may be rolled back)
    ACTIVE    held by at least one table, whether or not a transfer pins it as well
    PINNED    held by no table, pinned by at least one transfer
    IDLE      sealed, held and pinned by nobody: matchable and evictable

So the state follows from four facts: is it reserved, number of holds, number of pins, is it sealed. It is stored nevertheless,
because its counts are asked for all the time, and because a state that disagrees with the facts is how a defect shows.

The books are plain lists: half of all calls are about the one block that a decoding request has come to, where an array operation
costs ten times a list's, and for runs of thousands the two are equal because keys and orders are dictionaries either way.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

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


_FREE, _RESERVED, _ACTIVE, _PINNED, _IDLE = SlotState

# From which states an event is legal, and what it may lead to.
TRANSITIONS: dict[SlotEvent, dict[SlotState, frozenset[SlotState]]] = {
    SlotEvent.RESERVE: {_FREE: frozenset({_RESERVED})},
    SlotEvent.COMMIT: {_RESERVED: frozenset({_ACTIVE})},
    SlotEvent.SHARE: {_IDLE: frozenset({_ACTIVE}), _PINNED: frozenset({_ACTIVE}), _ACTIVE: frozenset({_ACTIVE})},
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
        self.state = [SlotState.FREE] * num_slots
        self.holds = [0] * num_slots  # by tables; a reservation counts as one
        self.pins = [0] * num_slots
        self._counts = [0] * len(SlotState)
        self._counts[SlotState.FREE] = num_slots
        self._pool = pool
        self._observer = observer

    @property
    def counts(self) -> SlotCounts:
        return SlotCounts(*self._counts)

    def num_in(self, state: SlotState) -> int:
        return self._counts[state]

    def those_in(self, state: SlotState, slots: Sequence[int]) -> list[int]:
        states = self.state
        return [slot for slot in slots if states[slot] is state]

    def require(self, slots: Sequence[int], event: SlotEvent) -> None:
        """Raise unless `event` is legal for every one of `slots`, each named once; changes nothing."""
        if not slots:
            return
        if min(slots) < 0 or max(slots) >= len(self.state):
            raise InvariantBroken(f"pool {self._pool!r} has slots 0 to {len(self.state) - 1}, got {min(slots)} to {max(slots)}")
        if len(set(slots)) != len(slots):
            raise InvariantBroken(f"pool {self._pool!r}: a run of slots to {event.name} names a slot twice")
        for old in set(map(self.state.__getitem__, slots)):
            if old not in TRANSITIONS[event]:
                raise self._illegal(slots, old, event)

    def move(self, slots: Sequence[int], event: SlotEvent, new: SlotState, owner: str) -> None:
        """Put `slots` into state `new` where `event` allows that from the state of each, else change nothing and raise."""
        if not slots:
            return
        state, legal = self.state, TRANSITIONS[event]
        before = list(map(state.__getitem__, slots))
        found = set(before)
        for old in found:
            if old not in legal or new not in legal[old]:
                raise self._illegal(slots, old, event)
        for slot in slots:
            state[slot] = new
        for old in found:
            num = before.count(old)
            self._counts[old] -= num
            self._counts[new] += num
        if self._observer is not None:
            for old in found - {new}:
                moved = [slot for slot, was in zip(slots, before, strict=True) if was is old]
                self._observer.moved(self._pool, moved, old.name.lower(), new.name.lower(), owner)

    def _illegal(self, slots: Sequence[int], state: SlotState, event: SlotEvent) -> IllegalTransition:
        slot = self.those_in(state, slots)[0]
        return IllegalTransition(f"slot {slot} of pool {self._pool!r}", state.name, event.name)
