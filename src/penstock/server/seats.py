"""Seats that several front processes take at one gate: counts in memory that they share, so that a limit is the whole server's. Owns that
memory, which has no name and ends with the last process that has it."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator
from enum import IntEnum

import numpy as np


class GateNumber(IntEnum):
    """The gates of a server. Connections have no limit: they are counted so that fronts get equal shares of them."""

    GENERATIONS = 0
    SIDE = 1
    LOADS = 2
    CONNECTIONS = 3


class SeatBook:
    """One row of counts for each front process, one column for each gate. A front adds to its own row alone, while it has the lock. The
    kernel takes the lock back from a process that ends: one that is killed leaves seats, never a lock."""

    def __init__(self, fd: int, num_fronts: int) -> None:
        self.fd = fd
        self.num_fronts = num_fronts
        self._map = mmap.mmap(fd, self._num_bytes(num_fronts))
        self._counts = np.frombuffer(self._map, np.int64).reshape(num_fronts, len(GateNumber))

    @staticmethod
    def _num_bytes(num_fronts: int) -> int:
        return 8 * num_fronts * len(GateNumber)

    @classmethod
    def make(cls, num_fronts: int) -> SeatBook:
        fd = os.memfd_create("penstock-seats", os.MFD_CLOEXEC)
        os.ftruncate(fd, cls._num_bytes(num_fronts))
        return cls(fd, num_fronts)

    def total(self, gate: GateNumber) -> int:
        return int(self._counts[:, gate].sum())

    def try_add(self, row: int, gate: GateNumber, num: int, limit: int) -> bool:
        with self._locked():
            if self.total(gate) + num > limit:
                return False
            self._counts[row, gate] += num
            return True

    def remove(self, row: int, gate: GateNumber, num: int) -> None:
        """Without the lock: a row is one process's, and what is read meanwhile is too much at worst."""
        self._counts[row, gate] -= num

    def note_connections(self, row: int, num: int) -> int:
        """A front has `num` open; returns what the front with the fewest has."""
        self._counts[row, GateNumber.CONNECTIONS] = num
        return int(self._counts[:, GateNumber.CONNECTIONS].min())

    def clear(self, row: int) -> None:
        """Of a front process that is gone, once the engine has ended all that it asked for."""
        with self._locked():
            self._counts[row] = 0

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self.fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN)


class SharedCount:
    """One front's view of one gate."""

    def __init__(self, book: SeatBook, row: int, gate: GateNumber) -> None:
        self._book = book
        self._row = row
        self._gate = gate

    @property
    def total(self) -> int:
        return self._book.total(self._gate)

    def try_add(self, num: int, limit: int) -> bool:
        return self._book.try_add(self._row, self._gate, num, limit)

    def remove(self, num: int) -> None:
        self._book.remove(self._row, self._gate, num)
