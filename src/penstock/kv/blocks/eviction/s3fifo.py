"""S3-FIFO: a small queue sorts out what is used once, a main queue keeps what came back. Owns the queues and the ghosts.

After Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023). Two things differ because a block in use is in no queue:
it returns to the tail instead of keeping its place, and one that was hit while it was in the small queue returns to the main one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from penstock.kv.blocks.eviction.ghosts import Ghosts
from penstock.kv.blocks.slots import Run, as_list

# Of the idle slots; measured on both Mooncake traces. The tenth that is usual elsewhere is too short for a conversation's pauses.
_SMALL_SHARE = 1 / 4
_MOVES = 4  # queue moves per evicted slot at most, so that a call's cost is bounded


class S3FifoOrder:
    """New blocks enter the small queue, and leave it into the main one or, never hit, as ghosts. A ghost that returns enters the main
    queue at once. At the head of the main queue a block that was hit gets another lap."""

    def __init__(self, num_slots: int) -> None:
        self._small: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._ghosts = Ghosts(num_slots)
        self._key = [b""] * num_slots
        self._in_main = [False] * num_slots  # where the slot is, or returns to
        self._was_hit = [False] * num_slots  # since it entered its queue

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __iter__(self) -> Iterator[int]:
        yield from self._small
        yield from self._main

    def sealed(self, slots: Sequence[int], keys: Sequence[bytes], depths: Sequence[int]) -> None:
        for slot, key in zip(slots, keys, strict=True):
            self._key[slot] = key
            self._in_main[slot] = self._ghosts.take(key) is not None
            self._was_hit[slot] = False

    def hit(self, slots: Run) -> None:
        was_hit = self._was_hit
        for slot in as_list(slots):
            was_hit[slot] = True

    def add(self, slots: Run) -> None:
        small, main, in_main, was_hit = self._small, self._main, self._in_main, self._was_hit
        for slot in as_list(slots):
            if in_main[slot]:
                main[slot] = None
            elif was_hit[slot]:
                in_main[slot], was_hit[slot] = True, False
                main[slot] = None
            else:
                small[slot] = None

    def remove(self, slots: Run) -> None:
        small, main, in_main = self._small, self._main, self._in_main
        for slot in as_list(slots):
            del (main if in_main[slot] else small)[slot]

    def pop(self, num: int) -> list[int]:
        small, main, was_hit = self._small, self._main, self._was_hit
        popped: list[int] = []
        moves = _MOVES * num
        while len(popped) < num and (small or main):
            from_small = bool(small) and (len(small) > _SMALL_SHARE * (len(small) + len(main)) or not main)
            slot, _ = (small if from_small else main).popitem(last=False)
            if was_hit[slot] and moves:
                moves -= 1
                was_hit[slot], self._in_main[slot] = False, True
                main[slot] = None
                continue
            if from_small:
                self._ghosts.add(self._key[slot], 0)
            popped.append(slot)
        return popped
