"""Lanes that a test runs by hand, item by item, and arenas of tags or of bytes. Owns when work happens:
nothing runs by itself.

Work that declares accesses takes two steps, a begin and an end. In between, what it writes holds garbage and
what it reads must not change; whoever touches such slots meanwhile is told so at once. What it does, it does
at its end, so that a read that comes too early finds garbage and a slot that is written too early is seen to
have changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from penstock.contract import Access, Fence, Mode
from penstock.errors import DeadlineExceeded, InvariantBroken, LaneClosed
from penstock.kv.transfer import Layers, Slots
from penstock.lanes.lane import Capture, Op, Replay, Ticket


class Tag:
    """What garbage is made of: equal to itself alone."""


class SteppedArena(Protocol):
    """`spoil` leaves values that nobody could want; `read` and `write` have a list of values by layer for
    each slot."""

    name: str

    def spoil(self, slots: Iterable[int], layers: Layers) -> None: ...

    def read(self, slots: Iterable[int], layers: Layers) -> list[list[object]]: ...

    def write(self, slots: Iterable[int], layers: Layers, values: Sequence[Sequence[object]]) -> None: ...


class TagArena:
    """`num_slots` blocks, each with a value per layer. `garbage` makes a value that nobody could want."""

    def __init__(
        self, name: str, num_slots: int, num_layers: int, garbage: Callable[[], object] = Tag
    ) -> None:
        self.name = name
        self.num_layers = num_layers
        self._garbage = garbage
        self.cells: list[list[object]] = [[garbage() for _ in range(num_layers)] for _ in range(num_slots)]

    def spoil(self, slots: Iterable[int], layers: Layers) -> None:
        for slot in slots:
            self.cells[slot][layers[0] : layers[1]] = [self._garbage() for _ in range(*layers)]

    def read(self, slots: Iterable[int], layers: Layers) -> list[list[object]]:
        return [self.cells[slot][layers[0] : layers[1]] for slot in slots]

    def write(self, slots: Iterable[int], layers: Layers, values: Sequence[Sequence[object]]) -> None:
        for slot, value in zip(slots, values, strict=True):
            self.cells[slot][layers[0] : layers[1]] = value


class Cell(NamedTuple):
    """One layer of a block in bytes: how many, and what they stand for."""

    num_bytes: int
    pack: Callable[[Any], bytes]
    unpack: Callable[[bytes], object]
    garbage: Callable[[], object]


class ByteArena:
    """As a `TagArena`, in memory that can be shown: for what reads and writes whole slots."""

    def __init__(self, name: str, num_slots: int, num_layers: int, cell: Cell) -> None:
        self.name = name
        self.num_layers = num_layers
        self._cell = cell
        self._memory = memoryview(bytearray(num_slots * num_layers * cell.num_bytes))
        self.spoil(range(num_slots), (0, num_layers))

    def view(self, slot: int) -> memoryview:
        """All layers of a slot, one behind the other."""
        size = self.num_layers * self._cell.num_bytes
        return self._memory[slot * size : (slot + 1) * size]

    def spoil(self, slots: Iterable[int], layers: Layers) -> None:
        for slot in slots:
            self.write([slot], layers, [[self._cell.garbage() for _ in range(*layers)]])

    def read(self, slots: Iterable[int], layers: Layers) -> list[list[object]]:
        return [
            [self._cell.unpack(bytes(self._bytes(slot, layer))) for layer in range(*layers)] for slot in slots
        ]

    def write(self, slots: Iterable[int], layers: Layers, values: Sequence[Sequence[object]]) -> None:
        for slot, row in zip(slots, values, strict=True):
            for layer, value in zip(range(*layers), row, strict=True):
                self._bytes(slot, layer)[:] = self._cell.pack(value)

    def _bytes(self, slot: int, layer: int) -> memoryview:
        return self.view(slot)[layer * self._cell.num_bytes : (layer + 1) * self._cell.num_bytes]


class TagCopier:
    """Copies tags; each call may be told to fail instead, which leaves the garbage where it is."""

    def __init__(self, source: SteppedArena, dest: SteppedArena) -> None:
        self.fail_next = 0
        self._source = source
        self._dest = dest

    def copy(self, source_slots: Slots, dest_slots: Slots, layers: Layers) -> None:
        if self.fail_next:
            self.fail_next -= 1
            raise OSError("the copy was told to fail")
        self._dest.write(dest_slots.tolist(), layers, self._source.read(source_slots.tolist(), layers))


class SteppedFence:
    """Passed when the first `number` items of its lane are over."""

    def __init__(self, lane: SteppedLane, number: int) -> None:
        self._lane = lane
        self.number = number

    @property
    def lane(self) -> str:
        return self._lane.name

    def passed(self) -> bool:
        return self._lane.num_finished >= self.number

    def wait_passed(self, timeout_s: float | None = None) -> None:
        """Every lane runs meanwhile; a wait that this does not end runs into its deadline."""
        self._lane.lanes.run_until(self.passed, f"fence {self.number} of lane {self.lane}")


@dataclass(slots=True)
class SteppedTicket:
    lane: SteppedLane
    number: int
    label: str
    failure: BaseException | None = None

    def done(self) -> bool:
        return self.lane.num_finished >= self.number

    def error(self) -> BaseException | None:
        return self.failure

    def wait_done(self, timeout_s: float | None = None) -> None:
        self.lane.lanes.run_until(self.done, f"{self.label!r} on lane {self.lane.name}")
        if self.failure is not None:
            raise self.failure


@dataclass(slots=True)
class _Item:
    ticket: SteppedTicket
    op: Op | None = None
    accesses: Sequence[Access] = ()
    after: Ticket | None = None
    fence: Fence | None = None
    seen: list[list[list[object]]] = field(default_factory=list)  # what it reads, as it was at its begin
    begun: bool = False


class SteppedLane:
    """A lane with the rules of `lanes.lane`, run by `step`. Records nothing."""

    def __init__(self, name: str, lanes: SteppedLanes) -> None:
        self.name = name
        self.lanes = lanes
        self.num_finished = 0
        self.refuses: BaseException | None = None  # raised by the next submit, once
        self._queue: deque[_Item] = deque()
        self._num_submitted = 0
        self._closed = False
        self._runs = False  # whether work of its own is running

    def __len__(self) -> int:
        return len(self._queue)

    def submit(
        self, op: Op, accesses: Sequence[Access] = (), *, label: str, after: Ticket | None = None
    ) -> Ticket:
        refusal, self.refuses = self.refuses, None
        if refusal is not None:
            raise refusal
        return self._put(_Item(SteppedTicket(self, self._num_submitted + 1, label), op, accesses, after))

    def record(self) -> SteppedFence:
        return SteppedFence(self, self._num_submitted)

    def wait(self, fence: Fence) -> None:
        if fence.lane != self.name:
            self._put(_Item(SteppedTicket(self, self._num_submitted + 1, "wait"), fence=fence))

    def capture(self, label: str) -> AbstractContextManager[Capture]:
        raise InvariantBroken("a stepped lane records nothing")

    def replay(
        self, replay: Replay, accesses: Sequence[Access] = (), *, after: Ticket | None = None
    ) -> Ticket:
        raise InvariantBroken("a stepped lane records nothing")

    def touch(self, accesses: Sequence[Access], *, label: str) -> None:
        for access in accesses:
            self.lanes.touch(access, label)

    def is_current(self) -> bool:
        return self._runs

    def drain(self, timeout_s: float | None = None) -> None:
        self.record().wait_passed(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        self.drain(timeout_s)
        self._closed = True

    def step(self) -> bool:
        """Begin the next item, or end it; False where there is none or it waits."""
        if not self._queue or not _is_over(self._queue[0].fence):
            return False
        item = self._queue[0]
        error = None if item.after is None else item.after.error()
        if error is None and item.accesses and not item.begun:
            self.lanes.begin(item)
            return True
        if error is None and item.op is not None:
            self.lanes.end(item)
            self._runs = True
            try:
                item.op()
            except Exception as raised:
                error = raised
            self._runs = False
        self._queue.popleft()
        item.ticket.failure = error
        self.num_finished += 1
        return True

    def begun(self) -> _Item | None:
        """What it is at, between begin and end."""
        return self._queue[0] if self._queue and self._queue[0].begun else None

    def _put(self, item: _Item) -> SteppedTicket:
        if self._closed:
            raise LaneClosed(f"lane {self.name} is closed; {item.ticket.label!r} was not submitted")
        self._num_submitted += 1
        self._queue.append(item)
        return item.ticket


class SteppedLanes:
    """Lanes over some arenas, and what they are at."""

    def __init__(self, *arenas: SteppedArena) -> None:
        self._arenas = {arena.name: arena for arena in arenas}
        self._lanes: dict[str, SteppedLane] = {}

    def __iter__(self) -> Iterator[SteppedLane]:
        return iter(self._lanes.values())

    def lane(self, name: str) -> SteppedLane:
        return self._lanes.setdefault(name, SteppedLane(name, self))

    def run_all(self) -> None:
        """Until no lane can go on."""
        while any(lane.step() for lane in self):
            pass

    def run_until(self, reached: Callable[[], bool], what: str) -> None:
        while not reached():
            if not any(lane.step() for lane in self):
                raise DeadlineExceeded(f"{what} is waited for, and no lane can go on")

    def touch(self, access: Access, by: str) -> None:
        """Something touches these slots now: raises where that is no business of its."""
        for lane in self:
            item = lane.begun()
            for other in item.accesses if item is not None else ():
                if (
                    other.arena == access.arena
                    and Mode.WRITE in (other.mode, access.mode)
                    and _meet(other.layers, access.layers)
                ):
                    both = {int(slot) for slot in other.slots} & {int(slot) for slot in access.slots}
                    if both and item is not None:
                        raise InvariantBroken(
                            f"{by} would {access.mode.value} slots {sorted(both)} of {access.arena} while "
                            f"{item.ticket.label!r} on lane {lane.name} is going to {other.mode.value} them"
                        )

    # ------------------------------------------------------------------------------------------ for the lanes

    def begin(self, item: _Item) -> None:
        for access in item.accesses:
            self.touch(access, item.ticket.label)
        item.begun = True
        item.seen = [self._read(access) for access in item.accesses if access.mode is Mode.READ]
        for access in item.accesses:
            if access.mode is Mode.WRITE and access.arena in self._arenas:
                self._arenas[access.arena].spoil((int(slot) for slot in access.slots), access.layers)

    def end(self, item: _Item) -> None:
        if item.begun and item.seen != [
            self._read(access) for access in item.accesses if access.mode is Mode.READ
        ]:
            raise InvariantBroken(f"{item.ticket.label!r} reads slots that somebody writes")

    def _read(self, access: Access) -> list[list[object]]:
        arena = self._arenas.get(access.arena)
        return [] if arena is None else arena.read((int(slot) for slot in access.slots), access.layers)


def _is_over(fence: Fence | None) -> bool:
    return fence is None or fence.passed()


def _meet(one: Layers, other: Layers) -> bool:
    return max(one[0], other[0]) < min(one[1], other[1])
