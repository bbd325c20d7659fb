"""Segment files and the slots in them: what their bytes mean; opens, makes, syncs and renews them, and says
where a slot lies. Owns the format and its version, the descriptors and the bound on their size; which block
has which slot is the index's business.

    segment file    [ segment head | slot 0 | slot 1 | ... ]       each head is one sector of 4096 bytes
    slot            [ slot head | payload, padded to whole sectors ]
    slot head       [ envelope | place ]                           the place says where this head was written,
                    and in which generation

A slot stands for a block when its head is whole, lies where it says it does, and has the generation of its
segment. So a new generation in the segment head forgets every slot of the file at once.

Slots are numbered through all segments, those that do not exist yet included. Files are preallocated one at a
time, when the slots of those before are used up, so that a large bound costs nothing until it is needed.
Files are opened for direct I/O where the file system can.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import struct
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import xxhash

from penstock.config import GIB
from penstock.errors import ConfigError, StoreFailed
from penstock.kv.blocks.handles import Reservation
from penstock.kv.blocks.key import SCOPE_BYTES
from penstock.kv.tiers.ssd.directory import (
    FULL,
    LOCK_BYTES,
    SECTOR_BYTES,
    Directory,
    DiskIo,
    Scratch,
    check_file,
    read_all,
    write_all,
)
from penstock.kv.tiers.store import HEADER_BYTES, Envelope, Space, unpack

FORMAT = 1
GENERATION_BYTES = 16
_MAGIC = b"penstkSG"
_SEGMENT = struct.Struct(
    f"<8sHHIIIQ{SCOPE_BYTES}s{GENERATION_BYTES}s"
)  # magic, format, 0, number, slots, 0, block bytes, space, generation


_PLACE = struct.Struct(f"<{GENERATION_BYTES}sIII")  # generation, number, slot, depth
_CHECK = struct.Struct("<Q")  # of everything before it
_PLACE_END = HEADER_BYTES + _PLACE.size


def slot_bytes(block_bytes: int) -> int:
    """Bytes of one block in a file."""
    return SECTOR_BYTES + -(-block_bytes // SECTOR_BYTES) * SECTOR_BYTES


def segment_bytes(num_slots: int, block_bytes: int) -> int:
    return SECTOR_BYTES + num_slots * slot_bytes(block_bytes)


def new_generation() -> bytes:
    return secrets.token_bytes(GENERATION_BYTES)


class SegmentHead(NamedTuple):
    """The owner of a file's blocks, and how many fit."""

    number: int  # of the file, as its name has it
    num_slots: int
    block_bytes: int
    space: bytes
    generation: bytes


class SlotHead(NamedTuple):
    """A valid head of a slot."""

    envelope: Envelope
    generation: bytes
    number: int
    slot: int
    depth: int  # the block's position in its prompt

    def is_for(self, segment: SegmentHead, slot: int) -> bool:
        """Whether it was written for that slot of the segment, in the segment's present generation."""
        place = (self.generation, self.number, self.slot) == (segment.generation, segment.number, slot)
        return place and (self.envelope.space, self.envelope.num_bytes) == (
            segment.space,
            segment.block_bytes,
        )


def pack_segment(head: SegmentHead) -> bytes:
    fields = _SEGMENT.pack(
        _MAGIC, FORMAT, 0, head.number, head.num_slots, 0, head.block_bytes, head.space, head.generation
    )
    return (fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))).ljust(SECTOR_BYTES, b"\0")


def unpack_segment(sector: memoryview | bytes) -> SegmentHead | None:
    """None: another format, or damaged."""
    if len(sector) < SECTOR_BYTES:
        return None
    fields = bytes(sector[: _SEGMENT.size])
    magic, version, _, number, num_slots, _, block_bytes, space, generation = _SEGMENT.unpack(fields)
    (expected,) = _CHECK.unpack_from(sector, _SEGMENT.size)
    if magic != _MAGIC or version != FORMAT or xxhash.xxh3_64_intdigest(fields) != expected:
        return None
    return SegmentHead(number, num_slots, block_bytes, space, generation)


def pack_slot(envelope: bytes, segment: SegmentHead, slot: int, depth: int) -> bytes:
    """`envelope` as `tiers.store.pack` made it."""
    fields = envelope + _PLACE.pack(segment.generation, segment.number, slot, depth)
    return (fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))).ljust(SECTOR_BYTES, b"\0")


def unpack_slot(sector: memoryview | bytes) -> SlotHead | None:
    """None: never written, or damaged."""
    envelope = unpack(sector)
    if envelope is None or len(sector) < SECTOR_BYTES:
        return None
    (expected,) = _CHECK.unpack_from(sector, _PLACE_END)
    if xxhash.xxh3_64_intdigest(bytes(sector[:_PLACE_END])) != expected:
        return None
    return SlotHead(envelope, *_PLACE.unpack_from(sector, HEADER_BYTES))


log = logging.getLogger(__name__)

_FEWEST_FILES = 8  # files of a small tier
_MOST_FILES = 256  # files of a large tier, each with a descriptor
_FEWEST_GROUPS = 8  # per segment; if the disk has no room for all of it, the first groups can be used
_MOST_GROUP_SLOTS = 256
_GROW_AGAIN_S = 60.0  # after a file could not be made
_COARSE_NS = 1_000_000_000  # a file's time may be this much earlier than its write


class WithheldSlots(NamedTuple):
    """Neighbouring slots that become usable together: when their file is made, or when their heads are
    read."""

    segment: Segment
    slots: range  # numbers within the segment
    reservation: Reservation  # keeps them out of use until then


class Segment:
    """One file, existing or planned. `first` is the number of its first slot among all; `fd` is negative if
    it is not open."""

    __slots__ = ("fd", "first", "head", "head_is_stale", "num_ready", "num_slots", "withheld")

    def __init__(self, head: SegmentHead, first: int, fd: int = -1, num_ready: int = 0) -> None:
        self.head = head
        self.first = first
        self.num_slots = head.num_slots  # planned slots
        self.num_ready = num_ready  # slots that are in the file
        self.fd = fd
        self.head_is_stale = False  # the head in the file is older than `head`
        self.withheld: list[WithheldSlots] = []

    def offset(self, slot: int) -> int:
        """The offset of `slot`, counted in this file."""
        return SECTOR_BYTES + slot * slot_bytes(self.head.block_bytes)

    def groups(self) -> Iterator[range]:
        """All slots, in groups that become usable together. Small groups come first: even if the disk has
        room for few slots, more than half of them can be used."""
        step, first = min(_MOST_GROUP_SLOTS, -(-self.num_slots // _FEWEST_GROUPS)), 0
        while first < self.num_slots:
            end = min(first + min(max(1, first), step), self.num_slots)
            yield range(first, end)
            first = end

    def take_ready(self) -> list[WithheldSlots]:
        """Withheld slots that are in the file now. The caller releases them."""
        ready = [group for group in self.withheld if group.slots.stop <= self.num_ready]
        self.withheld = self.withheld[len(ready) :]
        return ready


class SegmentFiles:
    """The files of one directory. All raise OSError; opening a file that other users may write raises
    ConfigError."""

    def __init__(self, io: DiskIo, directory: Directory) -> None:
        self.io = io
        self.directory = directory
        self.scratch = Scratch()
        self._direct = os.O_DIRECT

    def path(self, number: int) -> Path:
        return self.directory.segment_path(number)

    def open(self, number: int, flags: int) -> int:
        fd = self._open_direct(number, flags | os.O_NOFOLLOW)
        try:
            check_file(self.path(number), self.io.stat(fd))
        except BaseException:
            self.close(fd)
            raise
        return fd

    def _open_direct(self, number: int, flags: int) -> int:
        path = self.path(number)
        try:
            return self.io.open(path, flags | self._direct, self.directory.fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP) or not self._direct:
                raise
        log.warning(
            "the file system of %s has no O_DIRECT: the SSD cache goes through the system's file cache",
            self.directory.path,
        )
        self._direct = 0
        return self.io.open(path, flags & ~os.O_EXCL, self.directory.fd)

    def close(self, fd: int) -> None:
        with contextlib.suppress(OSError):
            self.io.close(fd)

    def remove(self, number: int) -> None:
        self.io.unlink(self.path(number), self.directory.fd)

    def read_head(self, fd: int, number: int) -> SegmentHead | None:
        """None: another format, damaged, or of another file."""
        sector = self.scratch.room(SECTOR_BYTES)
        head = unpack_segment(sector[: read_all(self.io, fd, [sector], 0)])
        return head if head is not None and head.number == number else None

    def write_head(self, head: SegmentHead, fd: int) -> None:
        sector = self.scratch.room(SECTOR_BYTES)
        sector[:] = pack_segment(head)
        write_all(self.io, fd, [sector], 0)

    def try_open_segment(self, number: int, first: int, space: Space, max_bytes: int) -> Segment | None:
        """An existing file, with the size that its head says. None: another space or format, damaged, or too
        large."""
        fd = self.open(number, os.O_RDWR)
        try:
            head = self.read_head(fd, number)
            if (
                head is not None
                and (head.space, head.block_bytes) == (space.digest, space.block_bytes)
                and head.num_slots
            ):
                wanted = segment_bytes(head.num_slots, head.block_bytes)
                if wanted <= max_bytes:
                    return Segment(head, first, fd, self._fit(fd, head, wanted))
        except BaseException:
            self.close(fd)
            raise
        self.close(fd)
        return None

    def _fit(self, fd: int, head: SegmentHead, wanted: int) -> int:
        """Returns the number of slots in the file."""
        if self.io.stat(fd).st_size > wanted:
            self.io.truncate(fd, wanted)
        if self.io.stat(fd).st_size < wanted:
            try:
                self.io.fallocate(fd, wanted)
            except OSError as error:
                log.warning("%s has been cut short and cannot be extended: %s", self.path(head.number), error)
        return min(head.num_slots, (self.io.stat(fd).st_size - SECTOR_BYTES) // slot_bytes(head.block_bytes))

    def make(self, segment: Segment) -> None:
        """Make its file, with as many slots as planned, or as many as the disk has room for."""
        head, flags = segment.head, os.O_RDWR | os.O_CREAT | os.O_EXCL
        try:
            fd = self.open(head.number, flags)
        except FileExistsError:
            # nothing had this name at start: a half-made file of ours could not be removed
            self.remove(head.number)
            fd = self.open(head.number, flags)
        try:
            head = head._replace(num_slots=self._preallocate(fd, head))
            self.write_head(head, fd)
        except BaseException:
            self.close(fd)
            with contextlib.suppress(OSError):
                self.remove(head.number)
            raise
        segment.head, segment.fd, segment.num_ready = head, fd, head.num_slots

    def _preallocate(self, fd: int, head: SegmentHead) -> int:
        num_slots = head.num_slots
        while True:
            try:
                self.io.fallocate(fd, segment_bytes(num_slots, head.block_bytes))
                return num_slots
            except OSError as error:
                if error.errno not in FULL or num_slots == 1:
                    raise
                self.io.truncate(fd, 0)
                num_slots //= 2

    def is_in_place(self, segment: Segment) -> bool:
        """Whether its open file is still the one at its name."""
        return self.directory.has_segment(segment.head.number, segment.fd)

    def sync(self, segment: Segment) -> None:
        if not self.is_in_place(segment):
            raise OSError(errno.ENOENT, f"{self.path(segment.head.number).name} has been removed")
        if segment.head_is_stale:
            self.write_head(segment.head, segment.fd)
            segment.head_is_stale = False
        self.io.fdatasync(segment.fd)


class Segments:
    """All segments of a tier. Several threads use it."""

    def __init__(self, files: SegmentFiles, space: Space, max_bytes: int) -> None:
        self.files = files
        # guards the two below: writes that may not survive a crash yet
        self._lock = threading.Lock()
        self._unsynced: set[Segment] = set()
        self._unsynced_names = False  # files were made or removed
        # one sync at a time: a thread that finds nothing to do knows that it is done
        self._sync_lock = threading.Lock()
        self._all: list[Segment] = []
        self._space = space
        self._grow_lock = threading.Lock()
        self._grow_again_s = 0.0
        # latest write of an earlier process, by its clock, which may have been ahead of ours
        self.written_ns = 0
        budget = max_bytes - LOCK_BYTES
        if budget < segment_bytes(1, space.block_bytes):
            raise ConfigError(
                f"an SSD cache of {max_bytes} bytes has no room for one block of {space.block_bytes}: raise "
                "--kv-offload-ssd-gib"
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
        """Usable slots, without files for which the disk had no room."""
        refused = self._grow_again_s > 0.0
        return sum(
            segment.num_ready if segment.fd >= 0 else 0 if refused else segment.num_slots
            for segment in self._all
        )

    def locate(self, slot: int) -> tuple[Segment, int]:
        """The segment that has `slot`, and its number there."""
        segment = self._all[bisect_right(self._firsts, slot) - 1]
        return segment, slot - segment.first

    def generation(self, slot: int) -> bytes:
        return self.locate(slot)[0].head.generation

    # ----------------------------------------------------------------------------------------------- at start

    def _adopt(self, budget: int) -> int:
        """Adopt our existing files and remove useless ones; returns the bytes in use."""
        used = num_removed = 0
        for number, path in self.files.directory.segment_files().items():
            try:
                segment = self.files.try_open_segment(number, self.num_slots, self._space, budget - used)
                if segment is None:
                    self.files.remove(number)
                    num_removed += 1
                    continue
                self._all.append(segment)
                self.written_ns = max(
                    self.written_ns, self.files.io.stat(segment.fd).st_mtime_ns + _COARSE_NS
                )
                self.note_unsynced(segment)  # an earlier process may have ended without a sync
                used += segment_bytes(segment.num_slots, self._space.block_bytes)
            except OSError as error:
                log.warning("%s cannot be used and is left as it is: %s", path, error)
                with contextlib.suppress(OSError):
                    used += os.stat(path.name, dir_fd=self.files.directory.fd, follow_symlinks=False).st_size
        if num_removed:
            self.note_unsynced(names=True)
            where = self.files.directory.path
            log.info(
                "%d files in %s make room: they are of another model or format, damaged, or too many",
                num_removed,
                where,
            )
        return used

    def _plan(self, budget: int, max_bytes: int) -> None:
        """Plan the files that may still be made."""
        block_bytes = self._space.block_bytes
        target = max(min(GIB, max_bytes // _FEWEST_FILES), max_bytes // _MOST_FILES)
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

    # --------------------------------------------------------------------------------------------- in service

    def try_grow(self) -> Segment | None:
        """Make the next file. None: there is none to make, or no room on the disk; tried again later."""
        with self._grow_lock:
            segment = next((segment for segment in self._all if segment.fd < 0), None)
            if segment is None or time.monotonic() < self._grow_again_s:
                return None
            try:
                self.files.make(segment)
            except OSError as error:
                if not self._grow_again_s:
                    num_made = sum(segment.fd >= 0 for segment in self._all)
                    log.warning(
                        "the SSD cache in %s stays at %d files: %s",
                        self.files.directory.path,
                        num_made,
                        error,
                    )
                self._grow_again_s = time.monotonic() + _GROW_AGAIN_S
                return None
            self._grow_again_s = 0.0  # there is room again, perhaps for other segments, too
            self.note_unsynced(segment, names=True)
            return segment

    def persist(self) -> None:
        """Make all writes so far durable. Raises StoreFailed."""
        with self._sync_lock:
            self._sync()

    def note_unsynced(self, *segments: Segment, names: bool = False) -> None:
        """Called when a write is over, before its success is reported."""
        with self._lock:
            self._unsynced.update(segments)
            self._unsynced_names |= names

    def _sync(self) -> None:
        """Under `_sync_lock`. Raises StoreFailed; files that failed stay on the list."""
        with self._lock:
            left, self._unsynced = self._unsynced, set()
            names, self._unsynced_names = self._unsynced_names, False
        try:
            for segment in sorted(left, key=lambda segment: segment.first):
                self.files.sync(segment)
                left.discard(segment)
            if names:
                self.files.io.fsync(self.files.directory.fd)
                names = False
        except OSError as error:
            raise StoreFailed(f"the SSD cache could not be synced: {error.strerror}") from error
        finally:
            self.note_unsynced(*left, names=names)

    @contextlib.contextmanager
    def renewal(self) -> Iterator[Callable[[], None]]:
        """Yields a function that gives every file a new generation in memory, to be called while no thread
        compares generations. The generations are on disk when the context ends. Raises StoreFailed; the next
        `persist` continues."""
        with self._grow_lock, self._sync_lock:
            yield self._renew_heads
            self._sync()

    def _renew_heads(self) -> None:
        made = [segment for segment in self._all if segment.fd >= 0]
        for segment in made:
            segment.head = segment.head._replace(generation=new_generation())
            segment.head_is_stale = True
        self.note_unsynced(*made)

    def are_in_place(self) -> bool:
        """Whether every file is still the one at its name."""
        return all(self.files.is_in_place(segment) for segment in self._all if segment.fd >= 0)

    def probe(self) -> None:
        """Returns if files can be read, else raises StoreFailed."""
        try:
            for segment in self._all[:1]:
                sector = self.files.scratch.room(SECTOR_BYTES)
                if segment.num_ready and read_all(self.files.io, segment.fd, [sector], 0) < SECTOR_BYTES:
                    raise OSError(errno.EIO, "a file is empty")
        except OSError as error:
            raise StoreFailed(
                f"the SSD cache in {self.files.directory.path} cannot be read: {error.strerror}"
            ) from error

    def close(self) -> None:
        """Idempotent. Makes no more files."""
        with self._grow_lock:
            self._grow_again_s = float("inf")
            for segment in self._all:
                if segment.fd >= 0:
                    self.files.close(segment.fd)
                    segment.fd = -1
