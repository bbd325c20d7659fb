"""The segments of one SSD tier: which there are, which may still be made, where a slot lies in them, what of them has to be synced. Owns
their descriptors and their bound; who uses which slot is the index's business.

Slots are numbered through all segments, those that do not exist yet included. Files are preallocated one at a time, when the slots of
those before are used up, so that a large bound costs nothing until it is needed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator

from penstock.config import GIB
from penstock.errors import ConfigError, StoreFailed
from penstock.kv.tiers.ssd.directory import LOCK_BYTES
from penstock.kv.tiers.ssd.disk import read_all
from penstock.kv.tiers.ssd.files import OpenFile, SegmentFiles
from penstock.kv.tiers.ssd.format import SECTOR_BYTES, SegmentHead, new_generation, segment_bytes, slot_bytes
from penstock.kv.tiers.store import Space

log = logging.getLogger(__name__)

_FEWEST = 8  # files that a small tier is divided into
_MOST = 256  # files that a large one may have, each with a descriptor
_GROW_AGAIN_S = 60.0  # after a file could not be made


class Segment:
    """One file, made or planned. `first` is the number of its first slot among all; `fd` is negative where it is not open."""

    __slots__ = ("fd", "first", "head", "head_is_stale", "num_ready", "num_slots")

    def __init__(self, head: SegmentHead, first: int) -> None:
        self.head = head
        self.first = first
        self.num_slots = head.num_slots  # that have a number
        self.num_ready = 0  # that lie in the file
        self.fd = -1
        self.head_is_stale = False  # in the file, compared with `head`

    def offset(self, slot: int) -> int:
        """Where `slot`, counted in this file, begins."""
        return SECTOR_BYTES + slot * slot_bytes(self.head.block_bytes)

    def opened(self, file: OpenFile) -> None:
        self.head, self.fd, self.num_ready = file.head, file.fd, file.num_ready


class Unsynced:
    """What was written and is not known to survive a crash. Several threads use it."""

    def __init__(self, files: SegmentFiles) -> None:
        self.sync_lock = threading.Lock()  # one sync after the other: who finds nothing to do knows that it has been done
        self._files = files
        self._lock = threading.Lock()
        self._segments: set[Segment] = set()
        self._names = False  # files were made or removed

    def note(self, *segments: Segment, names: bool = False) -> None:
        """Called when a write is over, and before anybody is told that it succeeded."""
        with self._lock:
            self._segments.update(segments)
            self._names |= names

    def sync(self) -> None:
        """Under `sync_lock`. Raises StoreFailed, and what could not be synced stays to be synced."""
        with self._lock:
            left, self._segments = self._segments, set()
            names, self._names = self._names, False
        try:
            for segment in sorted(left, key=lambda segment: segment.first):
                self._sync_segment(segment)
                left.discard(segment)
            if names:
                self._files.sync_names()
                names = False
        except OSError as error:
            raise StoreFailed(f"the SSD cache could not be synced: {error.strerror}") from error
        finally:
            self.note(*left, names=names)

    def _sync_segment(self, segment: Segment) -> None:
        if not self._files.is_at_its_path(segment.head.number, segment.fd):
            raise OSError(errno.ENOENT, f"{self._files.path(segment.head.number).name} has been removed")
        if segment.head_is_stale:
            self._files.write_head(segment.head, segment.fd)
            segment.head_is_stale = False
        self._files.io.fdatasync(segment.fd)


class Segments:
    """All files of a tier. Several threads use it."""

    def __init__(self, files: SegmentFiles, space: Space, max_bytes: int) -> None:
        self.files = files
        self.unsynced = Unsynced(files)
        self._all: list[Segment] = []
        self._space = space
        self._grow_lock = threading.Lock()
        self._grow_again_s = 0.0
        budget = max_bytes - LOCK_BYTES
        if budget < segment_bytes(1, space.block_bytes):
            raise ConfigError(
                f"an SSD cache of {max_bytes} bytes has no room for one block of {space.block_bytes}: raise --kv-offload-ssd-gib"
            )
        try:
            self._plan(budget - self._adopt(budget), max_bytes)
        except BaseException:
            self.close()
            raise
        self._firsts = [segment.first for segment in self._all]

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._all)

    @property
    def num_slots(self) -> int:
        return self._all[-1].first + self._all[-1].num_slots if self._all else 0

    @property
    def num_usable(self) -> int:
        """Slots that can be had, without those of files for which the disk had no room."""
        refused = self._grow_again_s > 0.0
        return sum(segment.num_ready if segment.fd >= 0 else 0 if refused else segment.num_slots for segment in self._all)

    def locate(self, slot: int) -> tuple[Segment, int]:
        """The segment that has `slot`, and its number there."""
        segment = self._all[bisect_right(self._firsts, slot) - 1]
        return segment, slot - segment.first

    def generation(self, slot: int) -> bytes:
        return self.locate(slot)[0].head.generation

    # --------------------------------------------------------------------------------------------------------------- at start

    def _adopt(self, budget: int) -> int:
        """Take over what is there and ours, remove what is of no use; returns the bytes that are taken."""
        used = num_removed = 0
        for number, path in self.files.directory.segment_files().items():
            try:
                file = self.files.try_open(number, self._space.digest, self._space.block_bytes, budget - used)
                if file is None:
                    self.files.remove(number)
                    num_removed += 1
                    continue
                segment = Segment(file.head, self.num_slots)
                segment.opened(file)
                self._all.append(segment)
                self.unsynced.note(segment)  # an earlier life may have ended before it had synced it
                used += segment_bytes(segment.num_slots, self._space.block_bytes)
            except OSError as error:
                log.warning("%s cannot be used and is left as it is: %s", path, error)
                with contextlib.suppress(OSError):
                    used += os.stat(path.name, dir_fd=self.files.directory.fd, follow_symlinks=False).st_size
        if num_removed:
            self.unsynced.note(names=True)
            where = self.files.directory.path
            log.info("%d files in %s make room: they are of another model or format, damaged, or too many", num_removed, where)
        return used

    def _plan(self, budget: int, max_bytes: int) -> None:
        """Files that may still be made."""
        block_bytes = self._space.block_bytes
        target = max(min(GIB, max_bytes // _FEWEST), max_bytes // _MOST)
        usual = max(1, (target - SECTOR_BYTES) // slot_bytes(block_bytes))
        number = 0
        while budget >= segment_bytes(1, block_bytes):
            while not self.files.directory.is_free(number):
                number += 1
            num_slots = min(usual, (budget - SECTOR_BYTES) // slot_bytes(block_bytes))
            head = SegmentHead(number, num_slots, block_bytes, self._space.digest, new_generation())
            self._all.append(Segment(head, self.num_slots))
            budget -= segment_bytes(num_slots, block_bytes)
            number += 1

    # -------------------------------------------------------------------------------------------------------------- in service

    def try_grow(self) -> Segment | None:
        """Make the next file. None: there is none to be made, or no room for it on the disk, which is asked again later."""
        with self._grow_lock:
            segment = next((segment for segment in self._all if segment.fd < 0), None)
            if segment is None or time.monotonic() < self._grow_again_s:
                return None
            try:
                segment.opened(self.files.make(segment.head))
            except OSError as error:
                if not self._grow_again_s:
                    num_made = sum(segment.fd >= 0 for segment in self._all)
                    log.warning("the SSD cache in %s stays at %d files: %s", self.files.directory.path, num_made, error)
                self._grow_again_s = time.monotonic() + _GROW_AGAIN_S
                return None
            self._grow_again_s = 0.0  # there is room again: for the others, too, as far as anybody knows
            self.unsynced.note(segment, names=True)
            return segment

    def persist(self) -> None:
        """What was written so far survives a crash. Raises StoreFailed."""
        with self.unsynced.sync_lock:
            self.unsynced.sync()

    def renew(self, forget: Callable[[Callable[[], None]], int]) -> int:
        """Give every file a new generation, durably. `forget` does it in memory, by calling what it is given, at a moment when nobody
        compares generations; its result is returned. Raises StoreFailed; the next `persist` goes on with it."""
        with self._grow_lock, self.unsynced.sync_lock:
            num = forget(self._renew_heads)
            self.unsynced.sync()
            return num

    def _renew_heads(self) -> None:
        made = [segment for segment in self._all if segment.fd >= 0]
        for segment in made:
            segment.head = segment.head._replace(generation=new_generation())
            segment.head_is_stale = True
        self.unsynced.note(*made)

    def are_in_place(self) -> bool:
        """Whether every file that was made is the one at its name."""
        return all(self.files.is_at_its_path(segment.head.number, segment.fd) for segment in self._all if segment.fd >= 0)

    def probe(self) -> None:
        """Return if files can be read. Raises StoreFailed."""
        try:
            for segment in self._all[:1]:
                sector = self.files.scratch.room(SECTOR_BYTES)
                if segment.num_ready and read_all(self.files.io, segment.fd, [sector], 0) < SECTOR_BYTES:
                    raise OSError(errno.EIO, "a file is empty")
        except OSError as error:
            raise StoreFailed(f"the SSD cache in {self.files.directory.path} cannot be read: {error.strerror}") from error

    def close(self) -> None:
        """Idempotent. Nothing is made any more."""
        with self._grow_lock:
            self._grow_again_s = float("inf")
            for segment in self._all:
                if segment.fd >= 0:
                    with contextlib.suppress(OSError):
                        self.files.io.close(segment.fd)
                    segment.fd = -1
