"""What other threads ask of the engine thread. Owns the queue of commands and the word that no more are
taken."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from penstock.errors import EngineClosed
from penstock.lanes.lane import sharpen_timers

log = logging.getLogger(__name__)

# commands of one turn: adding a request takes some ten microseconds, and ending one with a long table a few
# hundred
_AT_ONCE = 64


def _nobody_waits(error: BaseException) -> None:
    """For commands without an answer."""


def fail(done: Future[Any], error: BaseException) -> None:
    """Of a future that its owner may have cancelled, or that is over."""
    if not done.done() and done.set_running_or_notify_cancel():
        done.set_exception(error)


class Command(NamedTuple):
    """Exactly one of `run` and `fail` is called, or `run` and then `fail` where it raised."""

    run: Callable[[], object]
    fail: Callable[[BaseException], object]  # tells whoever waits that it will not be, or could not be, done

    def try_fail(self, error: BaseException) -> None:
        """Never raises: others are still to be told."""
        try:
            self.fail(error)
        except BaseException:
            log.exception("somebody could not be told that the engine thread has failed")


class Inbox:
    """Commands in order. `put` and `wake` may be called from any thread, `run_all`, `wait` and `end` from the
    engine thread only. `sharp`: waits end when they should, which costs a thread that waits shortly and often
    more of its core."""

    def __init__(self, sharp: bool = False) -> None:
        self._commands: deque[Command] = deque()
        self._lock = threading.Lock()
        # Locked: nobody has called since the last wait. No SimpleQueue: on a busy machine its `get` with a
        # time-out may last for ever.
        self._bell = threading.Lock()
        self._bell.acquire()
        self._sharp = sharp
        self._waiting: threading.Thread | None = None  # who did so last
        self._closed: str | None = None  # set under the lock, so that no submission slips in behind it
        self._ended = False  # nobody runs commands any more; also set under the lock

    def __len__(self) -> int:
        return len(self._commands)

    @property
    def ended(self) -> str | None:
        """Why nobody runs commands any more; None: somebody does."""
        return self._closed if self._ended else None

    def put(
        self,
        run: Callable[[], object],
        *,
        fail: Callable[[BaseException], object] = _nobody_waits,
        only_open: bool = False,
    ) -> None:
        """`only_open`: raise EngineClosed once the inbox is closed; other commands are taken until it has
        ended, and dropped then."""
        with self._lock:
            if only_open:
                self.check_open()
            if self._ended:
                return
            self._commands.append(Command(run, fail))
        self.wake()

    def check_open(self) -> None:
        if self._closed is not None:
            raise EngineClosed(self._closed)

    def close(self, why: str) -> None:
        """Take no further submissions. The newest reason counts, the last one being that of `end`."""
        with self._lock:
            if not self._ended:
                self._closed = why
        self.wake()

    def end(self, why: str) -> None:
        """Nobody runs commands any more: those that are here fail, and no more are taken. Never raises;
        idempotent."""
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
        """The oldest, as many as one turn takes: a thousand cancels at once would keep all others waiting.
        What a command raises is raised here, once whoever waits for it was told."""
        for _ in range(min(len(self._commands), _AT_ONCE)):
            command = self._commands.popleft()
            try:
                command.run()
            except BaseException as error:
                command.try_fail(error)
                raise

    def wake(self) -> None:
        """End a wait, the next one where nobody waits: something outside has changed."""
        if self._bell.locked():  # else whoever takes it looks after what has changed before this call
            with contextlib.suppress(RuntimeError):  # somebody else has rung it at the same moment
                self._bell.release()

    def wait(self, timeout_s: float) -> None:
        """Block until there is a command, or somebody wakes it, as closing does."""
        if self._sharp and self._waiting is not (thread := threading.current_thread()):
            self._waiting = thread
            sharpen_timers()
        if not self._commands:
            self._bell.acquire(timeout=timeout_s)
