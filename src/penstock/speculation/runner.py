"""Prepares the next step beside the one that runs. Owns one task at a time on a lane; shares nothing with it but what is handed over.

A task is a function and a value. The value goes in, a result comes out, and between the two only the lane's thread has it. What the task
has launched on a device is over when the result's fence has passed. Every task ends in exactly one `result` or `cancel`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from penstock.contract import Fence
from penstock.errors import HandleEnded, InvariantBroken
from penstock.lanes.lane import Lane, Ticket

log = logging.getLogger(__name__)

Value = TypeVar("Value")
Result = TypeVar("Result")


class Prepared(NamedTuple, Generic[Result]):
    """What a task has made."""

    value: Result
    fence: Fence  # of what it launched


class Preparation(Generic[Result]):
    """A task under way. Used by the thread that started it."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.fence: Fence | None = None  # once it is done: behind all that it launched, also where it failed
        self._ticket: Ticket | None = None
        self._made: Prepared[Result] | None = None
        self._ended = False

    def done(self) -> bool:
        """Poll; never blocks."""
        return self._ticket is not None and self._ticket.done()

    @property
    def ended(self) -> bool:
        return self._ended

    def result(self, timeout_s: float | None = None) -> Prepared[Result]:
        """Once. Raises what the task raised, with its traceback, or DeadlineExceeded: then the task is still under way, and may be waited
        for again or cancelled."""
        ticket = self._live()
        self._wait_over(ticket, timeout_s)
        self._ended = True
        made, self._made, self._ticket = self._made, None, None
        if (error := ticket.error()) is not None:
            raise error
        if made is None:
            raise InvariantBroken(f"{self.label} ended without a result")
        return made

    def cancel(self) -> None:
        """Nobody wants its result. The task runs to its end; what it made is dropped, and an error of its own is logged."""
        if not self._ended:
            self._ended = True
            self._made = None

    def _live(self) -> Ticket:
        if self._ended or self._ticket is None:
            raise HandleEnded(f"{self.label} was taken or cancelled already")
        return self._ticket

    def _wait_over(self, ticket: Ticket, timeout_s: float | None) -> None:
        try:
            ticket.wait_done(timeout_s)
        except BaseException:
            if not ticket.done():
                raise  # the wait ended, not the task

    def _keep(self, made: Prepared[Result]) -> None:
        if not self._ended:
            self._made = made

    def _bind(self, ticket: Ticket) -> None:
        self._ticket = ticket


class PrepareRunner:
    """Runs tasks on `lane`, which is this runner's alone. `record` is called there, and places a fence behind what a task launched."""

    def __init__(self, lane: Lane, record: Callable[[], Fence] | None = None) -> None:
        self._lane = lane
        self._record = record or lane.record
        self._current: Preparation[Any] | None = None
        self._running: Ticket | None = None

    def try_start(self, work: Callable[[Value], Result], value: Value, *, label: str) -> Preparation[Result] | None:
        """None: a task that was cancelled still runs, and the caller does the work itself. Raises LaneClosed behind `close`, and
        InvariantBroken where the last task was neither taken nor cancelled."""
        if self._current is not None:
            if not self._current.ended:
                raise InvariantBroken(f"{label} was started before {self._current.label} was taken or cancelled")
            if self._running is not None and not self._running.done():
                return None
        task: Preparation[Result] = Preparation(label)
        handed = [value]  # taken out by the task: what it was given is gone before it counts as over
        del value

        def run() -> None:
            try:
                made = work(handed.pop())
            except BaseException:
                task.fence = self._record()
                if task.ended:
                    log.exception("%s was cancelled, and failed", label)
                raise
            task.fence = self._record()
            task._keep(Prepared(made, task.fence))

        ticket = self._lane.submit(run, label=label)
        task._bind(ticket)
        self._current, self._running = task, ticket
        return task

    def close(self, timeout_s: float) -> None:
        """Ends the lane behind what runs on it; idempotent. Raises DeadlineExceeded where that takes longer: the lane's thread then ends
        with its task, and keeps nobody from leaving."""
        if self._current is not None:
            self._current.cancel()
        self._lane.close(timeout_s)
