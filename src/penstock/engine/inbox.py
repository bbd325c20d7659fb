"""What other threads ask of the engine thread. Owns the queue of commands and the word that no more are taken."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue

from penstock.errors import EngineClosed
from penstock.lanes.polling import sharpen_timers

Command = Callable[[], object]


class Inbox:
    """Commands in order. `put` and `wake` may be called from any thread, `run_all` and `wait` from the engine thread only. `sharp`: waits
    end when they should, which costs a thread that waits shortly and often more of its core."""

    def __init__(self, sharp: bool = False) -> None:
        self._commands: deque[Command] = deque()
        self._lock = threading.Lock()
        self._bell: SimpleQueue[None] = SimpleQueue()  # not empty: somebody has called since the last wait
        self._sharp = sharp
        self._waiting: threading.Thread | None = None  # who did so last
        self._closed: str | None = None  # set under the lock, so that no submission slips in behind it

    def __len__(self) -> int:
        return len(self._commands)

    def put(self, command: Command, *, only_open: bool = False) -> None:
        """`only_open`: raise EngineClosed once the inbox is closed; other commands are taken to the end."""
        with self._lock:
            if only_open:
                self.check_open()
            self._commands.append(command)
        self.wake()

    def check_open(self) -> None:
        if self._closed is not None:
            raise EngineClosed(self._closed)

    def close(self, why: str) -> None:
        """Take no further submissions. The newest reason counts."""
        with self._lock:
            self._closed = why
        self.wake()

    def run_all(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def wake(self) -> None:
        """End a wait, the next one where nobody waits: something outside has changed."""
        if self._bell.empty():  # else whoever takes what is in it looks after what has changed before this call
            self._bell.put(None)

    def wait(self, timeout_s: float) -> None:
        """Block until there is a command, somebody wakes it, or the inbox is closed."""
        if self._sharp and self._waiting is not (thread := threading.current_thread()):
            self._waiting = thread
            sharpen_timers()
        if not self._commands and self._closed is None:
            try:  # noqa: SIM105 - one call less in what an engine that polls does all the time
                self._bell.get(timeout=timeout_s)
            except Empty:
                pass
