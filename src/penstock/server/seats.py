"""Seats for work in progress: limits over all clients. Counts are in memory that front processes share, so
that a limit holds for the whole server. Owns that memory, which has no name and ends with the last process
that has it; owns no work."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
import weakref
from enum import IntEnum
from types import TracebackType

import numpy as np

from penstock.errors import InvalidRequest, Overloaded

LOCK_S = 0.05  # it is held for microseconds


class GateNumber(IntEnum):
    """The gates of a server. Connections have no limit: they are counted to spread them evenly over
    fronts."""

    GENERATIONS = 0
    SIDE = 1
    LOADS = 2
    CONNECTIONS = 3


class SeatBook:
    """One row of counts for each front process, one column for each gate. A front adds to its own row only,
    under the lock. The kernel releases the lock of a process that ends: a killed process leaves seats, never
    a lock."""

    def __init__(self, fd: int, num_fronts: int) -> None:
        self.fd = fd
        self.num_fronts = num_fronts
        weakref.finalize(self, os.close, fd)
        self._counts = np.frombuffer(mmap.mmap(fd, 0), np.int64).reshape(num_fronts, len(GateNumber))

    @classmethod
    def make(cls, num_fronts: int) -> SeatBook:
        fd = os.memfd_create("penstock-seats", os.MFD_CLOEXEC)
        os.ftruncate(fd, np.dtype(np.int64).itemsize * num_fronts * len(GateNumber))
        return cls(fd, num_fronts)

    def total(self, gate: GateNumber) -> int:
        return int(self._counts[:, gate].sum())

    def try_add(self, row: int, gate: GateNumber, num: int, limit: int) -> bool:
        """A process that stops while it holds the lock must not stop the others: they go on without it. Two
        concurrent calls may then take a seat too many."""
        by_s = time.monotonic() + LOCK_S
        while time.monotonic() < by_s:
            with contextlib.suppress(BlockingIOError, PermissionError):
                fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(LOCK_S / 100)
        try:
            if self.total(gate) + num > limit:
                return False
            self._counts[row, gate] += num
            return True
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN)

    def remove(self, row: int, gate: GateNumber, num: int) -> None:
        """Without the lock: a row belongs to one process, and a concurrent read is at worst too high."""
        self._counts[row, gate] -= num

    def note_connections(self, row: int, num: int) -> int:
        """A front has `num` connections open; returns the number of the front with the fewest."""
        self._counts[row, GateNumber.CONNECTIONS] = num
        return int(self._counts[:, GateNumber.CONNECTIONS].min())

    def clear(self, row: int) -> None:
        """For a front process that is gone, once the engine has ended its requests. Without the lock, as
        above."""
        self._counts[row] = 0


class Gate:
    """Counts work in progress against a limit. Lives on the event loop's thread; refuses rather than
    waits."""

    def __init__(
        self,
        limit: int,
        what: str,
        book: SeatBook | None = None,
        row: int = 0,
        number: GateNumber = GateNumber.GENERATIONS,
    ) -> None:
        """`row`: of this front process in `book`, which all fronts share. Without a book, this process is the
        only one."""
        self.limit = limit
        self.what = what
        self.book = SeatBook.make(1) if book is None else book
        self.row, self.number = row, number

    @property
    def taken(self) -> int:
        return self.book.total(self.number)

    def take(self, num: int) -> Seats:
        """Seats that end with `give_back` or `with`. Raises Overloaded and takes none if there are too
        few."""
        seats = Seats(self)
        seats.widen(num)
        return seats


class Seats:
    """Seats taken at a gate by one HTTP request."""

    def __init__(self, gate: Gate) -> None:
        self.num = 0
        self._gate = gate

    def widen(self, num: int) -> None:
        """Hold `num` seats in total. More than the gate's limit is the client's mistake, not a matter of
        time."""
        gate = self._gate
        if num == self.num:
            return
        if num > gate.limit:
            raise InvalidRequest(
                f"one request may ask for {gate.limit} generations at most, this one asks for {num}", "n"
            )
        if not gate.book.try_add(gate.row, gate.number, num - self.num, gate.limit):
            raise Overloaded(
                f"the server is at its limit of {gate.limit} concurrent {gate.what}; try again later"
            )
        self.num = num

    def give_back(self, num: int) -> None:
        self.num -= num
        self._gate.book.remove(self._gate.row, self._gate.number, num)

    def __enter__(self) -> Seats:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back(self.num)
