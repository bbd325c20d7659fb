"""The order in which a server's processes start, are started again and end. The children of the parent here
are processes that sleep: the test says what they would say, and the clock is the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from penstock.config import Config, ServerConfig
from penstock.contract import FinishReason, PromptLimits, SamplingParams, Submission
from penstock.engine.build import build
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduling.residency import ResidencyChoice
from penstock.errors import Overloaded, PenstockError
from penstock.models.tokenizer import ByteTokenizer, spec_of
from penstock.server import boundary, links, supervise
from penstock.server.boundary import FromEngine, FromParent, ToParent, Wire
from penstock.server.links import EngineProcess
from penstock.server.run import FrontServer, run_front
from penstock.server.seats import SeatBook
from penstock.server.supervise import MOST_RESTARTS, RESTARTS_S, Supervisor
from tests.cpu.server.served import DEADLINE_S, until
from tests.support.driving import tiny_config

# ------------------------------------------------------------------------------------------------- the parent

PLAY_S = 30.0  # for what takes milliseconds: nothing is imported or computed


class Played(NamedTuple):
    """A child's end of its connection to the parent."""

    kind: str
    wire: Wire[FromParent]

    def hear(self, kind: type) -> Any:
        """The next message of this kind."""
        while not isinstance(message := self.wire.receive(), kind):
            assert message is not None
        return message


class Parent:
    """A supervisor with one front, and a thread that plays its children while it runs."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.started: queue.Queue[Played | None] = queue.Queue()
        self.num_fronts = 0  # that were ready
        self.commands: list[str] = []
        self._sockets: list[socket.socket] = []
        self._wrong: list[BaseException] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.supervisor = Supervisor(
            Config(), ServerConfig(api_processes=1), ("info", "text"), self._listener, self._command
        )

    def _command(self, kind: str, fds: Sequence[int]) -> list[str]:
        sock = socket.socket(fileno=os.dup(fds[0]))
        sock.settimeout(PLAY_S)
        self._sockets.append(sock)
        self.commands.append(kind)
        self.started.put(Played(kind, Wire(sock, FromParent)))
        return ["sleep", "600"]

    def run(self, play: Callable[[Parent], None]) -> None:
        """Raises what the supervisor raises."""

        def played() -> None:
            try:
                play(self)
            except BaseException as error:
                self._wrong.append(error)
            finally:  # nothing of the children is left, the engine first
                for child in self.supervisor._children():
                    child.process.kill()
                for sock in self._sockets:
                    sock.close()

        player = threading.Thread(target=played, daemon=True)
        player.start()
        try:
            with self._listener:
                self.supervisor.run()
        finally:
            self.started.put(None)  # whoever still plays waits in vain
            for sock in self._sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            player.join(PLAY_S)
            if self._wrong:
                raise self._wrong[0]

    def child(self, kind: str) -> Played:
        child = self.started.get(timeout=PLAY_S)
        assert child is not None and child.kind == kind
        return child

    def engine(self) -> Played:
        child = self.child("engine")
        child.hear(boundary.EngineSetup)
        child.wire.send(boundary.Starting("cpu"))
        child.wire.send(boundary.Ready())
        return child

    def front(self) -> Played:
        child = self.child("front")
        child.hear(boundary.FrontSetup)
        child.wire.send(boundary.Ready())
        self.num_fronts += 1
        return child

    def wait_announced(self) -> None:
        until(lambda: self.supervisor._announced, "the server is ready", PLAY_S)

    def kill_front(self, front: Played) -> None:
        self.end_process()
        front.wire.sock.close()

    def end_process(self) -> None:
        """Of the front; that its connection has ended is not seen before the test's copy of that is closed,
        too."""
        process = self.supervisor._fronts[0].process
        process.kill()
        with contextlib.suppress(ChildProcessError):  # the parent was quicker
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Parent:
    made = Parent()
    monkeypatch.setattr(supervise, "time", SimpleNamespace(monotonic=lambda: made.now_s))
    return made


ENOUGH = boundary.Broken(boundary.SentError("EngineClosed", "enough"))


def test_a_front_that_ends_now_and_then_is_started_again_for_ever(parent: Parent) -> None:
    """What was long ago does not count."""

    def play(parent: Parent) -> None:
        engine, front = parent.engine(), parent.front()
        for _ in range(3 * MOST_RESTARTS):
            parent.now_s += RESTARTS_S / 2
            parent.kill_front(front)
            engine.wire.send(boundary.Detached(0))
            front = parent.front()
        engine.wire.send(ENOUGH)

    with pytest.raises(PenstockError, match="enough"):
        parent.run(play)
    assert parent.num_fronts == 1 + 3 * MOST_RESTARTS


def test_a_front_that_ends_again_and_again_is_the_end_of_the_server(parent: Parent) -> None:
    def play(parent: Parent) -> None:
        engine, front = parent.engine(), parent.front()
        for number in range(MOST_RESTARTS + 1):
            parent.now_s += RESTARTS_S / (MOST_RESTARTS + 1)
            parent.kill_front(front)
            engine.wire.send(boundary.Detached(0))
            if number < MOST_RESTARTS:
                front = parent.front()
        assert engine.hear(boundary.Stop) == boundary.Stop(now=True)

    with pytest.raises(
        PenstockError,
        match=f"front processes ended {MOST_RESTARTS + 1} times within {RESTARTS_S:g} s; the server ends",
    ):
        parent.run(play)
    assert parent.num_fronts == 1 + MOST_RESTARTS


def test_a_front_is_started_again_whichever_of_its_ends_is_seen_first(parent: Parent) -> None:
    """The engine may say that nothing of a front is left before the parent has seen its connection end."""

    def play(parent: Parent) -> None:
        engine, front = parent.engine(), parent.front()
        for _ in range(2):
            parent.end_process()
            engine.wire.send(boundary.Detached(0))
            until(lambda: parent.supervisor._detached, "the parent has read that", PLAY_S)
            front.wire.sock.close()
            front = parent.front()
        engine.wire.send(ENOUGH)

    with pytest.raises(PenstockError, match="enough"):
        parent.run(play)


def test_a_front_that_ends_before_it_is_ready_is_the_end_of_the_start(parent: Parent) -> None:
    def play(parent: Parent) -> None:
        parent.engine()
        front = parent.child("front")
        front.hear(boundary.FrontSetup)
        engine = parent.supervisor._engine.process
        parent.kill_front(front)
        until(lambda: engine.poll() is not None, "the engine is ended, too", PLAY_S)

    with pytest.raises(
        PenstockError, match="a front process was ended by signal SIGKILL before it was ready"
    ):
        parent.run(play)


def test_the_first_signal_waits_for_requests_the_second_does_not_and_the_third_kills(parent: Parent) -> None:
    def play(parent: Parent) -> None:
        engine, front = parent.engine(), parent.front()
        parent.wait_announced()
        process = parent.supervisor._engine.process
        for now in (False, True):
            os.kill(os.getpid(), signal.SIGINT)
            assert engine.hear(boundary.Stop) == front.hear(boundary.Stop) == boundary.Stop(now)
        os.kill(os.getpid(), signal.SIGINT)
        until(lambda: process.poll() is not None, "it is killed", PLAY_S)

    with pytest.raises(PenstockError, match="not everything ended in time; what was left was killed"):
        parent.run(play)


# ------------------------------------------------------------------------------------------------- the engine


MOST_BEATS = 120  # while an engine ends, which takes less than one


class EngineChild:
    """What runs in the engine's process, here on threads of the test's: its parent, its only front, and what
    a step does are the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, shutdown_s: float) -> None:
        self.engine = build(tiny_config("tiny-llama"))
        self.loop = EngineLoop(self.engine)
        self.entered, self.gate, self.gone = threading.Event(), threading.Event(), threading.Event()
        monkeypatch.setattr(
            links, "os", SimpleNamespace(_exit=lambda code: self.gone.set(), getpid=os.getpid)
        )
        self._codes: queue.Queue[int] = queue.Queue()
        self._sockets = [*socket.socketpair(), *socket.socketpair()]
        for one in self._sockets:
            one.settimeout(DEADLINE_S)
        ours, theirs, front, attached = self._sockets
        theirs.settimeout(None)
        self.parent: Wire[ToParent] = Wire(ours, ToParent)
        self.front: Wire[FromEngine] = Wire(front, FromEngine)
        process = EngineProcess(self.engine, self.loop, Wire(theirs, FromParent), shutdown_s)
        threading.Thread(target=lambda: self._codes.put(process.run(self.loop.start)), daemon=True).start()
        assert isinstance(self.parent.receive(), boundary.Ready)
        attached.settimeout(None)
        self.parent.send(boundary.Attach(0), [attached.fileno()])
        attached.close()
        assert isinstance(self.front.receive(), boundary.Hello)

    def hold_steps(self) -> None:
        """Until the gate is opened."""
        step = self.engine.step

        def held() -> bool:
            self.entered.set()
            assert self.gate.wait(DEADLINE_S)
            return step()

        self.engine.step = held  # type: ignore[method-assign]
        assert self.entered.wait(DEADLINE_S)

    def submit(self) -> None:
        self.front.send(
            boundary.Submit(
                1, Submission([0] * 4, SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True), "r")
            )
        )
        until(lambda: len(self.engine._inbox), "the engine has it")

    def code(self) -> int:
        return self._codes.get(timeout=DEADLINE_S)

    def told(self) -> list[boundary.FromEngine]:
        """All that the front is told until the end, without beats."""
        told, num_beats = list[boundary.FromEngine](), 0
        while (message := self.front.receive()) is not None:
            if not isinstance(message, boundary.Beat):
                told.append(message)
            num_beats += isinstance(message, boundary.Beat)
            assert num_beats < MOST_BEATS, "there is no end"
        return told

    def close(self) -> None:
        self.gate.set()
        self.loop.close(0.0)
        self._sockets[0].close()
        assert self.gone.wait(DEADLINE_S)  # it ends with its parent
        for one in self._sockets:
            one.close()


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineChild]:
    made = EngineChild(monkeypatch, DEADLINE_S)
    yield made
    made.close()


def test_an_engine_that_cannot_be_closed_says_so_and_ends_with_an_error(
    child: EngineChild, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    child.hold_steps()
    with monkeypatch.context() as patched:
        for name in ("_CLOSE_S", "_MARGIN_S"):
            patched.setattr(f"penstock.engine.loop.{name}", 0.0)
        child.parent.send(boundary.Stop(now=True))
        assert child.code() == 1
    assert (
        "the engine loop closed with an error"
    ) in caplog.text and "a step is stuck on the device" in caplog.text


@pytest.mark.parametrize(("now", "finish"), [(False, FinishReason.LENGTH), (True, FinishReason.CANCELLED)])
def test_requests_are_waited_for_unless_the_end_is_to_be_now(
    child: EngineChild, now: bool, finish: FinishReason
) -> None:
    """Either way their last event comes, and then a goodbye."""
    child.hold_steps()
    child.submit()
    child.parent.send(boundary.Stop(now))
    until(lambda: child.loop._stop_by_s is not None, "it is closing")
    child.gate.set()
    *events, bye = child.told()
    assert isinstance(bye, boundary.Bye) and isinstance(events[-1], boundary.Tokens)
    assert events[-1].rest[-1].event.finish is finish
    assert child.code() == 0


def test_when_the_loop_fails_the_front_and_the_parent_are_told_why(
    child: EngineChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> bool:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(child.engine, "step", fail)
    child.engine.cancel("none")  # so that it comes round
    assert child.code() == 1
    why = "RuntimeError: no such kernel"
    broken = child.parent.receive()
    assert isinstance(broken, boundary.Broken)
    assert (broken.fault.kind, broken.fault.message) == ("EngineClosed", f"the engine has failed: {why}")
    assert boundary.Bye(why) in child.told()


# ---------------------------------------------------------------------------------------------------- a front


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Iterator[FrontServer]:
    """As `run_front` makes it: of an engine that takes three requests at once. It does not run."""
    served, book = list[FrontServer](), SeatBook.make(1)
    monkeypatch.setattr(FrontServer, "run", lambda self: served.append(self))
    (engine, front), (parent, ours) = socket.socketpair(), socket.socketpair()
    limits, tokenizer = PromptLimits(512, 300, 512), spec_of(ByteTokenizer(300))
    fits = ResidencyChoice(0, 16, False, (), None)
    engine.sendall(
        boundary.frame(
            boundary.Hello(
                boundary.VERSION, "m", limits, {}, ("device",), 3, 1, 0.0, False, tokenizer, [], fits
            )
        )
    )
    with engine, front, parent, ours, socket.create_server(("127.0.0.1", 0)) as listener:
        server = boundary.packed(ServerConfig(max_concurrent=100))
        setup = boundary.FrontSetup(boundary.VERSION, server, ("info", "text"), 0, 1)
        run_front(setup, Wire(ours, FromParent), front, listener, os.dup(book.fd))
        listener.setblocking(False)
        yield served[0]


def test_a_front_has_no_more_seats_than_the_engine_takes_requests(front: FrontServer) -> None:
    """One more would be refused by the engine, behind the start of its stream."""
    seats = front.service.generations
    seats.take(3)
    with pytest.raises(Overloaded):
        seats.take(1)


async def turns() -> None:
    """Enough of the event loop for what is ready to happen."""
    for _ in range(10):
        await asyncio.sleep(0)


class Full:
    """A listener of a process that has as many files open as it may."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.num_tried = 0

    def fileno(self) -> int:
        return self._listener.fileno()

    def accept(self) -> None:
        self.num_tried += 1
        raise OSError(errno.EMFILE, "Too many open files")


def test_a_front_that_is_out_of_files_leaves_its_listener_alone_for_a_while(
    front: FrontServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection that it cannot take is still there: it would look without a pause, and do nothing
    else."""
    monkeypatch.setattr("penstock.server.run.OUT_OF_FILES_S", 3600.0)
    address, full = front._listener.getsockname(), Full(front._listener)
    monkeypatch.setattr(front, "_listener", full)

    async def run() -> None:
        front._listen()
        while not full.num_tried:
            await asyncio.sleep(0)
        await turns()

    with socket.create_connection(address):
        asyncio.run(run())
    assert full.num_tried == 1 and "a connection could not be taken" in caplog.text


def test_a_signal_that_comes_while_another_is_obeyed_counts(
    parent: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a user who presses Ctrl-C twice."""
    listener, signals = parent.supervisor.listener, iter([signal.SIGINT])

    def close() -> None:
        for number in signals:
            os.kill(os.getpid(), number)
        listener.close()

    def play(parent: Parent) -> None:
        engine = parent.engine()
        parent.front()
        parent.wait_announced()
        monkeypatch.setattr(parent.supervisor, "listener", SimpleNamespace(close=close))
        os.kill(os.getpid(), signal.SIGINT)
        for now in (False, True):
            assert engine.hear(boundary.Stop) == boundary.Stop(now)

    with pytest.raises(PenstockError, match="was ended by signal SIGKILL"):
        parent.run(play)
