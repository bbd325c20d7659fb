"""System calls for reading and writing files. Owns how a short read or write is continued, and the aligned memory of each thread; knows
nothing of blocks. Tests replace `DiskIo` by one that fails."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from penstock.kv.tiers.ssd.format import SECTOR_BYTES

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
