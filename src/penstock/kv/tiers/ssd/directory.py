"""The directory that an SSD tier lives in: the lock that gives it to one process, and the names of its files. Owns the lock; what is in the
files is others' business. Files with other names are nobody's here and stay as they are."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from pathlib import Path

from penstock.errors import ConfigError

_LOCK = "lock"
_LOCK_TEXT = re.compile(rb"penstock (\d+)\n")
_SEGMENT = re.compile(r"penstock-(\d{6})\.kv")
LOCK_BYTES = 4096  # what the lock file may take, generously


class Directory:
    """Locked for as long as it is open; the system unlocks it when the process dies, however it does."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    def segment_path(self, number: int) -> Path:
        return self.path / f"penstock-{number:06}.kv"

    def segment_files(self) -> dict[int, Path]:
        """Those that are there, by number, in order."""
        return _segment_files(self.path)

    def is_free(self, number: int) -> bool:
        """Whether nothing at all has that name."""
        return not os.path.lexists(self.segment_path(number))

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)  # unlocks; the file stays, since removing it could take away somebody else's lock
            self._fd = -1


def make_directory(path: Path) -> Directory:
    """Lock `path`, created where it is missing. Raises ConfigError where it cannot be used or somebody else has it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        return _lock(path)
    except OSError as error:
        raise ConfigError(f"the SSD cache directory {path} cannot be used: {error.strerror}") from error


def open_directory(path: Path) -> Directory:
    """Lock `path`, which must be an SSD cache already. Raises ConfigError."""
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory" if path.exists() else f"the directory {path} does not exist")
    try:
        lock_text = (path / _LOCK).read_bytes() if (path / _LOCK).is_file() else b"?"
        if not _segment_files(path) and not _LOCK_TEXT.fullmatch(lock_text):
            raise ConfigError(f"{path} is not an SSD cache directory of penstock")
        return _lock(path)
    except OSError as error:
        raise ConfigError(f"the SSD cache directory {path} cannot be used: {error.strerror}") from error


def _segment_files(path: Path) -> dict[int, Path]:
    found = {}
    for entry in path.iterdir():
        name = _SEGMENT.fullmatch(entry.name)
        with contextlib.suppress(FileNotFoundError):
            if name is not None and stat.S_ISREG(entry.lstat().st_mode):
                found[int(name[1])] = entry
    return dict(sorted(found.items()))


def _lock(path: Path) -> Directory:
    fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        found = os.pread(fd, 64, 0)
        owner = _LOCK_TEXT.fullmatch(found)
        if found and owner is None:
            raise ConfigError(f"{path} has a file named {_LOCK!r} that is not of penstock: give the SSD cache a directory of its own")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            by = f"process {int(owner[1])}" if owner is not None else "another process"
            raise ConfigError(f"the SSD cache directory {path} is in use by {by}: each engine needs a directory of its own") from None
        with contextlib.suppress(OSError):  # a full disk; the lock holds all the same
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"penstock %d\n" % os.getpid(), 0)
    except BaseException:
        os.close(fd)
        raise
    return Directory(path, fd)
