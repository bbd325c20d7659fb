"""Blocks in a real Valkey or Redis server on loopback: what comes back is what was written, or a miss. A
server that is paused, killed or full, and one that answers with something else, ends every call in time.
`test_every_store.py` has what all stores do."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

import penstock_valkey
from penstock.errors import StoreFailed
from penstock.kv.tiers import store as envelope
from penstock.kv.tiers.store import Outcome, Written
from penstock_valkey import ValkeyStore
from tests.cpu.kv.remote_rig import wait_usable
from tests.cpu.kv.valkey_rig import (
    BLOCK_BYTES,
    CALLS,
    CORRUPT,
    DONE,
    HANG_S,
    MISSING,
    SECRET,
    SHORT_S,
    fails,
    keys_of,
    name_of,
    opened,
    read,
    space,
    write,
)
from tests.store_servers import valkey_or_skip
from tests.support.servers import LOOPBACK, Valkey

# --------------------------------------------------------------------------------------------------- ordinary


def test_a_long_prompt_is_found_in_several_round_trips(store: ValkeyStore, server: Valkey) -> None:
    keys = keys_of(1100)
    server.ask("MSET", *(word for key in keys[:1030] for word in (name_of(key), "x")))
    assert store.find(keys) == 1030
    server.ask("DEL", name_of(keys[700]))
    assert store.find(keys) == 700


@pytest.mark.parametrize("size", [720 * 1024, 6 << 20])
def test_large_blocks_are_read_into_the_given_memory_and_nowhere_else(server: Valkey, size: int) -> None:
    keys = keys_of(3)
    blocks = [memoryview(os.urandom(size)) for _ in keys]
    slots = memoryview(bytearray(b"\xee" * (5 * size)))
    into = [slots[place * size : (place + 1) * size] for place in (3, 1, 0)]
    with opened(server.url(), of=space(block_bytes=size)) as store:
        assert store.write(keys, [0, 1, 2], blocks) == [DONE] * 3
        assert store.read(keys, into) == [DONE] * 3
    assert [bytes(view) for view in into] == [bytes(data) for data in blocks]
    assert slots[2 * size : 3 * size] == slots[4 * size :] == b"\xee" * size


def test_values_of_several_round_trips_are_not_mixed_up(
    server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(penstock_valkey, "_CHUNK_BYTES", 3 * BLOCK_BYTES)
    keys = keys_of(13)
    with opened(server.url()) as store:
        assert write(store, keys) == [DONE] * 13 and read(store, keys) == [DONE] * 13
        server.ask("DEL", name_of(keys[6]))
        server.ask("APPEND", name_of(keys[3]), "x")
        assert read(store, keys) == [*[DONE] * 3, CORRUPT, DONE, DONE, MISSING, *[DONE] * 6]


def test_a_time_to_live_is_set_and_renewed_where_the_url_has_one(server: Valkey, store: ValkeyStore) -> None:
    key, other = keys_of(2)
    with opened(server.url("ttl=1000")) as mortal:
        for _ in range(2):
            assert write(mortal, [key]) == [DONE]
            assert 990 <= int(server.ask("TTL", name_of(key))[1:]) <= 1000
            server.ask("EXPIRE", name_of(key), "5")
        server.ask("PEXPIRE", name_of(key), "0")
        assert read(mortal, [key]) == [MISSING]
    write(store, [other])
    assert server.ask("TTL", name_of(other)) == b":-1"


def test_a_manifest_lasts_as_long_as_it_shall_and_a_second_at_least(
    store: ValkeyStore, server: Valkey
) -> None:
    for id, left_s in (("aa-1", 99.5), ("aa-2", None), ("aa-3", -3.0)):
        assert store.write_manifest(id, b"old", left_s) is Written.DONE
    assert store.write_manifest("aa-1", b"new", 99.5, b"old") is Written.DONE
    prefix = store._manifest_prefix.decode()
    assert server.ask("TTL", prefix + "aa-1") in (b":99", b":100")
    assert server.ask("TTL", prefix + "aa-2") == b":-1"
    assert 0 < int(server.ask("PTTL", prefix + "aa-3")[1:]) <= 1000


def test_reset_forgets_all_blocks_and_nothing_else(server: Valkey, store: ValkeyStore) -> None:
    server.ask("MSET", "somebody", "else's", *(word for key in keys_of(2500) for word in (name_of(key), "x")))
    assert store.reset() == 2500
    assert server.ask("DBSIZE") == b":1" and store.reset() == 0


# ---------------------------------------------------------------------------------------------------- damaged


def damages(server: Valkey, key: bytes, other: bytes) -> Iterator[tuple[str, Callable[[], object]]]:
    name = name_of(key)
    yield "a bit", lambda: server.ask("SETBIT", name, str(8 * envelope.HEADER_BYTES + 4001), "1")
    yield "the header", lambda: server.ask("SETRANGE", name, "40", b"\xff\xfe")
    yield "no header", lambda: server.ask("SETRANGE", name, "0", bytes(envelope.HEADER_BYTES))
    yield "longer", lambda: server.ask("APPEND", name, "x")
    yield "much longer", lambda: server.ask("SETRANGE", name, str(3 << 20), "x")
    yield "shorter", lambda: server.ask("SET", name, bytes(100))
    yield "empty", lambda: server.ask("SET", name, "")
    yield "another block", lambda: server.ask("COPY", name_of(other), name, "REPLACE")
    yield "a list", lambda: (server.ask("DEL", name), server.ask("LPUSH", name, "x"))


# Holds invariant 23: a damaged value in Valkey or Redis is a miss and is removed.
def test_a_damaged_value_is_never_served_and_is_removed(store: ValkeyStore, server: Valkey) -> None:
    *keys, other = keys_of(4)
    for what, damage in damages(server, keys[1], other):
        write(store, [*keys, other])
        damage()
        assert read(store, keys) == [DONE, CORRUPT, DONE], what
        assert server.ask("EXISTS", name_of(keys[1])) == b":0", what
        assert read(store, keys) == [DONE, MISSING, DONE], what
        assert write(store, keys) == [DONE] * 3 and read(store, keys) == [DONE] * 3, what


# ------------------------------------------------------------------------------------------- full and refused


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru"])
def test_a_server_without_room_is_full_or_evicts_and_is_in_order(policy: str) -> None:
    keys = keys_of(3000)
    with (
        valkey_or_skip(settings=("--maxmemory", "6mb", "--maxmemory-policy", policy)) as small,
        opened(small.url()) as store,
    ):
        written, evicts = write(store, keys), policy == "allkeys-lru"
        assert set(written) == ({DONE} if evicts else {DONE, Outcome.FULL})
        kept = [key for key, outcome in zip(keys, written, strict=True) if outcome is DONE]
        assert set(read(store, kept)) == ({DONE, MISSING} if evicts else {DONE})
        store.probe()
        if not evicts:
            assert store.write_manifest("aa-1", b"text", None) is Written.FULL


def test_a_refusal_is_a_failure_with_its_kind_alone(server: Valkey) -> None:
    server.ask("ACL", "SETUSER", "reader", "on", f">{SECRET}", "~*", "+@read", "+ping", "+touch")
    with opened(f"valkey://reader:{SECRET}@{LOOPBACK}:{server.port}") as store:
        store.probe()
        assert read(store, keys_of(1)) == [MISSING]
        with pytest.raises(StoreFailed, match="refuses: NoPermissionError") as refused:
            write(store, keys_of(1))
        assert "reader" not in str(refused.value)
        server.ask("SET", name_of(keys_of(1)[0]), "x")
        with fails("refuses"):
            store.reset()
        assert read(store, keys_of(2)) == [CORRUPT, MISSING], "it may not remove it"


# ---------------------------------------------------------------------------------------------- gone and back


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "not yet connected"])
def test_a_paused_server_ends_every_call_and_is_used_again_when_it_goes_on(
    server: Valkey, connected: bool
) -> None:
    for call in CALLS.values():
        with opened(server.url(), SHORT_S) as store:
            if connected:
                wait_usable(store)
            server.pause()
            try:
                with fails("answer within|cannot be reached"):
                    call(store)
            finally:
                server.resume()
            wait_usable(store)


def test_a_killed_server_fails_every_call_and_comes_back_empty(server: Valkey, store: ValkeyStore) -> None:
    assert write(store, keys_of(3)) == [DONE] * 3
    server.kill()
    for call in CALLS.values():
        with fails("cannot be reached|closed the connection"):
            call(store)
    server.start()
    store.probe()
    assert read(store, keys_of(3)) == [MISSING] * 3
    assert write(store, keys_of(3)) == [DONE] * 3 and read(store, keys_of(3)) == [DONE] * 3


# ----------------------------------------------------------------------------------------------- odd answers


@contextlib.contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The URL of a server that answers whatever it is asked in its own way."""
    with socket.create_server((LOOPBACK, 0)) as listener:

        def serve(peer: socket.socket) -> None:
            with contextlib.suppress(OSError), peer:
                while peer.recv(1 << 16):
                    answer(peer)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"valkey://{LOOPBACK}:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)


ODD = [
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"-LOADING hunter2\r\n",
    b"-ERR hunter2\r\n",
    b"-hunter2\r\n",
    b"-MOVED 1 hunter2:1\r\n",
    b"*1\r\n*1\r\n:1\r\n",
    b"$-7\r\n",
    b"\0",
    b"",
]


@pytest.mark.parametrize("cluster", ["", "?cluster=1"])
@pytest.mark.parametrize("said", ODD)
def test_a_peer_that_speaks_something_else_is_a_failure_that_repeats_none_of_it(
    said: bytes, cluster: str
) -> None:
    with (
        answering(lambda peer: peer.sendall(said) if said else peer.close()) as url,
        opened(url + cluster, SHORT_S) as store,
    ):
        for call in ("find", "read", "reset", "write_manifest"):
            with pytest.raises(StoreFailed) as failed:
                CALLS[call](store)
            assert "hunter2" not in str(failed.value)


def test_bytes_that_come_one_by_one_do_not_extend_the_deadline_and_their_connection_is_closed() -> None:
    """Each of them comes in time."""
    closed = threading.Event()

    def dribble(peer: socket.socket) -> None:
        peer.sendall(b"$1000\r\n")
        try:
            for _ in range(1000):
                time.sleep(0.05)
                peer.sendall(b"x")
        except OSError:
            closed.set()

    with answering(dribble) as url, opened(url, SHORT_S) as store:
        with fails("answer within"):
            store.read_manifest("aa-1")
        assert closed.wait(HANG_S)
