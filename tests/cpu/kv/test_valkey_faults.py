"""A Valkey server that is paused, killed, replaced or never there: every call ends in time, and the store
comes back by itself."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import traceback
from collections.abc import Iterator

import pytest

from penstock.errors import ConfigError, StoreFailed
from penstock.kv.tiers.remote import Node, valkey
from penstock.kv.tiers.remote.valkey import ValkeyAddress, ValkeyConnection, ValkeyStore
from tests.cpu.kv.valkey_rig import (
    BLOCK_BYTES,
    CALLS,
    DONE,
    HANG_S,
    MISSING,
    PATIENT_S,
    SHORT_S,
    is_closed,
    keys_of,
    no_hang,
    num_idle,
    opened,
    read,
    space,
    write,
)
from tests.support.servers import LOOPBACK, Valkey, free_port

# ---------------------------------------------------------------------------------------------- gone and back


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("connected", [True, False], ids=["connected", "not yet connected"])
def test_a_paused_server_ends_every_call_and_is_used_again_when_it_goes_on(
    server: Valkey, call: str, connected: bool
) -> None:
    with contextlib.closing(opened(server.url())) as store:
        if connected:
            store.probe()
        store._timeout_s = SHORT_S
        server.pause()
        try:
            with pytest.raises(StoreFailed, match="time"), no_hang():
                CALLS[call](store)
        finally:
            server.resume()
        with contextlib.closing(opened(server.url())) as patient:
            patient.probe()  # it has caught up with what it was asked meanwhile
        store._timeout_s = PATIENT_S
        assert write(store, keys_of(3)) == [DONE] * 3
        assert read(store, keys_of(3)) == [DONE] * 3


def test_a_server_that_stops_while_it_answers_ends_the_call(server: Valkey) -> None:
    """The answer is larger than what sockets hold, so the server is stopped somewhere inside it."""
    size = 24 << 20
    with contextlib.closing(opened(server.url(), of=space(block_bytes=size))) as store:
        store.write(keys_of(1), [0], [memoryview(bytes(size))])
        store._timeout_s = SHORT_S
        real_recv = ValkeyConnection._receive

        def stopping(self: ValkeyConnection, target: memoryview) -> int:
            if len(target) < size // 2 and len(target) > BLOCK_BYTES:
                server.pause()
            return real_recv(self, target)

        with pytest.MonkeyPatch.context() as patch, no_hang():
            patch.setattr(ValkeyConnection, "_receive", stopping)
            with pytest.raises(StoreFailed, match="time"):
                store.read(keys_of(1), [memoryview(bytearray(size))])
        server.resume()
        store._timeout_s = PATIENT_S
        assert store.read(keys_of(1), [memoryview(bytearray(size))]) == [DONE]


@pytest.mark.parametrize("call", CALLS)
def test_a_killed_server_fails_every_call_and_comes_back_empty(server: Valkey, call: str) -> None:
    with contextlib.closing(opened(server.url())) as store:
        assert write(store, keys_of(3)) == [DONE] * 3
        server.kill()
        for _ in range(2):
            with pytest.raises(StoreFailed), no_hang():
                CALLS[call](store)
        server.start()
        store.probe()
        assert read(store, keys_of(3)) == [MISSING] * 3
        assert write(store, keys_of(3)) == [DONE] * 3 and read(store, keys_of(3)) == [DONE] * 3


def test_a_server_that_was_restarted_between_two_calls_is_not_even_noticed(
    server: Valkey, store: ValkeyStore
) -> None:
    write(store, keys_of(3))
    server.restart()
    assert read(store, keys_of(3)) == [MISSING] * 3


def test_a_server_that_was_down_from_the_start_is_found_later(server: Valkey) -> None:
    server.kill()
    with contextlib.closing(opened(server.url())) as store:
        with pytest.raises(StoreFailed, match="cannot be reached"):
            store.probe()
        server.start()
        store.probe()


def test_a_peer_that_speaks_something_else_is_a_failure(server: Valkey) -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:

        def answer() -> None:
            for _ in range(2):
                with listener.accept()[0] as peer:
                    peer.recv(4096)
                    peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        speaker = threading.Thread(target=answer)
        speaker.start()
        with contextlib.closing(opened(f"valkey://{LOOPBACK}:{listener.getsockname()[1]}")) as store:
            for call in ("read", "probe"):
                with pytest.raises(StoreFailed):
                    CALLS[call](store)
        speaker.join()


def test_connections_are_kept_while_they_are_in_order_and_not_after_a_failure(server: Valkey) -> None:
    with contextlib.closing(opened(server.url())) as store:
        for _ in range(5):
            write(store, keys_of(2))
            read(store, keys_of(4))
        assert num_idle(store) == 1
        server.kill()
        with pytest.raises(StoreFailed):
            store.probe()
        assert num_idle(store) == 0


def test_many_lanes_at_once_each_get_their_own_blocks(server: Valkey, store: ValkeyStore) -> None:
    failures: list[str] = []

    def lane(number: int) -> None:
        try:
            for turn in range(8):
                keys = keys_of(5, first=1000 * number + 10 * (turn % 3))
                assert write(store, keys) == [DONE] * 5
                assert read(store, keys) == [DONE] * 5
                assert store.find(keys) == 5
        except BaseException:
            failures.append(traceback.format_exc())

    lanes = [threading.Thread(target=lane, args=(number,)) for number in range(8)]
    for one in lanes:
        one.start()
    for one in lanes:
        one.join()
    assert not failures, failures[0]
    assert 1 <= num_idle(store) <= 8
    assert int(server.ask("DBSIZE")[1:]) == 8 * 15


def test_a_closed_store_answers_nobody(server: Valkey) -> None:
    store = opened(server.url())
    store.probe()
    store.close()
    store.close()
    with pytest.raises(StoreFailed, match="closed"):
        store.probe()
    assert num_idle(store) == 0


# -------------------------------------------------------------------------------------------- names and hosts


@pytest.mark.parametrize("name", ["no-such-host.invalid", "x" * 70, "a..b"])
def test_a_name_that_is_unknown_is_refused_at_start_and_a_failure_later(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="its host cannot be resolved"):
        opened(f"valkey://{name}")
    monkeypatch.setattr(valkey, "check_hosts", lambda hosts: None)  # it was known then
    with (
        contextlib.closing(opened(f"valkey://{name}")) as store,
        pytest.raises(StoreFailed, match="cannot be reached") as failure,
    ):
        store.probe()
    assert "no answer in time" not in str(failure.value), "it is told at once"


def test_a_resolver_that_does_not_answer_ends_with_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def stuck(node: Node, flags: int) -> object:
        if flags:
            raise socket.gaierror
        release.wait(HANG_S)
        raise socket.gaierror

    monkeypatch.setattr(valkey, "_addresses", stuck)
    monkeypatch.setattr(valkey, "check_hosts", lambda hosts: None)
    with (
        contextlib.closing(opened("valkey://somewhere", 0.05)) as store,
        no_hang(),
        pytest.raises(StoreFailed, match="in time"),
    ):
        store.probe()
    release.set()


def test_of_several_addresses_a_dead_one_does_not_take_all_the_time(
    server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = free_port()

    def two(node: Node, flags: int) -> object:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (LOOPBACK, port)) for port in (dead, server.port)]

    monkeypatch.setattr(valkey, "_addresses", two)
    monkeypatch.setattr(valkey, "check_hosts", lambda hosts: None)
    with contextlib.closing(opened("valkey://somewhere")) as store:
        store.probe()
        assert store.find([bytes(16)]) == 0, "the living one has answered"


@pytest.mark.parametrize(
    "error",
    [OSError("of user hunter2"), ConnectionResetError("of user hunter2")],
    ids=lambda e: type(e).__name__,
)
def test_what_the_system_raises_is_told_by_its_kind_alone(
    server: Valkey, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A connection that ends while a list of names is on its way."""

    class Broken:
        """A socket that sends and does not receive."""

        def __init__(self, real: socket.socket) -> None:
            self.settimeout, self.sendmsg, self.close = real.settimeout, real.sendmsg, real.close

        def recv_into(self, target: memoryview) -> int:
            raise error

    with contextlib.closing(opened(server.url())) as store:
        with monkeypatch.context() as patch:
            query = ValkeyConnection.query

            def broken(connection: ValkeyConnection, *words: bytes) -> object:
                connection._socket = Broken(connection._socket)  # type: ignore[assignment]
                return query(connection, *words)

            patch.setattr(ValkeyConnection, "query", broken)
            with pytest.raises(StoreFailed, match=type(error).__name__) as raised:
                store.reset()
            assert "hunter2" not in str(raised.value)
        assert num_idle(store) == 0, "a connection that owes an answer is not used again"
        assert write(store, keys_of(2)) == [DONE] * 2 and store.reset() == 2


@pytest.fixture
def listening() -> Iterator[str]:
    """Where somebody listens who says nothing: enough to be connected to."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        yield f"valkey://{LOOPBACK}:{listener.getsockname()[1]}"


def test_a_connection_whose_call_failed_is_closed_at_once_and_so_are_its_siblings(listening: str) -> None:
    with contextlib.closing(opened(listening)) as store:
        kept, node, until = store._connections, store._address.nodes[0], time.monotonic() + PATIENT_S
        with kept.borrowed(node, until) as one, kept.borrowed(node, until) as other:
            pass
        assert num_idle(store) == 2
        kept._slots = []
        with pytest.raises(MemoryError), kept.borrowed(node, until):
            raise MemoryError
        assert num_idle(store) == 0 and is_closed(one) and is_closed(other)
        assert kept._slots is None, "others may have taken over"


def test_a_connection_that_cannot_be_made_is_closed_at_once(
    listening: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ValkeyConnection] = []

    def fails_late(connection: ValkeyConnection, address: ValkeyAddress) -> None:
        made.append(connection)
        raise StoreFailed("after it was connected")

    with contextlib.closing(opened(listening)) as store:
        store._connections._slots = []
        with monkeypatch.context() as patch:
            patch.setattr(valkey, "_greet", fails_late)
            with pytest.raises(StoreFailed, match="after it was connected"):
                store.find(keys_of(1))
        (connection,) = made
        assert is_closed(connection) and store._connections._slots is None


def test_a_socket_that_reaches_nobody_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []

    class Seen(socket.socket):
        def __init__(self, *args: int) -> None:
            super().__init__(*args)
            made.append(self)

    node = Node(LOOPBACK, free_port())
    monkeypatch.setattr(valkey.socket, "socket", Seen)
    with pytest.raises(StoreFailed, match="cannot be reached"):
        valkey.dial(node, None, time.monotonic() + PATIENT_S)
    assert made and all(one.fileno() == -1 for one in made)
