"""What the fronts of a server count together: seats for work in progress, and figures of HTTP exchanges.
Seats are counted in memory that front processes share, so that a limit holds for the whole server. Owns that
memory, which has no name and ends with the last process that has it; owns no work."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import InvalidRequest, Overloaded
from penstock.figures import Histogram

if TYPE_CHECKING:
    from penstock.server.access import Exchange

LOCK_S = 0.05  # it is held for microseconds
SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
QUEUE_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKENS = tuple(float(2**power) for power in range(0, 21, 2))  # 1 to a million


class GateNumber(IntEnum):
    """The gates of a server. Connections have no limit: they are counted to spread them evenly over
    fronts."""

    GENERATIONS = 0
    SIDE = 1
    LOADS = 2
    CONNECTIONS = 3
    VIEWERS = 4


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


@dataclass(frozen=True, slots=True)
class Gate:
    """Counts work in progress against a limit, in the row of this front in a book that all fronts share.
    Lives on the event loop's thread; refuses rather than waits."""

    limit: int
    what: str
    book: SeatBook = field(default_factory=lambda: SeatBook.make(1))
    row: int = 0
    number: GateNumber = GateNumber.GENERATIONS

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

    def __exit__(self, *_: object) -> None:
        self.give_back(self.num)


@dataclass(slots=True)
class RequestFigures:
    """Of the exchanges of one front. Lives on the event loop's thread."""

    by_status: dict[tuple[str, str], int] = field(default_factory=Counter)  # path, status
    by_finish: dict[str, int] = field(default_factory=Counter)  # choices by finish reason
    # of generating requests: from their first byte to the answer's last
    e2e: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    queue: Histogram = field(default_factory=lambda: Histogram(QUEUE_SECONDS))
    prompt_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    output_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))

    def add(self, exchange: Exchange) -> None:
        """An exchange is over."""
        self.by_status[exchange.route, str(exchange.status)] += 1
        if not exchange.generating:
            return
        for finish in exchange.finish:
            self.by_finish[finish] += 1
        self.e2e.add(exchange.ended_s - exchange.started_s)
        self.prompt_tokens.add(exchange.prompt_tokens)
        self.output_tokens.add(exchange.output_tokens)
        if exchange.queue_s is not None:
            self.queue.add(exchange.queue_s)

    @classmethod
    def total(cls, parts: Iterable[RequestFigures]) -> RequestFigures:
        """The sum; the operands are unchanged."""
        total = cls()
        for one in parts:
            total.by_status = Counter(total.by_status) + Counter(one.by_status)
            total.by_finish = Counter(total.by_finish) + Counter(one.by_finish)
            for name in ("e2e", "queue", "prompt_tokens", "output_tokens"):
                getattr(total, name).take_in(getattr(one, name))
        return total
