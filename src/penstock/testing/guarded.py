"""Arenas that only declared work can touch: the pages of every slot are protected, except while an item runs
that has declared them. Owns the protection of memory; the sanitizer judges declarations and order.

An undeclared access ends the process where it happens, like any access to protected memory; `python -X
faulthandler` prints the line. So it catches an access by any code, and needs a process of its own. For arenas
in CPU memory, on CPU lanes, whose items report their begin and end. Protection is by page: bytes that share a
page with declared ones are open, too.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.contract import Access, Mode
from penstock.errors import ConfigError
from penstock.sanitizer.sanitizer import Sanitizer

_TILE = mmap.PAGESIZE  # bytes that the system protects together; a tile is one of these
_READ, _WRITE = 1, 2  # PROT_READ and PROT_WRITE; neither: no access


@dataclass(frozen=True, slots=True)
class GuardedArena:
    """The location of an arena. Slots after `num_slots`, such as the padding block, are not guarded."""

    name: str
    address: int
    block_bytes: int
    num_layers: int
    num_slots: int

    def tiles(self, access: Access) -> Iterator[int]:
        """Numbers of all tiles that have bytes of `access`."""
        layer_bytes = self.block_bytes // self.num_layers
        first, end = (layer * layer_bytes for layer in access.layers)
        for slot in {int(slot) for slot in access.slots}:
            if slot < self.num_slots:
                start = self.address + slot * self.block_bytes
                yield from range((start + first) // _TILE, -(-(start + end) // _TILE))

    def guarded_tiles(self) -> range:
        """Tiles that hold bytes of its slots only."""
        return range(-(-self.address // _TILE), (self.address + self.num_slots * self.block_bytes) // _TILE)


class GuardedSanitizer(Sanitizer):
    """A sanitizer that also keeps undeclared work out of the arenas given to `guard`."""

    def __init__(self) -> None:
        super().__init__()
        self._guarded: dict[str, GuardedArena] = {}
        # by item: its accesses, from submission to end
        self._declared: dict[tuple[str, int], list[Access]] = {}
        self._tiles = _Tiles()

    def guard(self, arena: GuardedArena) -> None:
        """Starts at once. No work that touches it may be in flight."""
        self._guarded[arena.name] = arena
        self._tiles.add(arena.guarded_tiles())

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Inside, every thread may touch everything; for checks from outside."""
        with self._tiles.lifted():
            yield

    def submitted(self, lane: str, ticket: int, label: str, accesses: Sequence[Access]) -> None:
        super().submitted(lane, ticket, label, accesses)
        # copied: arrays may be views of a buffer that is refilled before the item has ended
        self._declared[lane, ticket] = [
            access._replace(slots=[int(slot) for slot in access.slots]) for access in accesses
        ]

    def started(self, lane: str, ticket: int) -> None:
        super().started(lane, ticket)
        self._tiles.change(self._touched(lane, ticket, Mode.READ), self._touched(lane, ticket, Mode.WRITE), 1)

    def finished(self, lane: str, ticket: int, error: BaseException | None) -> None:
        started = self._clocks.actor.item == (lane, ticket)  # False if it was skipped
        super().finished(lane, ticket, error)
        if started:
            self._tiles.change(
                self._touched(lane, ticket, Mode.READ), self._touched(lane, ticket, Mode.WRITE), -1
            )
        del self._declared[lane, ticket]

    def _touched(self, lane: str, ticket: int, mode: Mode) -> set[int]:
        accesses = [
            access
            for access in self._declared[lane, ticket]
            if access.mode is mode and access.arena in self._guarded
        ]
        return {tile for access in accesses for tile in self._guarded[access.arena].tiles(access)}


class _Tiles:
    """The open tiles. Protection is per process, so a tile is open while any work may touch it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: Counter[int] = Counter()
        self._writers: Counter[int] = Counter()
        self._guarded: list[range] = []
        self._system = ctypes.CDLL(None, use_errno=True)

    def add(self, tiles: range) -> None:
        with self._lock:
            self._guarded.append(tiles)
            self._protect(tiles)

    def change(self, read: Iterable[int], written: Iterable[int], by: int) -> None:
        """`by` more, or fewer, items read and write these tiles."""
        with self._lock:
            touched = sorted({*read, *written})
            for counter, tiles in ((self._readers, read), (self._writers, written)):
                for tile in tiles:
                    counter[tile] += by
            self._protect([tile for tile in touched if any(tile in tiles for tiles in self._guarded)])

    @contextmanager
    def lifted(self) -> Iterator[None]:
        with self._lock:
            for tiles in self._guarded:
                self._set(tiles.start, len(tiles), _READ | _WRITE)
            try:
                yield
            finally:
                for tiles in self._guarded:
                    self._protect(tiles)

    def _protect(self, tiles: Sequence[int]) -> None:
        """Neighbouring tiles with the same protection are one call."""
        first, num, mode = 0, 0, 0
        for tile in tiles:
            own = _READ | _WRITE if self._writers[tile] else _READ if self._readers[tile] else 0
            if num and tile == first + num and own == mode:
                num += 1
                continue
            self._set(first, num, mode)
            first, num, mode = tile, 1, own
        self._set(first, num, mode)

    def _set(self, first: int, num: int, mode: int) -> None:
        if (
            num
            and self._system.mprotect(ctypes.c_void_p(first * _TILE), ctypes.c_size_t(num * _TILE), mode) != 0
        ):
            raise ConfigError(
                f"{num} tiles at {first * _TILE:#x} cannot be guarded: {os.strerror(ctypes.get_errno())}"
            )
