"""The order in which a server's processes start, are started again and end. The children of the parent here are processes that sleep: the
test says what they would say, and the clock is the test's own."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from served import DEADLINE_S, until

from penstock.config import Config, ServerConfig
from penstock.contract import PromptLimits
from penstock.engine.build import build
from penstock.engine.loop import EngineLoop
from penstock.errors import Overloaded, PenstockError
from penstock.models.tokenizer import ByteTokenizer, spec_of
from penstock.server import boundary, engine_process, supervise
from penstock.server.boundary import FromParent, ToParent, Wire
from penstock.server.engine_process import EngineProcess
from penstock.server.front import FrontServer, run_front
from penstock.server.seats import SeatBook
from penstock.server.supervise import MOST_RESTARTS, RESTARTS_S, Supervisor
from support.driving import tiny_config

# -------------------------------------------------------------------------------------------------------------------- the parent

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
        self.started: queue.SimpleQueue[Played | None] = queue.SimpleQueue()
        self.num_fronts = 0
        self._sockets: list[socket.socket] = []
        self._wrong: list[BaseException] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.supervisor = Supervisor(Config(), ServerConfig(api_processes=1), ("info", "text"), self._listener, self._command)

    def _command(self, kind: str, fds: Sequence[int]) -> list[str]:
        sock = socket.socket(fileno=os.dup(fds[0]))
        sock.settimeout(PLAY_S)
        self._sockets.append(sock)
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

    def kill_front(self, front: Played) -> None:
        self.end_process()
        front.wire.sock.close()

    def end_process(self) -> None:
        """Of the front; that its connection has ended is not seen before the test's copy of that is closed, too."""
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

    with pytest.raises(PenstockError, match=f"front processes ended {MOST_RESTARTS + 1} times within {RESTARTS_S:g} s; the server ends"):
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


def test_a_front_that_talks_nonsense_is_ended_and_started_again(parent: Parent, caplog: pytest.LogCaptureFixture) -> None:
    def play(parent: Parent) -> None:
        engine, front = parent.engine(), parent.front()
        until(lambda: parent.supervisor._announced, "the server is ready", PLAY_S)
        process = parent.supervisor._fronts[0].process
        front.wire.sock.sendall(b"\xff" * 8)
        until(lambda: process.poll() is not None, "it is ended", PLAY_S)
        engine.wire.send(boundary.Detached(0))
        parent.front()
        engine.wire.send(ENOUGH)

    with pytest.raises(PenstockError, match="enough"):
        parent.run(play)
    assert "a front process was ended by signal SIGKILL" in caplog.text


# -------------------------------------------------------------------------------------------------------------------- the engine


def test_an_engine_that_cannot_be_closed_says_so_and_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = build(tiny_config("tiny-llama"))
    loop = EngineLoop(engine)
    ours, theirs = socket.socketpair()
    ours.settimeout(DEADLINE_S)
    parent: Wire[ToParent] = Wire(ours, ToParent)
    entered, gate, gone = threading.Event(), threading.Event(), threading.Event()
    codes: queue.SimpleQueue[int] = queue.SimpleQueue()
    monkeypatch.setattr(engine_process, "os", SimpleNamespace(_exit=lambda code: gone.set()))
    process = EngineProcess(engine, loop, Wire(theirs, FromParent), 0.0)
    threading.Thread(target=lambda: codes.put(process.run(loop.start)), daemon=True).start()
    assert isinstance(parent.receive(), boundary.Ready)

    def stuck() -> bool:
        entered.set()
        return not gate.wait(DEADLINE_S)

    with monkeypatch.context() as patched:
        patched.setattr(engine, "step", stuck)
        for name in ("_CLOSE_S", "_MARGIN_S"):
            patched.setattr(f"penstock.engine.loop.{name}", 0.0)
        assert entered.wait(DEADLINE_S)
        parent.send(boundary.Stop(now=True))
        assert codes.get(timeout=DEADLINE_S) == 1
    assert "the engine loop closed with an error" in caplog.text and "a step is stuck on the device" in caplog.text
    gate.set()
    loop.close(0.0)
    ours.close()
    assert gone.wait(DEADLINE_S)  # it ends with its parent
    theirs.close()


# --------------------------------------------------------------------------------------------------------------------- a front


def test_a_front_has_no_more_seats_than_the_engine_takes_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more would be refused by the engine, behind the start of its stream."""
    served, book = list[FrontServer](), SeatBook.make(1)
    monkeypatch.setattr(FrontServer, "run", lambda self: served.append(self))
    (engine, front), (parent, ours) = socket.socketpair(), socket.socketpair()
    facts = boundary.Facts("m", PromptLimits(512, 300, 512), {}, ("device",), 3, 1, 0.0, False)
    engine.sendall(boundary.frame(boundary.Hello(boundary.VERSION, facts, spec_of(ByteTokenizer(300)), [])))
    with engine, front, parent, ours, socket.create_server(("127.0.0.1", 0)) as listener:
        setup = boundary.FrontSetup(boundary.VERSION, ServerConfig(max_concurrent=100), ("info", "text"), 0, 1)
        run_front(setup, Wire(ours, FromParent), front, listener, os.dup(book.fd))
    seats = served[0].service.generations
    seats.claim(3)
    with pytest.raises(Overloaded):
        seats.claim(1)
