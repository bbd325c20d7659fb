"""Least recently used first, where a block that has come back counts as used later. Owns both queues, and which keys came before.

A block that was found again, or whose key came again after it was forgotten, belongs to a conversation that goes on or to a prompt that
many share. A document that is read once, and a scan of many, never do. So there are two queues by recency, and a block that has come back
may be idle `PATIENCE` times as long as one that has not. Both age by what becomes idle, so a conversation that is over goes, too.

A request that finds a block has found all blocks before it. So in a run that becomes idle together, all blocks before the deepest one that
has come back count as come back, and no beginning goes before its continuation. The blocks behind it are new. Where they are the smaller
part, they are the last turn of a conversation and stay with it. Else they may be a document behind a prompt that many share.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.kv.blocks.eviction.lru import LruOrder
from penstock.kv.blocks.slots import PerSlot, Run, as_list

# Measured on all traces of docs/eviction.md: with 4 a scan pushes out more, with 16 a little less than with 8.
PATIENCE = 8
KEYS_PER_SLOT = 4  # that are remembered, those of blocks that are here among them
FEW_KEYS = 16  # up to which a loop is as quick as arrays
_FRESH, _RETURNED = 0, 1
_HALVES = struct.Struct("=2Q")


class SeenKeys:
    """Keys that came before, in a table in which a key has one place and the last one that came has it. Eight bytes for a key, and no
    work that grows with what is remembered."""

    def __init__(self, num_slots: int) -> None:
        size = 1 << (KEYS_PER_SLOT * num_slots - 1).bit_length()
        self._mark_at = array("Q", bytes(8 * size))  # the second half of a key at the place that its first half names
        self._marks = np.frombuffer(self._mark_at, np.uint64)  # the same memory
        self._mask = size - 1

    def add(self, keys: Sequence[bytes]) -> list[bool] | NDArray[np.bool_]:
        """Which of `keys` came before."""
        if len(keys) > FEW_KEYS:
            halves = np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 2)
            places, marks = halves[:, 0] & np.uint64(self._mask), halves[:, 1]
            known: NDArray[np.bool_] = self._marks[places] == marks
            self._marks[places] = marks
            return known
        pairs = [(place & self._mask, mark) for place, mark in map(_HALVES.unpack, keys)]
        came = [self._mark_at[place] == mark for place, mark in pairs]
        for place, mark in pairs:
            self._mark_at[place] = mark
        return came


class ReturningOrder(LruOrder):
    """A queue of blocks that came once and one of those that came back."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots, num_queues=2)
        self._returned = PerSlot("B", num_slots)  # 1: it has come back
        self._seen = SeenKeys(num_slots)

    def sealed(self, slots: Sequence[int], keys: Sequence[bytes], depths: Sequence[int]) -> None:
        came = self._seen.add(keys)
        if isinstance(came, np.ndarray):
            self._returned.array[np.asarray(slots, np.intp)] = came
        else:
            for slot, before in zip(as_list(slots), came, strict=True):
                self._returned.at[slot] = before

    def hit(self, slots: Run) -> None:
        self._returned.set(slots, 1)

    def add(self, slots: Run) -> None:
        num_fresh = self._num_fresh(slots)
        if num_fresh:
            self._enqueue(slots[:num_fresh], _FRESH)
        if num_fresh < len(slots):
            self.hit(slots[num_fresh:])
            self._enqueue(slots[num_fresh:], _RETURNED)

    def _num_fresh(self, slots: Run) -> int:
        """Of a run, the deepest first, those before the first that has come back; none where they are the smaller part."""
        if isinstance(slots, np.ndarray):
            returned = self._returned.array[slots]
            first = int(returned.argmax()) if len(slots) else 0
            first = first if returned[first : first + 1].any() else len(slots)
        else:
            first = bytes(map(self._returned.at.__getitem__, slots)).find(1) % (len(slots) + 1)
        return first if 2 * first >= len(slots) else 0

    def _rank(self, number: int) -> int:
        """By what has become idle since, which counts more where nothing has come back."""
        when, queue = divmod(number, len(self._queues))
        since = self._clock + 1 - when
        return -since if queue == _RETURNED else -PATIENCE * since
