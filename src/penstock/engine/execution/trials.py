"""Tests whether a grammar compiles within limits of time and memory, in a process that can be killed. Owns
that process.

llguidance compiles in native code that no thread can interrupt, and its limits do not cover all work.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping

from penstock.engine.execution import trial_process
from penstock.engine.execution.trial_process import DONE, KILL, MESSAGE, READY, TRY

TRIAL_S = 5.0  # wall-clock time
TRIAL_CPU_S = 2  # a usual schema takes milliseconds
TRIAL_MIB = 256  # besides the vocabulary; a usual schema takes less than 20
_NICE = 10  # steps of the engine have priority
_START_S = 30.0
_CLOSE_S = 2.0


class Trials:
    """A process with the vocabulary, which forks a child for each grammar. From any thread."""

    def __init__(
        self,
        tokens: list[bytes],
        special: list[int],
        eos: list[int],
        limits: Mapping[str, int],
    ) -> None:
        """Blocks until the process is ready."""
        self._control, theirs = socket.socketpair()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        with theirs:
            command = [sys.executable, "-P", trial_process.__file__, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        settings = {"cpu_s": TRIAL_CPU_S, "bytes": TRIAL_MIB << 20, "nice": _NICE, "limits": dict(limits)}
        self._control.settimeout(_START_S)
        assert self._process.stdin is not None
        try:
            with self._process.stdin as stdin:
                pickle.dump((tokens, special, eos, settings), stdin)
            is_ready = self._control.recv(1) == READY
        except OSError:
            is_ready = False
        if not is_ready:
            self.close()
            raise OSError("the process that tries out schemas and grammars did not start")

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def begin(self) -> Trial:
        mine, theirs = socket.socketpair()
        with theirs:
            trial = Trial(self, next(self._numbers), mine)
            self.send(TRY, trial.number, theirs)
        return trial

    def send(self, kind: bytes, number: int, passed: socket.socket | None = None) -> None:
        with self._lock:
            fds = [] if passed is None else [passed.fileno()]
            socket.send_fds(self._control, [MESSAGE.pack(kind, number)], fds)

    def close(self) -> None:
        """Also ends running trials. Idempotent."""
        self._control.close()  # the process then kills its children and ends
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Trial:
    """One grammar being tried out. `kill` may be called from any thread, at any time."""

    def __init__(self, trials: Trials, number: int, mine: socket.socket) -> None:
        self.number = number
        self._trials, self._mine = trials, mine

    def wait_fits(self, source: str) -> bool:
        """False: it takes too long or too much memory, or was killed. Called once."""
        with self._mine:
            try:
                self._mine.settimeout(TRIAL_S)
                self._mine.sendall(source.encode())
                self._mine.shutdown(socket.SHUT_WR)
                if self._mine.recv(1) == DONE:
                    return True
            except TimeoutError:
                self.kill()
            except (BrokenPipeError, ConnectionResetError):
                pass  # its child has ended
        if not self._trials.is_alive:
            raise OSError("the process that tries out schemas and grammars has ended")
        return False

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # the process is gone
            self._trials.send(KILL, self.number)
