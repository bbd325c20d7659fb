"""Making and opening segment files: direct where the file system can, preallocated, with a head. Owns no descriptor that it has given out
and no choice of which file to make."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from pathlib import Path
from typing import NamedTuple

from penstock.kv.tiers.ssd.directory import Directory, check_file
from penstock.kv.tiers.ssd.disk import DiskIo, Scratch, read_all, write_all
from penstock.kv.tiers.ssd.format import SECTOR_BYTES, SegmentHead, pack_segment, segment_bytes, slot_bytes, unpack_segment

log = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT)


class OpenFile(NamedTuple):
    head: SegmentHead
    fd: int
    num_ready: int  # slots that lie in the file


class SegmentFiles:
    """The files of one directory. All raise OSError; opening one that others may write raises ConfigError."""

    def __init__(self, io: DiskIo, directory: Directory) -> None:
        self.io = io
        self.directory = directory
        self.scratch = Scratch()
        self._direct = os.O_DIRECT

    def try_open(self, number: int, space: bytes, block_bytes: int, max_bytes: int) -> OpenFile | None:
        """An existing file, with the size that its head says. None: it is of another space or format, damaged, or too large."""
        fd = self._open(number, os.O_RDWR)
        try:
            sector = self.scratch.room(SECTOR_BYTES)
            head = unpack_segment(sector[: read_all(self.io, fd, [sector], 0)])
            if head is not None and (head.number, head.space, head.block_bytes) == (number, space, block_bytes) and head.num_slots:
                wanted = segment_bytes(head.num_slots, block_bytes)
                if wanted <= max_bytes:
                    return OpenFile(head, fd, self._fit(fd, head, wanted))
        except BaseException:
            self._close(fd)
            raise
        self._close(fd)
        return None

    def _fit(self, fd: int, head: SegmentHead, wanted: int) -> int:
        """Returns how many slots lie in the file."""
        if self.io.stat(fd).st_size > wanted:
            self.io.truncate(fd, wanted)
        if self.io.stat(fd).st_size < wanted:
            try:
                self.io.fallocate(fd, wanted)
            except OSError as error:
                log.warning("%s has been cut short and cannot be extended: %s", self.path(head.number), error)
        return min(head.num_slots, (self.io.stat(fd).st_size - SECTOR_BYTES) // slot_bytes(head.block_bytes))

    def make(self, head: SegmentHead) -> OpenFile:
        """A new file with as many slots as `head` says, or as many as the disk has room for."""
        try:
            fd = self._open(head.number, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except FileExistsError:  # nothing had this name at start: it was made here, half, and could not be removed
            self.remove(head.number)
            fd = self._open(head.number, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            head = head._replace(num_slots=self._preallocate(fd, head))
            self.write_head(head, fd)
        except BaseException:
            self._close(fd)
            with contextlib.suppress(OSError):
                self.remove(head.number)
            raise
        return OpenFile(head, fd, head.num_slots)

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

    def write_head(self, head: SegmentHead, fd: int) -> None:
        sector = self.scratch.room(SECTOR_BYTES)
        sector[:] = pack_segment(head)
        write_all(self.io, fd, [sector], 0)

    def remove(self, number: int) -> None:
        self.io.unlink(self.path(number), self.directory.fd)

    def path(self, number: int) -> Path:
        return self.directory.segment_path(number)

    def is_at_its_path(self, number: int, fd: int) -> bool:
        return self.directory.has(self.path(number).name, fd)

    def sync_names(self) -> None:
        """Files that were made or removed survive a crash as such."""
        self.io.fsync(self.directory.fd)

    def _open(self, number: int, flags: int) -> int:
        fd = self._open_direct(self.path(number), flags | os.O_NOFOLLOW)
        try:
            check_file(self.path(number), self.io.stat(fd))
        except BaseException:
            self._close(fd)
            raise
        return fd

    def _open_direct(self, path: Path, flags: int) -> int:
        try:
            return self.io.open(path, flags | self._direct, self.directory.fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP) or not self._direct:
                raise
        log.warning("the file system of %s has no O_DIRECT: the SSD cache goes through the system's file cache", self.directory.path)
        self._direct = 0
        return self.io.open(path, flags & ~os.O_EXCL, self.directory.fd)

    def _close(self, fd: int) -> None:
        with contextlib.suppress(OSError):
            self.io.close(fd)
