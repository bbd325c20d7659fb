"""Files of weights, read by position and hashed as they are read, so that a digest is of the very bytes that
were used. Owns the pieces and the threads that read them; knows no format.

Files are never mapped: one that is cut short under a mapping kills the process, one that is written to gives
other bytes to the second reader than to the first.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

from penstock.errors import ModelError
from penstock.models.progress import Progress

DIGEST_BYTES = 32
# part of every digest: with another size, no stored KV and no converted file is found any more
PIECE_BYTES = 4 << 20
_MAX_THREADS = 16
_AHEAD = 2  # pieces in memory for each thread: one being read, one waiting for its user


def piece_digest(data: Any) -> bytes:
    """SHA-256, which most processors have instructions for; it lets other threads run meanwhile."""
    return hashlib.sha256(data).digest()


def piece_rows(num_rows: int, row_bytes: int) -> Iterator[slice]:
    """The rows of a tensor that make up each of its pieces."""
    step = max(1, PIECE_BYTES // max(1, row_bytes))
    return (slice(first, min(first + step, num_rows)) for first in range(0, num_rows, step))


class WeightFile:
    """An open file. What is renamed over its path meanwhile does not matter; what is written into it is an
    error at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._readable():
            self._file = path.open("rb", buffering=0)
        self._stat = self._state()
        self.num_bytes = self._stat[0]

    def _state(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

    def read(self, start: int, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        self.read_into(memoryview(data), start)
        return bytes(data)

    def read_into(self, room: memoryview, start: int) -> None:
        """Fill `room` with what is at `start`; from any thread."""
        done = 0
        with self._readable():
            while done < len(room):
                num = os.preadv(self._file.fileno(), [room[done:]], start + done)
                if num == 0:
                    cut = f"ends at byte {start + done}: it was cut short while it was read"
                    raise ModelError(f"{self.path} {cut}")
                done += num

    def check_unchanged(self) -> None:
        """Raises if the file was written to since it was opened. Digests do not depend on this: it prevents
        running a mix of two models."""
        if self._state() != self._stat:
            raise self._changed()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ModelError(f"{self.path} cannot be read: {error.strerror or error}") from error

    def _changed(self) -> ModelError:
        return ModelError(f"{self.path} was written to while it was read; load it again when it is complete")


class FilePiece(NamedTuple):
    """A stretch of a file that has a digest of its own."""

    file: WeightFile
    start: int
    num_bytes: int


def read_pieces(pieces: Iterable[FilePiece]) -> Generator[tuple[memoryview, bytes]]:
    """Each piece's bytes and their digest, in order. Threads read and hash ahead; the bytes stay until the
    next piece is asked for."""
    num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    coming = iter(pieces)
    with ThreadPoolExecutor(num_threads, "weights") as pool:
        ahead = deque(
            pool.submit(_read, piece, bytearray()) for piece in islice(coming, _AHEAD * num_threads)
        )
        while ahead:
            room, num_bytes, digest = ahead.popleft().result()
            yield memoryview(room)[:num_bytes], digest
            for piece in islice(coming, 1):
                ahead.append(pool.submit(_read, piece, room))


def _read(piece: FilePiece, room: bytearray) -> tuple[bytearray, int, bytes]:
    if len(room) < piece.num_bytes:
        room = bytearray(piece.num_bytes)
    with memoryview(room) as whole, whole[: piece.num_bytes] as data:
        piece.file.read_into(data, piece.start)
        return room, piece.num_bytes, piece_digest(data)


class HashedFile(WeightFile):
    """A file that is hashed as a whole when it is opened. Whatever is read from it afterwards is what was
    hashed, or an error."""

    def __init__(self, path: Path, progress: Progress) -> None:
        super().__init__(path)
        self._at = -1
        self._piece = b""
        self._digests: list[bytes] = []
        try:
            starts = range(0, self.num_bytes, PIECE_BYTES)
            pieces = [FilePiece(self, start, min(PIECE_BYTES, self.num_bytes - start)) for start in starts]
            for piece, (_, digest) in zip(pieces, read_pieces(pieces), strict=True):
                self._digests.append(digest)
                progress(f"hashing {path.name}", piece.start + piece.num_bytes, self.num_bytes)
        except BaseException:
            self.close()
            raise
        state = hashlib.blake2b(
            self.num_bytes.to_bytes(8, "little"), digest_size=DIGEST_BYTES, person=b"penstock-file"
        )
        state.update(b"".join(self._digests))
        self.digest = state.digest()

    def read(self, start: int, num_bytes: int) -> bytes:
        end = start + num_bytes
        if end > self.num_bytes:
            raise ModelError(f"{self.path} has {self.num_bytes} bytes; {end} are wanted")
        first, at = divmod(start, PIECE_BYTES)
        pieces = [self._checked(number) for number in range(first, -(-end // PIECE_BYTES))]
        return b"".join(pieces)[at : at + num_bytes]  # of one piece there is no copy

    def _checked(self, number: int) -> bytes:
        if number != self._at:
            start = number * PIECE_BYTES
            data = super().read(start, min(PIECE_BYTES, self.num_bytes - start))
            if piece_digest(data) != self._digests[number]:
                raise self._changed()
            self._at, self._piece = number, data
        return self._piece
