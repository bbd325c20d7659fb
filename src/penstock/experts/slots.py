"""Which expert is in which slot of the device's memory. Owns the books: slots, who holds them, and the fences
of their last use. It owns no bytes and copies nothing. One thread calls it.

    free -> held -> idle -> held ...

A slot is held while work that touches it may still be submitted: a copy into it, products that read it. Given
back, it carries the fence behind that work. A held slot keeps its expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from penstock.contract import Fence
from penstock.errors import InvariantBroken
from penstock.experts.order import ExpertOrder, Numbers
from penstock.observe import PoolObserver

POOL = "experts"  # its name in declared accesses
_HELD, _IDLE, _FREE = "held", "idle", "free"
NONE = -1
_NO_SLOTS: Numbers = np.empty(0, np.int64)


class Move(NamedTuple):
    """An expert that is to be copied into a slot."""

    expert: int
    slot: int


class Wave(NamedTuple):
    """Experts of one layer that are on the device together, their slots in the same order, and what is
    missing of them: the last ones. The slots are held."""

    experts: Numbers
    slots: Numbers
    moves: tuple[Move, ...]


class ExpertSlots:
    """`num_layers` layers of `num_experts` experts, and slots for some of them."""

    def __init__(
        self,
        num_slots: int,
        num_layers: int,
        num_experts: int,
        order: ExpertOrder,
        observer: PoolObserver | None = None,
    ) -> None:
        self.num_slots, self.num_layers, self.num_experts = num_slots, num_layers, num_experts
        self.order = order
        self.slot_of: Numbers = np.full(num_layers * num_experts, NONE)
        self.expert_of: Numbers = np.full(num_slots, NONE)
        self.after: list[Fence | None] = [None] * num_slots  # of the last work on the slot
        self._is_held, self._was_held = np.zeros(num_slots, bool), np.zeros(num_slots, bool)
        self._observer = observer
        if observer is not None:
            observer.opened(POOL, num_slots)

    def bring(self, layer: int, wanted: Numbers) -> Wave:
        """Hold those of `wanted`, experts of `layer`, that fit at once: those that are there, and of the
        others as many as there are slots that are not held."""
        numbers = layer * self.num_experts + wanted
        slots = self.slot_of[numbers]
        here = slots != NONE
        self._hold(slots[here])
        # experts of this layer are wanted again only in the next step
        moves = self._place(numbers[~here], self._room(layer + 1, int((~here).sum())))
        chosen = np.concatenate((wanted[here], wanted[~here][: len(moves)]))
        held = np.concatenate((slots[here], np.array([move.slot for move in moves], np.int64)))
        return Wave(chosen, held, moves)

    def prefetch(self, layer: int, wanted: Numbers, most: int) -> tuple[Move, ...]:
        """Hold slots for those of `wanted` that are missing, `most` at most. The others stay."""
        numbers = layer * self.num_experts + wanted
        slots = self.slot_of[numbers]
        missing = numbers[slots == NONE][:most]
        if not len(missing):
            return ()
        return self._place(missing, self._room(layer, len(missing), slots[slots != NONE]))

    def give_back(self, slots: Numbers, fence: Fence | None) -> None:
        """They are no longer held. `fence` covers all work on them."""
        if not self._is_held[slots].all():
            raise InvariantBroken("a slot of an expert is given back that is not held")
        told = slots.tolist()
        for slot in told:
            self.after[slot] = fence
        self._is_held[slots] = False
        if self._observer is not None and told:
            self._observer.returned(POOL, told, POOL, fence)
            self._observer.moved(POOL, told, _HELD, _IDLE, POOL)

    def abandon(self) -> None:
        """Launching failed, and all work on held slots is over: they are empty from now on."""
        held = np.flatnonzero(self._is_held)
        self.lose(Move(int(self.expert_of[slot]), int(slot)) for slot in held if self.expert_of[slot] != NONE)
        self.give_back(held, None)

    def lose(self, moves: Iterable[Move]) -> None:
        """Their copies failed: no expert is in these slots, which stay as they are otherwise."""
        for expert, slot in moves:
            if self.expert_of[slot] == expert:
                self.slot_of[expert], self.expert_of[slot] = NONE, NONE

    def fences_of(self, slots: Sequence[int]) -> list[Fence]:
        """What a write of these has to wait for: the newest fence of each lane."""
        newest: dict[str, Fence] = {}
        for slot in slots:
            fence = self.after[slot]
            if fence is not None and (fence.lane not in newest or newest[fence.lane].number < fence.number):
                newest[fence.lane] = fence
        return list(newest.values())

    def map_of(self, layer: int) -> Numbers:
        """The slot of each expert of `layer`."""
        first = layer * self.num_experts
        return self.slot_of[first : first + self.num_experts]

    def close(self) -> None:
        if self._observer is not None:
            left = [f"hold on expert {self.expert_of[slot]}" for slot in np.flatnonzero(self._is_held)]
            self._observer.closed(POOL, left)

    def check(self) -> None:
        """Recount; raises InvariantBroken."""
        slots = np.flatnonzero(self.expert_of != NONE)
        same = (self.slot_of[self.expert_of[slots]] == slots).all()
        if not same or len(slots) != (self.slot_of != NONE).sum():
            raise InvariantBroken("the books of expert slots do not agree")

    def _room(self, layer: int, most: int, kept: Numbers = _NO_SLOTS) -> Numbers:
        """Slots without an expert, then those whose expert is worth least before `layer` comes; none that is
        held, and none of `kept`."""
        if most == 0:
            return _NO_SLOTS
        is_able = ~self._is_held
        is_able[kept] = False
        able = np.flatnonzero(is_able)
        experts = self.expert_of[able]
        later = (experts // self.num_experts - layer) % self.num_layers / self.num_layers
        worth = self.order.scores[experts] - self.order.tie * later
        worth[experts == NONE] = -np.inf
        return able[np.argpartition(worth, most)[:most]] if most < len(able) else able

    def _place(self, numbers: Numbers, room: Numbers) -> tuple[Move, ...]:
        """The first of these experts get the slots of `room`, which are held from now on."""
        numbers = numbers[: len(room)]
        room = room[: len(numbers)]
        left = self.expert_of[room]
        self.slot_of[left[left != NONE]] = NONE
        self._hold(room)
        self.slot_of[numbers], self.expert_of[room] = room, numbers
        self.order.admitted(numbers)
        return tuple(map(Move, numbers.tolist(), room.tolist()))

    def _hold(self, slots: Numbers) -> None:
        if self._is_held[slots].any():
            raise InvariantBroken("a slot of an expert is held twice")
        if self._observer is not None:
            for was, some in (
                (_FREE, slots[~self._was_held[slots]].tolist()),
                (_IDLE, slots[self._was_held[slots]].tolist()),
            ):
                if some:
                    self._observer.moved(POOL, some, was, _HELD, POOL)
                    self._observer.lent(POOL, some, POOL)
        self._is_held[slots] = self._was_held[slots] = True
