"""The CPU backend: a lane is a worker thread, so that asynchrony, and every race it allows, is real without a
GPU."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from queue import SimpleQueue

from penstock.contract import Access, Fence
from penstock.errors import DeadlineExceeded, InvariantBroken, LaneClosed
from penstock.lanes.lane import Capture, Op, Replay, Ticket, launched_fence
from penstock.observe import LaneObserver

log = logging.getLogger(__name__)

_EXIT_S = 5.0  # for unfinished work of lanes at exit


class CpuFence:
    """A count of finished items on one lane."""

    __slots__ = ("lane", "number", "owner")

    def __init__(self, lane: CpuLane, number: int) -> None:
        self.owner = lane
        self.lane = lane.name
        self.number = number

    def passed(self) -> bool:
        return self.owner.has_finished(self.number)

    def wait_passed(self, timeout_s: float | None = None) -> None:
        self.owner.wait_finished(self.number, timeout_s)


class CpuTicket(CpuFence):
    """Done when its item has run or was skipped."""

    __slots__ = ("failure", "label")

    def __init__(self, lane: CpuLane, number: int, label: str) -> None:
        super().__init__(lane, number)
        self.failure: BaseException | None = None
        self.label = label

    done = CpuFence.passed

    def error(self) -> BaseException | None:
        return self.failure

    def wait_done(self, timeout_s: float | None = None) -> None:
        self.wait_passed(timeout_s)
        if self.failure is not None:
            raise self.failure


class CpuReplay(Replay):
    """A recorded list of calls."""

    @classmethod
    def of(cls, capture: Capture) -> CpuReplay:
        ops = capture.ops

        def run_all() -> None:
            for op in ops:
                op()

        return cls(capture.label, run_all)


@dataclass(slots=True)
class _Item:
    """One place in the queue: work with its ticket, or a wait."""

    op: Op | None
    ticket: CpuTicket
    after: Ticket | None
    fence: Fence | None


class CpuLane:
    """One worker thread that runs items in order. `around` is entered once on that thread:
    torch.inference_mode, for example, is per thread. An unreferenced lane ends after its submitted work."""

    def __init__(
        self,
        name: str,
        observer: LaneObserver | None = None,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.name = name
        # items over, in order; read without the lock (a stale value only delays a poll)
        self.num_finished = 0
        self._observer = observer
        # in the order of numbers; None: no more will come
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._submitting = threading.Lock()
        self._num_submitted = 0
        self._closed = False
        self._recording: Capture | None = None
        self._over = threading.Condition()  # notified after every item
        # why its thread cannot run anything; all submitted work fails with it
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=_work, args=(name, self._queue, around), name=f"lane-{name}", daemon=True
        )
        self._thread.start()
        _lanes.add(self)
        weakref.finalize(self, self._queue.put, None).atexit = False

    # ---------------------------------------------------------------------------------------- submitting side

    def submit(
        self, op: Op, accesses: Sequence[Access] = (), *, label: str, after: Ticket | None = None
    ) -> Ticket:
        if (recording := self._recording) is not None:
            recording.check_thread(label)
            recording.ops.append(op)
            return CpuTicket(self, 0, label)
        return self._enqueue(op, label, accesses, after, None)

    def record(self) -> Fence:
        if self._recording is not None:
            raise InvariantBroken(
                f"lane {self.name}: a fence recorded inside a capture would never be placed"
            )
        return CpuFence(self, self._num_submitted)

    def wait(self, fence: Fence) -> None:
        if (recording := self._recording) is not None:
            recording.check_thread("wait")
        elif fence.lane != self.name:  # its own is no wait: a lane is ordered
            self._enqueue(None, "wait", (), None, fence)

    @contextmanager
    def capture(self, label: str) -> Iterator[Capture]:
        with self._submitting:
            if self._recording is not None:
                raise InvariantBroken(
                    f"lane {self.name}: capture {label!r} inside capture {self._recording.label!r}"
                )
            recording = self._recording = Capture(self.name, label)
        try:
            yield recording
            recording.made = CpuReplay.of(recording)
        finally:
            self._recording = None

    def replay(
        self, replay: Replay, accesses: Sequence[Access] = (), *, after: Ticket | None = None
    ) -> Ticket:
        if not isinstance(replay, CpuReplay):
            raise InvariantBroken(
                f"lane {self.name} cannot replay {replay!r}: it was captured on another backend"
            )
        return self.submit(replay.run, accesses, label=replay.label, after=after)

    def touch(self, accesses: Sequence[Access], *, label: str) -> None:
        if self._observer is not None:
            self._observer.touched(label, accesses)

    def is_current(self) -> bool:
        return threading.get_ident() == self._thread.ident

    def drain(self, timeout_s: float | None = None) -> None:
        self.record().wait_passed(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        with self._submitting:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"lane {self.name} did not finish its work within {timeout_s} s")

    def wait_finished(self, number: int, timeout_s: float | None, reported: bool = True) -> None:
        """Block until `number` items are over. `reported`: a host thread waits; tell the observer."""
        seconds = 0.0
        if self.num_finished < number:
            started = time.monotonic()
            with self._over:
                if not self._over.wait_for(lambda: self.num_finished >= number, timeout_s):
                    raise DeadlineExceeded(
                        f"lane {self.name}: item {number} was not over within {timeout_s} s"
                    )
            seconds = time.monotonic() - started
        if self._observer is not None and reported:
            self._observer.host_waited(self.name, number, seconds)

    def has_finished(self, number: int) -> bool:
        """Whether `number` items are over; never blocks."""
        finished = self.num_finished >= number
        if finished and self._observer is not None:
            self._observer.host_waited(self.name, number, 0.0)
        return finished

    def _enqueue(
        self, op: Op | None, label: str, accesses: Sequence[Access], after: Ticket | None, fence: Fence | None
    ) -> CpuTicket:
        with self._submitting:
            if self._closed:
                raise LaneClosed(f"lane {self.name} is closed; {label!r} was not submitted")
            ticket = CpuTicket(self, self._num_submitted + 1, label)
            if self._observer is not None:
                if fence is not None:
                    self._observer.waited(self.name, fence.lane, getattr(fence, "number", 0))
                else:
                    self._observer.submitted(self.name, ticket.number, label, accesses)
            # only after the observer agreed: a number without an item would never be over
            self._num_submitted += 1
            self._queue.put(_Item(op, ticket, after, fence))
        return ticket

    # -------------------------------------------------------------------------------------------- worker side

    def run_item(self, item: _Item, failure: BaseException | None) -> None:
        """`failure`: why its thread cannot run anything."""
        self._failure = self._failure or failure
        error = self._failure
        try:
            if error is None and item.after is not None:
                error = item.after.error()
            fence = None if error is not None or item.fence is None else launched_fence(item.fence)
            if isinstance(fence, CpuFence):
                # It blocks this worker thread. No host thread learns anything by it, so no wait is reported.
                fence.owner.wait_finished(fence.number, None, reported=False)
            elif fence is not None:
                fence.wait_passed()
            elif error is None and item.op is not None:
                if self._observer is not None:
                    self._observer.started(self.name, item.ticket.number)
                item.op()
        except BaseException as raised:
            error = raised
            if item.op is None:
                # work after a failed wait must not run: its inputs are undefined
                self._failure = raised
        try:
            if self._observer is not None and item.op is not None:
                self._observer.finished(self.name, item.ticket.number, error)
        except BaseException as raised:  # this thread must live on: other threads wait for it
            error = error or raised
        item.ticket.failure = error
        with self._over:
            self.num_finished += 1
            self._over.notify_all()


def _work(
    name: str, queue: SimpleQueue[_Item | None], around: Callable[[], AbstractContextManager[object]]
) -> None:
    """The worker thread. Between items it refers to its queue only."""
    ended = False
    try:
        with around():
            _run_all(queue, None)
            ended = True
    except BaseException as error:  # the thread lives on: other threads wait for submitted work
        log.exception(
            "lane %s: what is put around its work failed, and so does all that is submitted from now on", name
        )
        if not ended:
            _run_all(queue, error)


def _run_all(queue: SimpleQueue[_Item | None], failure: BaseException | None) -> None:
    while (item := queue.get()) is not None:
        item.ticket.owner.run_item(item, failure)
        del item  # otherwise the lane would live as long as this thread waits


_lanes: weakref.WeakSet[CpuLane] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """At exit the interpreter stops threads anywhere; one inside a C++ library would crash the process."""
    lanes = list(_lanes)
    by_s = time.monotonic() + _EXIT_S
    for lane in lanes:
        with contextlib.suppress(DeadlineExceeded):
            lane.close(max(0.0, by_s - time.monotonic()))
