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
import itertools
import logging
import os
import secrets
import struct
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from penstock.config import GIB
from penstock.errors import ConfigError, StoreFailed
from penstock.kv.blocks.key import SCOPE_BYTES
from penstock.kv.tiers.ssd.directory import (
    FULL,
    LOCK_BYTES,
    SECTOR_BYTES,
    Directory,
)
from penstock.kv.tiers.store import HEADER_BYTES, Envelope, Space, unpack

log = logging.getLogger(__name__)

FORMAT = 1
GENERATION_BYTES = 16
_MAGIC = b"penstkSG"
# magic, format, 0, number, slots, 0, block bytes, space, generation
_SEGMENT = struct.Struct(f"<8sHHIIIQ{SCOPE_BYTES}s{GENERATION_BYTES}s")
_PLACE = struct.Struct(f"<{GENERATION_BYTES}sIII")  # generation, number, slot, depth
_CHECK = struct.Struct("<Q")  # of everything before it

_FEWEST_FILES = 8  # files of a small tier
_MOST_FILES = 256  # files of a large tier, each with a descriptor
_FEWEST_GROUPS = 8  # per segment; if the disk has no room for all of it, the first groups can be used
_MOST_GROUP_SLOTS = 256
_GROW_AGAIN_S = 60.0  # after a file could not be made
_COARSE_NS = 1_000_000_000  # a file's time may be this much earlier than its write
# Heads up to this far apart are read in one call, with the bytes between them: a call costs more than these
# bytes.
_READ_THROUGH_BYTES = 16 << 10


def slot_bytes(block_bytes: int) -> int:
    """Bytes of one block in a file."""
    return SECTOR_BYTES + -(-block_bytes // SECTOR_BYTES) * SECTOR_BYTES


def segment_bytes(num_slots: int, block_bytes: int) -> int:
    """Bytes of a file with so many slots, and so the offset of the next one."""
    return SECTOR_BYTES + num_slots * slot_bytes(block_bytes)


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
        envelope = self.envelope
        return (self.generation, self.number, self.slot, envelope.space, envelope.num_bytes) == (
            segment.generation,
            segment.number,
            slot,
            segment.space,
            segment.block_bytes,
        )


def pack_segment(head: SegmentHead) -> bytes:
    return _sector(_SEGMENT.pack(_MAGIC, FORMAT, 0, *head[:2], 0, *head[2:]))


def unpack_segment(sector: memoryview | bytes) -> SegmentHead | None:
    """None: another format, or damaged."""
    if not _is_whole(sector, _SEGMENT.size):
        return None
    magic, version, _, number, num_slots, _, *rest = _SEGMENT.unpack_from(sector)
    return SegmentHead(number, num_slots, *rest) if (magic, version) == (_MAGIC, FORMAT) else None


def pack_slot(envelope: bytes, segment: SegmentHead, slot: int, depth: int) -> bytes:
    """`envelope` as `tiers.store.pack` made it."""
    return _sector(envelope + _PLACE.pack(segment.generation, segment.number, slot, depth))


def unpack_slot(sector: memoryview | bytes) -> SlotHead | None:
    """None: never written, or damaged."""
    envelope = unpack(sector)
    if envelope is None or not _is_whole(sector, HEADER_BYTES + _PLACE.size):
        return None
    return SlotHead(envelope, *_PLACE.unpack_from(sector, HEADER_BYTES))


def _sector(fields: bytes) -> bytes:
    return (fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))).ljust(SECTOR_BYTES, b"\0")


def _is_whole(sector: memoryview | bytes, num_bytes: int) -> bool:
    """Whether it is a sector, and its checksum is that of its first `num_bytes`."""
    return len(sector) >= SECTOR_BYTES and _CHECK.unpack_from(sector, num_bytes) == (
        xxhash.xxh3_64_intdigest(sector[:num_bytes]),
    )


@dataclass(slots=True, eq=False)
class Segment:
    """One file, existing or planned. `num_slots` are those of the plan: a full disk may have room for
    fewer."""

    head: SegmentHead
    first: int  # the number of its first slot among all
    num_slots: int
    fd: int = -1  # negative: not open
    num_ready: int = 0  # slots that are in the file
    head_is_stale: bool = False  # the head in the file is older than `head`

    def offset(self, slot: int) -> int:
        """The offset of `slot`, counted in this file."""
        return segment_bytes(slot, self.head.block_bytes)

    def groups(self) -> Iterator[range]:
        """All slots, in groups that become usable together. Small groups come first: even if the disk has
        room for few slots, more than half of them can be used."""
        step, first = min(_MOST_GROUP_SLOTS, -(-self.num_slots // _FEWEST_GROUPS)), 0
        while first < self.num_slots:
            end = min(first + min(max(1, first), step), self.num_slots)
            yield range(first, end)
            first = end


def read_head(directory: Directory, fd: int, number: int) -> SegmentHead | None:
    """None: another format, damaged, or of another file. Raises OSError, like the next two."""
    sector, _ = directory.scratch.parts(1, SECTOR_BYTES)
    head = unpack_segment(sector[: directory.read(fd, [sector], 0)])
    return head if head is not None and head.number == number else None


def read_slots(
    directory: Directory, fd: int, block_bytes: int, slots: range, payloads: bool = False
) -> list[memoryview]:
    """The bytes of each slot, at least its head, as far as the file has them. Good until the thread's next
    call."""
    width, offset = slot_bytes(block_bytes), segment_bytes(slots.start, block_bytes)
    if payloads or width <= _READ_THROUGH_BYTES:
        room, parts = directory.scratch.parts(len(slots), width)
        num = directory.read(fd, [room], offset)
        return [part[: max(0, num - place * width)] for place, part in enumerate(parts)]
    _, parts = directory.scratch.parts(len(slots), SECTOR_BYTES)
    return [part[: directory.read(fd, [part], offset + place * width)] for place, part in enumerate(parts)]


def write_head(directory: Directory, head: SegmentHead, fd: int) -> None:
    sector, _ = directory.scratch.parts(1, SECTOR_BYTES)
    sector[:] = pack_segment(head)
    directory.write(fd, [sector], 0)


class Segments:
    """All segments of a tier. Several threads use it. `directory` is the caller's."""

    def __init__(self, directory: Directory, space: Space, max_bytes: int) -> None:
        self.directory = directory
        # guards the two below: writes that may not survive a crash yet
        self._lock = threading.Lock()
        self._unsynced: set[Segment] = set()
        self._unsynced_names = False  # files were made or removed
        # one sync at a time: a thread that finds nothing to do knows that it is done
        self._sync_lock = threading.RLock()
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

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._all)

    @property
    def num_slots(self) -> int:
        return sum(segment.num_slots for segment in self._all)

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
        segment = self._all[bisect_right(self._all, slot, key=lambda segment: segment.first) - 1]
        return segment, slot - segment.first

    # ----------------------------------------------------------------------------------------------- at start

    def _adopt(self, budget: int) -> int:
        """Adopt our existing files and remove useless ones; returns the bytes in use."""
        used = num_removed = 0
        for number, path in self.directory.segment_files().items():
            try:
                segment = self._try_open(number, budget - used)
                if segment is None:
                    self.directory.unlink(path)
                    num_removed += 1
                    continue
                self._all.append(segment)
                written_ns = self.directory.io.stat(segment.fd).st_mtime_ns + _COARSE_NS
                self.written_ns = max(self.written_ns, written_ns)
                self.note_unsynced(segment)  # an earlier process may have ended without a sync
                used += segment_bytes(segment.num_slots, self._space.block_bytes)
            except OSError as error:
                log.warning("%s cannot be used and is left as it is: %s", path, error)
                with contextlib.suppress(OSError):
                    used += path.lstat().st_size
        if num_removed:
            self.note_unsynced(names=True)
            log.info(
                "%d files in %s make room: they are of another model or format, damaged, or too many",
                num_removed,
                self.directory.path,
            )
        return used

    def _try_open(self, number: int, max_bytes: int) -> Segment | None:
        """An existing file, with the size that its head says. None: another space or format, damaged, or too
        large."""
        fd = self.directory.open_direct(self.directory.segment_path(number), os.O_RDWR)
        try:
            head = read_head(self.directory, fd, number)
            if (
                head is not None
                and (head.space, head.block_bytes) == (self._space.digest, self._space.block_bytes)
                and head.num_slots
                and (wanted := segment_bytes(head.num_slots, head.block_bytes)) <= max_bytes
            ):
                num_ready = self._fit(fd, number, wanted)
                return Segment(head, self.num_slots, head.num_slots, fd, min(head.num_slots, num_ready))
        except BaseException:
            self.directory.close_file(fd)
            raise
        self.directory.close_file(fd)
        return None

    def _fit(self, fd: int, number: int, wanted: int) -> int:
        """Returns the number of slots in the file."""
        io = self.directory.io
        if io.stat(fd).st_size > wanted:
            io.truncate(fd, wanted)
        if io.stat(fd).st_size < wanted:
            try:
                io.fallocate(fd, wanted)
            except OSError as error:
                path = self.directory.segment_path(number)
                log.warning("%s has been cut short and cannot be extended: %s", path, error)
        return (io.stat(fd).st_size - SECTOR_BYTES) // slot_bytes(self._space.block_bytes)

    def _plan(self, budget: int, max_bytes: int) -> None:
        """Plan the files that may still be made."""
        space = self._space
        target = max(min(GIB, max_bytes // _FEWEST_FILES), max_bytes // _MOST_FILES)
        usual = max(1, (target - SECTOR_BYTES) // slot_bytes(space.block_bytes))
        taken = self.directory.segment_files()
        free = (number for number in itertools.count() if number not in taken)
        while budget >= segment_bytes(1, space.block_bytes):
            num_slots = min(usual, (budget - SECTOR_BYTES) // slot_bytes(space.block_bytes))
            head = SegmentHead(next(free), num_slots, space.block_bytes, space.digest, new_generation())
            self._all.append(Segment(head, self.num_slots, num_slots))
            budget -= segment_bytes(num_slots, space.block_bytes)

    # --------------------------------------------------------------------------------------------- in service

    def try_grow(self) -> bool:
        """Make the next file. False: there is none to make, or no room on the disk; tried again later."""
        with self._grow_lock:
            segment = next((segment for segment in self._all if segment.fd < 0), None)
            if segment is None or time.monotonic() < self._grow_again_s:
                return False
            try:
                segment.head, segment.fd = self._make(segment.head)
            except OSError as error:
                if not self._grow_again_s:
                    log.warning(
                        "the SSD cache in %s stays at %d files: %s",
                        self.directory.path,
                        sum(segment.fd >= 0 for segment in self._all),
                        error,
                    )
                self._grow_again_s = time.monotonic() + _GROW_AGAIN_S
                return False
            self._grow_again_s = 0.0  # there is room again, perhaps for other segments, too
            self.note_unsynced(segment, names=True)
            segment.num_ready = segment.head.num_slots  # last: from now on it is written to
            return True

    def _make(self, head: SegmentHead) -> tuple[SegmentHead, int]:
        """A file with as many slots as planned, or as many as the disk has room for."""
        path, flags = self.directory.segment_path(head.number), os.O_RDWR | os.O_CREAT | os.O_EXCL
        try:
            fd = self.directory.open_direct(path, flags)
        except FileExistsError:
            # nothing had this name at start: a half-made file of ours could not be removed
            self.directory.unlink(path)
            fd = self.directory.open_direct(path, flags)
        try:
            while True:
                try:
                    self.directory.io.fallocate(fd, segment_bytes(head.num_slots, head.block_bytes))
                    break
                except OSError as error:
                    if error.errno not in FULL or head.num_slots == 1:
                        raise
                    self.directory.io.truncate(fd, 0)
                    head = head._replace(num_slots=head.num_slots // 2)
            write_head(self.directory, head, fd)
        except BaseException:
            self.directory.close_file(fd)
            with contextlib.suppress(OSError):
                self.directory.unlink(path)
            raise
        return head, fd

    def persist(self) -> None:
        """Make all writes so far durable. Raises StoreFailed; files that failed stay on the list."""
        with self._sync_lock:
            with self._lock:
                left, self._unsynced = self._unsynced, set()
                names, self._unsynced_names = self._unsynced_names, False
            try:
                for segment in sorted(left, key=lambda segment: segment.first):
                    if not self._is_in_place(segment):
                        name = self.directory.segment_path(segment.head.number).name
                        raise OSError(errno.ENOENT, f"{name} has been removed")
                    if segment.head_is_stale:
                        write_head(self.directory, segment.head, segment.fd)
                        segment.head_is_stale = False
                    self.directory.io.fdatasync(segment.fd)
                    left.discard(segment)
                if names:
                    self.directory.io.fsync(self.directory.fd)
                    names = False
            except OSError as error:
                raise StoreFailed(f"the SSD cache could not be synced: {error.strerror}") from error
            finally:
                self.note_unsynced(*left, names=names)

    def note_unsynced(self, *segments: Segment, names: bool = False) -> None:
        """Called when a write is over, before its success is reported."""
        with self._lock:
            self._unsynced.update(segments)
            self._unsynced_names |= names

    @contextlib.contextmanager
    def renewal(self) -> Iterator[Callable[[], None]]:
        """Yields a function that gives every file a new generation in memory, to be called while no thread
        compares generations. The generations are on disk when the context ends. Raises StoreFailed; the next
        `persist` continues."""

        def renew() -> None:
            for segment in self._made():
                segment.head = segment.head._replace(generation=new_generation())
                segment.head_is_stale = True
            self.note_unsynced(*self._made())

        with self._grow_lock, self._sync_lock:
            yield renew
            self.persist()

    def _made(self) -> list[Segment]:
        return [segment for segment in self._all if segment.fd >= 0]

    def _is_in_place(self, segment: Segment) -> bool:
        return self.directory.has_segment(segment.head.number, segment.fd)

    def are_in_place(self) -> bool:
        """Whether every open file is still the one at its name."""
        return all(map(self._is_in_place, self._made()))

    def probe(self) -> None:
        """Returns if files can be read, else raises StoreFailed."""
        try:
            for segment in self._all[:1]:
                sector, _ = self.directory.scratch.parts(1, SECTOR_BYTES)
                if segment.num_ready and self.directory.read(segment.fd, [sector], 0) < SECTOR_BYTES:
                    raise OSError(errno.EIO, "a file is empty")
        except OSError as error:
            raise StoreFailed(
                f"the SSD cache in {self.directory.path} cannot be read: {error.strerror}"
            ) from error

    def close(self) -> None:
        """Idempotent. Makes no more files."""
        with self._grow_lock:
            self._grow_again_s = float("inf")
            for segment in self._made():
                self.directory.close_file(segment.fd)
                segment.fd = -1


def new_generation() -> bytes:
    return secrets.token_bytes(GENERATION_BYTES)
