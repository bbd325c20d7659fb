"""The token ids of blocks on disk, in a file beside them: what KV events say of these blocks after a restart.
Owns the file, which exists only if events are on. One thread uses it.

    record: key, key of the block before it (zeros: none), token ids, checksum of these

Records are appended without waiting for the disk: what a crash takes is not told of until a request brings
the tokens again. A record whose checksum is wrong is skipped.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import xxhash

from penstock.errors import ConfigError
from penstock.kv.blocks.key import KEY_BYTES
from penstock.kv.tiers.ssd.directory import Directory
from penstock.kv.tiers.ssd.store import SsdStore

log = logging.getLogger(__name__)

_NO_PARENT = bytes(KEY_BYTES)
_CHECK_BYTES = 8
_READ_BYTES = 1 << 20  # at once, about
_SPARE = 1024  # records of blocks that are gone, before the file is written anew


class TokenRecord(NamedTuple):
    key: bytes
    parent: bytes | None
    tokens: bytes


class TokenFile:
    """Never raises for the disk's sake: a file that cannot be used is given up, with one warning."""

    def __init__(self, store: SsdStore, token_bytes: int) -> None:
        """`token_bytes`: of one block."""
        self._store = store
        self._size = 2 * KEY_BYTES + token_bytes + _CHECK_BYTES
        self._fd: int | None = None
        self._open_in(store.directory)

    def _open_in(self, directory: Directory) -> None:
        self._directory = directory
        self._num = 0  # records in the file
        self._path = directory.tokens_path(self._store.space)
        try:
            self._fd = self._directory.open(self._path, os.O_RDWR | os.O_CREAT)
            self._num = os.fstat(self._fd).st_size // self._size
        except (OSError, ConfigError) as error:
            self._give_up(error)

    @property
    def scanned(self) -> Directory | None:
        """The store's directory. None while blocks of an earlier process in it are unknown: it cannot be said
        yet which of the records count."""
        return self._store.scanned

    def follow(self, directory: Directory) -> None:
        """Use the file in `directory`: the store may have been opened anew."""
        if directory is not self._directory:
            self.close()
            self._open_in(directory)

    def read(self) -> Iterator[TokenRecord]:
        """The intact records, oldest first."""
        at, most = 0, max(1, _READ_BYTES // self._size)
        while self._fd is not None and at < self._num:
            try:
                data = os.pread(self._fd, most * self._size, at * self._size)
            except OSError as error:
                self._give_up(error)
                return
            for first in range(0, len(data) - self._size + 1, self._size):
                if (record := self._unpacked(data[first : first + self._size])) is not None:
                    yield record
            at += max(1, len(data) // self._size)

    def add(self, records: Iterable[TokenRecord]) -> None:
        some = [self._packed(record) for record in records]
        try:
            if self._fd is not None and some:
                os.pwrite(self._fd, b"".join(some), self._num * self._size)
                self._num += len(some)
        except OSError as error:
            self._give_up(error)

    def has_too_many(self, num_here: int) -> bool:
        """Whether most records are of blocks that are gone."""
        return self._num > (2 * num_here + _SPARE if num_here else 0)

    def write_anew(self, records: Iterable[TokenRecord]) -> None:
        try:
            if self._fd is not None:
                os.ftruncate(self._fd, 0)
                self._num = 0
                self.add(records)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Idempotent."""
        if self._fd is not None:
            self._directory.close_file(self._fd)
            self._fd = None

    def _give_up(self, error: Exception) -> None:
        log.warning("%s cannot be used, so a restart will not tell of blocks on disk: %s", self._path, error)
        self.close()

    def _packed(self, record: TokenRecord) -> bytes:
        data = record.key + (record.parent or _NO_PARENT) + record.tokens
        return data + xxhash.xxh3_64_digest(data)

    def _unpacked(self, data: bytes) -> TokenRecord | None:
        body, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
        if xxhash.xxh3_64_digest(body) != check:
            return None
        parent = body[KEY_BYTES : 2 * KEY_BYTES]
        return TokenRecord(body[:KEY_BYTES], None if parent == _NO_PARENT else parent, body[2 * KEY_BYTES :])
