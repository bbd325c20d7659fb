"""The directory of an SSD tier: its permissions, the lock that gives it to one process, the names of its
files, and the manifests of snapshots in it; and the system calls, which tests replace by failing ones. Owns
the lock, the directory's descriptor and the aligned memory of each thread, not the content of segments. Files
with other names are left alone.

KV is trusted because no other user could have written it: checksums find accidents, not intent. So the
directory and each file of ours must belong to this user and be writable by no other. Everything is opened
through one descriptor and checked on descriptors, so that the checked file is the one used, even if the path
changes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
import shlex
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from penstock.errors import ConfigError, StoreFailed

SECTOR_BYTES = 4096  # alignment of addresses, lengths and offsets for O_DIRECT, on every device in use
FULL = (errno.ENOSPC, errno.EDQUOT)
# Heads up to this far apart are read in one call, with the bytes between them: a call costs more than these
# bytes.
READ_THROUGH_BYTES = 16 << 10
_ROOM_BYTES = 64 << 10  # the smallest buffer of a thread


class DiskIo:
    """The real system calls. All raise OSError."""

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
        """Allocate the first `num_bytes`; existing content stays."""
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
    done = _move(io.pwritev, fd, buffers, offset, total)
    if done < total:
        raise OSError(errno.EIO, f"a write ended after {done} of {total} bytes")


def read_all(io: DiskIo, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Number of bytes read: fewer than requested if the file ends."""
    return _move(io.preadv, fd, buffers, offset, sum(len(buffer) for buffer in buffers))


def _move(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    buffers: Sequence[memoryview],
    offset: int,
    total: int,
) -> int:
    """How many of `total` bytes were moved when the system moves no more."""
    done = 0
    while done < total:
        num = call(fd, _rest(buffers, done) if done else buffers, offset + done)
        if num < total - done:
            # O_DIRECT continues at a whole sector only, so a partial one is moved again
            num -= num % SECTOR_BYTES
        if not num:
            break
        done += num
    return done


def _rest(buffers: Sequence[memoryview], done: int) -> Sequence[memoryview]:
    """The bytes after the first `done`."""
    rest = []
    for buffer in buffers:
        if done < len(buffer):
            rest.append(buffer[done:])
        done = max(0, done - len(buffer))
    return rest


def is_aligned(view: memoryview) -> bool:
    """Whether O_DIRECT can use the buffer directly."""
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return not (address % SECTOR_BYTES or len(view) % SECTOR_BYTES)


class Scratch(threading.local):
    """Aligned memory of the calling thread, valid until its next call."""

    def __init__(self) -> None:
        self._room = memoryview(mmap.mmap(-1, _ROOM_BYTES))

    def room(self, num_bytes: int) -> memoryview:
        if num_bytes > len(self._room):
            self._room = memoryview(mmap.mmap(-1, 1 << (num_bytes - 1).bit_length()))
        return self._room[:num_bytes]


log = logging.getLogger(__name__)

_LOCK = "lock"
_LOCK_TEXT = re.compile(rb"penstock (\d+)\n")
_SEGMENT = re.compile(r"penstock-(\d{6})\.kv")
_SNAPSHOT = re.compile(r"penstock-([0-9a-f]{32}-[0-9a-f]{32})\.snapshot")
_UNFINISHED = re.compile(r"penstock-([0-9a-f]{32}-[0-9a-f]{32})\.new")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
LOCK_BYTES = 4096  # generous size of the lock file
_MAX_MANIFEST_BYTES = 1 << 30  # a larger file is not a manifest


class Directory:
    """Locked while it is open; the system unlocks it when the process dies."""

    def __init__(self, path: Path, fd: int, lock_fd: int) -> None:
        self.path = path
        self.fd = fd
        self.device = os.fstat(fd).st_dev
        self._lock_fd = lock_fd

    def segment_path(self, number: int) -> Path:
        """Its name within `fd` is the last part."""
        return self.path / f"penstock-{number:06}.kv"

    def segment_files(self) -> dict[int, Path]:
        """Segment files by number, in order. Raises ConfigError if one of these names is not a plain file of
        ours."""
        return {
            int(number): self.path / name for number, name in _names(self.path, self.fd, _SEGMENT).items()
        }

    def snapshot_path(self, id: str) -> Path:
        """Of a manifest; its name within `fd` is the last part."""
        return self.path / f"penstock-{id}.snapshot"

    def snapshot_files(self) -> dict[str, Path]:
        """Manifests by id. Raises ConfigError if one of these names is not a plain file of ours."""
        return {id: self.path / name for id, name in _names(self.path, self.fd, _SNAPSHOT).items()}

    def unfinished_files(self) -> list[Path]:
        """Manifests that a killed process had begun to write."""
        return [self.path / name for name in _names(self.path, self.fd, _UNFINISHED).values()]

    def is_free(self, number: int) -> bool:
        """Whether no file has that name."""
        return _lstat(self.segment_path(number).name, self.fd) is None

    def is_in_place(self) -> bool:
        """Whether the path still leads here, and its lock file is the one that is held."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.fd)) and _is_at(
                _LOCK, self.fd, self._lock_fd
            )
        except OSError:
            return False

    def has_segment(self, number: int, fd: int) -> bool:
        """Whether the file open as `fd` still has that name. A removed file is lost when the process ends."""
        return _is_at(self.segment_path(number).name, self.fd, fd)

    def close(self) -> None:
        """Idempotent."""
        # unlocks; the file stays, since removing it could remove another process's lock
        for fd in (self._lock_fd, self.fd):
            if fd >= 0:
                os.close(fd)
        self.fd = self._lock_fd = -1


def make_directory(path: Path) -> Directory:
    """Lock `path`, created if it is missing. Raises ConfigError if it cannot be used, if other users may
    write there, or if another process has it; then nothing in it has changed."""
    try:
        for missing in [parent for parent in (path, *path.parents) if not os.path.lexists(parent)][::-1]:
            missing.mkdir(0o700, exist_ok=True)
        directory = _open(path, must_be_ours=False)
    except OSError as error:
        raise _unusable(path, error) from error
    _warn_of_parents(path)
    return directory


def remake_directory(path: Path, device: int) -> Directory:
    """Like `make_directory`, for a path that was in use on `device` and was removed or replaced. It is not
    created on another device: an unmounted disk leaves an empty folder on a disk that was not chosen."""
    try:
        if not os.path.lexists(path) and os.stat(path.parent).st_dev == device:
            path.mkdir(0o700)
        return _open(path, must_be_ours=False)
    except OSError as error:
        raise _unusable(path, error) from error


def open_directory(path: Path) -> Directory:
    """Lock `path`, which must be an SSD cache already. Raises ConfigError."""
    if not path.is_dir():
        raise ConfigError(
            f"{path} is not a directory" if path.exists() else f"the directory {path} does not exist"
        )
    try:
        return _open(path, must_be_ours=True)
    except OSError as error:
        raise _unusable(path, error) from error


# ---------------------------------------------------------------------------------------------- who may write


def check_trusted(path: Path, found: os.stat_result) -> None:
    """Raises ConfigError if another user can write a file with that status, or could until now."""
    me = os.geteuid()
    mode = f"owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}"
    if found.st_uid != me:
        raise ConfigError(
            f"{path} belongs to another user ({mode}), who can put KV there, and this process runs as user "
            f"{me}: run it as the owner, name a directory that does not exist yet, or, if you trust what is "
            f"in it, chown -R {me} {shlex.quote(str(path))}"
        )
    if found.st_mode & _OTHERS_WRITE:
        raise ConfigError(
            f"{path} can be written by other users ({mode}), who can put KV there: if you trust what is in "
            f"it, chmod go-w {shlex.quote(str(path))}, else name another directory"
        )


def check_file(path: Path, found: os.stat_result) -> None:
    """The same for a file, which must be a plain one."""
    if not stat.S_ISREG(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a plain file"
        raise ConfigError(
            f"{path} is {kind}, and the SSD cache needs that name: move it away, or name another directory"
        )
    check_trusted(path, found)


def _warn_of_parents(path: Path) -> None:
    """A user who can rename the directory cannot write into it, and a replacement is not ours, so it is not
    used. But such a user can remove it, which loses its blocks. So this warns and does not refuse."""
    for parent in path.resolve().parents:
        found = os.stat(parent)
        can_rename = found.st_mode & _OTHERS_WRITE and not found.st_mode & stat.S_ISVTX
        if can_rename or found.st_uid not in (0, os.geteuid()):
            mode = f"owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}"
            log.warning(
                "other users can remove the SSD cache in %s: they can write %s (%s)", path, parent, mode
            )
            return


def _unusable(path: Path, error: OSError) -> ConfigError:
    """If it belongs to another user, the message says so."""
    with contextlib.suppress(OSError):
        if error.errno in (errno.EACCES, errno.EPERM):
            check_trusted(path, os.stat(path))
    name = error.filename
    where = f" ({path / name})" if isinstance(name, str) and not os.path.isabs(name) else ""
    return ConfigError(f"the SSD cache directory {path} cannot be used: {error.strerror}{where}")


# --------------------------------------------------------------------------------------------- names and lock


def _lstat(name: str, fd: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _is_at(name: str, dir_fd: int, fd: int) -> bool:
    found = _lstat(name, dir_fd)
    return found is not None and os.path.samestat(found, os.fstat(fd))


def _names(path: Path, fd: int, pattern: re.Pattern[str]) -> dict[str, str]:
    """Our files with such names, by the part that differs."""
    found = {}
    for name in sorted(os.listdir(fd)):
        matched = pattern.fullmatch(name)
        if matched is not None and (status := _lstat(name, fd)) is not None:
            check_file(path / name, status)
            found[matched[1]] = name
    return found


def _open(path: Path, must_be_ours: bool) -> Directory:
    with contextlib.ExitStack() as undo:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        undo.callback(os.close, fd)
        check_trusted(path, os.fstat(fd))
        _check_names(path, fd, must_be_ours)
        lock_fd = _open_lock(path, fd)
        undo.callback(os.close, lock_fd)
        _lock(path, fd, lock_fd)
        undo.pop_all()
        return Directory(path, fd, lock_fd)


def _check_names(path: Path, fd: int, must_be_ours: bool) -> None:
    """Check every file of ours before anything is changed. A lock file is ours if it says so, if segments are
    beside it, or if nothing is: then it has been damaged, and can be locked as well as any."""
    names, lock = {**_names(path, fd, _SEGMENT), **_names(path, fd, _SNAPSHOT)}, _lstat(_LOCK, fd)
    if lock is None:
        is_ours = bool(names)
    else:
        if not stat.S_ISDIR(lock.st_mode):  # an empty directory can be replaced
            check_file(path / _LOCK, lock)
        is_ours = bool(names) or os.listdir(fd) == [_LOCK] or _owner_in(fd) is not None
    if must_be_ours and not is_ours:
        raise ConfigError(f"{path} is not an SSD cache directory of penstock")
    if lock is not None and not is_ours:
        raise ConfigError(
            f"{path} has a file named {_LOCK!r} that is not of penstock: give the SSD cache a directory of "
            "its own"
        )


def _owner_in(fd: int) -> int | None:
    """The process that the lock file names, if any; only for messages. The lock itself decides."""
    with contextlib.ExitStack() as undo, contextlib.suppress(OSError):
        lock_fd = os.open(_LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd)
        undo.callback(os.close, lock_fd)
        if (found := _LOCK_TEXT.match(os.pread(lock_fd, 64, 0))) is not None:
            return int(found[1])
    return None


def _open_lock(path: Path, fd: int) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(_LOCK, flags, 0o600, dir_fd=fd)
    except IsADirectoryError:
        log.warning("%s is a directory; it is removed if it is empty", path / _LOCK)
        os.rmdir(_LOCK, dir_fd=fd)
        return os.open(_LOCK, flags, 0o600, dir_fd=fd)


def _lock(path: Path, fd: int, lock_fd: int) -> None:
    check_file(path / _LOCK, os.fstat(lock_fd))
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = _owner_in(fd)
        by = "another process" if owner is None else f"process {owner}"
        raise ConfigError(
            f"the SSD cache directory {path} is in use by {by}: each engine needs a directory of its own"
        ) from None
    if not _is_at(_LOCK, fd, lock_fd):
        raise ConfigError(f"the lock of the SSD cache directory {path} was removed while it was being taken")
    with contextlib.suppress(OSError):  # a full disk; the lock holds anyway
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, b"penstock %d\n" % os.getpid(), 0)


# -------------------------------------------------------------------------------------------------- manifests


class ManifestFiles:
    """Manifests of snapshots, one file each: written under another name, synced, renamed, and the directory
    synced, so that a crash leaves all of it or nothing. All raise StoreFailed if the directory or a file
    cannot be used."""

    def __init__(self, io: DiskIo, directory: Directory) -> None:
        self._io = io
        self._directory = directory

    def tidy(self) -> None:
        """Remove unfinished files of an earlier process."""
        with self._must_be("removed"):
            for path in self._directory.unfinished_files():
                self._io.unlink(path, self._directory.fd)

    def ids(self) -> list[str]:
        with self._must_be("listed"):
            return list(self._directory.snapshot_files())

    def read(self, id: str) -> bytes | None:
        path = self._directory.snapshot_path(id)
        with contextlib.ExitStack() as undo, self._must_be("read"):
            try:
                fd = self._io.open(path, os.O_RDONLY | os.O_NOFOLLOW, self._directory.fd)
            except FileNotFoundError:
                return None
            undo.callback(self._io.close, fd)
            found = self._io.stat(fd)
            check_file(path, found)
            data = bytearray(min(found.st_size, _MAX_MANIFEST_BYTES))
            return bytes(data[: read_all(self._io, fd, [memoryview(data)], 0)])

    def write(self, id: str, data: bytes) -> bool:
        """False: the disk is full."""
        path = self._directory.snapshot_path(id)
        aside = path.with_suffix(".new")
        with self._must_be("written"):
            try:
                self._write_whole(aside, data)
                self._io.rename(aside, path, self._directory.fd)
                self._io.fsync(self._directory.fd)
            except OSError as error:
                with contextlib.suppress(OSError):
                    self._io.unlink(aside, self._directory.fd)
                if error.errno in FULL:
                    return False
                raise
        return True

    def _write_whole(self, path: Path, data: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):  # left by a process that was killed here
            self._io.unlink(path, self._directory.fd)
        fd = self._io.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, self._directory.fd)
        try:
            write_all(self._io, fd, [memoryview(data)], 0)
            self._io.fsync(fd)
        finally:
            self._io.close(fd)

    def remove(self, id: str) -> None:
        with self._must_be("removed"), contextlib.suppress(FileNotFoundError):
            self._io.unlink(self._directory.snapshot_path(id), self._directory.fd)
            self._io.fsync(self._directory.fd)

    @contextlib.contextmanager
    def _must_be(self, done: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ConfigError) as error:
            what = error.strerror if isinstance(error, OSError) else error
            raise StoreFailed(f"a snapshot in {self._directory.path} cannot be {done}: {what}") from error
