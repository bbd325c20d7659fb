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
the facts is how a defect shows.

Half of all calls are about the one block that a decoding request has come to, where an array operation costs
ten times a loop's; for the thousands of a long prompt it costs a tenth. So a run of slots is a list or an
array by its length, and `PerSlot` can be used in both ways.
"""

from __future__ import annotations

import enum
from array import array
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


Run = list[int] | NDArray[np.intp]
FEW = 32  # slots up to which a run is a list


def as_run(slots: Sequence[int] | NDArray[np.integer[Any]]) -> Run:
    """`slots` as the books take them; a short list is returned unchanged."""
    return np.array(slots, np.intp) if len(slots) > FEW else as_list(slots)


def as_list(slots: Sequence[int] | NDArray[np.integer[Any]]) -> list[int]:
    """`slots` as plain numbers; a list is returned unchanged."""
    if isinstance(slots, list):
        return slots
    plain: list[int] = slots.tolist() if isinstance(slots, np.ndarray) else list(slots)
    return plain


class PerSlot:
    """A number for each slot: `at` is for one slot at a time, `array` the same memory for many."""

    __slots__ = ("array", "at")

    def __init__(self, typecode: str, num_slots: int) -> None:
        self.at = array(typecode, bytes(array(typecode).itemsize * num_slots))
        self.array: NDArray[Any] = np.frombuffer(self.at, typecode)

    def set(self, slots: Run, number: int) -> None:
        if isinstance(slots, np.ndarray):
            self.array[slots] = number
        else:
            at = self.at
            for slot in slots:
                at[slot] = number

    def add(self, slots: Run, by: int) -> None:
        """Add to each of `slots`, which are distinct."""
        if isinstance(slots, np.ndarray):
            self.array[slots] += by
        else:
            at = self.at
            for slot in slots:
                at[slot] += by

    def any(self, slots: Run) -> bool:
        """Whether one of them is not 0."""
        return (
            bool(self.array[slots].any())
            if isinstance(slots, np.ndarray)
            else any(map(self.at.__getitem__, slots))
        )

    def all(self, slots: Run) -> bool:
        """Whether none of them is 0."""
        return (
            bool(self.array[slots].all())
            if isinstance(slots, np.ndarray)
            else all(map(self.at.__getitem__, slots))
        )

    def parted(self, slots: Run) -> tuple[Run, Run]:
        """Slots whose number is not 0, and slots whose number is 0."""
        if isinstance(slots, np.ndarray):
            has = self.array[slots] != 0
            return slots[has], slots[~has]
        at = self.at
        return [slot for slot in slots if at[slot]], [slot for slot in slots if not at[slot]]


_STATES = tuple(SlotState)  # by number
_FREE, _RESERVED, _ACTIVE, _PINNED, _IDLE = _STATES

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


# The same by number: whether an event may lead from a state to another one.
_LEGAL = [
    [[new in TRANSITIONS[event].get(old, ()) for new in SlotState] for old in SlotState]
    for event in SlotEvent
]


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
        self.state = PerSlot("B", num_slots)  # a SlotState each
        self.holds = PerSlot("i", num_slots)  # by tables; a reservation counts as one
        self.pins = PerSlot("i", num_slots)
        self.num_in = [0] * len(SlotState)  # by state
        self.num_in[SlotState.FREE] = num_slots
        self._pool = pool
        self._observer = observer

    def those_in(self, state: SlotState, slots: Run) -> Run:
        if isinstance(slots, np.ndarray):
            those: NDArray[np.intp] = slots[self.state.array[slots] == state]
            return those
        states = self.state.at
        return [slot for slot in slots if states[slot] == state]

    def those_not_held(self, slots: Run, sealed: PerSlot) -> tuple[Run, Run, Run]:
        """The slots that no table holds, in three runs: pinned; not pinned and `sealed`; neither."""
        if isinstance(slots, np.ndarray):
            left = slots[self.holds.array[slots] == 0]
            is_pinned = self.pins.array[left] > 0
            is_idle = (sealed.array[left] != 0) & ~is_pinned
            return left[is_pinned], left[is_idle], left[~(is_pinned | is_idle)]
        holds, pins, is_sealed = self.holds.at, self.pins.at, sealed.at
        pinned: list[int] = []
        idle: list[int] = []
        free: list[int] = []
        for slot in slots:
            if not holds[slot]:
                (pinned if pins[slot] else idle if is_sealed[slot] else free).append(slot)
        return pinned, idle, free

    def require(self, slots: Run, event: SlotEvent) -> None:
        """Raise unless `event` is legal for every one of the distinct `slots`; changes nothing."""
        if not len(slots):
            return
        ordered = np.sort(slots) if isinstance(slots, np.ndarray) else sorted(slots)
        if ordered[0] < 0 or ordered[-1] >= len(self.state.at):
            raise InvariantBroken(
                f"pool {self._pool!r} has slots 0 to {len(self.state.at) - 1}, got {ordered[0]} to "
                f"{ordered[-1]}"
            )
        twice = (
            (ordered[1:] == ordered[:-1]).any()
            if isinstance(ordered, np.ndarray)
            else len(set(slots)) != len(slots)
        )
        if twice:
            raise InvariantBroken(f"pool {self._pool!r}: a run of slots to {event.name} names a slot twice")
        for old in self._num_by_state(slots):
            if not any(_LEGAL[event][old]):
                raise self._illegal(slots, old, event)

    def move(self, slots: Run, event: SlotEvent, new: SlotState, owner: str) -> None:
        """Move `slots` to state `new` if `event` allows that for each of them; else change nothing and
        raise."""
        if not len(slots):
            return
        legal, found = _LEGAL[event], self._num_by_state(slots)
        for old in found:
            if not legal[old][new]:
                raise self._illegal(slots, old, event)
        left = (
            {}
            if self._observer is None
            else {old: as_list(self.those_in(_STATES[old], slots)) for old in found if old != new}
        )
        self.state.set(slots, new)
        counts = self.num_in
        for old, num in found.items():
            counts[old] -= num
            counts[new] += num
        if self._observer is not None:
            for old, moved in left.items():
                self._observer.moved(self._pool, moved, _STATES[old].name.lower(), new.name.lower(), owner)

    def _num_by_state(self, slots: Run) -> dict[int, int]:
        """Number of `slots` in each state that occurs."""
        if isinstance(slots, np.ndarray):
            counts = np.bincount(self.state.array[slots]).tolist()
            return {state: num for state, num in enumerate(counts) if num}
        if len(slots) == 1:
            return {self.state.at[slots[0]]: 1}
        found = bytes(map(self.state.at.__getitem__, slots))
        return {state: found.count(state) for state in set(found)}

    def _illegal(self, slots: Run, number: int, event: SlotEvent) -> IllegalTransition:
        state = _STATES[number]
        slot = int(self.those_in(state, slots)[0])
        return IllegalTransition(f"slot {slot} of pool {self._pool!r}", state.name, event.name)
