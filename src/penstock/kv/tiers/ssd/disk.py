"""What the bytes of a segment file mean, and the system calls that move them. Owns the format and its version, how a short read or write
is continued, and the aligned memory of each thread. Tests replace `DiskIo` by one that fails.

    segment file    [ segment head | slot 0 | slot 1 | ... ]       each head is one sector of 4096 bytes
    slot            [ slot head | payload, padded to whole sectors ]
    slot head       [ envelope | place ]                           the place says where this head was written, and in which generation

A slot stands for a block when its head is whole, lies where it says it does, and has the generation of its segment. So a new generation
in the segment head forgets every slot of the file at once.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from penstock.kv.blocks.key import SCOPE_BYTES
from penstock.kv.tiers.store import HEADER_BYTES, Envelope, unpack

SECTOR_BYTES = 4096  # what O_DIRECT wants of addresses, lengths and offsets, on every device in use
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
    """What one block takes in a file."""
    return SECTOR_BYTES + -(-block_bytes // SECTOR_BYTES) * SECTOR_BYTES


def segment_bytes(num_slots: int, block_bytes: int) -> int:
    return SECTOR_BYTES + num_slots * slot_bytes(block_bytes)


def new_generation() -> bytes:
    return secrets.token_bytes(GENERATION_BYTES)


class SegmentHead(NamedTuple):
    """Whose blocks a file has, and how many fit."""

    number: int  # of the file, as its name has it
    num_slots: int
    block_bytes: int
    space: bytes
    generation: bytes


class SlotHead(NamedTuple):
    """A slot's head that is whole."""

    envelope: Envelope
    generation: bytes
    number: int
    slot: int
    depth: int  # the block's place in its prompt

    def is_for(self, segment: SegmentHead, slot: int) -> bool:
        """Whether it was written for that slot of the segment, and belongs to a block of the segment as it is now."""
        place = (self.generation, self.number, self.slot) == (segment.generation, segment.number, slot)
        return place and (self.envelope.space, self.envelope.num_bytes) == (segment.space, segment.block_bytes)


def pack_segment(head: SegmentHead) -> bytes:
    fields = _SEGMENT.pack(_MAGIC, FORMAT, 0, head.number, head.num_slots, 0, head.block_bytes, head.space, head.generation)
    return (fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))).ljust(SECTOR_BYTES, b"\0")


def unpack_segment(sector: memoryview | bytes) -> SegmentHead | None:
    """None: it is not of this format, or damaged."""
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
    """None: nothing was written there, or it is damaged."""
    envelope = unpack(sector)
    if envelope is None or len(sector) < SECTOR_BYTES:
        return None
    (expected,) = _CHECK.unpack_from(sector, _PLACE_END)
    if xxhash.xxh3_64_intdigest(bytes(sector[:_PLACE_END])) != expected:
        return None
    return SlotHead(envelope, *_PLACE.unpack_from(sector, HEADER_BYTES))


# ---------------------------------------------------------------------------------------------------------------- system calls

FULL = (errno.ENOSPC, errno.EDQUOT)
READ_THROUGH_BYTES = 16 << 10  # heads up to so far apart are read with what lies between them: one call costs more than these bytes
_ROOM_BYTES = 64 << 10  # the least that a thread takes


class DiskIo:
    """The system itself. All raise OSError."""

    def open(self, path: Path, flags: int, dir_fd: int) -> int:
        """The file that the last part of `path` names in `dir_fd`; the rest is for messages."""
        return os.open(path.name, flags, 0o600, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def unlink(self, path: Path, dir_fd: int) -> None:
        os.unlink(path.name, dir_fd=dir_fd)

    def rename(self, path: Path, to: Path, dir_fd: int) -> None:
        os.rename(path.name, to.name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def stat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def fallocate(self, fd: int, num_bytes: int) -> None:
        """Room for the first `num_bytes`; what is there already stays as it is."""
        os.posix_fallocate(fd, 0, num_bytes)

    def truncate(self, fd: int, num_bytes: int) -> None:
        os.ftruncate(fd, num_bytes)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)


def write_all(io: DiskIo, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Every byte, or OSError."""
    total = sum(len(buffer) for buffer in buffers)
    done = 0
    while done < total:
        progress = _whole(io.pwritev(fd, _rest(buffers, done), offset + done), total - done)
        if not progress:
            raise OSError(errno.EIO, f"a write ended after {done} of {total} bytes")
        done += progress


def read_all(io: DiskIo, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """How many bytes there were: fewer than asked for where the file ends."""
    total = sum(len(buffer) for buffer in buffers)
    done = 0
    while done < total:
        progress = _whole(io.preadv(fd, _rest(buffers, done), offset + done), total - done)
        if not progress:
            break
        done += progress
    return done


def _whole(num_bytes: int, wanted: int) -> int:
    """O_DIRECT goes on at a whole sector only, so half a one is moved again."""
    return num_bytes if num_bytes >= wanted else num_bytes - num_bytes % SECTOR_BYTES


def _rest(buffers: Sequence[memoryview], done: int) -> Sequence[memoryview]:
    if not done:
        return buffers
    rest = []
    for buffer in buffers:
        if done < len(buffer):
            rest.append(buffer[done:])
        done = max(0, done - len(buffer))
    return rest


def is_aligned(view: memoryview) -> bool:
    """Whether O_DIRECT can use it as it is."""
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return not (address % SECTOR_BYTES or len(view) % SECTOR_BYTES)


class Scratch(threading.local):
    """Aligned memory of the calling thread, good until its next call."""

    def __init__(self) -> None:
        self._room = memoryview(mmap.mmap(-1, _ROOM_BYTES))

    def room(self, num_bytes: int) -> memoryview:
        if num_bytes > len(self._room):
            self._room = memoryview(mmap.mmap(-1, 1 << (num_bytes - 1).bit_length()))
        return self._room[:num_bytes]
