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

log = logging.getLogger(__name__)

SECTOR_BYTES = 4096  # alignment of addresses, lengths and offsets for O_DIRECT, on every device in use
LOCK_BYTES = 4096  # generous size of the lock file
FULL = (errno.ENOSPC, errno.EDQUOT)
STATES_FOLDER = "states"  # a directory of its own for states of recurrent layers, beside the files of blocks
_ROOM_BYTES = 64 << 10  # the smallest buffer of a thread
_MAX_MANIFEST_BYTES = 1 << 30  # a larger file is not a manifest
_LOCK = "lock"
_LOCK_TEXT = re.compile(rb"penstock (\d+)\n")
_SEGMENT = re.compile(r"penstock-(\d{6})\.kv")
_SNAPSHOT = re.compile(r"penstock-([0-9a-f]{32}-[0-9a-f]{32})\.snapshot")
_UNFINISHED = re.compile(r"penstock-([0-9a-f]{32}-[0-9a-f]{32})\.new")
_TOKENS = re.compile(r"penstock-([0-9a-f]{64})\.tokens")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


Buffers = Sequence[memoryview]


class DiskIo:
    """The real system calls. All raise OSError."""

    close = staticmethod(os.close)
    stat = staticmethod(os.fstat)
    truncate = staticmethod(os.ftruncate)

    def open(self, path: Path, flags: int, dir_fd: int) -> int:
        """The file that the last part of `path` names in `dir_fd`; the rest is for messages."""
        return os.open(path.name, flags, 0o600, dir_fd=dir_fd)

    def unlink(self, path: Path, dir_fd: int) -> None:
        os.unlink(path.name, dir_fd=dir_fd)

    def rename(self, path: Path, to: Path, dir_fd: int) -> None:
        os.rename(path.name, to.name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def fallocate(self, fd: int, num_bytes: int) -> None:
        """Allocate the first `num_bytes`; existing content stays."""
        os.posix_fallocate(fd, 0, num_bytes)

    def pwritev(self, fd: int, buffers: Buffers, offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Buffers, offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)


Move = Callable[[int, Buffers, int], int]  # preadv or pwritev


def _move(move: Move, fd: int, buffers: Buffers, offset: int) -> int:
    """Number of bytes moved: fewer than requested if the file ends, or if the system takes no more."""
    done, total = 0, sum(map(len, buffers))
    while done < total:
        num = move(fd, _rest(buffers, done) if done else buffers, offset + done)
        if num < total - done:
            # O_DIRECT continues at a whole sector only, so a partial one is moved again
            num -= num % SECTOR_BYTES
        if not num:
            break
        done += num
    return done


def _rest(buffers: Buffers, done: int) -> Buffers:
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

    def parts(self, num: int, num_bytes: int) -> tuple[memoryview, list[memoryview]]:
        """Room for `num` parts of `num_bytes`: the whole and its parts."""
        if num * num_bytes > len(self._room):
            self._room = memoryview(mmap.mmap(-1, 1 << (num * num_bytes - 1).bit_length()))
        room = self._room[: num * num_bytes]
        return room, [room[start : start + num_bytes] for start in range(0, len(room), num_bytes)]


class Directory:
    """Locked while it is open; the system unlocks it when the process dies.

    Each manifest is a file. It is written under another name, synced, renamed, and the directory is synced,
    so that a crash leaves all of it or nothing. Calls about manifests raise StoreFailed if the directory or a
    file cannot be used.
    """

    def __init__(self, path: Path, fd: int, lock_fd: int, io: DiskIo) -> None:
        self.path = path
        self.fd = fd
        self.io = io  # a test may replace it by a disk that fails
        self.device = os.fstat(fd).st_dev
        self.scratch = Scratch()
        self._lock_fd = lock_fd
        self._direct = os.O_DIRECT

    # -------------------------------------------------------------------------------------------------- files

    def segment_path(self, number: int) -> Path:
        """Its name within `fd` is the last part, like that of the other paths."""
        return self.path / f"penstock-{number:06}.kv"

    def segment_files(self) -> dict[int, Path]:
        """Segment files by number, in order. Raises ConfigError if one of these names is not a plain file of
        ours, like the next two."""
        return {int(number): path for number, path in _files(self.path, self.fd, _SEGMENT).items()}

    def snapshot_files(self) -> dict[str, Path]:
        """Manifests by id."""
        return _files(self.path, self.fd, _SNAPSHOT)

    def unfinished_files(self) -> list[Path]:
        """Manifests that a killed process had begun to write."""
        return list(_files(self.path, self.fd, _UNFINISHED).values())

    def tokens_path(self, space: bytes) -> Path:
        """Where the tokens of the blocks of a space are, for events."""
        return self.path / f"penstock-{space.hex()}.tokens"

    def token_files(self) -> list[Path]:
        return list(_files(self.path, self.fd, _TOKENS).values())

    def open(self, path: Path, flags: int) -> int:
        """Raises OSError, and ConfigError if other users may write the file."""
        fd = self.io.open(path, flags | os.O_NOFOLLOW, self.fd)
        try:
            check_file(path, self.io.stat(fd))
        except BaseException:
            self.close_file(fd)
            raise
        return fd

    def open_direct(self, path: Path, flags: int) -> int:
        """For direct I/O if the file system supports it, so that what is read comes from the disk."""
        try:
            return self.open(path, flags | self._direct)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP) or not self._direct:
                raise
        log.warning(
            "the file system of %s has no O_DIRECT: the SSD cache goes through the system's file cache",
            self.path,
        )
        self._direct = 0
        return self.open(path, flags & ~os.O_EXCL)

    def read(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Number of bytes read: fewer than requested if the file ends."""
        return _move(self.io.preadv, fd, buffers, offset)

    def write(self, fd: int, buffers: Buffers, offset: int) -> None:
        """Every byte, or OSError."""
        done, total = _move(self.io.pwritev, fd, buffers, offset), sum(map(len, buffers))
        if done < total:
            raise OSError(errno.EIO, f"a write ended after {done} of {total} bytes")

    def close_file(self, fd: int) -> None:
        with contextlib.suppress(OSError):
            self.io.close(fd)

    def unlink(self, path: Path) -> None:
        self.io.unlink(path, self.fd)

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

    # ---------------------------------------------------------------------------------------------- manifests

    def tidy(self) -> None:
        """Remove unfinished manifests of an earlier process."""
        with self._must_be("removed"):
            for path in self.unfinished_files():
                self.unlink(path)

    def manifests(self) -> list[str]:
        """Ids."""
        with self._must_be("listed"):
            return list(self.snapshot_files())

    def read_manifest(self, id: str) -> bytes | None:
        with self._must_be("read"):
            try:
                fd = self.open(self._manifest_path(id), os.O_RDONLY)
            except FileNotFoundError:
                return None
            try:
                data = bytearray(min(self.io.stat(fd).st_size, _MAX_MANIFEST_BYTES))
                return bytes(data[: self.read(fd, [memoryview(data)], 0)])
            finally:
                self.io.close(fd)

    def write_manifest(self, id: str, data: bytes) -> bool:
        """False: the disk is full."""
        path = self._manifest_path(id)
        aside = path.with_suffix(".new")
        with self._must_be("written"):
            try:
                with contextlib.suppress(FileNotFoundError):  # left by a process that was killed here
                    self.unlink(aside)
                fd = self.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
                try:
                    self.write(fd, [memoryview(data)], 0)
                    self.io.fsync(fd)
                finally:
                    self.io.close(fd)
                self.io.rename(aside, path, self.fd)
                self.io.fsync(self.fd)
            except OSError as error:
                with contextlib.suppress(OSError):
                    self.unlink(aside)
                if error.errno in FULL:
                    return False
                raise
        return True

    def remove_manifest(self, id: str) -> None:
        with self._must_be("removed"), contextlib.suppress(FileNotFoundError):
            self.unlink(self._manifest_path(id))
            self.io.fsync(self.fd)

    def _manifest_path(self, id: str) -> Path:
        return self.path / f"penstock-{id}.snapshot"

    @contextlib.contextmanager
    def _must_be(self, done: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ConfigError) as error:
            what = error.strerror if isinstance(error, OSError) else error
            raise StoreFailed(f"a snapshot in {self.path} cannot be {done}: {what}") from error


def make_directory(path: Path, io: DiskIo) -> Directory:
    """Lock `path`, created if it is missing. Raises ConfigError if it cannot be used, if other users may
    write there, or if another process has it; then nothing in it has changed."""
    with usable(path):
        for missing in [parent for parent in (path, *path.parents) if not os.path.lexists(parent)][::-1]:
            missing.mkdir(0o700, exist_ok=True)
        directory = _open(path, io)
    _warn_of_parents(path)
    return directory


def remake_directory(path: Path, io: DiskIo, device: int) -> Directory:
    """Like `make_directory`, for a path that was in use on `device` and was removed or replaced. It is not
    created on another device: an unmounted disk leaves an empty folder on a disk that was not chosen."""
    with usable(path):
        if not os.path.lexists(path) and os.stat(path.parent).st_dev == device:
            path.mkdir(0o700)
        return _open(path, io)


def open_directory(path: Path) -> Directory:
    """Lock `path`, which must be an SSD cache already. Raises ConfigError."""
    if not path.is_dir():
        raise ConfigError(
            f"{path} is not a directory" if path.exists() else f"the directory {path} does not exist"
        )
    with usable(path):
        return _open(path, DiskIo(), must_be_ours=True)


# ---------------------------------------------------------------------------------------------- who may write


def check_trusted(path: Path, found: os.stat_result) -> None:
    """Raises ConfigError if another user can write a file with that status, or could until now."""
    me = os.geteuid()
    mode = _mode(found)
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


def _mode(found: os.stat_result) -> str:
    return f"owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}"


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
            log.warning(
                "other users can remove the SSD cache in %s: they can write %s (%s)",
                path,
                parent,
                _mode(found),
            )
            return


@contextlib.contextmanager
def usable(path: Path) -> Iterator[None]:
    """Turns OSError into ConfigError. If the directory belongs to another user, the message says so."""
    try:
        yield
    except OSError as error:
        with contextlib.suppress(OSError):
            if error.errno in (errno.EACCES, errno.EPERM):
                check_trusted(path, os.stat(path))
        name = error.filename
        where = f" ({path / name})" if isinstance(name, str) and not os.path.isabs(name) else ""
        raise ConfigError(
            f"the SSD cache directory {path} cannot be used: {error.strerror}{where}"
        ) from error


# --------------------------------------------------------------------------------------------- names and lock


def _lstat(name: str, fd: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _is_at(name: str, dir_fd: int, fd: int) -> bool:
    found = _lstat(name, dir_fd)
    return found is not None and os.path.samestat(found, os.fstat(fd))


def _files(path: Path, fd: int, pattern: re.Pattern[str]) -> dict[str, Path]:
    """Our files with such names, by the part that differs."""
    found = {}
    for name in sorted(os.listdir(fd)):
        matched = pattern.fullmatch(name)
        if matched is not None and (status := _lstat(name, fd)) is not None:
            check_file(path / name, status)
            found[matched[1]] = path / name
    return found


def _open(path: Path, io: DiskIo, must_be_ours: bool = False) -> Directory:
    with contextlib.ExitStack() as undo:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        undo.callback(os.close, fd)
        check_trusted(path, os.fstat(fd))
        _check_names(path, fd, must_be_ours)
        lock_fd = _open_lock(path, fd)
        undo.callback(os.close, lock_fd)
        _lock(path, fd, lock_fd)
        undo.pop_all()
        return Directory(path, fd, lock_fd, io)


def _check_names(path: Path, fd: int, must_be_ours: bool) -> None:
    """Check every file of ours before anything is changed. A lock file is ours if it says so, if segments are
    beside it, or if nothing is: then it has been damaged, and can be locked as well as any."""
    has_files, lock = bool({**_files(path, fd, _SEGMENT), **_files(path, fd, _SNAPSHOT)}), _lstat(_LOCK, fd)
    if lock is not None and not stat.S_ISDIR(lock.st_mode):  # an empty directory can be replaced
        check_file(path / _LOCK, lock)
    if has_files or (lock is not None and (os.listdir(fd) == [_LOCK] or _owner_in(fd) is not None)):
        return
    if must_be_ours:
        raise ConfigError(f"{path} is not an SSD cache directory of penstock")
    if lock is not None:
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
