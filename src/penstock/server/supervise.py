"""The parent of a server's processes: one for the engine, one or more that speak HTTP. Owns their start,
their restart and their end; serves nothing itself.

All sockets between them are made here and handed over. None has a name, so that nothing is left of them and
no other process can connect.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.config import Config, ServerConfig
from penstock.errors import PenstockError
from penstock.server import boundary
from penstock.server.boundary import ToParent, Wire, error_from
from penstock.server.run import url_of
from penstock.server.seats import SeatBook
from penstock.server.service import CLOSE_GRACE_S

logger = logging.getLogger("penstock.serve")

LINGER_S = 2.0  # in which fronts say that the engine is gone, to clients and probes, before they end as well
# that the engine may take beyond the time of its requests: transfers, lanes, saying goodbye
ENGINE_CLOSE_S = 30.0
NOW_S = 10.0  # for all processes to end once requests are no longer waited for
FRONT_END_S = 10.0  # for fronts to end after the engine has
MOST_RESTARTS = 5  # of fronts, within:
RESTARTS_S = 60.0
CUDA_FRONTS = 4

_Command = Callable[[str, Sequence[int]], list[str]]


@dataclass(eq=False)
class Child:
    """A process of ours and the socket that says whether it is there."""

    name: str
    process: subprocess.Popen[bytes]
    wire: Wire[ToParent]
    ready: bool = False
    ended: bool = False  # its connection has, and it is reaped

    def tell(self, message: Any, fds: Sequence[int] = ()) -> None:
        with contextlib.suppress(OSError):  # its end shows on the same socket
            self.wire.send(message, fds)

    def ending(self) -> str:
        """How it ended. It is reaped by that."""
        code = self.process.wait()
        return (
            (f"was ended by signal {signal.Signals(-code).name}")
            if code < 0
            else f"ended with exit code {code}"
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.wire.sock.close()


@dataclass
class Supervisor:
    """`command` makes the command line of a child from its kind and the numbers of its sockets."""

    config: Config
    server: ServerConfig
    logs: tuple[str, str]
    listener: socket.socket
    command: _Command
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _others: list[Child] = field(default_factory=list)  # the engine
    _fronts: dict[int, Child] = field(default_factory=dict)
    _detached: set[int] = field(default_factory=set)  # gone, and nothing of them is left in the engine
    _restarts: deque[float] = field(default_factory=deque)
    _signals: int = 0  # that have come
    _obeyed: int = 0  # of them
    _announced: bool = False
    _stopping: bool = False
    _deadline_s: float = float("inf")
    _linger_until_s: float = float("inf")
    _failure: PenstockError | None = None

    def run(self) -> int:
        """Until a signal ends the server, or a process that it cannot do without does."""
        with self._children_end(), self._wakeups() as wakeup:
            self._others.append(engine := self._spawn("engine", []))
            config, server = boundary.packed(self.config), boundary.packed(self.server)
            engine.tell(boundary.EngineSetup(boundary.VERSION, config, server, self.logs, self.url))
            while self._is_running():
                self._look(wakeup)
            wrong = [child for child in self._children() if child.process.returncode]
        if self._failure is not None:
            raise self._failure
        if wrong:
            raise PenstockError(f"the {wrong[0].name} process {wrong[0].ending()}")
        return 0

    def __post_init__(self) -> None:
        self.url = url_of(self.server.host, self.listener)

    def _is_running(self) -> bool:
        if not self._stopping:
            return True
        return any(child.process.poll() is None for child in self._children())

    @property
    def _engine(self) -> Child:
        return self._others[0]

    def _children(self) -> list[Child]:
        return [*self._others, *self._fronts.values()]

    # ------------------------------------------------------------------------------------------------- events

    def _look(self, wakeup: socket.socket) -> None:
        """Wait for something to happen, and deal with it."""
        patience_s = max(0.0, min(1.0, min(self._deadline_s, self._linger_until_s) - time.monotonic()))
        for key, _ in self._selector.select(patience_s):
            if key.data is None:
                wakeup.recv(4096)
            else:
                self._hear(key.data)
        if self._signals > self._obeyed:  # one may come at any moment
            self._obeyed = self._signals
            self._on_signal()
        if time.monotonic() >= self._linger_until_s:
            self._linger_until_s = float("inf")
            self._tell_all(boundary.Stop())
        if time.monotonic() >= self._deadline_s:
            self._failure = self._failure or PenstockError(
                "not everything ended in time; what was left was killed"
            )
            for child in self._children():
                child.process.kill()
            self._deadline_s = float("inf")

    def _hear(self, child: Child) -> None:
        try:
            message = child.wire.receive()
        except ConnectionResetError:  # it has ended without reading all messages
            message = None
        except (OSError, PenstockError) as error:
            logger.error("the connection to the %s process failed: %s", child.name, error)
            child.process.kill()  # its messages can no longer be read
            message = None
        if message is None:
            self._selector.unregister(child.wire.sock)
            self._on_end(child)
            return
        for one in (message, *child.wire.left()):
            self._on_message(child, one)

    def _on_message(self, child: Child, message: ToParent) -> None:
        match message:
            case boundary.Starting():
                self._start_fronts(self._num_fronts(message.device))
            case boundary.Ready():
                child.ready = True
                if not self._announced and all(one.ready for one in self._children()) and not self._stopping:
                    self._announced = True
                    print(f"Penstock is ready on {self.url}", flush=True)
            case boundary.Detached():
                self._detached.add(message.index)
                self._restart_gone()
            case boundary.Broken():
                error = error_from(message.fault)
                self._failure = self._failure or (
                    error if isinstance(error, PenstockError) else PenstockError(str(error))
                )

    def _on_end(self, child: Child) -> None:
        how = child.ending()
        child.ended = True
        if child is self._engine and not self._stopping:
            self._failure = self._failure or PenstockError(
                f"the engine process {how}; its open requests have ended with an error"
            )
            if self._announced:
                logger.error("the engine process %s; the server ends", how)
            self._end_without_engine()
        elif child is not self._engine and not self._stopping:
            logger.error("a front process %s", how)
            if not child.ready:
                self._failure = self._failure or PenstockError(f"a front process {how} before it was ready")
                self._stop(now=True)
            else:
                self._restart_gone()

    def _end_without_engine(self) -> None:
        """Fronts tell who asks what has happened for a moment, then end."""
        if not self._announced:
            self._stop(now=True)
            return
        self._stopping = True
        self._linger_until_s = time.monotonic() + LINGER_S
        self._deadline_s = self._linger_until_s + FRONT_END_S

    # ------------------------------------------------------------------------------------------------- fronts

    def _num_fronts(self, device: str) -> int:
        if self.server.api_processes is not None:
            return self.server.api_processes
        return 1 if device != "cuda" else max(1, min(CUDA_FRONTS, len(os.sched_getaffinity(0)) // 4))

    def _start_fronts(self, num: int) -> None:
        self._seats = SeatBook.make(num)
        for index in range(num):
            self._start_front(index)

    def _start_front(self, index: int) -> None:
        engine_end, front_end = socket.socketpair()
        with engine_end, front_end:
            self._fronts[index] = child = self._spawn(
                "front", [front_end.fileno(), self.listener.fileno(), self._seats.fd]
            )
            self._engine.tell(boundary.Attach(index), [engine_end.fileno()])
        server = boundary.packed(self.server)
        child.tell(boundary.FrontSetup(boundary.VERSION, server, self.logs, index, self._seats.num_fronts))

    def _restart_gone(self) -> None:
        """Restart fronts that have ended and are fully cleaned up: until then their seats are taken."""
        for index in sorted(self._detached) if not self._stopping else []:
            # it was cut off, or is about to end: this comes again when its connection has
            if not self._fronts[index].ended:
                self._fronts[index].process.kill()
                continue
            self._detached.discard(index)
            now = time.monotonic()
            while self._restarts and self._restarts[0] < now - RESTARTS_S:
                self._restarts.popleft()
            self._restarts.append(now)
            if len(self._restarts) > MOST_RESTARTS:
                self._failure = PenstockError(
                    f"front processes ended {len(self._restarts)} times within {RESTARTS_S:g} s; the server "
                    "ends"
                )
                self._stop(now=True)
                return
            self._fronts[index].wire.sock.close()
            self._seats.clear(index)
            self._start_front(index)
            logger.info("front process %d is started again", index)

    # ---------------------------------------------------------------------------------------------- processes

    def _spawn(self, kind: str, fds: list[int]) -> Child:
        """A process of its own interpreter, not a copy of this one. Its first socket is the one to us."""
        ours, theirs = socket.socketpair()
        with theirs:
            passed = [theirs.fileno(), *fds]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            process = subprocess.Popen(
                self.command(kind, passed), pass_fds=passed, env=environment, stdin=subprocess.DEVNULL
            )
        child = Child(kind, process, Wire(ours, ToParent))
        self._selector.register(ours, selectors.EVENT_READ, child)
        return child

    @contextlib.contextmanager
    def _children_end(self) -> Iterator[None]:
        """However this ends, nothing that was started stays."""
        try:
            yield
        finally:
            for child in self._children():
                child.kill()
            self._selector.close()

    # ------------------------------------------------------------------------------------------------ signals

    @contextlib.contextmanager
    def _wakeups(self) -> Iterator[socket.socket]:
        """SIGINT and SIGTERM end the wait for events."""
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        self._selector.register(reading, selectors.EVENT_READ, None)

        def note(number: int, frame: object) -> None:
            self._signals += 1
            if not self._announced:  # no request can be running yet
                raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        old = signal.set_wakeup_fd(writing.fileno())
        try:
            with reading, writing:
                yield reading
        finally:
            signal.set_wakeup_fd(old)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self) -> None:
        if self._signals > 2:
            self._deadline_s = 0.0
        else:
            self._stop(now=self._signals == 2)

    def _stop(self, now: bool) -> None:
        self._stopping = True
        if not self._announced:
            for child in self._children():
                child.process.kill()
        wait_s = NOW_S if now else self.server.shutdown_s + CLOSE_GRACE_S + ENGINE_CLOSE_S
        self._deadline_s = min(self._deadline_s, time.monotonic() + wait_s)
        self._tell_all(boundary.Stop(now))

    def _tell_all(self, message: boundary.Stop) -> None:
        # once the last front has closed it as well, connections are refused instead of left waiting
        self.listener.close()
        for child in self._children():
            if child.process.poll() is None:
                child.tell(message)
