"""The connection between an engine and its front processes, with a real engine behind it: what is said, and
what becomes of fronts that hang up, do not read, or talk nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import itertools
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
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
    InvariantBroken,
    Overloaded,
    StoreFailed,
)
from penstock.models.chat import ChatTemplate
from penstock.models.tokenizer import ByteTokenizer, Tokenizer, TokenizerSpec, spec_of, tokenizer_of
from penstock.server import boundary, remote
from penstock.server import links as links_module
from penstock.server.boundary import (
    Frames,
    FromEngine,
    FromFront,
    ProtocolBroken,
    Wire,
    error_from,
    fault_from,
    frame,
    packed,
    unpacked,
)
from penstock.server.client import RequestFigures
from penstock.server.links import FrontLink, FrontLinks, tokens_of
from penstock.server.remote import RemoteAdapters, RemoteEngine, greeted
from penstock.server.seats import Gate, GateNumber, SeatBook
from penstock.server.supervise import Supervisor
from penstock.testing.tiny_models import TINY_LLAMA, tiny_tokenizer
from tests.cpu.server.served import DEADLINE_S, until
from tests.support.adapters import write_random_adapter
from tests.support.driving import tiny_config

MOST_BEATS = 120  # until an answer that takes milliseconds
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def greeting(
    limits: PromptLimits,
    adapters: Sequence[LoadedAdapter] = (),
    lora: bool = False,
    version: int = boundary.VERSION,
) -> bytes:
    """What an engine says first."""
    tokenizer = spec_of(ByteTokenizer(300))
    residency = ResidencyChoice(8, 16, False, (), Division(4, 16, 1, 3, 1))
    return frame(
        boundary.Hello(
            version, "m", limits, {}, ("device",), 9, 1, 0.0, lora, tokenizer, list(adapters), residency
        )
    )


class Linked:
    """An engine whose loop runs, and as many fronts as a test makes."""

    def __init__(self) -> None:
        self.engine: Engine = build(tiny_config("tiny-llama", host_blocks=16))
        self.loop = EngineLoop(self.engine)
        self.detached: list[int] = []
        self.open_then: list[int] = []  # requests of all fronts, each time that one was over
        self.links = FrontLinks(self.engine, self.loop, self._detached)
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
        self.links.add(next(self._indices), theirs)
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
        self.loop.close(0.0)
        self.links.close()
        self.engine.check()


@pytest.fixture(autouse=True)
def _fronts_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of these tests answer no beats."""
    monkeypatch.setattr(links_module, "SILENT_BEATS", 1 << 40)


@pytest.fixture
def linked() -> Iterator[Linked]:
    made = Linked()
    made.loop.start()
    yield made
    made.close()


def submit(number: int, name: str = "r", **sampling: object) -> boundary.Submit:
    prompt = np.arange(5, dtype=np.uint32).tobytes()
    return boundary.Submit(number, f"{name}{number}", prompt, SamplingParams(**{**GREEDY, **sampling}))  # type: ignore[arg-type]


def call(number: int, name: str, *arguments: object) -> boundary.Call:
    return boundary.Call(number, name, msgspec.msgpack.encode(arguments))


def steps_of(wire: Wire[FromEngine]) -> Iterator[boundary.Tokens]:
    while (message := wire.receive()) is not None:
        if isinstance(message, boundary.Tokens):
            yield message


# ----------------------------------------------------------------------------------------------------- a step


def test_a_step_is_left_for_a_front_as_one_list_of_all_its_requests() -> None:
    """The engine is stepped by hand, and nobody takes what is left: so it is seen what one step leaves."""
    made = Linked()
    ours, theirs = socket.socketpair()
    link = FrontLink(0, theirs, made.links)
    made.links._links = [link]
    for number in range(1, 9):
        link._submit(submit(number, max_tokens=20))
    left: list[list[object]] = []
    for _ in range(40):
        made.engine.step()
        found = [link._queue.get() for _ in range(link._queue.qsize())]
        lists = [item for item in found if isinstance(item, list)]  # others are beats
        assert len(lists) <= 1
        left += lists
    assert [len(events) for events in left] == [8] * 20
    assert link._num_queued == 160 and not link._open
    made.links._links = []
    ours.close()
    theirs.close()
    made.loop.start()
    made.close()


def test_two_fronts_hear_of_their_own_requests_only(linked: Linked) -> None:
    one, other = linked.front(), linked.front()
    one.send(submit(1, max_tokens=4))
    other.send(submit(1, "another", max_tokens=6))
    for wire, num in ((one, 4), (other, 6)):
        found = 0
        for step in steps_of(wire):
            found += len(step.plain) // 2 + sum(len(sent.event.tokens) for sent in step.rest)
            if any(sent.event.finish for sent in step.rest):
                break
        assert found == num


def event(number: int, **fields: object) -> tuple[int, TokenEvent]:
    return number, TokenEvent(f"r{number}", **fields)  # type: ignore[arg-type]


def test_events_of_a_request_keep_their_order_where_steps_were_merged() -> None:
    """What comes behind an event that is more than a token goes behind it: plain tokens of a message are read
    first."""
    batch = [
        event(1, tokens=(10,)),
        event(2, tokens=(20,), source=KvSource(computed=1)),
        event(1, tokens=(11,)),
        event(2, tokens=(21,)),
        event(2, finish=FinishReason.STOP),
    ]
    message = tokens_of(batch)
    assert message.plain == [1, 10, 1, 11]
    assert [(one.number, one.event.tokens, one.event.finish) for one in message.rest] == [
        (2, (20,), None),
        (2, (21,), None),
        (2, (), FinishReason.STOP),
    ]


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
    assert isinstance(made.failure, Overloaded) and (str(made.failure), made.failure.retry_after_s) == (
        "later",
        3.0,
    )


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("a", "p"),
        ContextExceeded(3, "x"),
        Overloaded("o", 2.5),
        EngineClosed("z"),
        StoreFailed("s"),
        DeadlineExceeded("d"),
    ],
)
def test_an_error_is_the_same_on_the_other_side(error: Exception) -> None:
    made = error_from(fault_from(error))
    assert (type(made), str(made), vars(made)) == (type(error), str(error), vars(error))


def test_a_defect_there_is_a_defect_here() -> None:
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


def test_a_tokenizer_is_made_again_from_plain_data() -> None:
    plain = spec_of(ByteTokenizer(300))
    assert plain == TokenizerSpec(None, 300) and tokenizer_of(plain).encode("hé") == list("hé".encode())


def test_a_vocabulary_with_a_template_is_made_again_with_all_that_the_template_names() -> None:
    roles = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    template = ChatTemplate(
        "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
        roles,
        "{{ eos_token }}{{ tools | tojson }}",
    )
    made = Tokenizer(tiny_tokenizer(), (2, 7), template)
    again = tokenizer_of(spec_of(made))
    messages = [{"role": "user", "content": "hello"}]
    assert again.encode_chat(messages) == made.encode_chat(messages)
    assert again.decode(again.encode_chat(messages)) == "<|begin|>hello<|end|>"
    assert again.decode(again.encode_chat(messages, tools=[{"name": "now"}])) == '<|end|>[{"name": "now"}]'
    assert again.eos_ids == {2, 7} and again.encode("a b c") == made.encode("a b c")


# ------------------------------------------------------------------------------------ fronts that are no good


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
    assert any(one.event.finish is FinishReason.CANCELLED for step in steps_of(kept) for one in step.rest)
    until(lambda: linked.num_open == 0, "the other one's was cancelled as well")


def test_an_adapter_that_a_front_held_when_it_hung_up_can_be_freed(linked: Linked, tmp_path: Path) -> None:
    adapters = linked.engine.adapters
    adapter = adapters.load("a", write_random_adapter(tmp_path / "a", TINY_LLAMA, 0)).adapter
    front = linked.front()
    front.send(boundary.HoldAdapter(1, adapter))
    _wait_dealt_with(front)
    assert adapters.unload("a")
    adapters.hold(adapter).end()  # the front still has it
    front.sock.close()
    until(lambda: linked.detached == [0], "nothing of the front is left")
    with pytest.raises(InvalidRequest, match="is not loaded"):
        adapters.hold(adapter)


def test_a_front_that_does_not_read_is_cut_off_and_holds_up_nobody(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    # more than the other one is told: however late it reads, it is not cut off
    monkeypatch.setattr(links_module, "MOST_EVENTS", 640)
    deaf, good = linked.front(small=True), linked.front()
    for number in range(1, 5):
        deaf.send(submit(number, "deaf", max_tokens=600, logprobs=20))
    good.send(submit(1, max_tokens=600))
    found = 0
    for step in steps_of(good):
        found += len(step.plain) // 2 + sum(len(one.event.tokens) for one in step.rest)
        if any(one.event.finish for one in step.rest):
            break
    assert found == 600
    until(lambda: linked.detached == [0], "it was cut off, and its request cancelled")
    assert linked.engine.stats().generated_tokens < 5 * 600


def test_a_front_that_stands_still_is_cut_off_though_nothing_is_generated(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beats gather, and answers: nothing may grow without bound for somebody who does not read."""
    monkeypatch.setattr(links_module, "MOST_MESSAGES", 16)
    deaf = linked.front(small=True)
    (link,) = linked.links._links
    for _ in range(2000):  # more than the socket takes
        link.tell(boundary.AdapterList(0, [LoadedAdapter(Adapter("a" * 128, "d"), "root", 1.0, False)]))
    until(lambda: linked.detached == [0], "it was cut off")
    assert link._queue.qsize() <= 32
    assert deaf.sock.fileno() >= 0


def test_a_front_that_says_nothing_any_more_is_cut_off_and_its_requests_are_cancelled(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process: its socket takes what it is told for minutes. One that has yet to say something is
    still starting."""
    stopped, starting = linked.front(), linked.front()
    stopped.send(submit(1, "stopped", max_tokens=1900))
    starting.sock.setblocking(False)
    until(lambda: linked.num_open == 1, "it runs")
    monkeypatch.setattr(links_module, "SILENT_BEATS", 3)
    until(lambda: linked.detached == [0], "it was cut off")
    assert linked.open_then == [0]
    assert [link.index for link in linked.links._links] == [1]


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
    front.send(boundary.Awake(0))  # it has said something before
    front.send(submit(1, max_tokens=2))
    assert entered.wait(DEADLINE_S)
    (link,) = linked.links._links
    monkeypatch.setattr(links_module, "SILENT_BEATS", 3)
    for _ in range(10):
        link.beat(0.0, True)
    monkeypatch.setattr(links_module, "SILENT_BEATS", 1 << 40)
    gate.set()
    assert any(one.event.finish is FinishReason.LENGTH for step in steps_of(front) for one in step.rest)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 64,
        b"\x05\0\0\0hello",
        b"\x01\0\0\0\xc1",
        frame(boundary.Tokens([], [])),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["length", "text", "no MessagePack", "the other end's", "HTTP"],
)
def test_garbage_cuts_off_whoever_says_it_and_nobody_else(
    linked: Linked, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = linked.front(), linked.front()
    bad.send(submit(1, max_tokens=1900))
    until(lambda: linked.num_open == 1, "it is running")
    bad.sock.sendall(garbage)
    until(lambda: linked.detached == [0], "it was cut off, and its request cancelled")
    assert "front process 0 is cut off: it says what cannot be" in caplog.text
    good.send(submit(1, max_tokens=2))
    assert any(
        one.event.finish is FinishReason.LENGTH
        for one in next(step for step in steps_of(good) if any(e.event.finish for e in step.rest)).rest
    )


def test_what_the_engine_refuses_is_the_requests_only_event(linked: Linked) -> None:
    wire = linked.front()
    wire.send(submit(1, max_tokens=10**6))
    (only,) = next(steps_of(wire)).rest
    assert (only.number, only.event.finish) == (1, FinishReason.ERROR)
    assert only.fault is not None and only.fault.kind == "ContextExceeded"


def test_a_reset_is_alone_in_the_whole_server(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    began, go = threading.Event(), threading.Event()

    def slow(tiers: object) -> dict[str, int]:
        began.set()
        assert go.wait(DEADLINE_S)
        return {"device": 0}

    monkeypatch.setattr(linked.engine, "reset_cache", slow)
    one, other = linked.front(), linked.front()
    one.send(call(1, "EngineClient.reset_cache", ("device",)))
    assert began.wait(DEADLINE_S)
    other.send(call(1, "EngineClient.reset_cache", ("device",)))
    assert _reply(other).fault == boundary.SentError("Overloaded", "a cache reset is in progress", None, 1.0)
    go.set()
    assert msgspec.msgpack.decode(_reply(one).value) == {"device": 0}
    other.send(call(2, "EngineClient.reset_cache", ("device",)))
    assert _reply(other).fault is None  # the first one is over


def test_a_beat_tells_fronts_how_long_the_loop_has_been_silent(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They answer probes by it."""
    monkeypatch.setattr(linked.loop, "beat_age_s", lambda: 42.0)
    front = linked.front()
    beats = (message for message in iter(front.receive, None) if isinstance(message, boundary.Beat))
    assert 42.0 in [next(beats).age_s, next(beats).age_s]


def test_fronts_are_told_whether_the_engine_is_warm_in_the_greeting_and_when_it_gets_so(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The greeting is looked at where a front is made."""
    linked.front()
    monkeypatch.setattr(type(linked.loop), "is_warm", False)
    cold = linked.front()
    beats = (message for message in iter(cold.receive, None) if isinstance(message, boundary.Beat))
    assert False in [next(beats).is_warm, next(beats).is_warm]
    monkeypatch.setattr(type(linked.loop), "is_warm", True)
    assert any(next(beats).is_warm for _ in range(3))


def test_a_call_that_fails_is_answered_with_its_error(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tiers: object) -> dict[str, int]:
        raise StoreFailed("the disk is gone")

    monkeypatch.setattr(linked.engine, "reset_cache", fail)
    front = linked.front()
    front.send(call(1, "EngineClient.reset_cache", ("device",)))
    front.send(call(2, "SnapshotStore.begin_find", "none", ""))
    faults = {reply.call: reply.fault for reply in (_reply(front), _reply(front))}
    assert faults[1] == boundary.SentError("StoreFailed", "the disk is gone") and faults[2] is not None


def test_a_session_of_a_front_that_is_gone_ends_with_its_prompt(linked: Linked) -> None:
    """How much of the answer its client was given is not known."""
    front = linked.front()
    prompt = np.arange(20, dtype=np.uint32).tobytes()
    options = boundary.SubmitOptions(session="agent")
    front.send(boundary.Submit(1, "r1", prompt, SamplingParams(**{**GREEDY, "max_tokens": 200}), options))  # type: ignore[arg-type]
    next(steps_of(front))
    front.sock.close()
    until(lambda: linked.detached, "its requests have ended")
    assert linked.engine.snapshots.take(SnapshotRequest("talk", session="agent")).num_tokens == 20


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
        front.send(call(number, "SnapshotStore.begin_open", f"talk-{number}", "", None))
    until(lambda: snapshots.figures().waiting == 2, "both wait")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("front-call")]
    front.send(boundary.LetGo(1))
    until(lambda: snapshots.figures().waiting == 1, "the first has left")
    front.sock.close()
    until(lambda: snapshots.figures().waiting == 0, "the second has left with its front")
    assert not busy.done()
    go_on.set()


@pytest.mark.parametrize(
    ("method", "arguments"), [("reset_cache", (("device",),)), ("wait_flushed", ("persisted", 1.0))]
)
def test_one_that_failed_is_not_in_progress_any_more(
    linked: Linked, method: str, arguments: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StoreFailed("the disk is gone")

    monkeypatch.setattr(linked.engine, method, fail)
    front = linked.front()
    for number in (1, 2):
        front.send(call(number, f"EngineClient.{method}", *arguments))
        assert _reply(front).fault == boundary.SentError("StoreFailed", "the disk is gone")


def test_a_prefetch_reaches_the_engine_as_its_front_said_it(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, begun = list[dict[str, object]](), Future[None]()
    begun.set_result(None)

    def prefetch(prompt: Any, **options: object) -> Future[None]:
        asked.append({"prompt": prompt.tolist(), **options})
        return begun

    monkeypatch.setattr(linked.engine, "prefetch", prefetch)
    front = linked.front()
    front.send(
        call(
            1,
            "EngineClient.prefetch",
            np.arange(3, dtype=np.uint32).tobytes(),
            "s",
            "t",
            Adapter("a", "digest"),
        )
    )
    assert _reply(front).fault is None
    assert asked == [
        {"prompt": [0, 1, 2], "session": "s", "cache_salt": "t", "adapter": Adapter("a", "digest")}
    ]


def test_a_change_of_adapters_is_answered_when_every_front_knows_of_it(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links_module, "ANSWER_S", DEADLINE_S)
    one, other = linked.front(), linked.front()
    _, second = linked.links._links
    seen_when_answered = []
    tell = FrontLink.tell

    def watched(link: FrontLink, message: msgspec.Struct) -> None:
        if isinstance(message, boundary.Returned):
            seen_when_answered.append(second.adapters_seen)
        tell(link, message)

    monkeypatch.setattr(FrontLink, "tell", watched)
    one.send(call(1, "AdapterNames.unload", "none"))
    for wire in (one, other):
        while not isinstance(message := wire.receive(), boundary.AdapterList):
            assert message is not None
        wire.send(boundary.Awake(message.version))
    assert _reply(one).value == msgspec.msgpack.encode(False)
    assert seen_when_answered == [1]


def test_ready_waits_until_every_front_knows_that_the_engine_is_warm(linked: Linked) -> None:
    one, other = linked.front(), linked.front()
    one.send(boundary.Awake(0, is_warm=True))
    waiting = threading.Thread(target=linked.links.wait_known_warm)
    waiting.start()
    other.send(boundary.Awake(0))
    until(lambda: linked.links._links[0].knows_warm, "the first one knows it")
    assert waiting.is_alive(), "the other one does not know it yet"
    other.send(boundary.Awake(0, is_warm=True))
    waiting.join(DEADLINE_S)
    assert all(link.knows_warm for link in linked.links._links)


def test_an_adapter_can_be_submitted_to_until_every_front_knows_that_it_is_unloaded(
    linked: Linked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links_module, "ANSWER_S", DEADLINE_S)
    adapter = linked.engine.adapters.load("a", write_random_adapter(tmp_path / "a", TINY_LLAMA, 0)).adapter
    one, other = linked.front(), linked.front()
    one.send(call(1, "AdapterNames.unload", "a"))
    for wire in (one, other):
        while not isinstance(message := wire.receive(), boundary.AdapterList):
            assert message is not None
    late = submit(1, max_tokens=2)
    late.options.adapter = adapter
    other.send(late)  # before it has read that
    assert any(
        sent.event.finish is FinishReason.LENGTH
        for sent in itertools.chain(*(step.rest for step in _until_over(other)))
    )
    for wire in (one, other):
        wire.send(boundary.Awake(message.version))
    assert _reply(one).value == msgspec.msgpack.encode(True)
    with pytest.raises(InvalidRequest):
        linked.engine.adapters.hold(adapter)


def _until_over(wire: Wire[FromEngine]) -> Iterator[boundary.Tokens]:
    """The steps of a front with one request."""
    for step in steps_of(wire):
        yield step
        if any(sent.event.finish for sent in step.rest):
            return


def _reply(wire: Wire[FromEngine]) -> boundary.Returned:
    num_beats = 0
    while not isinstance(message := wire.receive(), boundary.Returned):
        assert message is not None
        num_beats += isinstance(message, boundary.Beat)
        assert num_beats < MOST_BEATS, "there is no answer"
    return message


def test_a_compiled_grammar_is_kept_until_its_front_lets_go(linked: Linked) -> None:
    pytest.importorskip("llguidance")
    wire = linked.front()
    grammar = Grammar("regex", "[ab]{3}")
    wire.send(call(7, "GrammarCompiler.begin", grammar))
    assert _reply(wire).fault is None
    (link,) = linked.links._links
    assert list(link._kept) == [7]
    wire.send(boundary.LetGo(7))
    until(lambda: not link._kept, "it is let go of")


def test_a_grammar_that_its_front_lets_go_of_is_compiled_no_further(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling = Future[object]()
    monkeypatch.setattr(linked.engine.grammars, "begin", lambda grammar: compiling)
    front = linked.front()
    front.send(call(7, "GrammarCompiler.begin", Grammar("regex", "[ab]{3}")))
    front.send(boundary.LetGo(7))
    front.send(call(9, "EngineClient.reset_cache", ("device",)))
    assert _reply(front).call == 9 and compiling.cancelled()


def test_a_grammar_that_is_refused_is_not_kept(linked: Linked) -> None:
    front = linked.front()
    front.send(call(7, "GrammarCompiler.begin", Grammar("regex", "[ab")))
    refusal = _reply(front)
    assert refusal.call == 7 and refusal.fault is not None and refusal.fault.kind == "InvalidRequest"
    (link,) = linked.links._links
    assert not link._kept


def _wait_dealt_with(front: Wire[FromEngine]) -> None:
    """All that was said before: messages are read in turn, and what is refused is answered at once."""
    front.send(submit(1 << 30, max_tokens=10**6))
    assert any(one.number == 1 << 30 for one in next(steps_of(front)).rest)


# ------------------------------------------------------------------------------------------- the front's side


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


def test_another_version_is_refused() -> None:
    engine, front = socket.socketpair()
    with engine, front:
        made = Linked()
        engine.sendall(greeting(made.engine.limits, version=boundary.VERSION + 1))
        with pytest.raises(
            ProtocolBroken,
            match=f"version {boundary.VERSION + 1} of the protocol, and this process {boundary.VERSION}",
        ):
            greeted(Wire(front, FromEngine))
        made.loop.start()
        made.close()


def test_a_child_of_another_version_says_so_and_ends() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fd = theirs.fileno()
        command = [sys.executable, "-m", "penstock.commands.serve", "front", str(os.getpid()), str(fd)]
        source = os.path.dirname(os.path.dirname(remote.__file__))
        environment = {**os.environ, "PYTHONPATH": os.path.dirname(source)}
        with subprocess.Popen(command, pass_fds=[fd], env=environment) as child:
            theirs.close()
            wire: Wire[boundary.ToParent] = Wire(ours, boundary.ToParent)
            wire.send(
                boundary.FrontSetup(boundary.VERSION + 1, packed(ServerConfig()), ("info", "text"), 0, 1)
            )
            said = wire.receive()
            assert (
                isinstance(said, boundary.Broken)
                and ("of the protocol, and this process") in said.fault.message
            )
            assert child.wait(DEADLINE_S) == 1


@pytest.mark.parametrize("end", ["garbage", "hang up", "failed"])
def test_everybody_is_told_at_once_when_the_engine_is_gone(end: str) -> None:
    """Whoever has a request, waits for an answer, or asks later."""
    engine, front = socket.socketpair()
    made = Linked()
    engine.sendall(greeting(made.engine.limits))

    async def run() -> None:
        client = RemoteEngine(front)
        client.start()
        heard: list[TokenEvent] = []
        client.submit([1], SamplingParams(max_tokens=4), heard.append, request_id="a")
        asked = client.prefetch([1])
        with pytest.raises(InvariantBroken):  # the loop would wait for itself
            client.stats()
        if end == "hang up":
            engine.close()
        else:
            engine.sendall(b"\xff" * 8 if end == "garbage" else frame(boundary.Bye("RuntimeError: no")))
        with pytest.raises(EngineClosed):
            await asyncio.wait_for(asyncio.wrap_future(asked), DEADLINE_S)
        (last,) = heard
        assert last.finish is FinishReason.ERROR and isinstance(last.failure, EngineClosed)
        assert client.failed() is not None
        with pytest.raises(EngineClosed):
            client.submit([1], SamplingParams(max_tokens=4), heard.append)
        client.close(0.0)  # does not wait

    asyncio.run(run())
    for one in (engine, front):
        one.close()
    made.loop.start()
    made.close()


def test_messages_of_many_socket_buffers_arrive_as_they_are_though_the_engine_reads_late() -> None:
    engine, front = socket.socketpair()
    front.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    engine.sendall(greeting(PromptLimits(1 << 20, 300, 1 << 20)))
    prompts = [[n % 250 for n in range(first, first + 60_000)] for first in (0, 1, 2)]

    async def run() -> None:
        client = RemoteEngine(front)
        client.start()
        for prompt in prompts:
            client.submit(prompt, SamplingParams(max_tokens=4), lambda event: None)
        wire: Wire[FromFront] = Wire(engine, FromFront)
        engine.settimeout(DEADLINE_S)
        for prompt in prompts:
            message = await asyncio.to_thread(wire.receive)
            assert (
                isinstance(message, boundary.Submit)
                and np.frombuffer(message.prompt, np.uint32).tolist() == prompt
            )

    asyncio.run(run())
    for one in (engine, front):
        one.close()


def as_front(
    play: Callable[[RemoteEngine, Wire[FromFront]], Awaitable[None]], *adapters: LoadedAdapter
) -> None:
    """`play` on the event loop of a front, with the engine's end of its connection."""
    engine, front = socket.socketpair()
    engine.settimeout(30.0)  # for what takes milliseconds
    engine.sendall(greeting(PromptLimits(512, 300, 512), adapters))

    async def run() -> None:
        client = RemoteEngine(front)
        client.start()
        await play(client, Wire(engine, FromFront))

    with engine, front:
        asyncio.run(run())


async def _heard(engine: Wire[FromFront]) -> FromFront | None:
    return await asyncio.to_thread(engine.receive)


async def _wait_read(engine: Wire[FromFront]) -> None:
    """All that was said before: a front reads in turn, and answers a beat at once."""
    engine.send(boundary.Beat(0.0))
    assert isinstance(await _heard(engine), boundary.Awake)


def test_a_request_has_one_last_event_though_the_engine_goes_later() -> None:
    heard: list[TokenEvent] = []

    async def play(client: RemoteEngine, engine: Wire[FromFront]) -> None:
        client.submit([1], SamplingParams(max_tokens=4), heard.append, request_id="a")
        asked = client.prefetch([1])
        submitted = await _heard(engine)
        assert isinstance(submitted, boundary.Submit)
        engine.send(tokens_of([(submitted.number, TokenEvent("a", (5,), finish=FinishReason.LENGTH))]))
        engine.send(boundary.Bye())
        with pytest.raises(EngineClosed):
            await asyncio.wait_for(asyncio.wrap_future(asked), DEADLINE_S)

    as_front(play)
    assert [(event.tokens, event.finish) for event in heard] == [((5,), FinishReason.LENGTH)]


def test_a_prefetch_is_asked_for_as_it_was_said() -> None:
    async def play(client: RemoteEngine, engine: Wire[FromFront]) -> None:
        client.prefetch([1, 2], session="s", cache_salt="t", adapter=Adapter("a", "digest"))
        asked = await _heard(engine)
        assert isinstance(asked, boundary.Call)
        prompt, *others = boundary.arguments_of(asked)
        assert np.frombuffer(prompt, np.uint32).tolist() == [1, 2] and others == [
            "s",
            "t",
            Adapter("a", "digest"),
        ]

    as_front(play)


def test_an_adapter_is_let_go_of_when_its_hold_ends() -> None:
    loaded = LoadedAdapter(Adapter("a", "digest"), "root", 1.0, False)

    async def play(client: RemoteEngine, engine: Wire[FromFront]) -> None:
        hold = client.adapters.try_hold("a")
        assert hold is not None
        with hold as adapter:
            assert adapter == loaded.adapter
        client.prefetch([1])
        held, let_go = await _heard(engine), await _heard(engine)
        assert isinstance(held, boundary.HoldAdapter) and held.adapter == loaded.adapter
        assert let_go == boundary.LetGo(held.number)

    as_front(play, loaded)


def test_an_answer_that_nobody_waits_for_any_more_costs_nobody_theirs() -> None:
    async def play(client: RemoteEngine, engine: Wire[FromFront]) -> None:
        given_up, waited_for = (client.prefetch(session="s") for _ in range(2))
        assert given_up.cancel()
        asked = [await _heard(engine) for _ in range(2)]
        answers = [
            boundary.Returned(one.number, msgspec.msgpack.encode(None))
            for one in asked
            if isinstance(one, boundary.Call)
        ]
        engine.sock.sendall(b"".join(map(frame, answers)))
        assert await asyncio.wait_for(asyncio.wrap_future(waited_for), 30.0) is None

    as_front(play)


def test_a_compiled_grammar_is_let_go_of_once_nobody_here_has_it() -> None:
    async def play(client: RemoteEngine, engine: Wire[FromFront]) -> None:
        compiling = client.grammars.begin(Grammar("regex", "[ab]{3}"))
        asked = await _heard(engine)
        assert isinstance(asked, boundary.Call)
        engine.send(boundary.Returned(asked.number, msgspec.msgpack.encode(None)))
        engine.send(boundary.Beat(0.0))
        await asyncio.wrap_future(compiling)
        assert await _heard(engine) == boundary.Awake(0, is_warm=True)
        del compiling
        gc.collect()
        engine.send(boundary.Beat(0.0))
        assert await _heard(engine) == boundary.Awake(0, is_warm=True)
        engine.send(boundary.Beat(0.0))
        assert await _heard(engine) == boundary.LetGo(asked.number)

    as_front(play)


def test_nothing_is_asked_of_an_engine_that_has_said_goodbye() -> None:
    """It would never be answered."""

    async def play(client: RemoteEngine, engine: Wire[FromFront]) -> None:
        asked = client.prefetch([1])
        engine.send(boundary.Bye())
        with pytest.raises(EngineClosed):
            await asyncio.wait_for(asyncio.wrap_future(asked), DEADLINE_S)
        for ask in (
            lambda: client.prefetch([1]),
            lambda: client.submit([1], SamplingParams(max_tokens=4), lambda event: None),
        ):
            with pytest.raises(EngineClosed, match="shutting down"):
                ask()

    as_front(play)


def test_an_engine_that_ends_before_it_has_said_what_it_is_has_ended() -> None:
    engine, front = socket.socketpair()
    with front:
        engine.close()
        with pytest.raises(EngineClosed, match="before it was ready"):
            greeted(Wire(front, FromEngine))


def test_an_engine_that_begins_with_something_else_is_none() -> None:
    engine, front = socket.socketpair()
    with engine, front:
        engine.sendall(frame(boundary.Beat(0.0)))
        with pytest.raises(ProtocolBroken, match="began with Beat"):
            greeted(Wire(front, FromEngine))


def test_a_request_is_cancelled_by_its_own_name_until_it_has_ended() -> None:
    async def play(client: RemoteEngine, engine: Wire[FromFront]) -> None:
        heard: list[TokenEvent] = []
        assert client.submit([1], SamplingParams(max_tokens=4), heard.append, request_id="a") == "a"
        submitted = await _heard(engine)
        assert isinstance(submitted, boundary.Submit) and submitted.request_id == "a"
        client.cancel("another")
        client.cancel("a")
        assert await _heard(engine) == boundary.Cancel(submitted.number)
        engine.send(tokens_of([(submitted.number, TokenEvent("a", finish=FinishReason.CANCELLED))]))
        await _wait_read(engine)
        client.cancel("a")
        assert heard and not client._asked and not client._number_of
        client.prefetch([1])
        assert isinstance(await _heard(engine), boundary.Call), "nothing was said of it any more"

    as_front(play)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"pins": [(5, 3)]}, "kv_pin_spans"),
        ({"pins": [(0, 5)]}, "kv_pin_spans"),
        ({"residency": "scored", "pins": [(0, 130)]}, "kv_pin_spans"),
        ({"max_tokens": 10**6}, "max_tokens"),
    ],
)
def test_what_can_be_wrong_with_a_request_is_said_before_it_is_sent(
    options: dict[str, Any], param: str
) -> None:
    """A stream has its status then, and its client is told by an event of it alone."""
    sampling = SamplingParams(max_tokens=options.pop("max_tokens", 4))

    async def play(client: RemoteEngine, engine: Wire[FromFront]) -> None:
        with pytest.raises(InvalidRequest) as raised:
            client.submit([1] * 200, sampling, lambda event: None, **options)
        assert raised.value.param == param and not client._asked
        client.submit(
            [1] * 200, SamplingParams(max_tokens=4), lambda event: None, residency="scored", pins=[(0, 5)]
        )
        sent = await _heard(engine)
        assert isinstance(sent, boundary.Submit) and sent.options.residency == "scored"

    as_front(play)


def test_nothing_is_kept_of_a_request_that_cannot_be_sent() -> None:
    async def play(client: RemoteEngine, engine: Wire[FromFront]) -> None:
        with pytest.raises(TypeError):
            client.submit([1], SamplingParams(max_tokens=4), lambda event: None, nonsense=1)
        assert not client._asked and not client._number_of

    as_front(play)


def test_a_prefetch_of_a_session_has_no_prompt_and_one_of_a_prompt_may_fill_the_context() -> None:
    async def play(client: RemoteEngine, engine: Wire[FromFront]) -> None:
        client.prefetch(session="s")
        client.prefetch([1] * client.max_model_len)
        prompts = []
        for _ in range(2):
            asked = await _heard(engine)
            assert isinstance(asked, boundary.Call)
            prompts.append(boundary.arguments_of(asked)[0])
        assert prompts == [None, np.ones(client.max_model_len, np.uint32).tobytes()]

    as_front(play)


def test_a_call_says_all_that_it_takes_and_is_answered_with_a_future() -> None:
    async def play(client: RemoteEngine, engine: Wire[FromFront]) -> None:
        deleting = asyncio.wrap_future(client.snapshots.begin_delete("talk"))
        asked = await _heard(engine)
        assert isinstance(asked, boundary.Call) and asked.name == "SnapshotStore.begin_delete"
        assert boundary.arguments_of(asked) == ("talk", "")
        engine.send(boundary.Returned(asked.number, fault=fault_from(StoreFailed("the disk is gone"))))
        with pytest.raises(StoreFailed, match="the disk is gone"):
            await deleting

    as_front(play)


def test_a_call_that_is_cancelled_is_given_up_there_and_its_answer_goes_nowhere() -> None:
    async def play(client: RemoteEngine, engine: Wire[FromFront]) -> None:
        opening = asyncio.create_task(
            asyncio.wait_for(asyncio.wrap_future(client.snapshots.begin_open("talk")), 60.0)
        )
        asked = await _heard(engine)
        assert isinstance(asked, boundary.Call) and boundary.arguments_of(asked) == ("talk", "", None)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert await _heard(engine) == boundary.LetGo(asked.number)
        engine.send(boundary.Returned(asked.number, fault=fault_from(StoreFailed("too late"))))
        finding = asyncio.wrap_future(client.snapshots.begin_find("talk"))
        asked = await _heard(engine)
        assert isinstance(asked, boundary.Call)
        engine.send(boundary.Returned(asked.number, fault=fault_from(StoreFailed("in time"))))
        with pytest.raises(StoreFailed, match="in time"):
            await finding

    as_front(play)


def test_an_answer_of_another_kind_is_an_error_and_no_wait() -> None:
    async def play(client: RemoteEngine, engine: Wire[FromFront]) -> None:
        asking = asyncio.create_task(asyncio.to_thread(client.stats))
        asked = await _heard(engine)
        assert isinstance(asked, boundary.Call)
        engine.send(boundary.Returned(asked.number, value=msgspec.msgpack.encode("no numbers")))
        with pytest.raises(ProtocolBroken, match="answered what cannot be"):
            await asking

    as_front(play)


def test_half_a_pair_of_tokens_ends_the_connection() -> None:
    heard: list[TokenEvent] = []

    async def play(client: RemoteEngine, engine: Wire[FromFront]) -> None:
        client.submit([1], SamplingParams(max_tokens=4), heard.append, request_id="a")
        await _heard(engine)
        engine.send(boundary.Tokens([1], []))
        await asyncio.to_thread(until, lambda: heard, "its end is told")

    as_front(play)
    assert heard[-1].finish is FinishReason.ERROR and ("connection to the engine's process is broken") in (
        heard[-1].error or ""
    )


def test_who_is_not_answered_in_time_is_told_so_and_a_late_answer_goes_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "STATS_S", 0.01)

    async def play(client: RemoteEngine, engine: Wire[FromFront]) -> None:
        with pytest.raises(DeadlineExceeded, match=r"within 0\.01 s"):
            await asyncio.to_thread(client.stats)
        late = await _heard(engine)
        assert isinstance(late, boundary.Call)
        assert await _heard(engine) == boundary.LetGo(late.number)
        engine.send(boundary.Returned(late.number, b"no stats"))
        engine.send(boundary.Beat(7.0))
        assert await _heard(engine) == boundary.Awake(0, is_warm=True)
        assert client.failed() is None

    as_front(play)


def test_who_waits_for_the_end_of_an_engine_that_does_not_end_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[float | None] = []

    async def play(client: RemoteEngine, engine: Wire[FromFront]) -> None:
        monkeypatch.setattr(client._over, "wait", lambda seconds: waited.append(seconds) or False)
        with pytest.raises(DeadlineExceeded, match="did not close in time"):
            client.close(5.0)

    as_front(play)
    assert waited == [5.0 + remote.CLOSE_MARGIN_S], "the engine itself gives up first"


def test_who_has_asked_an_engine_that_fails_is_told_why_and_so_is_who_asks_later() -> None:
    heard: list[TokenEvent] = []

    async def play(client: RemoteEngine, engine: Wire[FromFront]) -> None:
        client.submit([1], SamplingParams(max_tokens=4), heard.append)
        client._take(boundary.Bye("RuntimeError: no"))
        with pytest.raises(EngineClosed, match="RuntimeError: no"):
            client.submit([1], SamplingParams(max_tokens=4), heard.append)

    as_front(play)
    assert [(event.error, str(event.failure)) for event in heard] == [
        ("the engine has failed: RuntimeError: no",) * 2
    ]


def test_the_end_of_the_engine_reaches_all_who_wait_though_one_has_given_up() -> None:
    async def play(client: RemoteEngine, engine: Wire[FromFront]) -> None:
        given_up, waits = (client.prefetch([1]) for _ in range(2))
        assert given_up.cancel()
        client._take(boundary.Bye())
        assert waits.done() and isinstance(waits.exception(), EngineClosed)
        loop = asyncio.get_running_loop()
        assert not loop.remove_reader(client._sock), (
            "the loop does not turn for a socket that has nothing more to say"
        )

    as_front(play)


def test_figures_that_have_not_changed_are_not_sent_again() -> None:
    async def play(client: RemoteEngine, engine: Wire[FromFront]) -> None:
        client.own_figures = RequestFigures()
        for _ in range(2):
            engine.send(boundary.Beat(0.0))
        heard = [type(await _heard(engine)) for _ in range(3)]
        assert heard == [boundary.Awake, boundary.FrontFigures, boundary.Awake]
        client.prefetch([1])
        assert isinstance(await _heard(engine), boundary.Call)

    as_front(play)


def test_a_request_hears_all_of_its_own_events_and_nobody_those_of_one_that_is_not_known() -> None:
    heard: list[TokenEvent] = []

    async def play(client: RemoteEngine, engine: Wire[FromFront]) -> None:
        client.submit([1], SamplingParams(max_tokens=4), heard.append, request_id="a")
        submitted = await _heard(engine)
        assert isinstance(submitted, boundary.Submit)
        number, unknown = submitted.number, submitted.number + 100
        for batch in (
            [event(unknown, tokens=(9,)), event(number, tokens=(5,), source=KvSource(computed=1))],
            [event(number, tokens=(6,)), event(unknown, finish=FinishReason.STOP)],
            [event(number, tokens=(7,), finish=FinishReason.LENGTH)],
        ):
            engine.send(tokens_of(batch))
        await _wait_read(engine)

    as_front(play)
    assert [(one.request_id, one.tokens) for one in heard] == [("a", (5,)), ("a", (6,)), ("a", (7,))]


def test_figures_are_sent_when_they_are_asked_for() -> None:
    async def play(client: RemoteEngine, engine: Wire[FromFront]) -> None:
        engine.send(boundary.WantFigures())  # there are none yet
        engine.send(boundary.Beat(0.0))
        assert await _heard(engine) == boundary.Awake(0, is_warm=True)
        client.own_figures = RequestFigures(by_finish=Counter(stop=3))
        engine.send(boundary.WantFigures())
        engine.send(boundary.Beat(0.0))
        told = await _heard(engine)
        assert (
            isinstance(told, boundary.FrontFigures)
            and told.figures.by_finish["stop"] == 3
            and told.were_wanted
        )

    as_front(play)


def test_a_second_greeting_is_no_message() -> None:
    async def play(client: RemoteEngine, engine: Wire[FromFront]) -> None:
        (hello,) = Frames[FromEngine](FromEngine).feed(greeting(PromptLimits(512, 300, 512)))
        with pytest.raises(ProtocolBroken, match="Hello is no message for now"):
            client._take(hello)

    as_front(play)


def test_a_grammar_that_is_no_longer_waited_for_is_let_go_of_at_once() -> None:
    async def play(client: RemoteEngine, engine: Wire[FromFront]) -> None:
        compiling = client.grammars.begin(Grammar("regex", "[ab]{3}"))
        asked = await _heard(engine)
        assert isinstance(asked, boundary.Call)
        waiting = asyncio.ensure_future(asyncio.wrap_future(compiling))
        await asyncio.sleep(0)
        waiting.cancel()
        assert await _heard(engine) == boundary.LetGo(asked.number)

    as_front(play)


def test_a_grammar_that_the_engine_refuses_is_refused_here() -> None:
    async def play(client: RemoteEngine, engine: Wire[FromFront]) -> None:
        compiling = client.grammars.begin(Grammar("regex", "[ab"))
        asked = await _heard(engine)
        assert isinstance(asked, boundary.Call)
        engine.send(
            boundary.Returned(
                asked.number, fault=fault_from(InvalidRequest("no such pattern", "guided_regex"))
            )
        )
        with pytest.raises(InvalidRequest, match="no such pattern"):
            await asyncio.wait_for(asyncio.wrap_future(compiling), DEADLINE_S)

    as_front(play)


def test_an_adapter_that_is_not_loaded_cannot_be_held_and_none_is_loaded_where_the_engine_has_no_place_for_them() -> (  # noqa: E501
    None
):
    async def play(client: RemoteEngine, engine: Wire[FromFront]) -> None:
        assert client.adapters.try_hold("none") is None
        assert client.adapters.root is None
        assert RemoteAdapters(client, [], True).root is not None

    as_front(play)


class Unreadable:
    """A socket whose connection has failed in a way of its own."""

    def __init__(self, sock: socket.socket) -> None:
        self.fileno = sock.fileno

    def recv(self, num_bytes: int) -> bytes:
        raise TimeoutError("no route")


def test_a_connection_that_fails_in_any_way_ends_what_waits_for_it() -> None:
    heard: list[TokenEvent] = []

    async def play(client: RemoteEngine, engine: Wire[FromFront]) -> None:
        client.submit([1], SamplingParams(max_tokens=4), heard.append)
        client._sock = Unreadable(client._sock)  # type: ignore[assignment]
        client._read()

    as_front(play)
    assert [str(event.failure) for event in heard] == [
        "the connection to the engine's process failed: no route"
    ]


def test_a_message_does_not_overtake_the_rest_of_one_before_it() -> None:
    """Though the socket has room again when it comes."""
    engine, front = socket.socketpair()
    front.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    engine.sendall(greeting(PromptLimits(1 << 20, 300, 1 << 20)))
    engine.settimeout(DEADLINE_S)

    async def run() -> None:
        client = RemoteEngine(front)
        client.start()
        client.submit([7] * 60_000, SamplingParams(max_tokens=4), lambda event: None)
        frames: Frames[FromFront] = Frames(FromFront)
        found = [*frames.feed(engine.recv(1 << 20))]
        client.cancel(client.submit([1], SamplingParams(max_tokens=4), lambda event: None))
        while len(found) < 3:
            found += frames.feed(await asyncio.to_thread(engine.recv, 1 << 20))
        assert [type(message) for message in found] == [boundary.Submit, boundary.Submit, boundary.Cancel]
        assert not asyncio.get_running_loop().remove_writer(front), (
            "the loop does not turn for a socket that could take more"
        )

    with engine, front:
        asyncio.run(run())


@pytest.mark.parametrize("end", [boundary.Bye(), boundary.Bye("RuntimeError: no")], ids=["goodbye", "failed"])
def test_a_request_that_is_submitted_while_the_engine_ends_is_refused(end: FromEngine) -> None:
    """On another thread, which looked before and sends after: no event would ever come."""
    heard: list[TokenEvent] = []

    async def play(client: RemoteEngine, engine: Wire[FromFront]) -> None:
        _ends_meanwhile(client, end)
        with pytest.raises(EngineClosed):
            client.submit([1], SamplingParams(max_tokens=4), heard.append, request_id="a")
        assert not client._asked and not client._number_of

    as_front(play)
    assert not heard


@pytest.mark.parametrize("end", [boundary.Bye(), boundary.Bye("RuntimeError: no")], ids=["goodbye", "failed"])
def test_a_call_that_is_made_while_the_engine_ends_is_answered(end: FromEngine) -> None:
    async def play(client: RemoteEngine, engine: Wire[FromFront]) -> None:
        _ends_meanwhile(client, end)
        asked = client.prefetch([1])
        assert asked.done() and isinstance(asked.exception(), EngineClosed)

    as_front(play)


def _ends_meanwhile(client: RemoteEngine, end: FromEngine) -> None:
    """`end` comes when what is asked next has been found to be possible, and before it is known."""
    next_number = client.next_number

    def number() -> int:
        client._take(end)
        return next_number()

    client.next_number = number  # type: ignore[method-assign]


def test_figures_are_sent_whenever_they_have_changed() -> None:
    """So little is lost when a front is killed."""

    async def play(client: RemoteEngine, engine: Wire[FromFront]) -> None:
        client.own_figures = RequestFigures()
        for num in range(1, 4):
            client.own_figures.by_finish["stop"] = num
            engine.send(boundary.Beat(0.0))
            assert await _heard(engine) == boundary.Awake(0, is_warm=True)
            told = await _heard(engine)
            assert (
                isinstance(told, boundary.FrontFigures)
                and told.figures.by_finish["stop"] == num
                and not told.were_wanted
            )

    as_front(play)


def test_a_front_knows_whether_the_engine_is_warm() -> None:
    async def play(client: RemoteEngine, engine: Wire[FromFront]) -> None:
        assert client.is_warm
        for is_warm in (False, True):
            engine.send(boundary.Beat(0.0, is_warm))
            assert await _heard(engine) == boundary.Awake(0, is_warm=is_warm)
            assert client.is_warm is is_warm

    as_front(play)


def test_a_beat_says_how_long_the_loop_has_been_silent() -> None:
    engine, front = socket.socketpair()
    made = Linked()
    engine.sendall(greeting(made.engine.limits) + frame(boundary.Beat(50.0)))

    async def run() -> None:
        client = RemoteEngine(front)
        assert client.beat_age_s() < 50.0
        client.start()
        assert 50.0 <= client.beat_age_s() < 100.0

    asyncio.run(run())
    for one in (engine, front):
        one.close()
    made.loop.start()
    made.close()


def test_an_adapter_that_was_loaded_before_the_front_listened_is_known_and_acknowledged() -> None:
    """What came right behind the greeting is not lost."""
    engine, front = socket.socketpair()
    made = Linked()
    loaded = LoadedAdapter(Adapter("new", "d"), "root", 1.0, False)
    engine.sendall(greeting(made.engine.limits, lora=True) + frame(boundary.AdapterList(4, [loaded])))

    async def run() -> None:
        client = RemoteEngine(front)
        client.start()
        assert client.adapters.find("new") == loaded
        wire: Wire[FromFront] = Wire(engine, FromFront)
        assert await asyncio.to_thread(wire.receive) == boundary.Awake(4, is_warm=True)
        engine.sendall(frame(boundary.Beat(0.0)))  # which every front answers
        engine.settimeout(DEADLINE_S)
        assert await asyncio.to_thread(wire.receive) == boundary.Awake(4, is_warm=True)

    asyncio.run(run())
    for one in (engine, front):
        one.close()
    made.loop.start()
    made.close()


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


ADD = """
import sys, time
from penstock.server import seats
sleep, seats.LOCK_S = time.sleep, 30.0
seats.time.sleep = lambda seconds: (print("waits", flush=True), sleep(seconds))
book = seats.SeatBook(int(sys.argv[1]), 2)
print(book.try_add(1, seats.GateNumber.GENERATIONS, 1, 3))
"""
HOLD = """
import fcntl, os, signal, sys
fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX)
print("held", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def seat_process(script: str, fd: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", script, str(fd)],
        pass_fds=[fd],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_who_looks_and_takes_is_alone() -> None:
    """A process that wants a seat waits while another one is at it, and sees what that one has taken."""
    book = SeatBook.make(2)
    fcntl.lockf(book.fd, fcntl.LOCK_EX)
    taker = seat_process(ADD, book.fd)
    assert taker.stdout is not None and taker.stdout.readline() == "waits\n"
    book._counts[0, GateNumber.GENERATIONS] = 3
    fcntl.lockf(book.fd, fcntl.LOCK_UN)
    assert taker.communicate()[0].splitlines()[-1] == "False"
    assert book.total(GateNumber.GENERATIONS) == 3


def test_a_process_that_stands_still_with_the_lock_stops_nobody() -> None:
    book = SeatBook.make(2)
    with seat_process(HOLD, book.fd) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        taken: list[bool] = []
        taker = threading.Thread(
            target=lambda: taken.append(book.try_add(0, GateNumber.GENERATIONS, 1, 3)), daemon=True
        )
        taker.start()
        try:
            until(lambda: taken, "it has its seat")
            book.clear(0)
        finally:
            holder.kill()
    assert taken == [True] and book.total(GateNumber.GENERATIONS) == 0


TAKE = """
import sys
from penstock.server.seats import GateNumber, SeatBook
book = SeatBook(int(sys.argv[1]), 4)
print(sum(book.try_add(int(sys.argv[2]), GateNumber.GENERATIONS, 1, 1000) for _ in range(700)))
"""


def test_processes_that_take_seats_at_once_never_take_more_than_there_are_nor_fewer() -> None:
    book = SeatBook.make(4)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    takers = [
        subprocess.Popen(
            [sys.executable, "-c", TAKE, str(book.fd), str(row)],
            pass_fds=[book.fd],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for row in range(4)
    ]
    taken = [int(taker.communicate()[0]) for taker in takers]
    assert sum(taken) == 1000 == book.total(GateNumber.GENERATIONS)


# -------------------------------------------------------------------------------------------- how many fronts


@pytest.mark.parametrize(
    ("given", "device", "num_cores", "expected"),
    [
        (None, "cpu", 64, 1),
        (None, "cuda", 2, 1),
        (None, "cuda", 8, 2),
        (None, "cuda", 16, 4),
        (None, "cuda", 64, 4),
        (7, "cpu", 2, 7),
    ],
)
def test_how_many_fronts_there_are_unless_it_is_said(
    monkeypatch: pytest.MonkeyPatch, given: int | None, device: str, num_cores: int, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cores)))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        parent = Supervisor(
            Config(), ServerConfig(api_processes=given), ("info", "text"), listener, lambda kind, fds: []
        )
        assert parent._num_fronts(device) == expected
