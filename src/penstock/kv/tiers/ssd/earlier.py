"""Blocks from an earlier life of an SSD tier: how they enter the pool of slots, which of two copies counts, how old they are, whether they
can be believed. Owns no pool and no lock; shares those of the index."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from penstock.kv.blocks.handles import Reservation
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.tiers.ssd.format import SlotHead

ABSENT = -1
_NEVER = 1 << 64  # above every sequence: what was written since the start is the newest
_PIECE = 1000  # blocks whose recency is restored under one hold of the lock


class EarlierLife:
    """What the index knows of it. `note_use`, `next_sequence` and `unread` are for the index, under its lock; the others take it."""

    def __init__(self, pool: BlockPool, lock: threading.Lock, generation: Callable[[int], bytes]) -> None:
        self.unread: set[int] = set()  # slots of blocks from an earlier life: whether they are whole shows when they are first read
        self._pool = pool
        self._lock = lock
        self._generation = generation
        self._sequence = 0
        self._recent: dict[bytes, None] | None = None  # while a scan runs: blocks used since it began, the latest last

    def note_use(self, keys: Iterable[bytes]) -> None:
        if self._recent is not None:
            for key in keys:
                self._recent.pop(key, None)
                self._recent[key] = None

    def next_sequence(self, num: int) -> int:
        """The first of `num` numbers: times, so that a human can read them, but never twice the same."""
        first = max(self._sequence + 1, time.time_ns())
        self._sequence = first + num - 1
        return first

    def note_good(self, slots: Iterable[int]) -> None:
        """What was read there is whole; its reader still pins it."""
        if self.unread:
            with self._lock:
                self.unread.difference_update(slots)

    def begin_scan(self) -> None:
        """Called before the index is used."""
        self._recent = {}

    def publish(self, withheld: Reservation, heads: Mapping[int, SlotHead], found: dict[bytes, int]) -> None:
        """The slots withheld so far hold the blocks with these heads, by slot, all of one file. `found` has the sequences of all blocks
        that the scan has published; of two with one key the newer stays, or the one that has been used since the start."""
        newest = sorted(heads.items(), key=lambda item: item[1].envelope.sequence, reverse=True)
        with self._lock:
            hold = self._pool.hold("scan")
            withheld.commit(hold)
            if newest and newest[0][1].generation == self._generation(newest[0][0]):
                self._sequence = max(self._sequence, newest[0][1].envelope.sequence)
                chosen = self._choose(newest, found)
                self._pool.seal(list(chosen), [head.envelope.key for head in chosen.values()], [head.depth for head in chosen.values()])
                self.unread.update(chosen)
            hold.end()

    def _choose(self, newest: Sequence[tuple[int, SlotHead]], found: dict[bytes, int]) -> dict[int, SlotHead]:
        """Those that count; older copies of them are forgotten."""
        recent = self._recent or {}
        chosen: dict[int, SlotHead] = {}
        seen: set[bytes] = set()
        there = self._pool.find_each([head.envelope.key for _, head in newest])
        for (slot, head), other in zip(newest, there, strict=True):
            key, sequence = head.envelope.key, head.envelope.sequence
            if key in seen or (other != ABSENT and (key in recent or found.get(key, _NEVER) >= sequence)):
                continue
            if other != ABSENT:
                self._pool.forget([other])
            seen.add(key)
            chosen[slot] = head
            found[key] = sequence
        return chosen

    def end_scan(self, found: Mapping[bytes, int]) -> None:
        """Blocks count as used in the order in which they were written, before all that was used since the start."""
        oldest = sorted(found, key=found.__getitem__)
        for first in range(0, len(oldest), _PIECE):
            with self._lock:
                recent = self._recent or {}
                self._use_again([key for key in oldest[first : first + _PIECE] if key not in recent])
        with self._lock:
            self._use_again(list(self._recent or ()))
            self._recent = None

    def _use_again(self, keys: Sequence[bytes]) -> None:
        """Pinned and let go, they are the latest used; of a pin's slots the last is the first to go."""
        slots = [slot for slot in self._pool.find_each(keys) if slot != ABSENT]
        self._pool.pin(slots[::-1], "scan").end()
