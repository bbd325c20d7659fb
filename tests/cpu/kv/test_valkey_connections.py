"""Connections to Valkey that are kept: each call has its own deadline, none outlives its store, and a probe
asks anew who has what."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import StoreFailed
from penstock.kv.tiers import remote
from penstock.kv.tiers.remote import Node, valkey
from penstock.kv.tiers.store import Outcome
from tests.cpu.kv.valkey_rig import PATIENT_S, is_closed, keys_of, num_idle, opened, write
from tests.support.servers import LOOPBACK


@pytest.fixture(autouse=True)
def _any_name_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(valkey, "check_hosts", lambda hosts: None)


@pytest.fixture
def answering() -> Iterator[str]:
    """Somebody who says that he is a whole cluster, and answers a ping."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        slots = f"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n${len(LOOPBACK)}\r\n{LOOPBACK}\r\n:{port}\r\n".encode()

        def answer(peer: socket.socket) -> None:
            with contextlib.suppress(OSError), peer:
                while asked := peer.recv(4096):
                    peer.sendall(slots if b"SLOTS" in asked else b"+PONG\r\n")

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"valkey://{LOOPBACK}:{port}?cluster=1"
        listener.shutdown(socket.SHUT_RDWR)


def test_a_probe_asks_anew_who_has_what(answering: str) -> None:
    """While a node takes over from another, maps with holes are handed out: blocks in a hole fail, and no
    connection does."""
    with contextlib.closing(opened(answering)) as store:
        store._connections._slots = [None] * 16384
        with store._connections.holding([b"name"], time.monotonic() + PATIENT_S) as holders:
            assert holders == []
        store.probe()
        with store._connections.holding([b"name"], time.monotonic() + PATIENT_S) as holders:
            assert [(connection.node, places) for connection, places in holders] == [
                (store._address.nodes[0], [0])
            ]


def test_a_connection_that_is_used_again_has_the_deadline_of_its_new_call(answering: str) -> None:
    with contextlib.closing(opened(answering)) as store:
        kept, node, until = store._connections, store._address.nodes[0], time.monotonic() + PATIENT_S
        with kept.borrowed(node, until) as one:
            assert one.deadline == until
        with kept.borrowed(node, until + 1.0) as again:
            assert again is one and again.deadline == until + 1.0


def test_a_connection_that_is_in_use_when_its_store_is_closed_is_not_kept(answering: str) -> None:
    store = opened(answering)
    with store._connections.borrowed(store._address.nodes[0], time.monotonic() + PATIENT_S) as connection:
        store.close()
        assert not is_closed(connection), "whoever has it may go on"
    assert is_closed(connection) and num_idle(store) == 0


def test_each_node_that_may_know_the_others_has_its_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is switched off would leave nothing for those that are not. The clock stands still, and nobody
    answers."""
    asked: list[tuple[int, float]] = []

    @contextlib.contextmanager
    def borrowed(node: Node, deadline: float) -> Iterator[None]:
        asked.append((node.port, deadline))
        raise StoreFailed("no answer in time")
        yield

    with contextlib.closing(opened(f"valkey://{LOOPBACK}:1,{LOOPBACK}:2,{LOOPBACK}:3?cluster=1")) as store:
        monkeypatch.setattr(valkey, "time", SimpleNamespace(monotonic=lambda: 1000.0))
        monkeypatch.setattr(store._connections, "borrowed", borrowed)
        with pytest.raises(StoreFailed):
            store._connections.nodes(1006.0)
    assert asked == [(1, 1002.0), (2, 1003.0), (3, 1006.0)]


def test_each_exchange_of_a_reset_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of many blocks takes longer than one exchange may."""
    now_s = 1000.0
    deadlines: list[float] = []

    class Slow:
        """Three pages of names, each three seconds after it was asked for."""

        def __init__(self) -> None:
            self.pages = [[b"7", [b"a", b"b"]], [b"9", []], [b"0", [b"c"]]]
            self.deadline = now_s + 4.0

        def unlink(self, names: list[bytes]) -> list[int]:
            return [1] * len(names)

        def query(self, *words: bytes) -> object:
            nonlocal now_s
            deadlines.append(self.deadline - now_s)
            now_s += 3.0
            return self.pages[len(deadlines) - 1]

    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: now_s))
    with contextlib.closing(opened(f"valkey://{LOOPBACK}:1", 4.0)) as store:
        assert store._clear(Slow()) == 3  # type: ignore[arg-type]
    assert deadlines == [4.0] * 3


def test_a_store_that_is_closed_leaves_no_connection_open_and_makes_none(answering: str) -> None:
    store = opened(answering)
    node, until = store._address.nodes[0], time.monotonic() + PATIENT_S
    with store._connections.borrowed(node, until) as one, store._connections.borrowed(node, until) as other:
        assert one is not other
    assert num_idle(store) == 2 and not is_closed(one) and not is_closed(other)
    store.close()
    assert num_idle(store) == 0 and is_closed(one) and is_closed(other)
    with pytest.raises(StoreFailed, match="was closed"):
        store.probe()
    store.close()


def test_whoever_forgets_a_node_closes_its_idle_connections_and_those_alone(answering: str) -> None:
    with contextlib.closing(opened(answering)) as store:
        node, until = store._address.nodes[0], time.monotonic() + PATIENT_S
        with store._connections.borrowed(node, until) as connection:
            pass
        store._connections._slots = [node] * 16384
        store._connections.forget(Node("other", 1))
        assert store._connections._slots is None and num_idle(store) == 1 and not is_closed(connection)
        store._connections._slots = [node] * 16384
        store._connections.forget(node)
        assert store._connections._slots is None and num_idle(store) == 0 and is_closed(connection)


@pytest.mark.parametrize("wrong", [(-1, 5), (5, 4), (0, 16384)])
def test_a_map_with_slots_that_are_none_is_no_map(wrong: tuple[int, int]) -> None:
    with pytest.raises(StoreFailed, match="map of its slots"):
        valkey.slot_map([[*wrong, [b"h", 7, b"id"]]], Node("asked", 1))
    for port in (0, 65536):
        with pytest.raises(StoreFailed, match="map of its slots"):
            valkey.slot_map([[0, 5, [b"h", port, b"id"]]], Node("asked", 1))


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_a_probe_asks_every_node_and_one_that_is_silent_fails_it(
    monkeypatch: pytest.MonkeyPatch, silent: int
) -> None:
    nodes = [Node("h", port) for port in range(3)]
    asked: list[Node] = []

    @contextlib.contextmanager
    def borrowed(node: Node, deadline: float) -> Iterator[SimpleNamespace]:
        asked.append(node)
        if node.port == silent:
            raise StoreFailed("no answer in time")
        yield SimpleNamespace(ask=lambda word: b"PONG")

    with contextlib.closing(opened(f"valkey://{LOOPBACK}:1?cluster=1")) as store:
        monkeypatch.setattr(store._connections, "nodes", lambda deadline: nodes)
        monkeypatch.setattr(store._connections, "borrowed", borrowed)
        with pytest.raises(StoreFailed):
            store.probe()
        assert asked == nodes[: silent + 1]
        silent = -1
        store.probe()
        assert asked[-3:] == nodes


def test_a_connection_that_is_left_with_answers_owed_is_not_kept(answering: str) -> None:
    with contextlib.closing(opened(answering)) as store:
        with store._connections.borrowed(store._address.nodes[0], time.monotonic() + PATIENT_S) as connection:
            connection.num_owed = 1
        assert num_idle(store) == 0 and is_closed(connection)


@contextlib.contextmanager
def asked_slowly(monkeypatch: pytest.MonkeyPatch, is_there: bool) -> Iterator[tuple[Any, list[float]]]:
    """A store with four seconds for a call, in which every question takes one; and the deadlines that it was
    asked under."""
    now_s = 1000.0
    deadlines: list[float] = []

    def ask_each(word: bytes, names: list[bytes], after: object, deadline: float) -> list[bool]:
        nonlocal now_s
        now_s += 1.0
        deadlines.append(deadline)
        return [is_there] * len(names)

    with contextlib.closing(opened(f"valkey://{LOOPBACK}:1", 4.0)) as store:
        monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: now_s))
        monkeypatch.setattr(store, "_ask_each", ask_each)
        yield store, deadlines


def test_a_long_prompt_is_looked_for_under_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    with asked_slowly(monkeypatch, is_there=True) as (store, deadlines):
        assert store.find(keys_of(1100)) == 1100
    assert deadlines == [1004.0] * 3


def test_a_write_asks_what_is_there_and_sends_the_rest_under_one_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def set_each(
        names: list[bytes], value: object, value_bytes: int, ttl: object, deadline: float
    ) -> list[Outcome]:
        deadlines.append(deadline)
        return [Outcome.DONE] * len(names)

    with asked_slowly(monkeypatch, is_there=False) as (store, deadlines):
        monkeypatch.setattr(store, "_set_each", set_each)
        assert write(store, keys_of(3)) == [Outcome.DONE] * 3
    assert deadlines == [1004.0] * 2


def test_manifests_are_looked_for_at_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(opened("valkey://h:1?cluster=1")) as store:

        @contextlib.contextmanager
        def borrowed(node: Node, deadline: float) -> Iterator[SimpleNamespace]:
            yield SimpleNamespace(
                query=lambda *words: [b"0", [store._manifest_prefix + b"aa-%d" % node.port]]
            )

        monkeypatch.setattr(
            store._connections, "nodes", lambda deadline: [Node("h", port) for port in (3, 1, 2)]
        )
        monkeypatch.setattr(store._connections, "borrowed", borrowed)
        assert store.manifests() == ["aa-1", "aa-2", "aa-3"]


@pytest.mark.parametrize("alive", [1, 2, 3])
def test_any_node_that_was_named_or_was_known_tells_who_has_what(
    monkeypatch: pytest.MonkeyPatch, alive: int
) -> None:
    """The one in the URL may be gone for good, and so may those that were there when the map was asked
    for."""
    answering_ports = {1}

    @contextlib.contextmanager
    def borrowed(node: Node, deadline: float) -> Iterator[SimpleNamespace]:
        if node.port not in answering_ports:
            raise StoreFailed("no answer in time")
        yield SimpleNamespace(query=lambda *words: [[0, 9999, [b"h", 2]], [10000, 16383, [b"h", 3]]])

    with contextlib.closing(opened("valkey://h:1?cluster=1")) as store:
        monkeypatch.setattr(store._connections, "borrowed", borrowed)
        assert store._connections.nodes(time.monotonic() + PATIENT_S) == [Node("h", 2), Node("h", 3)]
        store._connections.forget()
        answering_ports = {alive}
        assert store._connections.nodes(time.monotonic() + PATIENT_S) == [Node("h", 2), Node("h", 3)]


def test_nodes_are_those_of_the_newest_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that left the cluster are not asked for names, nor for a ping."""
    ports = (2, 3)

    @contextlib.contextmanager
    def borrowed(node: Node, deadline: float) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(
            query=lambda *words: [[0, 9999, [b"h", ports[0]]], [10000, 16383, [b"h", ports[1]]]]
        )

    with contextlib.closing(opened("valkey://h:1?cluster=1")) as store:
        monkeypatch.setattr(store._connections, "borrowed", borrowed)
        for ports in ((2, 3), (3, 4)):
            store._connections.forget()
            assert store._connections.nodes(time.monotonic() + PATIENT_S) == [
                Node("h", port) for port in ports
            ]


def test_each_address_of_a_host_has_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still, and nobody answers."""
    given_s: list[float] = []

    class Silent:
        def __init__(self, *kind: object) -> None: ...

        def settimeout(self, timeout_s: float) -> None:
            given_s.append(timeout_s)

        def connect(self, address: object) -> None:
            raise TimeoutError

        def close(self) -> None: ...

    monkeypatch.setattr(
        valkey, "resolve", lambda node, patience_s: [(2, 1, 6, "", ("h", number)) for number in range(3)]
    )
    monkeypatch.setattr(valkey, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    monkeypatch.setattr(valkey, "socket", SimpleNamespace(socket=Silent))
    with pytest.raises(StoreFailed, match="no answer in time"):
        valkey.dial(Node("h", 1), None, 1006.0)
    assert given_s == [2.0, 3.0, 6.0]
