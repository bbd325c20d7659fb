"""Arenas that only declared work can touch: the pages of every slot are out of bounds except while an item runs that has declared them.
Owns the protection of memory; what is declared, and whether in the right order, is the sanitizer's business.

An undeclared access ends the process where it happens, as any access to forbidden memory does; with `python -X faulthandler` the line is
printed. So it catches whatever code makes the access, and belongs into a process of its own. For arenas in CPU memory, on CPU lanes,
whose items say when they begin and end. Protection is by page: what shares a page with declared bytes is open, too.
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

_PAGE = mmap.PAGESIZE
_READ, _WRITE = 1, 2  # PROT_READ and PROT_WRITE; neither: nobody comes in


@dataclass(frozen=True, slots=True)
class GuardedArena:
    """Where an arena lies. Slots behind `num_slots`, such as the padding block, are not guarded."""

    name: str
    address: int
    block_bytes: int
    num_layers: int
    num_slots: int

    def pages(self, access: Access) -> Iterator[int]:
        """Numbers of all pages that have bytes of `access`."""
        layer_bytes = self.block_bytes // self.num_layers
        first, end = (layer * layer_bytes for layer in access.layers)
        for slot in {int(slot) for slot in access.slots}:
            if slot < self.num_slots:
                start = self.address + slot * self.block_bytes
                yield from range((start + first) // _PAGE, -(-(start + end) // _PAGE))

    def guarded_pages(self) -> range:
        """Those that have bytes of its slots only."""
        return range(-(-self.address // _PAGE), (self.address + self.num_slots * self.block_bytes) // _PAGE)


class GuardedSanitizer(Sanitizer):
    """A sanitizer that also keeps undeclared work out of the arenas given to `guard`."""

    def __init__(self) -> None:
        super().__init__()
        self._guarded: dict[str, GuardedArena] = {}
        self._declared: dict[tuple[str, int], list[Access]] = {}  # by item: what it may touch, from its submission to its end
        self._pages = _Pages()

    def guard(self, arena: GuardedArena) -> None:
        """From now on. No work that touches it may be under way."""
        self._guarded[arena.name] = arena
        self._pages.add(arena.guarded_pages())

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Inside, everybody may touch everything: for whoever looks from outside."""
        with self._pages.lifted():
            yield

    def submitted(self, lane: str, ticket: int, label: str, accesses: Sequence[Access]) -> None:
        super().submitted(lane, ticket, label, accesses)
        # Arrays may be views of a buffer that is filled anew before the item has ended.
        self._declared[lane, ticket] = [access._replace(slots=[int(slot) for slot in access.slots]) for access in accesses]

    def started(self, lane: str, ticket: int) -> None:
        super().started(lane, ticket)
        self._pages.change(self._touched(lane, ticket, Mode.READ), self._touched(lane, ticket, Mode.WRITE), 1)

    def finished(self, lane: str, ticket: int, error: BaseException | None) -> None:
        started = self._clocks.actor.item == (lane, ticket)  # not where it was skipped
        super().finished(lane, ticket, error)
        if started:
            self._pages.change(self._touched(lane, ticket, Mode.READ), self._touched(lane, ticket, Mode.WRITE), -1)
        del self._declared[lane, ticket]

    def _touched(self, lane: str, ticket: int, mode: Mode) -> set[int]:
        accesses = [access for access in self._declared[lane, ticket] if access.mode is mode and access.arena in self._guarded]
        return {page for access in accesses for page in self._guarded[access.arena].pages(access)}


class _Pages:
    """Who may touch which page now. The system knows it by process, so a page is open while anybody may touch it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: Counter[int] = Counter()
        self._writers: Counter[int] = Counter()
        self._guarded: list[range] = []
        self._system = ctypes.CDLL(None, use_errno=True)

    def add(self, pages: range) -> None:
        with self._lock:
            self._guarded.append(pages)
            self._protect(pages)

    def change(self, read: Iterable[int], written: Iterable[int], by: int) -> None:
        """So many more, or fewer, read and write these pages."""
        with self._lock:
            touched = sorted({*read, *written})
            for counter, pages in ((self._readers, read), (self._writers, written)):
                for page in pages:
                    counter[page] += by
            self._protect([page for page in touched if any(page in pages for pages in self._guarded)])

    @contextmanager
    def lifted(self) -> Iterator[None]:
        with self._lock:
            for pages in self._guarded:
                self._set(pages.start, len(pages), _READ | _WRITE)
            try:
                yield
            finally:
                for pages in self._guarded:
                    self._protect(pages)

    def _protect(self, pages: Sequence[int]) -> None:
        """Runs of neighbours that are open in the same way are one call."""
        first, num, mode = 0, 0, 0
        for page in pages:
            own = _READ | _WRITE if self._writers[page] else _READ if self._readers[page] else 0
            if num and page == first + num and own == mode:
                num += 1
                continue
            self._set(first, num, mode)
            first, num, mode = page, 1, own
        self._set(first, num, mode)

    def _set(self, first: int, num: int, mode: int) -> None:
        if num and self._system.mprotect(ctypes.c_void_p(first * _PAGE), ctypes.c_size_t(num * _PAGE), mode) != 0:
            raise ConfigError(f"{num} pages at {first * _PAGE:#x} cannot be guarded: {os.strerror(ctypes.get_errno())}")
