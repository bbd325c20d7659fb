"""Lanes with a chosen interleaving: run one schedule, replay it, enumerate schedules, shrink a failing one.
Owns time.

A program is a function that gets a `Sequencer`, makes lanes of it and uses them like any lanes; it raises on
an error. Whenever the program calls a lane or a fence, the sequencer decides which thread goes on: the
program; a lane, with its next item; or a launcher, a lane whose work uses lanes, from where it stopped. While
the program blocks, other threads run until it can go on. Only one thread runs at a time: launchers have
threads, but they pass a baton.

A schedule is the list of the decisions that differ from the default. The default is: a thread that is no
longer blocked, else the one that ran last, else the program, else the lanes by name. So few entries mean few
preemptions, and a schedule describes a run completely.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.contract import Access, Fence
from penstock.errors import InvariantBroken, LaneClosed
from penstock.lanes.cpu import CpuReplay
from penstock.lanes.lane import Capture, Op, Replay, Ticket
from penstock.observe import LaneObserver

HOST = "host"
# For the thread with the baton; a longer wait means that it blocks on something that is not a lane.
_PATIENCE_S = 60.0

Schedule = Mapping[int, str]  # by number of the decision: the thread to run, if not the default
Program = Callable[["Sequencer"], None]


class Deadlock(InvariantBroken):
    """The program waits for something, and no lane can run."""


class _Abandoned(BaseException):
    """The run is over; a launcher that stopped half-way ends here."""


class Decision(NamedTuple):
    chosen: str
    options: tuple[str, ...]


class Sequencer:
    """Decides which thread runs. With `rng` decisions are random, and `schedule` records them. If it has
    launchers, close it after use: their threads end."""

    def __init__(
        self,
        schedule: Schedule | None = None,
        rng: random.Random | None = None,
        observer: LaneObserver | None = None,
    ) -> None:
        self.schedule: dict[int, str] = {}  # as taken
        self.decisions: list[Decision] = []
        self.trace: list[str] = []
        self.num_finished = 0  # items, on all lanes
        self._wanted = dict(schedule or {})
        self._rng = rng
        self._observer = observer
        self._lanes: dict[str, SequencedLane] = {}
        self._stage = _Stage()

    # ------------------------------------------------------------------------------------------- for programs

    def lane(self, name: str) -> SequencedLane:
        """A lane whose work uses no other lanes: each item runs at once."""
        return self._add(name, is_launcher=False)

    def launcher(self, name: str) -> SequencedLane:
        """A lane whose work submits to other lanes, waits or polls, like the program."""
        return self._add(name, is_launcher=True)

    def watch(self, observer: LaneObserver) -> None:
        """`observer` observes the lanes that are made from now on."""
        self._observer = observer

    def run_all(self) -> None:
        """Run every lane until it is empty."""
        self.pause("lets all lanes run dry", lambda: not self._able(but=HOST))

    def close(self) -> None:
        """End the launchers' threads, at any point."""
        self._stage.close()

    # ---------------------------------------------------------------------------------------------- for lanes

    def act(self, what: str) -> None:
        """The acting thread does `what`."""
        self.trace.append(f"{self._stage.acting}: {what}")

    def pause(self, what: str, until: Callable[[], bool] | None = None) -> None:
        """The acting thread has done `what`; other threads may run before it goes on. `until`: it cannot go
        on before that."""
        stage = self._stage
        if stage.inline is not None:
            raise stage.give_up(
                InvariantBroken(f"work on lane {stage.inline} {what}: make that lane with Sequencer.launcher")
            )
        me = stage.acting
        self.act(what)
        stage.until[me] = until
        self._let_go_on(me)
        del stage.until[me]

    # ---------------------------------------------------------------------------------------------- decisions

    def _let_go_on(self, me: str) -> None:
        """Run the chosen thread, until it is `me`."""
        stage = self._stage
        while (chosen := self._decide(me)) != me:
            lane = self._lanes.get(chosen)
            if lane is None or lane.is_launcher:
                stage.hand_to(chosen, me, None if lane is None else self._drive)
                return
            stage.acting = stage.inline = chosen
            try:
                lane.run_next()
            finally:
                stage.acting, stage.inline = me, None
            stage.raise_failure()

    def _drive(self, name: str) -> None:
        """The thread of a launcher: runs an item whenever it is chosen."""
        while True:
            self._lanes[name].run_next()
            self._let_go_on(name)

    def _able(self, but: str = "") -> list[str]:
        """Threads that can go on, or begin their next item; the program first."""
        until = self._stage.until
        names = [HOST, *sorted(self._lanes)]
        return [
            name
            for name in names
            if name != but
            and (
                (name in until and _holds(until[name]))
                or (name in self._lanes and self._lanes[name].can_begin())
            )
        ]

    def _decide(self, me: str) -> str:
        stage = self._stage
        options = tuple(self._able())
        if not options:
            raise stage.give_up(
                Deadlock("the program waits, and no lane can run:\n" + "\n".join(self.trace[-20:])), me
            )
        woken = [name for name in options if name in stage.blocked]
        stage.blocked = {name for name, until in stage.until.items() if not _holds(until)}
        default = woken[0] if woken else stage.last if stage.last in options else options[0]
        chosen = self._choose(len(self.decisions), options, default)
        if chosen != default:
            self.schedule[len(self.decisions)] = chosen
        self.decisions.append(Decision(chosen, options))
        stage.last = chosen
        return chosen

    def _choose(self, number: int, options: tuple[str, ...], default: str) -> str:
        if self._rng is not None:
            return self._rng.choice(options)
        wanted = self._wanted.get(number, default)
        # a schedule of another program, or one that shrinking has cut
        return wanted if wanted in options else default

    def _add(self, name: str, is_launcher: bool) -> SequencedLane:
        if name == HOST or name in self._lanes:
            raise InvariantBroken(f"there is a {name!r} already")
        self._lanes[name] = SequencedLane(name, self, self._observer, is_launcher)
        return self._lanes[name]


def _holds(until: Callable[[], bool] | None) -> bool:
    return until is None or until()


class _Stage:
    """The acting thread, the waiting threads, and the baton. Launchers have threads, of which one at a time
    is awake."""

    def __init__(self) -> None:
        self.acting = HOST
        self.inline: str | None = None  # the plain lane whose item runs now, on the thread that started it
        self.last = HOST
        # by thread that stands at a call: the condition that ends its wait
        self.until: dict[str, Callable[[], bool] | None] = {}
        self.blocked: set[str] = set()  # at the last decision
        self._failure: BaseException | None = None  # why the run cannot go on; raised on the program's thread
        self._batons: dict[str, threading.Semaphore] = {HOST: threading.Semaphore(0)}
        self._threads: list[threading.Thread] = []
        self._is_over = False

    def hand_to(self, chosen: str, me: str, drive: Callable[[str], None] | None) -> None:
        """`chosen` goes on; its thread is made if it has none. `me` waits until another thread hands back."""
        self.acting = chosen
        if chosen not in self._batons and drive is not None:
            self._batons[chosen] = threading.Semaphore(0)
            thread = threading.Thread(
                target=self._drive, args=(chosen, drive), name=f"sequenced-{chosen}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        else:
            self._batons[chosen].release()
        if not self._batons[me].acquire(timeout=_PATIENCE_S):
            raise Deadlock(
                f"{self.acting} has not come back: it blocks on something that is no lane, a lock that "
                "another one holds?"
            )
        if self._is_over:
            raise _Abandoned
        if me == HOST:
            self.raise_failure()

    def give_up(self, error: BaseException, me: str | None = None) -> BaseException:
        """The run cannot go on. Returns the exception for the caller; the program gets `error`."""
        if me == HOST:
            return error
        self._failure = self._failure or error
        if me is not None:  # a launcher had the baton, and passes it on for the last time
            self.acting = HOST
            self._batons[HOST].release()
            self._batons[me].acquire()
        return _Abandoned() if me is not None else error

    def raise_failure(self) -> None:
        if self._failure is not None and self.acting == HOST:
            raise self._failure

    def close(self) -> None:
        self._is_over = True
        for name, baton in self._batons.items():
            if name != HOST:
                baton.release()
        for thread in self._threads:
            thread.join(_PATIENCE_S)

    def _drive(self, name: str, drive: Callable[[str], None]) -> None:
        try:
            drive(name)
        except _Abandoned:
            pass
        except BaseException as error:
            if not self._is_over:
                self._failure = error
                self.acting = HOST
                self._batons[HOST].release()


@dataclass(frozen=True, slots=True)
class Failure:
    """A schedule under which a program fails; `trace` is the run, step by step."""

    schedule: dict[int, str]
    error: BaseException
    trace: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        steps = "\n".join(f"  {number:3} {step}" for number, step in enumerate(self.trace, start=1))
        return f"{type(self.error).__name__}: {self.error}\nschedule {self.schedule!r}:\n{steps}"


def run(
    program: Program, schedule: Schedule | None = None, rng: random.Random | None = None
) -> tuple[Sequencer, Failure | None]:
    """One run. Lanes with remaining work when the program returns run until they are empty."""
    return run_on(Sequencer(schedule, rng), program)


def run_on(sequencer: Sequencer, program: Program) -> tuple[Sequencer, Failure | None]:
    with closing(sequencer):
        try:
            program(sequencer)
            sequencer.run_all()
        except Exception as error:
            return sequencer, Failure(dict(sequencer.schedule), error, sequencer.trace)
    return sequencer, None


def explore(program: Program, max_preemptions: int = 2, max_runs: int = 20_000) -> tuple[int, Failure | None]:
    """Every schedule with at most `max_preemptions` decisions that differ from the default, fewest first.
    Returns the number of runs, and the first failure, which is minimal since all shorter schedules were tried
    before it."""
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
            pending.extend(
                {**schedule, number: option} for option in decision.options if option != decision.chosen
            )
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
    """Leave out decisions, the last ones first, while the program still fails: later decisions depend on
    earlier ones."""
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


# ------------------------------------------------------------------------------------------------------ lanes


class SequencedFence:
    def __init__(self, lane: SequencedLane, number: int) -> None:
        self._lane = lane
        self.number = number

    @property
    def lane(self) -> str:
        return self._lane.name

    def is_over(self) -> bool:
        """For lanes and the sequencer: no clock learns from it."""
        return self._lane.num_finished >= self.number

    def passed(self) -> bool:
        self._lane.sequencer.pause(f"looks at fence {self.number} of {self.lane}")
        return self.is_over() and self._lane.saw(self.number, 0)

    def wait_passed(self, timeout_s: float | None = None) -> None:
        """There is no clock, so deadlines never come: a wait that cannot end raises Deadlock. Each item that
        runs meanwhile counts as one second."""
        sequencer = self._lane.sequencer
        before, blocks = sequencer.num_finished, not self.is_over()
        sequencer.pause(f"waits for fence {self.number} of {self.lane}", self.is_over)
        self._lane.saw(self.number, sequencer.num_finished - before if blocks else 0)


class SequencedTicket(SequencedFence):
    """Of one item; over when it has run or was skipped."""

    def __init__(self, lane: SequencedLane, number: int, label: str) -> None:
        super().__init__(lane, number)
        self.label = label
        self.failure: BaseException | None = None

    done = SequencedFence.passed

    def error(self) -> BaseException | None:
        return self.failure

    def wait_done(self, timeout_s: float | None = None) -> None:
        self.wait_passed()
        if self.failure is not None:
            raise self.failure


@dataclass(slots=True)
class _SequencedItem:
    ticket: SequencedTicket
    op: Op | None = None
    after: Ticket | None = None
    fence: SequencedFence | None = None


class SequencedLane:
    """A lane with the rules of `lanes.lane`. The work of a launcher may itself use lanes, and can be
    interrupted at each such call."""

    def __init__(
        self, name: str, sequencer: Sequencer, observer: LaneObserver | None, is_launcher: bool
    ) -> None:
        self.name = name
        self.sequencer = sequencer
        self.is_launcher = is_launcher
        self.is_running = False  # an item
        self.num_finished = 0
        self._observer = observer
        self._queue: deque[_SequencedItem] = deque()
        self._num_submitted = 0
        self._recording: Capture | None = None
        self._closed = False

    def submit(
        self, op: Op, accesses: Sequence[Access] = (), *, label: str, after: Ticket | None = None
    ) -> Ticket:
        if self._recording is not None:
            self._recording.ops.append(op)
            return SequencedTicket(self, 0, label)
        ticket = self._next_ticket(label)
        if self._observer is not None:
            self._observer.submitted(self.name, ticket.number, label, accesses)
        return self._put(_SequencedItem(ticket, op, after), f"submits {label!r} to {self.name}")

    def record(self) -> Fence:
        return SequencedFence(self, self._num_submitted)

    def wait(self, fence: Fence) -> None:
        if not isinstance(fence, SequencedFence):
            raise InvariantBroken(
                f"lane {self.name} cannot wait for {fence!r}: it is of another kind of lane"
            )
        if self._recording is not None or fence.lane == self.name:
            return
        ticket = self._next_ticket("wait")
        if self._observer is not None:
            self._observer.waited(self.name, fence.lane, fence.number)
        self._put(
            _SequencedItem(ticket, fence=fence),
            f"lets {self.name} wait for fence {fence.number} of {fence.lane}",
        )

    @contextmanager
    def capture(self, label: str) -> Iterator[Capture]:
        recording = self._recording = Capture(self.name, label)
        try:
            yield recording
            recording.made = CpuReplay.of(recording)
        finally:
            self._recording = None

    def replay(
        self, replay: Replay, accesses: Sequence[Access] = (), *, after: Ticket | None = None
    ) -> Ticket:
        """One unit, as on every lane: nothing runs between its ops."""
        return self.submit(replay.run, accesses, label=replay.label, after=after)

    def touch(self, accesses: Sequence[Access], *, label: str) -> None:
        if self._observer is not None:
            self._observer.touched(label, accesses)

    def is_current(self) -> bool:
        return self.is_running

    def drain(self, timeout_s: float | None = None) -> None:
        self.record().wait_passed()

    def close(self, timeout_s: float | None = None) -> None:
        self.drain()
        self._closed = True

    # ------------------------------------------------------------------------------- for fences and sequencer

    def saw(self, number: int, num_meanwhile: int) -> bool:
        if self._observer is not None:
            self._observer.host_waited(self.name, number, float(num_meanwhile))
        return True

    @property
    def head(self) -> str:
        """The next item."""
        return self._queue[0].ticket.label

    def can_begin(self) -> bool:
        if not self._queue or self.is_running:
            return False
        fence = self._queue[0].fence
        return fence is None or fence.is_over()

    def run_next(self) -> None:
        """Run the item at the head."""
        item = self._queue.popleft()
        self.is_running = True
        self.sequencer.act(item.ticket.label)
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
        self.is_running = False
        self.num_finished += 1
        self.sequencer.num_finished += 1

    def _next_ticket(self, label: str) -> SequencedTicket:
        if self._closed:
            raise LaneClosed(f"lane {self.name} is closed; {label!r} was not submitted")
        self._num_submitted += 1
        return SequencedTicket(self, self._num_submitted, label)

    def _put(self, item: _SequencedItem, what: str) -> SequencedTicket:
        self._queue.append(item)
        self.sequencer.pause(what)
        return item.ticket
