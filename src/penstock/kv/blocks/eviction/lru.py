"""Least recently used first. Owns the runs in which slots became idle; knows neither keys nor depths.

The blocks of a long prompt become idle together, and are mostly used again together: what is done for such a run is done once, not for each
of its slots. A slot that is used again without its neighbours stays where it was in its run, and is passed over there. A run that is more
than half such slots is written anew, so that what is passed over is never more than what was idle.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvariantBroken
from penstock.kv.blocks.slots import PerSlot, Run, as_list


@dataclass(slots=True)
class _Lot:
    """Slots that became idle together, those that go last first, and how many of them still are."""

    slots: Run
    num_left: int


class LruOrder:
    """Idle slots in the order in which they became idle; or queues of such, of which the head that ranks lowest goes first."""

    def __init__(self, num_slots: int, num_queues: int = 1) -> None:
        self._lot_of = PerSlot("q", num_slots)  # the number of the lot in which it became idle; 0: it is in use
        self._queues: list[OrderedDict[int, _Lot]] = [OrderedDict() for _ in range(num_queues)]
        self._clock = 0  # slots that have become idle so far
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[int]:
        """In the order in which they would be popped now."""
        for number in heapq.merge(*self._queues, key=self._rank):
            lot = self._queue_of(number)[number]
            yield from (slot for slot in reversed(as_list(lot.slots)) if self._lot_of.at[slot] == number)

    def sealed(self, slots: Sequence[int], keys: Sequence[bytes], depths: Sequence[int]) -> None:
        """What a block is plays no part."""

    def hit(self, slots: Run) -> None:
        """A block that was used goes to the end when it becomes idle again; that is all."""

    def add(self, slots: Run) -> None:
        self._enqueue(slots, 0)

    def remove(self, slots: Run) -> None:
        if not len(slots):
            return
        found = self._num_by_lot(slots)
        if 0 in found:
            raise InvariantBroken(f"{found[0]} of {len(slots)} slots are to be used again, and are not idle")
        self._lot_of.set(slots, 0)
        self._num -= len(slots)
        for number, num in found.items():
            self._shorten(number, num)

    def pop(self, num: int) -> list[int]:
        popped: list[int] = []
        while len(popped) < num and any(self._queues):
            number = min((next(iter(queue)) for queue in self._queues if queue), key=self._rank)
            lot = self._queue_of(number)[number]
            if not len(lot.slots):  # would go on for ever
                raise InvariantBroken(f"{lot.num_left} slots are idle in a lot that has none left")
            lot.slots = slots = as_list(lot.slots)
            first = len(popped)
            while slots and len(popped) < num:
                slot = slots.pop()
                if self._lot_of.at[slot] == number:
                    popped.append(slot)
            self._lot_of.set(popped[first:], 0)
            self._num -= len(popped) - first
            self._shorten(number, len(popped) - first)
        return popped

    def _rank(self, number: int) -> int:
        """Of a lot; of two equal ones that of the first queue goes first. Within a queue it never falls."""
        return number

    def _enqueue(self, slots: Run, queue: int) -> None:
        """A lot at the end of that queue. Its number says when it became idle, and in which queue it is."""
        if not len(slots):
            return
        if self._lot_of.any(slots):
            raise InvariantBroken(f"of {len(slots)} slots that become idle, some are idle already")
        self._clock += len(slots)
        number = self._clock * len(self._queues) + queue
        self._queues[queue][number] = _Lot(slots[::-1], len(slots))
        self._lot_of.set(slots, number)
        self._num += len(slots)

    def _queue_of(self, number: int) -> OrderedDict[int, _Lot]:
        return self._queues[number % len(self._queues)]

    def _num_by_lot(self, slots: Run) -> dict[int, int]:
        if not isinstance(slots, np.ndarray):
            lots = list(map(self._lot_of.at.__getitem__, slots))
            return {number: lots.count(number) for number in set(lots)}
        numbers = self._lot_of.array[slots]
        if (numbers == numbers[0]).all():
            return {int(numbers[0]): len(slots)}
        found, nums = np.unique(numbers, return_counts=True)
        return dict(zip(found.tolist(), nums.tolist(), strict=True))

    def _shorten(self, number: int, num: int) -> None:
        """So many of its slots are no longer idle."""
        queue = self._queue_of(number)
        lot = queue[number]
        lot.num_left -= num
        if not lot.num_left:
            del queue[number]
        elif 2 * lot.num_left < len(lot.slots):
            lot.slots = self._those_in(number, lot.slots)

    def _those_in(self, number: int, slots: Run) -> Run:
        if isinstance(slots, np.ndarray):
            left: NDArray[np.intp] = slots[self._lot_of.array[slots] == number]
            return left
        lot_of = self._lot_of.at
        return [slot for slot in slots if lot_of[slot] == number]
