"""What other threads ask of the engine thread. Owns the queue of commands and the word that no more are taken."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from penstock.errors import EngineClosed

Command = Callable[[], object]


class Inbox:
    """Commands in order. `put` may be called from any thread, `run_all` from the engine thread only."""

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._changed = threading.Condition()
        self._woken = False
        self._closed: str | None = None  # set under the lock, so that no submission slips in behind it

    def __len__(self) -> int:
        return len(self._commands)

    def put(self, command: Command, *, only_open: bool = False) -> None:
        """`only_open`: raise EngineClosed once the inbox is closed; other commands are taken to the end."""
        with self._changed:
            if only_open:
                self.check_open()
            self._commands.append(command)
            self._changed.notify()

    def check_open(self) -> None:
        if self._closed is not None:
            raise EngineClosed(self._closed)

    def close(self, why: str) -> None:
        """Take no further submissions. The newest reason counts."""
        with self._changed:
            self._closed = why
            self._changed.notify()

    def run_all(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def wake(self) -> None:
        """End a wait: something outside has changed."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def wait(self, timeout_s: float) -> None:
        """Block until there is a command, somebody wakes it, or the inbox is closed."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._commands) or self._woken or self._closed is not None, timeout_s)
            self._woken = False
