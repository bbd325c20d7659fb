"""Commands from other threads to the engine thread. Owns their queue and whether it is closed."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

from penstock.errors import EngineClosed, Overloaded
from penstock.lanes.lane import sharpen_timers

log = logging.getLogger(__name__)

T = TypeVar("T")

# commands per turn: adding a request takes some ten microseconds, ending one with a long table a few hundred
_AT_ONCE = 64


def _ignore(error: BaseException) -> None:
    """Default for commands that no caller waits for."""


def fail(done: Future[Any], error: BaseException) -> None:
    """Fail a future, unless it is done or cancelled."""
    if not done.done() and done.set_running_or_notify_cancel():
        done.set_exception(error)


class Command(NamedTuple):
    """Exactly one of `run` and `fail` is called, or `run` and, if it raised, `fail`."""

    run: Callable[[], object]
    fail: Callable[[BaseException], object]  # tells the waiting caller that the command was dropped or failed

    def try_fail(self, error: BaseException) -> None:
        """Never raises: further callers must still be notified."""
        try:
            self.fail(error)
        except BaseException:
            log.exception("a waiting caller could not be notified that the engine thread has failed")


class Inbox:
    """Commands in order. `put` and `wake` may be called from any thread, `run_all`, `wait` and `end` from the
    engine thread only. `sharp`: precise timers, which cost more CPU for short and frequent waits."""

    def __init__(self, sharp: bool = False) -> None:
        self._commands: deque[Command] = deque()
        self._lock = threading.Lock()
        # Locked: no wake-up since the last wait. Not a SimpleQueue: on a busy machine its `get` with a
        # time-out may never return.
        self._bell = threading.Lock()
        self._bell.acquire()
        self._sharp = sharp
        self._waiting: threading.Thread | None = None  # the thread that waited last
        self._closed: str | None = None  # set under the lock, so that no later submission is taken
        self._ended = False  # no more commands are run; also set under the lock

    def __len__(self) -> int:
        return len(self._commands)

    @property
    def ended(self) -> str | None:
        """Why no more commands are run; None while they are."""
        return self._closed if self._ended else None

    def put(
        self,
        run: Callable[[], object],
        *,
        fail: Callable[[BaseException], object] = _ignore,
        only_open: bool = False,
    ) -> None:
        """`only_open`: raise EngineClosed once the inbox is closed. Other commands are taken until it has
        ended, and dropped afterwards."""
        with self._lock:
            if only_open:
                self.check_open()
            if self._ended:
                return
            self._commands.append(Command(run, fail))
        self.wake()

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` on the engine thread, unless the future is cancelled before. The future gets its result,
        or what it raised; Overloaded is for the caller alone. Raises EngineClosed."""
        done: Future[T] = Future()

        def run() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(work())
                except BaseException as error:
                    done.set_exception(error)
                    if not isinstance(error, Overloaded):
                        raise

        self.put(run, fail=partial(fail, done), only_open=True)
        return done

    def check_open(self) -> None:
        if self._closed is not None:
            raise EngineClosed(self._closed)

    def close(self, why: str) -> None:
        """Take no further submissions. The latest reason counts; that of `end` is final."""
        with self._lock:
            if not self._ended:
                self._closed = why
        self.wake()

    def end(self, why: str) -> None:
        """Stop running commands: queued ones fail, and no more are taken. Never raises; idempotent."""
        with self._lock:
            if not self._ended:
                self._closed, self._ended = why, True
            left, self._commands = self._commands, deque()
        error = EngineClosed(why)
        for command in left:
            command.try_fail(error)

    def run_all(self) -> None:
        while self._commands:
            self.run_some()

    def run_some(self) -> None:
        """Run the oldest commands of one turn: a thousand cancels at once would delay all other requests. An
        exception of a command is raised here after its caller was notified."""
        for _ in range(min(len(self._commands), _AT_ONCE)):
            command = self._commands.popleft()
            try:
                command.run()
            except BaseException as error:
                command.try_fail(error)
                raise

    def wake(self) -> None:
        """End the current wait, or the next one: something outside has changed."""
        if self._bell.locked():  # otherwise the next wait ends at once and sees the change
            with contextlib.suppress(RuntimeError):  # another thread released it at the same moment
                self._bell.release()

    def wait(self, timeout_s: float) -> None:
        """Block until there is a command, or until `wake` or `close` is called."""
        if self._sharp and self._waiting is not (thread := threading.current_thread()):
            self._waiting = thread
            sharpen_timers()
        if not self._commands:
            self._bell.acquire(timeout=timeout_s)
