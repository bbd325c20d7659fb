"""A lane whose work a thread of its own launches, so that launching may wait for what the device computed.
Owns that thread's queue, and fences and tickets of work that is not launched yet.

    submit (any thread) -> launcher (its own thread) -> inner lane (a stream, or a thread on the CPU)

Several such lanes may share a launcher: then work is launched in the order of all their submissions. To its
observer it is a lane like any other: work has its number when it is submitted, whatever the launcher does
later. The inner lane has another name; what `LaunchedWork` submits there is observed there.

A lane that waits for a fence of this one needs a point on the inner lane: `launched_fence` waits until there
is one. A thread that must not block does not call it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar, runtime_checkable

from penstock.contract import Access, Fence
from penstock.errors import DeadlineExceeded, InvariantBroken, LaneClosed
from penstock.lanes.cpu import CpuLane, CpuReplay, CpuTicket
from penstock.lanes.lane import Capture, Lane, Op, Replay, Ticket, launched_fence
from penstock.observe import LaneObserver

T = TypeVar("T")


@runtime_checkable
class LaunchedWork(Protocol):
    """Work in several parts, between which the launcher waits. It is submitted like an op."""

    def __call__(self) -> object:
        """It is no op of the inner lane."""

    def launch(self, inner: Lane, after: Ticket | None) -> Ticket:
        """On the launcher's thread: submit all parts; the ticket returned is that of the last. What it raises
        is the work's error."""


class _Bound:
    """Set by the launcher: the point or the work on the inner lane, or why there is none."""

    __slots__ = ("_over", "failure", "inner")

    def __init__(self) -> None:
        self.inner: Fence | Ticket | None = None
        self.failure: BaseException | None = None
        self._over = threading.Event()

    def bind(self, inner: Fence | Ticket | None, failure: BaseException | None = None) -> None:
        self.inner, self.failure = inner, failure
        self._over.set()

    def is_bound(self) -> bool:
        return self._over.is_set()

    def wait_bound(self, lane: str, timeout_s: float | None) -> None:
        if not self._over.wait(timeout_s):
            raise DeadlineExceeded(f"lane {lane}: work was not launched within {timeout_s} s")


class LaunchedFence:
    """A point on the lane."""

    __slots__ = ("_lane", "bound", "number")

    def __init__(self, lane: LaunchedLane, number: int) -> None:
        self._lane = lane
        self.number = number
        self.bound = _Bound()

    @property
    def lane(self) -> str:
        return self._lane.name

    def passed(self) -> bool:
        bound = self.bound
        if not bound.is_bound():
            return False
        if bound.failure is not None:
            raise bound.failure
        passed = bool(bound.inner.passed())  # type: ignore[union-attr]
        if passed:
            self._lane.report_wait(self.number, 0.0)
        return passed

    def wait_passed(self, timeout_s: float | None = None) -> None:
        started = time.monotonic()
        self.wait_launched(timeout_s).wait_passed(_left(started, timeout_s))
        self._lane.report_wait(self.number, time.monotonic() - started)

    def wait_launched(self, timeout_s: float | None = None) -> Fence:
        """Block until there is such a point on the inner lane."""
        self.bound.wait_bound(self._lane.name, timeout_s)
        if self.bound.failure is not None:
            raise self.bound.failure
        assert self.bound.inner is not None
        return self.bound.inner  # type: ignore[return-value]


class LaunchedTicket:
    """Submitted work, perhaps not launched yet."""

    __slots__ = ("_lane", "bound", "label", "number")

    def __init__(self, lane: LaunchedLane, number: int, label: str) -> None:
        self._lane = lane
        self.number = number
        self.label = label
        self.bound = _Bound()

    def done(self) -> bool:
        bound = self.bound
        return bound.is_bound() and (bound.failure is not None or bound.inner.done())  # type: ignore[union-attr]

    def error(self) -> BaseException | None:
        """As far as it is known: of work that is not launched yet, nothing is."""
        bound = self.bound
        return bound.failure if bound.inner is None else bound.inner.error()  # type: ignore[union-attr]

    def wait_done(self, timeout_s: float | None = None) -> None:
        started = time.monotonic()
        self.bound.wait_bound(self._lane.name, timeout_s)
        if self.bound.failure is not None:
            raise self.bound.failure
        self.bound.inner.wait_done(_left(started, timeout_s))  # type: ignore[union-attr]
        self._lane.report_wait(self.number, time.monotonic() - started)


class LaunchedLane:
    """`inner` behind a queue that `launcher` works off."""

    def __init__(self, name: str, inner: Lane, launcher: Lane, observer: LaneObserver | None = None) -> None:
        self.name = name
        self.inner = inner
        self._launcher = launcher
        self._observer = observer
        self._submitting = threading.Lock()
        self._num_submitted = 0
        self._closed = False
        self._recording: Capture | None = None
        # of a wait: work behind it must not run
        self._failure: BaseException | None = None

    def submit(
        self, op: Op, accesses: Sequence[Access] = (), *, label: str, after: Ticket | None = None
    ) -> Ticket:
        if (recording := self._recording) is not None:
            if not isinstance(self.inner, CpuLane):
                return self.inner.submit(op, label=label)
            recording.check_thread(label)
            recording.ops.append(op)
            return CpuTicket(self.inner, 0, label)

        def launch(number: int) -> Ticket:
            if isinstance(op, LaunchedWork):
                return self._reported(number, lambda: op.launch(self.inner, after))
            if self._observer is None:
                return self.inner.submit(op, label=label, after=after)
            return self.inner.submit(lambda: self._reported(number, op, after), label=label)

        return self._enqueue(launch, label, accesses)

    def record(self) -> Fence:
        if self._recording is not None:
            raise InvariantBroken(
                f"lane {self.name}: a fence recorded inside a capture would never be placed"
            )
        with self._submitting:
            fence = LaunchedFence(self, self._num_submitted)
            if self._launcher.is_current():  # an op asks for the point where it is
                fence.bound.bind(self.inner.record())
            else:
                self._launch(lambda: self.inner.record(), fence.bound, "fence")
        return fence

    def wait(self, fence: Fence) -> None:
        if (recording := self._recording) is not None:
            recording.check_thread("wait")
        elif fence.lane != self.name:
            with self._submitting:
                self._check_open("wait")
                # a wait has a number of its own, as on other lanes
                if self._observer is not None:
                    self._observer.waited(self.name, fence.lane, fence.number)
                self._num_submitted += 1
                self._launch(lambda: self._wait_inside(fence), _Bound(), "wait")

    @contextmanager
    def capture(self, label: str) -> Iterator[Capture]:
        """A stream captures what is launched, so nothing else may be launched meanwhile. A list of calls is
        made without the inner lane."""
        if self._recording is not None:
            raise InvariantBroken(
                f"lane {self.name}: capture {label!r} inside capture {self._recording.label!r}"
            )
        if isinstance(self.inner, CpuLane):
            recording = Capture(self.name, label)
            with self._recorded(recording):
                yield recording
            recording.made = CpuReplay.of(recording)
            return
        self._launcher.drain()
        with self.inner.capture(label) as recording, self._recorded(recording):
            yield recording

    @contextmanager
    def _recorded(self, recording: Capture) -> Iterator[None]:
        self._recording = recording
        try:
            yield
        finally:
            self._recording = None

    def replay(
        self, replay: Replay, accesses: Sequence[Access] = (), *, after: Ticket | None = None
    ) -> Ticket:
        if not isinstance(replay, Replay):
            raise InvariantBroken(
                f"lane {self.name} cannot replay {replay!r}: it was captured on another backend"
            )

        def launch(number: int) -> Ticket:
            run = replay.run
            if isinstance(run, LaunchedWork):
                return self._reported(number, lambda: run.launch(self.inner, after))
            return self.inner.submit(lambda: self._reported(number, run, after), label=replay.label)

        return self._enqueue(launch, replay.label, accesses)

    def touch(self, accesses: Sequence[Access], *, label: str) -> None:
        if self._observer is not None:
            self._observer.touched(label, accesses)

    def is_current(self) -> bool:
        return self.inner.is_current()

    def drain(self, timeout_s: float | None = None) -> None:
        self.record().wait_passed(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """The launcher ends when the last of its lanes is closed."""
        started = time.monotonic()
        with self._submitting:
            self._closed = True
        self._launcher.drain(timeout_s)
        self.inner.close(_left(started, timeout_s))

    def report_wait(self, number: int, seconds: float) -> None:
        if self._observer is not None:
            self._observer.host_waited(self.name, number, seconds)

    def _enqueue(self, launch: Callable[[int], Ticket], label: str, accesses: Sequence[Access]) -> Ticket:
        with self._submitting:
            self._check_open(label)
            ticket = LaunchedTicket(self, self._num_submitted + 1, label)
            if self._observer is not None:
                self._observer.submitted(self.name, ticket.number, label, accesses)
            self._num_submitted += 1  # only after the observer agreed
            self._launch(lambda: self._unless_failed(launch, ticket.number), ticket.bound, label)
        return ticket

    def _reported(self, number: int, run: Callable[[], T], after: Ticket | None = None) -> T:
        """Skipped if `after` has failed. The observer hears how it ended."""
        error: BaseException | None = None
        try:
            if after is not None and (failed := after.error()) is not None:
                raise failed
            return run()
        except BaseException as raised:
            error = raised
            raise
        finally:
            if self._observer is not None:
                self._observer.finished(self.name, number, error)

    def _unless_failed(self, launch: Callable[[int], Ticket], number: int) -> Ticket:
        if self._failure is not None:
            raise self._failure
        return launch(number)

    def _wait_inside(self, fence: Fence) -> None:
        try:
            self.inner.wait(launched_fence(fence))
        except BaseException as error:
            self._failure = error
            raise

    def _check_open(self, label: str) -> None:
        if self._closed:
            raise LaneClosed(f"lane {self.name} is closed; {label!r} was not submitted")

    def _launch(self, launch: Callable[[], Ticket | Fence | None], bound: _Bound, label: str) -> None:
        def run() -> None:
            try:
                bound.bind(launch())
            except BaseException as error:  # its waiters must not wait for good
                bound.bind(None, error)

        self._launcher.submit(run, label=f"launch {label}")


def _left(started: float, timeout_s: float | None) -> float | None:
    return None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - started))
