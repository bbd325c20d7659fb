"""Lanes that a sequencer runs: the rules of `lanes.lane`, without threads of their own. Owns queues and tickets; who runs next is decided
by the sequencer, which every call of a lane or fence asks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from penstock.contract import Access, Fence
from penstock.errors import InvariantBroken, LaneClosed
from penstock.lanes.cpu import CpuReplay
from penstock.lanes.lane import Capture, Op, Replay, Ticket
from penstock.observe import LaneObserver

Place = tuple[str, int]  # an item: its lane, and its number there


@dataclass(slots=True)
class Effects:
    """What somebody did between two decisions, as far as others can tell."""

    submitted: set[Place] = field(default_factory=set)
    looked_at: set[Place] = field(default_factory=set)  # whether they were over
    after: set[Place] = field(default_factory=set)  # could not begin before these were over
    begun: Place | None = None
    finished: Place | None = None
    accesses: tuple[Access, ...] = ()
    may_touch_anything: bool = False  # ran code that has declared nothing


class LaneScheduler(Protocol):
    """The sequencer as its lanes see it."""

    effects: Effects  # of whoever acts now
    num_finished: int  # items, on all lanes

    def pause(self, what: str, until: Callable[[], bool] | None = None) -> None:
        """Whoever acts has done `what`; others may go on before it does. `until`: it cannot go on before."""

    def act(self, what: str) -> None:
        """Whoever acts does `what`."""


class SequencedFence:
    def __init__(self, lane: SequencedLane, number: int) -> None:
        self._lane = lane
        self.number = number

    @property
    def lane(self) -> str:
        return self._lane.name

    @property
    def place(self) -> Place:
        return self._lane.name, self.number

    def is_over(self) -> bool:
        """For lanes and the sequencer: nobody learns anything by it."""
        return self._lane.num_finished >= self.number

    def passed(self) -> bool:
        self._lane.scheduler.pause(f"looks at fence {self.number} of {self.lane}")
        self._lane.scheduler.effects.looked_at.add(self.place)
        return self.is_over() and self._lane.saw(self.number, 0)

    def wait_passed(self, timeout_s: float | None = None) -> None:
        """Deadlines never come: there is no clock, and a wait that cannot end raises Deadlock. Each item that runs meanwhile is taken to
        have lasted a second."""
        scheduler = self._lane.scheduler
        before, blocks = scheduler.num_finished, not self.is_over()
        scheduler.pause(f"waits for fence {self.number} of {self.lane}", self.is_over)
        scheduler.effects.after.add(self.place)
        self._lane.saw(self.number, scheduler.num_finished - before if blocks else 0)


@dataclass(slots=True)
class SequencedTicket:
    lane: SequencedLane
    number: int
    label: str
    failure: BaseException | None = None

    def done(self) -> bool:
        return SequencedFence(self.lane, self.number).passed()

    def error(self) -> BaseException | None:
        self.lane.scheduler.effects.looked_at.add((self.lane.name, self.number))
        return self.failure

    def wait_done(self, timeout_s: float | None = None) -> None:
        SequencedFence(self.lane, self.number).wait_passed()
        if self.failure is not None:
            raise self.failure


@dataclass(slots=True)
class _SequencedItem:
    ticket: SequencedTicket
    op: Op | None = None
    accesses: tuple[Access, ...] = ()
    after: Ticket | None = None
    fence: SequencedFence | None = None


class SequencedLane:
    """A lane with the rules of `lanes.lane`. The work of a launcher may itself use lanes, and can be left half-way at each such call."""

    def __init__(self, name: str, scheduler: LaneScheduler, observer: LaneObserver | None, is_launcher: bool) -> None:
        self.name = name
        self.scheduler = scheduler
        self.is_launcher = is_launcher
        self.accesses: tuple[Access, ...] | None = None  # of the item that has begun and not ended; None: there is none
        self.num_finished = 0
        self._observer = observer
        self._queue: deque[_SequencedItem] = deque()
        self._num_submitted = 0
        self._recording: Capture | None = None
        self._closed = False

    def submit(self, op: Op, accesses: Sequence[Access] = (), *, label: str, after: Ticket | None = None) -> Ticket:
        if self._recording is not None:
            self._recording.ops.append(op)
            return SequencedTicket(self, 0, label)
        ticket = self._next_ticket(label)
        if self._observer is not None:
            self._observer.submitted(self.name, ticket.number, label, accesses)
        return self._put(_SequencedItem(ticket, op, tuple(accesses), after), f"submits {label!r} to {self.name}")

    def record(self) -> Fence:
        fence = SequencedFence(self, self._num_submitted)
        if self._observer is not None:
            self._observer.recorded(self.name, fence.number)
        return fence

    def wait(self, fence: Fence) -> None:
        if not isinstance(fence, SequencedFence):
            raise InvariantBroken(f"lane {self.name} cannot wait for {fence!r}: it is of another kind of lane")
        if self._recording is not None:
            if self._observer is not None:
                self._observer.wait_ignored(self.name, fence.lane, fence.number)
            return
        if fence.lane == self.name:
            return
        ticket = self._next_ticket("wait")
        if self._observer is not None:
            self._observer.waited(self.name, fence.lane, fence.number)
        self._put(_SequencedItem(ticket, fence=fence), f"lets {self.name} wait for fence {fence.number} of {fence.lane}")

    @contextmanager
    def capture(self, label: str) -> Iterator[Capture]:
        recording = self._recording = Capture(self.name, label)
        try:
            yield recording
            recording.made = CpuReplay.of(recording)
        finally:
            self._recording = None

    def replay(self, replay: Replay, accesses: Sequence[Access] = (), *, after: Ticket | None = None) -> Ticket:
        """One unit, as everywhere: nothing comes between its ops."""
        return self.submit(replay.run, accesses, label=replay.label, after=after)

    def touch(self, accesses: Sequence[Access], *, label: str) -> None:
        if self._observer is not None:
            self._observer.touched(label, accesses)

    def is_current(self) -> bool:
        return self.accesses is not None

    def drain(self, timeout_s: float | None = None) -> None:
        self.record().wait_passed()

    def close(self, timeout_s: float | None = None) -> None:
        self.drain()
        self._closed = True

    # ------------------------------------------------------------------------------------------- for fences and sequencer

    def saw(self, number: int, num_meanwhile: int) -> bool:
        if self._observer is not None:
            self._observer.host_waited(self.name, number, float(num_meanwhile))
        return True

    @property
    def head(self) -> str:
        """What comes next."""
        return self._queue[0].ticket.label

    def can_begin(self) -> bool:
        if not self._queue or self.accesses is not None:
            return False
        fence = self._queue[0].fence
        return fence is None or fence.is_over()

    def run_next(self) -> None:
        """Run the item at the head."""
        item = self._queue.popleft()
        self._announce(item)
        error = item.after.error() if item.after is not None else None
        if error is None and item.op is not None:
            if self._observer is not None:
                self._observer.started(self.name, item.ticket.number)
            try:
                item.op()
            except Exception as raised:
                error = raised
        item.ticket.failure = error
        if self._observer is not None and item.op is not None:
            self._observer.finished(self.name, item.ticket.number, error)
        self.accesses = None
        self.num_finished += 1
        self.scheduler.num_finished += 1
        self.scheduler.effects.finished = self.name, item.ticket.number

    def _announce(self, item: _SequencedItem) -> None:
        self.scheduler.act(item.ticket.label)
        effects = self.scheduler.effects
        effects.begun = self.name, item.ticket.number
        effects.accesses = self.accesses = item.accesses
        effects.may_touch_anything = item.op is not None and not item.accesses
        if item.fence is not None:
            effects.after.add(item.fence.place)

    def _next_ticket(self, label: str) -> SequencedTicket:
        if self._closed:
            raise LaneClosed(f"lane {self.name} is closed; {label!r} was not submitted")
        self._num_submitted += 1
        return SequencedTicket(self, self._num_submitted, label)

    def _put(self, item: _SequencedItem, what: str) -> SequencedTicket:
        self._queue.append(item)
        self.scheduler.effects.submitted.add((self.name, item.ticket.number))
        self.scheduler.pause(what)
        return item.ticket
