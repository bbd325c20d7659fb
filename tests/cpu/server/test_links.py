"""The connection between an engine and its fronts: what is said, and what becomes of fronts that hang up, do
not read, or talk nonsense. A real engine is behind it where the engine's side is the subject."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import (
    Config,
    EngineConfig,
    KvConfig,
    LoraConfig,
    ModelSource,
    OffloadConfig,
    ServerConfig,
)
from penstock.contract import (
    Adapter,
    FinishReason,
    Grammar,
    KvSource,
    LoadedAdapter,
    PromptLimits,
    PromptLogprobs,
    SamplingParams,
    SnapshotRequest,
    Submission,
    TokenEvent,
    TokenLogprob,
    TokenScores,
)
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduling.residency import Division, ResidencyChoice
from penstock.errors import (
    ContextExceeded,
    DeadlineExceeded,
    EngineClosed,
    InvalidRequest,
    Overloaded,
    StoreFailed,
)
from penstock.models.tokenizer import ByteTokenizer, spec_of
from penstock.server import boundary, channel
from penstock.server import links as links_module
from penstock.server.boundary import (
    Awake,
    Beat,
    Bye,
    Frames,
    FromEngine,
    FromFront,
    ProtocolBroken,
    Wire,
    error_from,
    fault_from,
    frame,
    packed,
    tokens_of,
    unpacked,
)
from penstock.server.channel import Outgoing, SocketFrontEnd
from penstock.server.client import EngineClient
from penstock.server.links import EngineService
from penstock.server.seats import Gate, GateNumber, SeatBook
from penstock.server.supervise import Supervisor
from penstock.testing.tiny_models import TINY_LLAMA
from tests.cpu.server.served import DEADLINE_S, until
from tests.support.adapters import write_random_adapter
from tests.support.driving import tiny_config

MOST_BEATS = 120  # until an answer that takes milliseconds
GREEDY = {"temperature": 0.0, "ignore_eos": True}
FOUR = SamplingParams(max_tokens=4)


def event(number: int, **fields: object) -> tuple[int, TokenEvent]:
    return number, TokenEvent(f"r{number}", **fields)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------- messages


def test_events_of_a_request_keep_their_order_where_steps_were_merged() -> None:
    """What comes behind an event that is more than a token goes behind it: plain tokens of a message are read
    first."""
    woken: list[None] = []
    out = Outgoing(lambda: woken.append(None))
    out.put([event(1, tokens=(10,)), event(2, tokens=(20,), source=KvSource(computed=1))])
    out.put([event(1, tokens=(11,)), event(2, tokens=(21,)), event(2, finish=FinishReason.STOP)])
    out.put(Beat(1, 0.0))
    assert len(woken) == 1, "one wake-up for all that has gathered"
    batch, beat = out.take()
    message = tokens_of(batch)
    assert message.plain == [1, 10, 1, 11] and beat == Beat(1, 0.0)
    assert [(one.number, one.event.tokens, one.event.finish) for one in message.rest] == [
        (2, (20,), None),
        (2, (21,), None),
        (2, (), FinishReason.STOP),
    ]


def test_a_message_that_comes_while_others_are_taken_is_taken_with_them_or_wakes_again() -> None:
    woken: list[None] = []
    out = Outgoing(lambda: woken.append(None))
    out.put(Beat(1, 0.0))
    taking = out.take()
    next(taking)
    out.put(Beat(2, 0.0))
    assert len(woken) == 2 and [one.number for one in taking] == [2]
    assert not [*out.take()]


def test_an_event_arrives_as_it_was() -> None:
    scores = TokenScores(
        *(np.arange(3, dtype=kind) for kind in (np.int32, np.float32, np.int32)),
        *(np.ones((3, 2), kind) for kind in (np.int32, np.float32)),
    )
    given_event = TokenEvent(
        "r",
        (1, 2),
        (TokenLogprob(1, -0.5, 1, ((1, -0.5), (2, -1.0))),) * 2,
        PromptLogprobs((None, scores)),
        FinishReason.LENGTH,
        7,
        KvSource(1, 2, 3, 4, 5),
        "wrong",
        0.25,
        0.125,
        0.0625,
        Overloaded("later", 3.0),
    )
    (read,) = Frames[boundary.Tokens](FromEngine).feed(frame(tokens_of([(5, given_event)])))
    made = read.rest[0].made("r")
    assert made[:11] == given_event[:11]
    assert isinstance(made.failure, Overloaded)
    assert (str(made.failure), made.failure.retry_after_s) == ("later", 3.0)


def test_an_error_is_the_same_on_the_other_side_and_a_defect_there_is_a_defect_here() -> None:
    for error in (
        InvalidRequest("a", "p"),
        ContextExceeded(3, "x"),
        Overloaded("o", 2.5),
        EngineClosed("z"),
        StoreFailed("s"),
        DeadlineExceeded("d"),
    ):
        made = error_from(fault_from(error))
        assert (type(made), str(made), vars(made)) == (type(error), str(error), vars(error))
    assert type(error_from(fault_from(KeyError("secret")))) is RuntimeError


@given(st.lists(st.integers(0, 2**31)), st.lists(st.integers(1, 40), max_size=30))
def test_messages_come_out_of_any_pieces(numbers: list[int], sizes: list[int]) -> None:
    data = b"".join(frame(boundary.Cancel(number)) for number in numbers)
    frames: Frames[boundary.Cancel] = Frames(FromFront)
    found = []
    for size in (*sizes, len(data)):
        found += frames.feed(data[:size])
        data = data[size:]
    assert [message.number for message in found] == numbers


def test_settings_reach_the_processes_whatever_bytes_and_numbers_they_have() -> None:
    """A key or a path comes from a shell, which knows no alphabet."""
    key, path, number = "caf\udce9", "/tmp/\udcff", 10**30
    server = ServerConfig(api_key=key, max_body_bytes=number, served_names=("a", "b"))
    config = Config(
        ModelSource(path, seed=number),
        KvConfig(residency="scored", pin_spans=((0, 64), (128, 192))),
        EngineConfig(max_model_len=512),
        OffloadConfig(ssd_dir=path, host_gib=0.1),
        lora=LoraConfig((("a", path),), path),
    )
    sent = boundary.EngineSetup(
        boundary.VERSION, packed(config), packed(server), ("info", "text"), "http://x"
    )
    (got,) = Frames[boundary.FromParent](boundary.FromParent).feed(frame(sent))
    assert isinstance(got, boundary.EngineSetup)
    assert (unpacked(got.config, Config), unpacked(got.server, ServerConfig)) == (config, server)
    for wrong in (b"", b"[]", b'{"port": -1}', b'{"port": "x"}'):
        with pytest.raises(ProtocolBroken):
            unpacked(wrong, ServerConfig)


# ------------------------------------------------------------------------------------------ the engine's side


class Linked:
    """An engine whose loop runs, and as many fronts as a test makes."""

    def __init__(self) -> None:
        self.engine: Engine = build(tiny_config("tiny-llama", host_blocks=16))
        self.loop = EngineLoop(self.engine)
        self.detached: list[int] = []
        self.open_then: list[int] = []  # requests of all fronts, each time that one was over
        self.service = EngineService(self.engine, self.loop, self._detached)
        self._stack = contextlib.ExitStack()
        self._indices = itertools.count()

    def front(self, small: bool = False) -> Wire[FromEngine]:
        """The front's end, behind the greeting."""
        theirs, ours = socket.socketpair()
        if small:
            for one in (theirs, ours):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        ours.settimeout(DEADLINE_S)
        self._stack.enter_context(contextlib.closing(ours))
        self.service.attach(next(self._indices), theirs)
        wire: Wire[FromEngine] = Wire(ours, FromEngine)
        hello = wire.receive()
        assert isinstance(hello, boundary.Hello) and hello.residency == self.engine.residency
        assert hello.is_warm is self.loop.is_warm
        return wire

    def _detached(self, index: int) -> None:
        self.open_then.append(self.num_open)
        self.detached.append(index)

    @property
    def num_open(self) -> int:
        return sum(self.engine.stats().requests.values())

    def close(self) -> None:
        self._stack.close()
        self.service.close(0.0)
        self.engine.check()


@pytest.fixture
def linked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Linked]:
    monkeypatch.setattr(links_module, "SILENT_BEATS", 1 << 40)  # these fronts answer no beats
    made = Linked()
    made.service.start()
    made.loop.start()
    yield made
    made.close()


def submit(number: int, name: str = "r", **sampling: object) -> boundary.Submit:
    params = SamplingParams(**{**GREEDY, **sampling})  # type: ignore[arg-type]
    return boundary.Submit(number, Submission([*range(5)], params, f"{name}{number}"))


def call(number: int, name: str, *arguments: object) -> boundary.Call:
    return boundary.Call(number, name, msgspec.msgpack.encode(arguments))


def steps_of(wire: Wire[FromEngine]) -> Iterator[boundary.Tokens]:
    while (message := wire.receive()) is not None:
        if isinstance(message, boundary.Tokens):
            yield message


def until_over(wire: Wire[FromEngine]) -> tuple[int, FinishReason]:
    """Tokens and finish of the only request of a front."""
    num = 0
    for step in steps_of(wire):
        num += len(step.plain) // 2 + sum(len(one.event.tokens) for one in step.rest)
        for one in step.rest:
            if one.event.finish is not None:
                return num, one.event.finish
    raise AssertionError("there is no end")


def reply_of(wire: Wire[FromEngine]) -> boundary.Returned:
    num_beats = 0
    while not isinstance(message := wire.receive(), boundary.Returned):
        assert message is not None
        num_beats += isinstance(message, Beat)
        assert num_beats < MOST_BEATS, "there is no answer"
    return message


def test_a_front_that_hangs_up_has_its_requests_cancelled_and_is_over_then(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, left = linked.front(), linked.front()
    kept.send(submit(1, max_tokens=1500))
    for number in range(1, 4):
        left.send(submit(number, "left", max_tokens=1500))
    until(lambda: linked.num_open == 4, "all are running")
    cancel, asked = linked.engine.cancel, list[str]()
    monkeypatch.setattr(linked.engine, "cancel", asked.append)  # until then its requests go on
    left.sock.close()
    until(lambda: len(asked) == 3, "its requests are to end")
    for request_id in asked:
        cancel(request_id)
    until(lambda: linked.detached == [1], "nothing of it is left")
    assert linked.open_then == [1]
    monkeypatch.undo()
    kept.send(boundary.Cancel(1))
    assert until_over(kept)[1] is FinishReason.CANCELLED


def test_what_a_front_held_when_it_hung_up_is_let_go_of(linked: Linked, tmp_path: Path) -> None:
    """An adapter can be freed, and a session ends with its prompt: how much its client was given is not
    known."""
    adapters = linked.engine.adapters
    adapter = adapters.load("a", write_random_adapter(tmp_path / "a", TINY_LLAMA, 0)).adapter
    front = linked.front()
    front.send(boundary.HoldAdapter(1, adapter))
    sampling = SamplingParams(**{**GREEDY, "max_tokens": 200})  # type: ignore[arg-type]
    front.send(boundary.Submit(1, Submission([*range(20)], sampling, "r1", session="agent")))
    next(steps_of(front))
    assert adapters.unload("a")
    adapters.hold(adapter).end()  # the front still has it
    front.sock.close()
    until(lambda: linked.detached == [0], "nothing of the front is left")
    with pytest.raises(InvalidRequest, match="is not loaded"):
        adapters.hold(adapter)
    assert linked.engine.snapshots.take(SnapshotRequest("talk", session="agent")).num_tokens == 20


def test_a_front_that_does_not_read_is_cut_off_and_delays_no_other(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    # more than the other one is told: however late it reads, it is not cut off
    monkeypatch.setattr(channel, "MOST_EVENTS", 640)
    deaf, good = linked.front(small=True), linked.front()
    for number in range(1, 5):
        deaf.send(submit(number, "deaf", max_tokens=600, logprobs=20))
    good.send(submit(1, max_tokens=600))
    assert until_over(good) == (600, FinishReason.LENGTH)
    until(lambda: linked.detached == [0], "it was cut off, and its request cancelled")
    assert linked.engine.stats().generated_tokens < 5 * 600


def test_messages_to_a_front_that_does_not_read_are_bounded(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beats gather, and answers, though nothing is generated."""
    monkeypatch.setattr(channel, "MOST_MESSAGES", 16)
    linked.front(small=True)
    (link,) = linked.service._links
    for _ in range(2000):  # more than the socket takes
        link.tell(boundary.AdapterList(0, [LoadedAdapter(Adapter("a" * 128, "d"), "root", 1.0, False)]))
    until(lambda: linked.detached == [0], "it was cut off")


def test_a_front_is_not_silent_while_the_engine_deals_with_what_it_said(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A submit may wait for a store; what the front says meanwhile is not read yet."""
    entered, gate = threading.Event(), threading.Event()
    submitted = linked.engine.submit

    def slow(*args: Any, **options: Any) -> str:
        entered.set()
        assert gate.wait(DEADLINE_S)
        return submitted(*args, **options)

    monkeypatch.setattr(linked.engine, "submit", slow)
    front = linked.front()
    front.send(Awake())  # it has said something before
    front.send(submit(1, max_tokens=2))
    assert entered.wait(DEADLINE_S)
    (link,) = linked.service._links
    monkeypatch.setattr(links_module, "SILENT_BEATS", 3)
    for _ in range(10):
        link.beat(0.0, True)
    monkeypatch.setattr(links_module, "SILENT_BEATS", 1 << 40)
    gate.set()
    assert until_over(front) == (2, FinishReason.LENGTH)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 64,
        b"\x05\0\0\0hello",
        frame(boundary.Tokens([], [])),
        frame(boundary.Call(1, "close", b"\x90")),
        frame(boundary.Call(1, "kv.reset", b"\x01")),
    ],
    ids=["length", "text", "the other end's", "no call", "no arguments"],
)
def test_garbage_cuts_off_the_front_that_says_it_and_no_other(
    linked: Linked, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = linked.front(), linked.front()
    bad.send(submit(1, max_tokens=1900))
    until(lambda: linked.num_open == 1, "it is running")
    bad.sock.sendall(garbage)
    until(lambda: linked.detached == [0], "it was cut off, and its request cancelled")
    assert "front process 0 is cut off: it says what cannot be" in caplog.text
    good.send(submit(1, max_tokens=2))
    assert until_over(good) == (2, FinishReason.LENGTH)


def test_a_call_that_fails_is_answered_with_its_error_and_is_not_in_progress_any_more(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StoreFailed("the disk is gone")

    calls = [("kv.reset", (("device",),)), ("kv.wait_flushed", ("persisted", 1.0))]
    front = linked.front()
    for number, (name, arguments) in enumerate(itertools.chain(calls, calls)):
        monkeypatch.setattr(linked.engine.kv, name.removeprefix("kv."), fail)
        front.send(call(number, name, *arguments))
        assert reply_of(front).fault == boundary.SentError("StoreFailed", "the disk is gone")


# Holds invariant 20: a call about snapshots can be cancelled while it waits.
def test_a_call_about_snapshots_that_is_abandoned_leaves_the_line_and_one_of_a_front_that_is_gone_does(
    linked: Linked,
) -> None:
    """No thread waits for either."""
    snapshots, reached, go_on = linked.engine.snapshots, threading.Event(), threading.Event()
    busy = snapshots._begin(lambda: (reached.set(), go_on.wait(60.0)))
    assert reached.wait(60.0)
    front = linked.front()
    for number in (1, 2):
        front.send(call(number, "snapshots.begin_open", f"talk-{number}", "", None))
    until(lambda: snapshots.figures().waiting == 2, "both wait")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("front-call")]
    front.send(boundary.LetGo(1))
    until(lambda: snapshots.figures().waiting == 1, "the first has left")
    front.sock.close()
    until(lambda: snapshots.figures().waiting == 0, "the second has left with its front")
    assert not busy.done()
    go_on.set()


def test_an_adapter_can_be_submitted_to_until_every_front_knows_that_it_is_unloaded(
    linked: Linked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change is answered then, and not before."""
    monkeypatch.setattr(links_module, "ANSWER_S", DEADLINE_S)
    adapter = linked.engine.adapters.load("a", write_random_adapter(tmp_path / "a", TINY_LLAMA, 0)).adapter
    one, other = linked.front(), linked.front()
    one.send(call(1, "adapters.unload", "a"))
    for wire in (one, other):
        while not isinstance(message := wire.receive(), boundary.AdapterList):
            assert message is not None and not isinstance(message, boundary.Returned)
    one.send(Awake(adapters=message.version))
    late = submit(1, max_tokens=2)
    late.asked = dataclasses.replace(late.asked, adapter=adapter)
    other.send(late)  # before it has read that
    assert until_over(other) == (2, FinishReason.LENGTH)
    one.sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while (told := one.receive()) is not None:
            assert not isinstance(told, boundary.Returned), "the other front does not know it yet"
    one.sock.settimeout(DEADLINE_S)
    other.send(Awake(adapters=message.version))
    assert reply_of(one).value == msgspec.msgpack.encode(True)
    with pytest.raises(InvalidRequest):
        linked.engine.adapters.hold(adapter)


def test_ready_waits_until_every_front_knows_that_the_engine_is_warm(linked: Linked) -> None:
    one, other = linked.front(), linked.front()
    one.send(Awake(is_warm=True))
    waiting = threading.Thread(target=linked.service.wait_known_warm)
    waiting.start()
    other.send(Awake())
    until(lambda: linked.service._links[0].heard.is_warm, "the first one knows it")
    assert waiting.is_alive(), "the other one does not know it yet"
    other.send(Awake(is_warm=True))
    waiting.join(DEADLINE_S)
    assert all(link.heard.is_warm for link in linked.service._links)


def test_a_compiled_grammar_is_kept_until_its_front_lets_go_and_a_refused_one_is_not(linked: Linked) -> None:
    pytest.importorskip("llguidance")
    wire = linked.front()
    (link,) = linked.service._links
    for number, pattern, is_kept in ((7, "[ab]{3}", True), (8, "[ab", False)):
        wire.send(call(number, "grammars.begin", Grammar("regex", pattern)))
        reply = reply_of(wire)
        assert reply.call == number and (reply.fault is None) is is_kept
        assert list(link._kept) == ([number] if is_kept else [])
        wire.send(boundary.LetGo(number))
        until(lambda: not link._kept, "it is let go of")


# ------------------------------------------------------------------------------------------- the front's side


def greeting(limits: PromptLimits, *adapters: LoadedAdapter, version: int = boundary.VERSION) -> bytes:
    """What an engine says first."""
    tokenizer = spec_of(ByteTokenizer(300))
    residency = ResidencyChoice(8, 16, False, (), Division(4, 16, 1, 3, 1))
    return frame(
        boundary.Hello(
            version, "m", limits, {}, ("device",), 9, 1, 0.0, False, tokenizer, list(adapters), residency
        )
    )


def client_of(front: socket.socket) -> EngineClient:
    return EngineClient(SocketFrontEnd(front))


Play = Callable[[EngineClient, Wire[FromFront]], Awaitable[None]]


def as_front(play: Play, *adapters: LoadedAdapter, behind: bytes = b"", context: int = 512) -> None:
    """`play` on the event loop of a front, with the engine's end of its connection. `behind`: what comes
    right behind the greeting."""
    engine, front = socket.socketpair()
    front.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    engine.settimeout(30.0)  # for what takes milliseconds
    engine.sendall(greeting(PromptLimits(context, 300, context), *adapters) + behind)

    async def run() -> None:
        client = client_of(front)
        client.start()
        await play(client, Wire(engine, FromFront))

    with engine, front:
        asyncio.run(run())


async def heard(engine: Wire[FromFront]) -> Any:
    return await asyncio.to_thread(engine.receive)


async def wait_read(engine: Wire[FromFront]) -> None:
    """All that was said before: a front reads in turn, and answers a beat at once."""
    engine.send(Beat(1, 0.0))
    while not isinstance(await heard(engine), Awake):
        pass


def ask(client: EngineClient, listener: Callable[[TokenEvent], None] = lambda event: None) -> int:
    number = client.new_number()
    client.submit(number, Submission([1], FOUR, "a"), listener)
    return number


@pytest.mark.parametrize(
    ("first", "error"),
    [
        (b"", "before it was ready"),
        (frame(Beat(1, 0.0)), "began with Beat"),
        (greeting(PromptLimits(512, 300, 512), version=boundary.VERSION + 1), "of the protocol, and this"),
    ],
)
def test_an_engine_that_ends_says_something_else_or_has_another_version_is_refused(
    first: bytes, error: str
) -> None:
    engine, front = socket.socketpair()
    with front:
        with engine:
            engine.sendall(first)
        with pytest.raises((EngineClosed, ProtocolBroken), match=error):
            client_of(front)


@pytest.mark.parametrize("end", ["garbage", "half a pair", "second greeting", "hang up", "failed", "bye"])
def test_all_who_wait_and_all_who_ask_later_are_told_when_the_engine_is_gone(end: str) -> None:
    events: list[TokenEvent] = []
    said = {
        "garbage": b"\xff" * 8,
        "half a pair": frame(boundary.Tokens([1], [])),
        "second greeting": greeting(PromptLimits(512, 300, 512)),
        "failed": frame(Bye("RuntimeError: no")),
        "bye": frame(Bye()),
    }

    async def play(client: EngineClient, engine: Wire[FromFront]) -> None:
        ask(client, events.append)
        given_up, asked = (client.prefetch([1]) for _ in range(2))
        assert given_up.cancel()
        if end == "hang up":
            engine.sock.close()
        else:
            engine.sock.sendall(said[end])
        with pytest.raises(EngineClosed):
            await asyncio.wait_for(asyncio.wrap_future(asked), DEADLINE_S)
        (last,) = events
        assert last.finish is FinishReason.ERROR and isinstance(last.failure, EngineClosed)
        assert client.over.is_set() and (client.error is None) is (end == "bye")
        if end == "failed":
            assert last.error == str(last.failure) == "the engine has failed: RuntimeError: no"
        for again in (lambda: ask(client), lambda: client.call("stats")):
            with pytest.raises(EngineClosed):
                again()
        loop, sock = asyncio.get_running_loop(), client._channel._sock
        assert not loop.remove_reader(sock) and not loop.remove_writer(sock), "the loop turns for it no more"

    as_front(play)


def test_what_is_asked_on_another_thread_while_the_engine_ends_is_refused() -> None:
    """That thread has looked before, and sends after: no event would ever come."""
    events: list[TokenEvent] = []

    def ends_meanwhile(client: EngineClient) -> None:
        send = client._channel.send
        client._channel.send = lambda message: (send(message), client._take(Bye()))  # type: ignore[method-assign]

    async def play(client: EngineClient, engine: Wire[FromFront]) -> None:
        ends_meanwhile(client)
        asked = client.prefetch([1])
        assert asked.done() and isinstance(asked.exception(), EngineClosed)

    as_front(play)

    async def submitting(client: EngineClient, engine: Wire[FromFront]) -> None:
        ends_meanwhile(client)
        ask(client, events.append)
        assert not client.num_open

    as_front(submitting)
    assert [event.finish for event in events] == [FinishReason.ERROR]


def test_messages_of_many_socket_buffers_arrive_in_order_though_the_engine_reads_late() -> None:
    prompts = [[n % 250 for n in range(first, first + 150_000)] for first in (0, 1, 2)]

    async def play(client: EngineClient, engine: Wire[FromFront]) -> None:
        for prompt in prompts:
            number = client.new_number()
            client.submit(number, Submission(prompt, FOUR, "a"), lambda event: None)
        client.cancel(number)
        for prompt in prompts:
            message = await heard(engine)
            assert message.asked.prompt == prompt
        assert await heard(engine) == boundary.Cancel(number)
        loop = asyncio.get_running_loop()
        assert not loop.remove_writer(client._channel._sock), "the loop turns for it no more"

    as_front(play, context=1 << 20)


def test_a_request_hears_all_of_its_own_events_one_of_them_last_and_is_cancelled_until_then() -> None:
    events: list[TokenEvent] = []

    async def play(client: EngineClient, engine: Wire[FromFront]) -> None:
        number = ask(client, events.append)
        submitted, unknown = await heard(engine), number + 100
        assert (submitted.number, submitted.asked.id) == (number, "a")
        client.cancel(unknown)
        client.cancel(number)
        assert await heard(engine) == boundary.Cancel(number)
        for batch in (
            [event(unknown, tokens=(9,)), event(number, tokens=(5,), source=KvSource(computed=1))],
            [event(number, tokens=(6,)), event(unknown, finish=FinishReason.STOP)],
            [event(number, tokens=(7,), finish=FinishReason.LENGTH)],
            [event(number, tokens=(8,)), event(number, finish=FinishReason.LENGTH)],
        ):
            engine.send(tokens_of(batch))
        await wait_read(engine)
        client.cancel(number)
        assert not client.num_open
        client.call("stats")
        assert isinstance(await heard(engine), boundary.Call), "nothing was said of it any more"
        engine.send(Bye())
        await asyncio.wait_for(client.over.wait(), DEADLINE_S)

    as_front(play)
    assert [(one.request_id, one.tokens) for one in events] == [("a", (5,)), ("a", (6,)), ("a", (7,))]


def test_a_call_ends_with_its_error_and_an_answer_that_cannot_be_is_one() -> None:
    async def play(client: EngineClient, engine: Wire[FromFront]) -> None:
        asked = client.prefetch([1])
        fault = fault_from(StoreFailed("the disk is gone"))
        engine.send(boundary.Returned((await heard(engine)).number, fault=fault))
        with pytest.raises(StoreFailed, match="the disk is gone"):
            await asyncio.wrap_future(asked)
        asked = client.call("stats")
        engine.send(boundary.Returned((await heard(engine)).number, msgspec.msgpack.encode("no numbers")))
        with pytest.raises(ProtocolBroken, match="answered what cannot be"):
            await asyncio.wrap_future(asked)

    as_front(play)


def test_a_call_that_is_cancelled_is_given_up_there_and_its_answer_goes_nowhere() -> None:
    async def play(client: EngineClient, engine: Wire[FromFront]) -> None:
        for name, arguments in (("snapshots.begin_open", ("talk", "", None)), ("grammars.begin", (GRAMMAR,))):
            waiting = asyncio.ensure_future(asyncio.wrap_future(client.call(name, *arguments)))
            asked = await heard(engine)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert await heard(engine) == boundary.LetGo(asked.number)
            engine.send(boundary.Returned(asked.number, fault=fault_from(StoreFailed("too late"))))
        finding = asyncio.wrap_future(client.call("snapshots.begin_find", "talk", ""))
        engine.send(boundary.Returned((await heard(engine)).number, fault=fault_from(StoreFailed("in time"))))
        with pytest.raises(StoreFailed, match="in time"):
            await finding

    as_front(play)


GRAMMAR = Grammar("regex", "[ab]{3}")


def test_a_compiled_grammar_is_let_go_of_by_the_number_of_its_call() -> None:
    async def play(client: EngineClient, engine: Wire[FromFront]) -> None:
        compiling = client.call("grammars.begin", GRAMMAR)
        asked = await heard(engine)
        engine.send(boundary.Returned(asked.number, msgspec.msgpack.encode(None)))
        client.let_go(await asyncio.wrap_future(compiling))
        assert await heard(engine) == boundary.LetGo(asked.number)

    as_front(play)


def test_a_front_knows_the_adapters_holds_them_and_acknowledges_a_new_list() -> None:
    """Also one that came right behind the greeting."""
    old, new = (LoadedAdapter(Adapter(name, "d"), "root", 1.0, False) for name in ("old", "new"))

    async def play(client: EngineClient, engine: Wire[FromFront]) -> None:
        assert client.adapters == {"new": new} and client.hold_adapter("old") is None
        assert (await heard(engine)).adapters == 4
        hold = client.hold_adapter("new")
        assert hold is not None
        with hold as adapter:
            assert adapter == new.adapter
        held, let_go = await heard(engine), await heard(engine)
        assert held.adapter == new.adapter and let_go == boundary.LetGo(held.number)

    as_front(play, old, behind=frame(boundary.AdapterList(4, [new])))


def test_a_beat_is_answered_with_figures_and_says_how_the_engine_is() -> None:
    async def play(client: EngineClient, engine: Wire[FromFront]) -> None:
        assert 50.0 <= client.beat_age_s() < 100.0
        assert await heard(engine) == Awake(1, is_warm=True)
        client.figures.by_finish["stop"] += 3
        engine.send(Beat(2, 0.0, False))
        told = await heard(engine)
        assert (told.beat, told.is_warm, told.figures.by_finish) == (2, False, {"stop": 3})
        assert not client.is_warm and client.beat_age_s() < 50.0

    as_front(play, behind=frame(Beat(1, 50.0)))


# ------------------------------------------------------------------------------------------------------ seats


def test_seats_are_counted_over_all_fronts_and_those_of_one_that_is_gone_come_back() -> None:
    book = SeatBook.make(3)
    one, other, more = (Gate(5, "things", book, row) for row in range(3))
    one.take(2)
    others = other.take(2)
    with pytest.raises(Overloaded):
        more.take(2)
    assert more.taken == 4
    more.take(1)
    with pytest.raises(Overloaded):
        one.take(1)
    another = Gate(5, "others", book, 0, GateNumber.SIDE)
    another.take(5)
    others.give_back(1)
    assert one.taken == 4
    book.clear(0)
    assert one.taken == 2 and another.taken == 0


HOLD = """
import fcntl, os, signal, sys
fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX)
print("held", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""
TAKE = """
import sys
from penstock.server.seats import GateNumber, SeatBook
book = SeatBook(int(sys.argv[1]), 4)
print(sum(book.try_add(int(sys.argv[2]), GateNumber.GENERATIONS, 1, 1000) for _ in range(700)))
"""


def seat_process(script: str, fd: int, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", script, str(fd), *arguments],
        pass_fds=[fd],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_process_that_stands_still_with_the_lock_stops_no_other() -> None:
    book = SeatBook.make(2)
    with seat_process(HOLD, book.fd) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        try:
            assert book.try_add(0, GateNumber.GENERATIONS, 1, 3)
            book.clear(0)
        finally:
            holder.kill()
    assert book.total(GateNumber.GENERATIONS) == 0


def test_processes_that_take_seats_at_once_never_take_more_than_there_are_nor_fewer() -> None:
    book = SeatBook.make(4)
    takers = [seat_process(TAKE, book.fd, str(row)) for row in range(4)]
    taken = [int(taker.communicate()[0]) for taker in takers]
    assert sum(taken) == 1000 == book.total(GateNumber.GENERATIONS)


def test_how_many_fronts_there_are_unless_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for said, device, num_cores, expected in (
            (None, "cpu", 64, 1),
            (None, "cuda", 2, 1),
            (None, "cuda", 8, 2),
            (None, "cuda", 64, 4),
            (7, "cpu", 2, 7),
        ):
            monkeypatch.setattr(os, "sched_getaffinity", lambda pid, num=num_cores: set(range(num)))
            server = ServerConfig(api_processes=said)
            parent = Supervisor(Config(), server, ("info", "text"), listener, lambda kind, fds: [])
            assert parent._num_fronts(device) == expected
