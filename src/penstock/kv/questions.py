"""Questions to a lane, with futures for their answers. Owns the queue of waiting questions: it is bounded,
equal questions share an answer, and a cancelled one leaves at once. No thread waits for an answer.

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


class Questions:
    """For any thread. The lane gets one question at a time."""

    def __init__(self, lane: CpuLane, most: int) -> None:
        self._lane = lane
        self._most = most
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
                raise EngineClosed("the engine is closed")
            if name not in self._waiting and len(self._waiting) >= self._most and not goes_on:
                raise Overloaded(f"{self._most} calls about snapshots wait already; try again later")
            self._waiting.setdefault(name, _Question(work, [])).asked.append(future)
            self._tell_lane()
        future.add_done_callback(lambda over: self._leave(name, over) if over.cancelled() else None)
        return future

    def close(self) -> None:
        """Fail all waiting questions and accept no more. The one that runs ends normally."""
        with self._lock:
            self._is_closed = True
            left, self._waiting = list(self._waiting.values()), {}
        for question in left:
            _answer(question.asked, _refuse)

    def _leave(self, name: Hashable, future: Future[Any]) -> None:
        with self._lock:
            question = self._waiting.get(name)
            if question is not None and future in question.asked:
                question.asked.remove(future)
                if not question.asked:
                    del self._waiting[name]

    def _tell_lane(self) -> None:
        """With the lock held."""
        if self._waiting and not self._is_next:
            try:
                self._lane.submit(self._answer_first, label="snapshots")
            except LaneClosed:
                raise EngineClosed("the engine is closed") from None
            self._is_next = True

    def _answer_first(self) -> None:
        """On the lane."""
        with self._lock:
            self._is_next = False
            if not self._waiting:
                return
            question = self._waiting.pop(next(iter(self._waiting)))
        _answer(question.asked, question.work)
        with self._lock, contextlib.suppress(EngineClosed):
            self._tell_lane()


def _refuse() -> None:
    raise EngineClosed("the engine is closed")


def _answer(asked: list[Future[Any]], work: Callable[[], Any]) -> None:
    waiting = [future for future in asked if future.set_running_or_notify_cancel()]
    if not waiting:
        return
    try:
        answer = work()
    except BaseException as error:
        for future in waiting:
            future.set_exception(error)
    else:
        for future in waiting:
            future.set_result(answer)


def run_steps(steps: Generator[Future[Any], Any, T]) -> Future[T]:
    """A future of the value that `steps` returns. The generator resumes each time a future that it yielded is
    over, on the thread that ended it. A cancel cancels the awaited future and raises CancelledError in the
    generator."""
    run = _Run(steps)
    run.go_on(None)
    return run.done


class _Run:
    def __init__(self, steps: Generator[Future[Any], Any, Any]) -> None:
        self.done: Future[Any] = Future()
        self._steps = steps
        self._awaited: Future[Any] | None = None
        self.done.add_done_callback(lambda done: self._cancel() if done.cancelled() else None)

    def _cancel(self) -> None:
        if self._awaited is not None:
            self._awaited.cancel()

    def go_on(self, over: Future[Any] | None) -> None:
        """One step. Only one future is awaited at a time, so no two threads are here at once."""
        try:
            if self.done.cancelled() or (over is not None and over.cancelled()):
                awaited = self._steps.throw(CancelledError())
            elif over is not None and (error := over.exception()) is not None:
                awaited = self._steps.throw(error)
            else:
                awaited = self._steps.send(None if over is None else over.result())
        except StopIteration as end:
            self._end(end.value, None)
        except BaseException as error:
            self._end(None, error)
        else:
            self._awaited = awaited
            if self.done.cancelled():  # by a thread that has seen the previous future
                awaited.cancel()
            awaited.add_done_callback(self.go_on)

    def _end(self, value: Any, error: BaseException | None) -> None:
        if self.done.set_running_or_notify_cancel():
            self.done.set_result(value) if error is None else self.done.set_exception(error)
