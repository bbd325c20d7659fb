"""KV events on real sockets: sequences, replay, subscribers that do not read, what is refused at start."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator

import pytest
import zmq

from penstock.commands import serve
from penstock.config import Config, ServerConfig
from penstock.errors import ConfigError
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.events import Event, KvEvents, KvReports
from penstock.server.kv_events import EventReplay, Kept, KvPublisher
from tests.cpu.server.served import until
from tests.support.kv_router import Router
from tests.support.kv_wire import connected, replayed
from tests.support.servers import free_port

SIZE = 4
SCOPE = b"scope"


class Publishing:
    """A publisher, and a pool whose blocks it tells of."""

    def __init__(self, most_waiting: int = 1 << 20) -> None:
        self.live, self.replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        self.reports = KvReports(most_waiting)
        self.events = KvEvents(self.reports, SIZE)
        self.reports.make_public(SCOPE)
        self.pool = BlockPool(4096, "device", self.reports)
        self.publisher = KvPublisher(self.live, self.replay, "kv")
        self._num = 0

    def seal(self, num_blocks: int = 1) -> None:
        first, self._num = self._num + 1, self._num + num_blocks
        keys = [number.to_bytes(8, "big") * 2 for number in range(first, self._num + 1)]
        self.reports.tell(SCOPE, None, keys, bytes(4 * SIZE * num_blocks))
        hold, reservation = self.pool.hold("request"), self.pool.try_reserve(num_blocks, "request")
        assert reservation is not None
        reservation.commit(hold)
        self.pool.seal(hold.slots, keys)
        hold.end()

    def said(self) -> None:
        until(lambda: not self.events.num_waiting, "all changes are taken")

    def heard(self, first: int = 0) -> Router:
        router = Router()
        router.next_sequence = first
        for topic, sequence, payload in replayed(self.replay, first):
            assert topic == b"kv"
            router.hear(sequence, payload)
        return router


@contextlib.contextmanager
def publishing(**limits: int) -> Iterator[Publishing]:
    one = Publishing(**limits)
    one.publisher.start(one.events, SIZE)
    try:
        yield one
    finally:
        one.publisher.close()


def test_a_subscriber_that_comes_late_replays_what_it_missed() -> None:
    with publishing() as one:
        for _ in range(20):
            one.seal()
            one.said()
        until(lambda: len(one.heard().held("GPU")) == 20, "all blocks are in the replay")
        until(lambda: one.heard().next_sequence == one.publisher._kept.next_sequence, "nothing is due")
        router = one.heard(5)
        assert router.next_sequence == one.heard().next_sequence and len(router.kinds) < 20
        assert one.heard(10_000).kinds == []


def test_a_live_subscriber_hears_every_number_once() -> None:
    with publishing() as one, connected(zmq.SUB, one.live) as live:
        live.setsockopt(zmq.SUBSCRIBE, b"kv")
        until(lambda: one.seal() or live.poll(5), "it has joined")  # type: ignore[func-returns-value]
        topic, number, _ = live.recv_multipart()
        first = int.from_bytes(number, "big")
        for _ in range(50):
            one.seal()
            one.said()
        last = one.publisher._kept.next_sequence
        heard = [int.from_bytes(live.recv_multipart()[1], "big") for _ in range(first + 1, last)]
        assert topic == b"kv" and heard == list(range(first + 1, last))


def test_a_subscriber_that_stops_reading_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the threads that report, nor the one that sends to others."""
    monkeypatch.setattr("penstock.server.kv_events._EVENTS_PER_MESSAGE", 1)
    with publishing() as one, connected(zmq.SUB, one.live) as stopped:
        stopped.setsockopt(zmq.SUBSCRIBE, b"")
        until(lambda: one.seal() or stopped.poll(5), "it has joined")  # type: ignore[func-returns-value]
        for _ in range(6):  # more than sockets hold: it never reads
            one.seal(500)
            one.pool.evict(500)
            one.said()
        one.seal()
        one.said()
        until(lambda: one.heard().next_sequence == one.publisher._kept.next_sequence, "nothing is due")
        assert one.heard().held("GPU")


def test_while_the_sender_is_stuck_blocks_are_sealed_and_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate holds the sending thread: reporting does not wait for it, its memory is bounded, and afterwards
    the router is right again."""
    gate, entered, take = threading.Event(), threading.Event(), KvEvents.take

    def gated(self: KvEvents, most: int) -> list[Event]:
        entered.set()
        assert gate.wait(120)
        return take(self, most)

    monkeypatch.setattr(KvEvents, "take", gated)
    with publishing(most_waiting=64) as one:
        assert entered.wait(120)
        for _ in range(40):
            one.seal(10)
            one.pool.evict(5)
        assert one.events.num_waiting == 64 and one.reports.num_dropped > 0
        gate.set()
        one.said()
        one.seal(3)
        one.said()
        until(lambda: len(one.heard().held("GPU")) >= 3, "new blocks are heard of")
        assert "AllBlocksCleared" in one.heard().kinds


def test_a_sender_that_has_failed_leaves_nothing_in_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(self: KvEvents, most: int) -> list[Event]:
        raise RuntimeError("a defect")

    monkeypatch.setattr(KvEvents, "take", fails)
    with publishing() as one:
        until(lambda: "KV events have stopped" in caplog.text, "it has failed")
        one.seal(10)
        assert not one.events.num_waiting and one.reports.num_dropped == 11


def test_a_request_that_is_no_number_gets_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    with publishing() as one:
        with connected(zmq.DEALER, one.replay) as socket:
            socket.send_multipart([b"", b"all of it"])
            socket.send_multipart([b"x"])
            until(lambda: caplog.text.count("not a sequence number") == 2, "both are refused")
        one.seal()
        one.said()
        until(lambda: one.heard().kinds, "others are answered")


class Replaying:
    """Kept messages, and the socket that repeats them, driven by the test."""

    def __init__(self, num_messages: int, size: int) -> None:
        self.kept = Kept()
        for number in range(num_messages):
            self.kept.add(number.to_bytes(size, "big"))
        self.context = zmq.Context()
        self.replay = EventReplay(self.context, self.kept, b"kv")
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.replay.socket.bind(self.endpoint)

    def until(self, condition: Callable[[], object], what: str) -> None:
        until(lambda: self.replay.turn(1) or condition(), what)  # type: ignore[func-returns-value]

    def asked(self, first: int, stack: contextlib.ExitStack) -> zmq.Socket[bytes]:
        """A client that has asked, is being answered, and has room for one message."""
        client = stack.enter_context(connected(zmq.DEALER, self.endpoint))
        client.disconnect(self.endpoint)
        for option in (zmq.RCVHWM, zmq.RCVBUF):
            client.setsockopt(option, 1)
        client.connect(self.endpoint)
        client.send_multipart([b"", first.to_bytes(8, "big")])
        num = len(self.replay.answers)
        self.until(lambda: len(self.replay.answers) > num, "its request is taken")
        return client


@pytest.fixture
def replaying() -> Iterator[Callable[[int, int], Replaying]]:
    made = list[Replaying]()

    def make(num_messages: int, size: int) -> Replaying:
        made.append(Replaying(num_messages, size))
        return made[-1]

    yield make
    for one in made:
        one.replay.socket.close(0)
        one.context.term()


Make = Callable[[int, int], Replaying]


def test_an_answer_comes_in_slices_and_in_order(replaying: Make) -> None:
    one, heard = replaying(500, 10), list[int]()
    with contextlib.ExitStack() as stack:
        client = one.asked(7, stack)
        one.kept.add(b"after the request")

        def hears() -> bool:
            while client.poll(0):
                heard.append(int.from_bytes(client.recv_multipart()[2], "big", signed=True))
            return heard[-1:] == [-1]

        one.until(hears, "the end has come")
        assert heard == [*range(7, 500), -1] and not one.replay.answers
        heard.clear()
        client.send_multipart([b"", b"\xff" * 8])
        one.until(hears, "there is nothing that late")
        assert heard == [-1]


def test_for_a_client_that_reads_nothing_little_is_held_and_others_are_answered(
    replaying: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Forty megabytes: a few messages wait for it, and in the end it gets no more."""
    one = replaying(40, 1 << 20)
    with contextlib.ExitStack() as stack:
        stuck = one.asked(0, stack)
        good = stack.enter_context(connected(zmq.DEALER, one.endpoint))
        good.send_multipart([b"", (38).to_bytes(8, "big")])
        one.until(lambda: good.poll(0), "others are answered")
        assert [good.recv_multipart()[2] for _ in range(3)][-1] == b"\xff" * 8
        monkeypatch.setattr("penstock.server.kv_events._STUCK_S", 0.0)
        one.until(lambda: not one.replay.answers, "it gets no more")
        assert caplog.text.count("does not read them") == 1
        num_got = 0
        while stuck.poll(500):
            num_got += bool(stuck.recv_multipart())
        assert 0 < num_got <= 20


def test_those_that_come_while_others_read_nothing_are_answered_when_these_get_no_more(
    replaying: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.server.kv_events._ANSWERS", 2)
    one = replaying(40, 1 << 20)
    with contextlib.ExitStack() as stack:
        _stuck = [one.asked(0, stack) for _ in range(2)]
        late = stack.enter_context(connected(zmq.DEALER, one.endpoint))
        late.send_multipart([b"", (39).to_bytes(8, "big")])
        for _ in range(50):
            one.replay.turn(1)
        assert not late.poll(0) and len(one.replay.answers) == 2
        monkeypatch.setattr("penstock.server.kv_events._STUCK_S", 0.0)
        one.until(lambda: late.poll(0), "it is answered")


def test_a_client_that_goes_during_its_answer_ends_it(replaying: Make) -> None:
    one = replaying(40, 1 << 20)
    with contextlib.ExitStack() as stack:
        one.asked(0, stack)
    one.until(lambda: not one.replay.answers, "its answer has ended")


def test_a_request_that_is_too_long_is_refused(replaying: Make) -> None:
    one = replaying(3, 10)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(connected(zmq.DEALER, one.endpoint))
        monitor = client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        stack.callback(client.disable_monitor)
        stack.callback(monitor.close)
        client.send_multipart([b"", bytes(2000)])
        one.until(lambda: monitor.poll(0), "it is disconnected")


def test_the_end_of_the_server_clears_all() -> None:
    with publishing() as one, connected(zmq.SUB, one.live) as live:
        live.setsockopt(zmq.SUBSCRIBE, b"")
        until(lambda: one.seal() or live.poll(5), "it has joined")  # type: ignore[func-returns-value]
        one.publisher.close()
        payloads = []
        while live.poll(500):
            payloads.append(live.recv_multipart()[2])
    assert b"AllBlocksCleared" in payloads[-1]


def test_what_is_kept_for_replay_is_bounded_in_number_and_bytes() -> None:
    kept = Kept(most=3, most_bytes=100)
    assert [kept.add(bytes(10)) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert [number for number, _ in kept.since(0)] == [2, 3, 4]
    kept.add(bytes(95))
    assert [number for number, _ in kept.since(0)] == [5]


def test_a_port_that_is_taken_is_said_before_anything_is_loaded() -> None:
    with publishing() as one, pytest.raises(ConfigError, match=r"--kv-events: cannot listen on .* in use"):
        KvPublisher(one.live, None, "")
    free = f"tcp://127.0.0.1:{free_port()}"
    with publishing() as one, pytest.raises(ConfigError, match=r"--kv-events-replay: cannot listen"):
        KvPublisher(free, one.replay, "")
    KvPublisher(free, None, "").close()  # the port was given back


@pytest.mark.parametrize(
    "wrong", ["5557", "udp://127.0.0.1:5557", "tcp://127.0.0.1", "tcp://*:0", "tcp://:5557", "ipc://x", ""]
)
def test_an_address_that_cannot_be_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="--kv-events"):
        ServerConfig(kv_events=wrong)
    with pytest.raises(ConfigError, match="--kv-events-replay"):
        ServerConfig(kv_events="tcp://127.0.0.1:5557", kv_events_replay=wrong)


def test_one_address_for_both_is_refused_and_so_is_a_replay_of_nothing() -> None:
    with pytest.raises(ConfigError, match="ports of their own"):
        ServerConfig(kv_events="tcp://*:5557", kv_events_replay="tcp://*:5557")
    with pytest.raises(ConfigError, match="--kv-events-replay needs --kv-events"):
        ServerConfig(kv_events_replay="tcp://*:5557")


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    args = Namespace(api_key=None, otlp_endpoint=None, kv_events="tcp://*:5557", served_model=None)
    with pytest.raises(ConfigError, match=r"penstock\[events\]"):
        serve.run(args, Config())


def test_without_the_flag_nothing_of_it_is_imported() -> None:
    code = (
        "import sys, penstock.commands.serve, penstock.server.run, penstock.server.links; "
        "assert not {'zmq', 'penstock.server.kv_events'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
