"""Lanes whose interleaving is chosen, not left to chance: run one schedule, replay it, enumerate them, shrink a failing one. Owns time.

A program is a function that gets a `Sequencer`, makes lanes of it and uses them as it would any lanes; it raises where something went
wrong. Nothing runs on a thread. Whenever the program calls a lane or a fence, the sequencer decides whether the program goes on or some
lane runs its next item first; when the program blocks, lanes run until it can go on. Work that itself submits is the program meanwhile.

A schedule is the list of those decisions that differ from the default, which is: whoever ran last goes on as long as it can, then the
program, then the lanes by name. So few entries mean few preemptions, and a schedule says all there is to say about a run.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.contract import Access, Fence
from penstock.errors import InvariantBroken, LaneClosed
from penstock.lanes.cpu import CpuReplay
from penstock.lanes.lane import Op, Replay, Ticket
from penstock.observe import LaneObserver

HOST = "host"

Schedule = Mapping[int, str]  # by number of the decision: who runs, where it is not the default
Program = Callable[["Sequencer"], None]


class Deadlock(InvariantBroken):
    """The program waits for something, and no lane can run."""


class Decision(NamedTuple):
    chosen: str
    options: tuple[str, ...]


class SequencedFence:
    def __init__(self, lane: SequencedLane, number: int) -> None:
        self._lane = lane
        self.number = number

    @property
    def lane(self) -> str:
        return self._lane.name

    def passed(self) -> bool:
        self._lane.sequencer.yield_to_lanes(f"looks at fence {self.number} of {self.lane}")
        return self._lane.saw(self.number)

    def wait_passed(self, timeout_s: float | None = None) -> None:
        """Deadlines never come: there is no clock, and a wait that cannot end raises Deadlock."""
        self._lane.sequencer.block(lambda: self._lane.num_finished >= self.number, f"waits for fence {self.number} of {self.lane}")
        self._lane.saw(self.number)


@dataclass(slots=True)
class SequencedTicket:
    lane: SequencedLane
    number: int
    label: str
    failure: BaseException | None = None

    def done(self) -> bool:
        return SequencedFence(self.lane, self.number).passed()

    def error(self) -> BaseException | None:
        return self.failure

    def wait_done(self, timeout_s: float | None = None) -> None:
        SequencedFence(self.lane, self.number).wait_passed()
        if self.failure is not None:
            raise self.failure


@dataclass(slots=True)
class _Item:
    ticket: SequencedTicket
    op: Op | None = None
    after: Ticket | None = None
    fence: SequencedFence | None = None


@dataclass(slots=True)
class _Recording:
    pending: CpuReplay
    complete: bool = False

    @property
    def replay(self) -> CpuReplay:
        if not self.complete:
            raise InvariantBroken(f"capture {self.pending.label!r} is still open")
        return self.pending


class SequencedLane:
    """A lane with the rules of `lanes.lane`, run by its sequencer."""

    def __init__(self, name: str, sequencer: Sequencer, observer: LaneObserver | None) -> None:
        self.name = name
        self.sequencer = sequencer
        self.num_finished = 0
        self._observer = observer
        self._queue: deque[_Item] = deque()
        self._num_submitted = 0
        self._recording: _Recording | None = None
        self._running = False  # an item of this lane is being run, and may itself have let others run
        self._closed = False

    def submit(self, op: Op, accesses: Sequence[Access] = (), *, label: str, after: Ticket | None = None) -> Ticket:
        if self._recording is not None:
            self._recording.pending.ops.append(op)
            return SequencedTicket(self, 0, label)
        ticket = self._next_ticket(label)
        if self._observer is not None:
            self._observer.submitted(self.name, ticket.number, label, accesses)
        return self._put(_Item(ticket, op, after), f"submits {label!r} to {self.name}")

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
        if self._observer is not None:
            self._observer.waited(self.name, fence.lane, fence.number)
        self._put(_Item(self._next_ticket("wait"), fence=fence), f"lets {self.name} wait for fence {fence.number} of {fence.lane}")

    @contextmanager
    def capture(self, label: str) -> Iterator[_Recording]:
        recording = self._recording = _Recording(CpuReplay(label))
        try:
            yield recording
            recording.complete = True
        finally:
            self._recording = None

    def replay(self, replay: Replay, accesses: Sequence[Access] = (), *, after: Ticket | None = None) -> Ticket:
        """One unit, as everywhere: nothing comes between its ops."""
        ops = replay.ops if isinstance(replay, CpuReplay) else ()
        return self.submit(lambda: [op() for op in ops], accesses, label=replay.label, after=after)

    def drain(self, timeout_s: float | None = None) -> None:
        self.record().wait_passed()

    def close(self, timeout_s: float | None = None) -> None:
        self.drain()
        self._closed = True

    # ------------------------------------------------------------------------------------------- for fences and sequencer

    def saw(self, number: int) -> bool:
        passed = self.num_finished >= number
        if passed and self._observer is not None:
            self._observer.host_waited(self.name, number, 0.0)
        return passed

    def can_run(self) -> bool:
        if not self._queue or self._running:
            return False
        fence = self._queue[0].fence
        return fence is None or fence._lane.num_finished >= fence.number

    def run_next(self) -> str:
        """Run the item at the head; returns what it was."""
        item = self._queue.popleft()
        error = item.after.error() if item.after is not None else None
        self._running = True
        if error is None and item.op is not None:
            try:
                item.op()
            except Exception as raised:
                error = raised
        self._running = False
        item.ticket.failure = error
        self.num_finished += 1
        if self._observer is not None and item.op is not None:
            self._observer.finished(self.name, item.ticket.number, error)
        return item.ticket.label

    def _next_ticket(self, label: str) -> SequencedTicket:
        if self._closed:
            raise LaneClosed(f"lane {self.name} is closed; {label!r} was not submitted")
        self._num_submitted += 1
        return SequencedTicket(self, self._num_submitted, label)

    def _put(self, item: _Item, what: str) -> SequencedTicket:
        self._queue.append(item)
        self.sequencer.yield_to_lanes(what)
        return item.ticket


class Sequencer:
    """Decides who runs. With `rng` decisions are random and `schedule` says afterwards which they were."""

    def __init__(self, schedule: Schedule | None = None, rng: random.Random | None = None, observer: LaneObserver | None = None) -> None:
        self.schedule: dict[int, str] = {}  # as taken
        self.decisions: list[Decision] = []
        self.trace: list[str] = []
        self._wanted = dict(schedule or {})
        self._rng = rng
        self._observer = observer
        self._lanes: dict[str, SequencedLane] = {}
        self._last = HOST

    def lane(self, name: str) -> SequencedLane:
        if name == HOST or name in self._lanes:
            raise InvariantBroken(f"there is a {name!r} already")
        self._lanes[name] = SequencedLane(name, self, self._observer)
        return self._lanes[name]

    def yield_to_lanes(self, what: str) -> None:
        """The program has done something, and lanes may run before it does the next."""
        self.trace.append(f"{HOST}: {what}")
        while (actor := self._decide(host_can_run=True)) != HOST:
            self._run(actor)

    def block(self, until: Callable[[], bool], what: str) -> None:
        """The program cannot go on before `until`."""
        self.trace.append(f"{HOST}: {what}")
        while not until():
            self._run(self._decide(host_can_run=False))

    def run_all(self) -> None:
        """Let every lane run dry."""
        while any(lane.can_run() for lane in self._lanes.values()):
            self._run(self._decide(host_can_run=False))

    def _run(self, actor: str) -> None:
        self.trace.append(f"{actor}: {self._lanes[actor].run_next()}")

    def _decide(self, host_can_run: bool) -> str:
        lanes = sorted(name for name, lane in self._lanes.items() if lane.can_run())
        options = ((HOST,) if host_can_run else ()) + tuple(lanes)
        if not options:
            raise Deadlock("the program waits, and no lane can run:\n" + "\n".join(self.trace[-20:]))
        default = self._last if self._last in options else options[0]
        number = len(self.decisions)
        chosen = self._rng.choice(options) if self._rng is not None else self._wanted.get(number, default)
        if chosen not in options:
            chosen = default  # a schedule of another program, or one that shrinking has cut
        if chosen != default:
            self.schedule[number] = chosen
        self.decisions.append(Decision(chosen, options))
        self._last = chosen
        return chosen


@dataclass(frozen=True, slots=True)
class Failure:
    """A schedule under which a program fails; `trace` is what happened, step by step."""

    schedule: dict[int, str]
    error: BaseException
    trace: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        steps = "\n".join(f"  {number:3} {step}" for number, step in enumerate(self.trace, start=1))
        return f"{type(self.error).__name__}: {self.error}\nschedule {self.schedule!r}:\n{steps}"


def run(program: Program, schedule: Schedule | None = None, rng: random.Random | None = None) -> tuple[Sequencer, Failure | None]:
    """One run. Lanes that still have work when the program returns run dry first."""
    sequencer = Sequencer(schedule, rng)
    try:
        program(sequencer)
        sequencer.run_all()
    except Exception as error:
        return sequencer, Failure(dict(sequencer.schedule), error, sequencer.trace)
    return sequencer, None


def explore(program: Program, max_preemptions: int = 2, max_runs: int = 20_000) -> tuple[int, Failure | None]:
    """Every schedule with at most so many decisions that differ from the default, fewest first. Returns the number of runs, and the
    first failure, which has no superfluous decision since all shorter schedules were tried before it."""
    pending: deque[dict[int, str]] = deque([{}])
    num_runs = 0
    while pending and num_runs < max_runs:
        schedule = pending.popleft()
        sequencer, failure = run(program, schedule)
        num_runs += 1
        if failure is not None:
            return num_runs, failure
        if len(schedule) == max_preemptions:
            continue
        first = max(schedule, default=-1) + 1
        for number, decision in enumerate(sequencer.decisions[first:], start=first):
            pending.extend({**schedule, number: option} for option in decision.options if option != decision.chosen)
    return num_runs, None


def walk(program: Program, seed: int, num_runs: int = 1000) -> tuple[int, Failure | None]:
    """Random schedules, beyond what can be enumerated; a failing one is shrunk."""
    rng = random.Random(seed)
    for done in range(1, num_runs + 1):
        _, failure = run(program, rng=rng)
        if failure is not None:
            return done, shrink(program, failure)
    return num_runs, None


def shrink(program: Program, failure: Failure) -> Failure:
    """Leave out decisions as long as the program still fails, the last ones first: they depend on those before them."""
    smallest = run(program, failure.schedule)[1] or failure
    shrunk = True
    while shrunk:
        shrunk = False
        for number in sorted(smallest.schedule, reverse=True):
            _, found = run(program, {n: actor for n, actor in smallest.schedule.items() if n != number})
            if found is not None and len(found.schedule) < len(smallest.schedule):
                smallest, shrunk = found, True
                break
    return smallest
