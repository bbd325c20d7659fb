"""Least recently used first. Owns the runs in which slots became idle; knows neither keys nor depths.

The blocks of a long prompt become idle together, and are mostly used again together: what is done for such a run is done once, not for each
of its slots. A slot that is used again without its neighbours stays where it was in its run, and is passed over there. A run that is more
than half such slots is written anew, so that what is passed over is never more than what was idle.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvariantBroken
from penstock.kv.blocks.slots import Run, as_list


@dataclass(slots=True)
class _Turn:
    """Slots that became idle together, those that go last first, and how many of them still are."""

    slots: Run
    num_left: int


class LruOrder:
    """Idle slots in the order in which they became idle."""

    def __init__(self, num_slots: int) -> None:
        self._turn_of = array("q", bytes(8 * num_slots))  # by slot: the number of the turn in which it became idle; 0: it is in use
        self._turns_of = np.frombuffer(self._turn_of, np.int64)  # the same memory
        self._turns: OrderedDict[int, _Turn] = OrderedDict()
        self._num_turns = 0
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[int]:
        for number, turn in self._turns.items():
            yield from (slot for slot in reversed(as_list(turn.slots)) if self._turn_of[slot] == number)

    def sealed(self, slots: Sequence[int], keys: Sequence[bytes], depths: Sequence[int]) -> None:
        """What a block is plays no part."""

    def hit(self, slots: Run) -> None:
        """A block that was used goes to the end when it becomes idle again; that is all."""

    def add(self, slots: Run) -> None:
        if not len(slots):
            return
        if self._any_idle(slots):
            raise InvariantBroken(f"of {len(slots)} slots that become idle, some are idle already")
        self._num_turns += 1
        self._turns[self._num_turns] = _Turn(slots[::-1], len(slots))
        self._set(slots, self._num_turns)
        self._num += len(slots)

    def remove(self, slots: Run) -> None:
        if not len(slots):
            return
        found = self._num_by_turn(slots)
        if 0 in found:
            raise InvariantBroken(f"{found[0]} of {len(slots)} slots are to be used again, and are not idle")
        self._set(slots, 0)
        self._num -= len(slots)
        for number, num in found.items():
            self._shorten(number, num)

    def pop(self, num: int) -> list[int]:
        popped: list[int] = []
        while len(popped) < num and self._turns:
            number, turn = next(iter(self._turns.items()))
            if not len(turn.slots):  # would go on for ever
                raise InvariantBroken(f"{turn.num_left} slots are idle in a turn that has none left")
            turn.slots = slots = as_list(turn.slots) if isinstance(turn.slots, np.ndarray) else turn.slots
            first = len(popped)
            while slots and len(popped) < num:
                slot = slots.pop()
                if self._turn_of[slot] == number:
                    popped.append(slot)
            self._set(popped[first:], 0)
            self._num -= len(popped) - first
            self._shorten(number, len(popped) - first)
        return popped

    def _set(self, slots: Run, number: int) -> None:
        if isinstance(slots, np.ndarray):
            self._turns_of[slots] = number
        else:
            for slot in slots:
                self._turn_of[slot] = number

    def _any_idle(self, slots: Run) -> bool:
        if isinstance(slots, np.ndarray):
            return bool(self._turns_of[slots].any())
        return any(map(self._turn_of.__getitem__, slots))

    def _num_by_turn(self, slots: Run) -> dict[int, int]:
        if not isinstance(slots, np.ndarray):
            turns = list(map(self._turn_of.__getitem__, slots))
            return {number: turns.count(number) for number in set(turns)}
        numbers = self._turns_of[slots]
        if (numbers == numbers[0]).all():
            return {int(numbers[0]): len(slots)}
        found, nums = np.unique(numbers, return_counts=True)
        return dict(zip(found.tolist(), nums.tolist(), strict=True))

    def _shorten(self, number: int, num: int) -> None:
        """So many of its slots are no longer idle."""
        turn = self._turns[number]
        turn.num_left -= num
        if not turn.num_left:
            del self._turns[number]
        elif 2 * turn.num_left < len(turn.slots):
            turn.slots = self._those_in(number, turn.slots)

    def _those_in(self, number: int, slots: Run) -> Run:
        if isinstance(slots, np.ndarray):
            left: NDArray[np.intp] = slots[self._turns_of[slots] == number]
            return left
        turn_of = self._turn_of
        return [slot for slot in slots if turn_of[slot] == number]
