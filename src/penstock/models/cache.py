"""The cache directory on disk: where it is, files written whole or not at all, remembered digests of files. Owns no weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from pathlib import Path

from penstock.errors import ModelError
from penstock.models.progress import Progress

DIGEST_BYTES = 32
_PIECE_BYTES = 8 << 20
# A write in the same clock tick as the one before leaves size and mtime unchanged, so a fresh file is hashed but not remembered.
_SETTLED_NS = 2_000_000_000


def cache_dir() -> Path:
    """$PENSTOCK_CACHE, or ~/.cache/penstock."""
    chosen = os.environ.get("PENSTOCK_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "penstock"


def write_durably(path: Path, data: bytes) -> None:
    """Create or replace `path` so that a reader, also one after a crash, sees all of `data` or what was there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames inside `path` survive a crash."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_digest(path: Path, stage: str, progress: Progress) -> bytes:
    """Digest of the file's bytes. Remembered under its path, size and modification time, so that it is read once."""
    path = path.resolve()
    try:
        before = path.stat()
        known = _recall(path, before)
        if known is not None:
            return known
        digest = _hash(path, before.st_size, stage, progress)
        after = path.stat()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    if _identity(before) == _identity(after) and time.time_ns() - after.st_mtime_ns > _SETTLED_NS:
        remember_digest(path, digest)
    return digest


def remember_digest(path: Path, digest: bytes) -> None:
    """For a file that nobody will write to any more. Without a usable cache directory nothing is remembered."""
    with contextlib.suppress(OSError):
        path = path.resolve()
        entry = {"path": str(path), "identity": _identity(path.stat()), "digest": digest.hex()}
        write_durably(_entry(path), json.dumps(entry).encode())


def _recall(path: Path, stat: os.stat_result) -> bytes | None:
    try:
        entry = json.loads(_entry(path).read_bytes())
        if entry["path"] == str(path) and entry["identity"] == _identity(stat):
            digest = bytes.fromhex(entry["digest"])
            return digest if len(digest) == DIGEST_BYTES else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None


def _entry(path: Path) -> Path:
    return cache_dir() / "digests" / (hashlib.blake2b(os.fsencode(path), digest_size=16).hexdigest() + ".json")


def _identity(stat: os.stat_result) -> list[int]:
    return [stat.st_size, stat.st_mtime_ns]


def _hash(path: Path, size: int, stage: str, progress: Progress) -> bytes:
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    piece = memoryview(bytearray(_PIECE_BYTES))
    done = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            state.update(piece[:count])
            done += count
            progress(stage, min(done, size), size)
    return state.digest()
