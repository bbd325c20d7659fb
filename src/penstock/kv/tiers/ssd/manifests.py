"""Manifests of snapshots in the directory of an SSD tier, a file each. Owns how one gets there whole: written beside its name, synced,
renamed, and the directory synced, so that a crash leaves all of it or nothing."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from penstock.errors import ConfigError, StoreFailed
from penstock.kv.tiers.ssd.directory import Directory, check_file
from penstock.kv.tiers.ssd.disk import DiskIo, read_all, write_all
from penstock.kv.tiers.ssd.segments import FULL

_MAX_BYTES = 1 << 30  # more is no manifest


class ManifestFiles:
    """All raise StoreFailed where the directory or a file cannot be used."""

    def __init__(self, io: DiskIo, directory: Directory) -> None:
        self._io = io
        self._directory = directory

    def tidy(self) -> None:
        """What was begun and not ended by an earlier process goes."""
        try:
            for path in self._directory.unfinished_files():
                self._io.unlink(path, self._directory.fd)
        except (OSError, ConfigError) as error:
            raise self._failure("removed", error) from error

    def ids(self) -> list[str]:
        try:
            return list(self._directory.snapshot_files())
        except (OSError, ConfigError) as error:
            raise self._failure("listed", error) from error

    def read(self, id: str) -> bytes | None:
        path = self._directory.snapshot_path(id)
        try:
            fd = self._io.open(path, os.O_RDONLY | os.O_NOFOLLOW, self._directory.fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._failure("read", error) from error
        try:
            found = self._io.stat(fd)
            check_file(path, found)
            data = bytearray(min(found.st_size, _MAX_BYTES))
            return bytes(data[: read_all(self._io, fd, [memoryview(data)], 0)])
        except (OSError, ConfigError) as error:
            raise self._failure("read", error) from error
        finally:
            self._io.close(fd)

    def write(self, id: str, data: bytes) -> bool:
        """False: the disk is full."""
        path = self._directory.snapshot_path(id)
        aside = path.with_suffix(".new")
        try:
            self._write_whole(aside, data)
            self._io.rename(aside, path, self._directory.fd)
            self._io.fsync(self._directory.fd)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._io.unlink(aside, self._directory.fd)
            if error.errno in FULL:
                return False
            raise self._failure("written", error) from error
        return True

    def _write_whole(self, path: Path, data: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):  # of a process that was killed here
            self._io.unlink(path, self._directory.fd)
        fd = self._io.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, self._directory.fd)
        try:
            write_all(self._io, fd, [memoryview(data)], 0)
            self._io.fsync(fd)
        finally:
            self._io.close(fd)

    def remove(self, id: str) -> None:
        try:
            with contextlib.suppress(FileNotFoundError):
                self._io.unlink(self._directory.snapshot_path(id), self._directory.fd)
                self._io.fsync(self._directory.fd)
        except OSError as error:
            raise self._failure("removed", error) from error

    def _failure(self, done: str, error: OSError | ConfigError) -> StoreFailed:
        what = error.strerror if isinstance(error, OSError) else error
        return StoreFailed(f"a snapshot in {self._directory.path} cannot be {done}: {what}")
