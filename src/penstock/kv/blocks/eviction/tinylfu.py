"""W-TinyLFU: recency in a window, frequency in the main part, and a contest between the two. Owns the queues and the sketch.

After Einziger, Friedman and Manes, "TinyLFU: a highly efficient cache admission policy" (2017). A block that becomes idle is in its slot
already, so it cannot be refused: to lose the contest means to go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from penstock.kv.blocks.eviction.sketch import FrequencySketch
from penstock.kv.blocks.slots import Run, as_list

# Measured on both Mooncake traces: a conversation pauses for longer than it stays in the usual window of a hundredth.
_WINDOW_SHARE = 0.5  # of the idle slots: above that, the oldest of the window has to contest
_WINDOW_LIMIT = 0.6  # of the idle slots: above that, there has been room, and the oldest moves on without a contest
_PROTECTED_SHARE = 0.8  # of the main part
_MOVES = 2  # moves between queues per added slot at most
_WINDOW, _PROBATION, _PROTECTED = range(3)


class TinyLfuOrder:
    """New blocks enter the window, and then the probation queue unless they are rarer than its oldest; a hit there protects them."""

    def __init__(self, num_slots: int) -> None:
        self._queues: tuple[OrderedDict[int, None], ...] = (OrderedDict(), OrderedDict(), OrderedDict())
        self._sketch = FrequencySketch(num_slots)
        self._key = [b""] * num_slots
        self._queue_of = [_WINDOW] * num_slots  # where the slot is, or returns to
        self._was_hit = [False] * num_slots  # since it became idle

    def __len__(self) -> int:
        window, probation, protected = self._queues
        return len(window) + len(probation) + len(protected)

    def __iter__(self) -> Iterator[int]:
        for queue in self._queues:
            yield from queue

    def sealed(self, slots: Sequence[int], keys: Sequence[bytes], depths: Sequence[int]) -> None:
        for slot, key in zip(slots, keys, strict=True):
            self._key[slot] = key
            self._queue_of[slot] = _WINDOW
            self._was_hit[slot] = False
            self._sketch.add(key)

    def hit(self, slots: Run) -> None:
        for slot in as_list(slots):
            self._was_hit[slot] = True
            self._sketch.add(self._key[slot])

    def add(self, slots: Run) -> None:
        queues, queue_of, was_hit = self._queues, self._queue_of, self._was_hit
        for slot in as_list(slots):
            if was_hit[slot] and queue_of[slot] == _PROBATION:
                queue_of[slot] = _PROTECTED
            was_hit[slot] = False
            queues[queue_of[slot]][slot] = None
        self._balance(_MOVES * len(slots))

    def remove(self, slots: Run) -> None:
        queues, queue_of = self._queues, self._queue_of
        for slot in as_list(slots):
            del queues[queue_of[slot]][slot]

    def pop(self, num: int) -> list[int]:
        window, probation, protected = self._queues
        popped: list[int] = []
        num_idle = len(self)
        for num_left in range(num_idle, max(0, num_idle - num), -1):
            main = probation or protected
            if main and len(window) > _WINDOW_SHARE * num_left:
                popped.append(self._contest(main))
            else:
                popped.append((main or window).popitem(last=False)[0])
        return popped

    def _contest(self, main: OrderedDict[int, None]) -> int:
        """The oldest of the window against the oldest of the main part; returns who goes: the rarer one, else the older one."""
        window, probation, _ = self._queues
        newcomer, _ = window.popitem(last=False)
        if self._estimate(newcomer) < self._estimate(next(iter(main))):
            return newcomer
        loser, _ = main.popitem(last=False)
        self._queue_of[newcomer] = _PROBATION
        probation[newcomer] = None
        return loser

    def _balance(self, moves: int) -> None:
        """Move the oldest of queues that are too long to probation."""
        window, probation, protected = self._queues
        while moves and len(window) > _WINDOW_LIMIT * len(self):
            moves -= 1
            self._move(window, probation)
        while moves and len(protected) > _PROTECTED_SHARE * (len(probation) + len(protected)):
            moves -= 1
            self._move(protected, probation)

    def _move(self, queue: OrderedDict[int, None], probation: OrderedDict[int, None]) -> None:
        slot, _ = queue.popitem(last=False)
        self._queue_of[slot] = _PROBATION
        probation[slot] = None

    def _estimate(self, slot: int) -> int:
        return self._sketch.estimate(self._key[slot])
