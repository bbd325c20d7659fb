"""Questions to a lane, with futures for their answers. Owns the lane and the queue of waiting questions: it
is bounded, equal questions share an answer, and a cancelled one leaves at once. No thread waits for an
answer.

`run_steps` chains several futures behind one, which can be cancelled in every state.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Hashable
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple, TypeVar

from penstock.errors import EngineClosed, LaneClosed, Overloaded
from penstock.lanes.cpu import CpuLane

T = TypeVar("T")


class _Question(NamedTuple):
    work: Callable[[], Any]
    asked: list[Future[Any]]  # futures that wait for the answer

    def answer(self) -> None:
        waiting = [future for future in self.asked if future.set_running_or_notify_cancel()]
        if not waiting:
            return
        try:
            answer = self.work()
        except BaseException as error:
            for future in waiting:
                future.set_exception(error)
        else:
            for future in waiting:
                future.set_result(answer)


class Questions:
    """For any thread. The lane gets one question at a time."""

    def __init__(self, subject: str, most: int) -> None:
        self._subject = subject
        self._most = most
        self._lane = CpuLane(subject)
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, _Question] = {}  # in order
        self._is_next = False  # the lane has been asked to take the first one
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Futures of questions that have not begun."""
        with self._lock:
            return sum(len(question.asked) for question in self._waiting.values())

    def begin(self, work: Callable[[], T], same: Hashable = None, goes_on: bool = False) -> Future[T]:
        """Run `work` on the lane. A waiting question of the same name answers this one, too. Raises
        Overloaded if too many wait and this one does not continue an accepted one; raises EngineClosed."""
        future: Future[T] = Future()
        name = object() if same is None else same
        with self._lock:
            if self._is_closed:
                _refuse()
            if name not in self._waiting and len(self._waiting) >= self._most and not goes_on:
                raise Overloaded(f"{self._most} calls about {self._subject} wait already; try again later")
            self._waiting.setdefault(name, _Question(work, [])).asked.append(future)
            try:
                self._take_next()
            except LaneClosed:
                _refuse()
        future.add_done_callback(lambda over: self._leave(name, over) if over.cancelled() else None)
        return future

    def run(self, work: Callable[[], None]) -> None:
        """Run `work` on the lane, outside the queue. After the close, nothing happens."""
        with contextlib.suppress(LaneClosed):
            self._lane.submit(work, label=self._subject)

    def close(self, timeout_s: float | None) -> None:
        """Fail all waiting questions, accept no more, and finish what runs. Raises DeadlineExceeded."""
        with self._lock:
            self._is_closed = True
            left, self._waiting = list(self._waiting.values()), {}
        for question in left:
            question._replace(work=_refuse).answer()
        self._lane.close(timeout_s)

    def _leave(self, name: Hashable, future: Future[Any]) -> None:
        with self._lock:
            question = self._waiting.get(name)
            if question is not None and future in question.asked:
                question.asked.remove(future)
                if not question.asked:
                    del self._waiting[name]

    def _take_next(self) -> None:
        """With the lock held."""
        if self._waiting and not self._is_next:
            self._lane.submit(self._answer_first, label=self._subject)
            self._is_next = True

    def _answer_first(self) -> None:
        """On the lane."""
        with self._lock:
            self._is_next = False
            if not self._waiting:
                return
            question = self._waiting.pop(next(iter(self._waiting)))
        question.answer()
        with self._lock, contextlib.suppress(LaneClosed):
            self._take_next()


def _refuse() -> None:
    raise EngineClosed("the engine is closed")


def run_steps(steps: Generator[Future[Any], Any, T]) -> Future[T]:
    """A future of the value that `steps` returns. The generator resumes each time a future that it yielded is
    over, on the thread that ended it. A cancel cancels the awaited future and raises CancelledError in the
    generator."""
    done: Future[T] = Future()
    awaited: Future[Any] | None = None

    def go_on(over: Future[Any] | None) -> None:
        """One step. Only one future is awaited at a time, so no two threads are here at once."""
        nonlocal awaited
        try:
            if done.cancelled() or (over is not None and over.cancelled()):
                awaited = steps.throw(CancelledError())
            elif over is not None and (error := over.exception()) is not None:
                awaited = steps.throw(error)
            else:
                awaited = steps.send(None if over is None else over.result())
        except BaseException as end:
            if done.set_running_or_notify_cancel():
                done.set_result(end.value) if isinstance(end, StopIteration) else done.set_exception(end)
            return
        if done.cancelled():  # by a thread that has seen the previous future
            awaited.cancel()
        awaited.add_done_callback(go_on)

    def cancel(done: Future[T]) -> None:
        if done.cancelled() and awaited is not None:
            awaited.cancel()

    done.add_done_callback(cancel)
    go_on(None)
    return done
