"""Blocks in a real Valkey or Redis server on loopback: what comes back is what was written, or a miss."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence

import pytest

from penstock.errors import InvariantBroken, StoreFailed
from penstock.kv.tiers import store as envelope
from penstock.kv.tiers.remote import valkey
from penstock.kv.tiers.remote.valkey import ValkeyStore
from penstock.kv.tiers.store import Outcome
from tests.cpu.kv.valkey_rig import (
    BLOCK_BYTES,
    CORRUPT,
    DONE,
    MISSING,
    SECRET,
    block,
    keys_of,
    name_of,
    num_idle,
    opened,
    read,
    space,
    write,
)
from tests.store_servers import valkey_or_skip
from tests.support.servers import LOOPBACK, Valkey

# --------------------------------------------------------------------------------------------------- ordinary


def test_what_is_written_is_found_and_read_back(store: ValkeyStore) -> None:
    keys = keys_of(9)
    assert write(store, keys) == [DONE] * 9
    assert read(store, keys) == [DONE] * 9
    assert store.find(keys) == 9


def test_what_is_not_there_is_missing(store: ValkeyStore) -> None:
    keys = keys_of(4)
    write(store, [keys[0], keys[2]])
    assert read(store, keys) == [DONE, MISSING, DONE, MISSING]
    assert store.find(keys) == 1
    assert store.find(keys[1:]) == 0
    assert store.find([]) == 0
    assert store.read([], []) == [] and store.write([], [], []) == []


def test_a_long_prompt_is_found_in_several_calls(store: ValkeyStore, server: Valkey) -> None:
    keys = keys_of(1100)
    server.ask("MSET", *(word for key in keys[:1030] for word in (name_of(key), "x")))
    assert store.find(keys) == 1030
    server.ask("DEL", name_of(keys[700]))
    assert store.find(keys) == 700


@pytest.mark.parametrize("size", [720 * 1024, 6 << 20])
def test_large_blocks_are_read_into_the_given_memory_and_nowhere_else(server: Valkey, size: int) -> None:
    """More than fits into a socket's buffer."""
    keys = keys_of(3)
    blocks = [memoryview(os.urandom(size)) for _ in keys]
    slots = memoryview(bytearray(b"\xee" * (5 * size)))
    into = [slots[place * size : (place + 1) * size] for place in (3, 1, 0)]
    with contextlib.closing(opened(server.url(), of=space(block_bytes=size))) as store:
        assert store.write(keys, [0, 1, 2], blocks) == [DONE] * 3
        assert store.read(keys, into) == [DONE] * 3
    assert [bytes(view) for view in into] == [bytes(data) for data in blocks]
    assert slots[2 * size : 3 * size] == slots[4 * size :] == b"\xee" * size


@pytest.mark.parametrize("near", [True, False], ids=["on this machine", "over a network"])
def test_blocks_are_asked_for_ahead_without_mixing_them_up(
    store: ValkeyStore, server: Valkey, monkeypatch: pytest.MonkeyPatch, near: bool
) -> None:
    monkeypatch.setattr(valkey, "_NEAR_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(valkey, "_FAR_BYTES", 5 * BLOCK_BYTES)
    monkeypatch.setattr(
        valkey.ValkeyConnection, "near", property(lambda _: near, lambda _, found: None), raising=False
    )
    owed = watched_debts(monkeypatch)
    keys = keys_of(13)
    assert write(store, keys) == [DONE] * 13
    assert read(store, keys) == [DONE] * 13
    server.ask("DEL", name_of(keys[6]))
    damages(server, keys[3])["longer"]()
    assert read(store, keys) == [*[DONE] * 3, CORRUPT, DONE, DONE, MISSING, *[DONE] * 6]
    assert max(owed) == (1 if near else 4)  # a value is a little longer than its block


def watched_debts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many answers with values, or to values, were owed at each moment."""
    owed: list[int] = []
    send = valkey.ValkeyConnection.send

    def watched(self: valkey.ValkeyConnection, parts: Sequence[bytes], num_answers: int) -> None:
        send(self, parts, num_answers)
        if b"GET" in bytes(parts[0]) or len(parts) > 1:
            owed.append(self.num_owed)

    monkeypatch.setattr(valkey.ValkeyConnection, "send", watched)
    return owed


def test_a_block_that_is_there_is_not_sent_again(store: ValkeyStore, server: Valkey) -> None:
    keys = keys_of(2)
    assert write(store, keys) == [DONE, DONE]
    before = received_bytes(server)
    assert write(store, keys) == [DONE, DONE]
    assert received_bytes(server) - before < BLOCK_BYTES


def received_bytes(server: Valkey) -> int:
    lines = server.ask("INFO", "stats").split(b"\r\n")
    return next(int(line.partition(b":")[2]) for line in lines if line.startswith(b"total_net_input_bytes:"))


@pytest.mark.parametrize(
    "view",
    [
        memoryview(bytearray(BLOCK_BYTES + 1)),
        memoryview(bytearray(8)),
        memoryview(bytearray(4 * BLOCK_BYTES)).cast("i"),
    ],
)
def test_a_view_of_another_size_than_a_block_is_refused_before_anything_is_sent(
    store: ValkeyStore, server: Valkey, view: memoryview
) -> None:
    for call in (lambda: store.read(keys_of(1), [view]), lambda: store.write(keys_of(1), [0], [view])):
        with pytest.raises(InvariantBroken):
            call()
    assert server.ask("DBSIZE") == b":0" and num_idle(store) == 0


def test_two_spaces_never_meet(server: Valkey, store: ValkeyStore) -> None:
    keys = keys_of(2)
    with contextlib.closing(opened(server.url(), of=space(b"t" * 32))) as other:
        assert write(store, keys) == [DONE, DONE]
        assert other.find(keys) == 0 and read(other, keys) == [MISSING, MISSING]
        assert write(other, keys[:1]) == [DONE]
        assert store.reset() == 2
        assert read(other, keys) == [DONE, MISSING]
        assert read(store, keys) == [MISSING, MISSING]


def test_a_block_of_another_space_under_our_name_is_corrupt(server: Valkey, store: ValkeyStore) -> None:
    (key,) = keys_of(1)
    server.ask("SET", name_of(key), envelope.pack(key, b"t" * 32, block(key)) + bytes(block(key)))
    assert read(store, [key]) == [CORRUPT]


def test_a_time_to_live_is_set_and_renewed(server: Valkey) -> None:
    (key,) = keys_of(1)
    with contextlib.closing(opened(server.url("ttl=1000"))) as store:
        assert write(store, [key]) == [DONE]
        assert 990 <= int(server.ask("TTL", name_of(key))[1:]) <= 1000
        server.ask("EXPIRE", name_of(key), "5")
        assert write(store, [key]) == [DONE]
        assert 990 <= int(server.ask("TTL", name_of(key))[1:]) <= 1000
        server.ask("PEXPIRE", name_of(key), "0")
        assert read(store, [key]) == [MISSING]


def test_without_a_time_to_live_nothing_expires(server: Valkey, store: ValkeyStore) -> None:
    write(store, keys_of(1))
    assert server.ask("TTL", name_of(keys_of(1)[0])) == b":-1"


def test_reset_forgets_all_blocks_and_nothing_else(server: Valkey, store: ValkeyStore) -> None:
    server.ask("MSET", "somebody", "else's", *(word for key in keys_of(2500) for word in (name_of(key), "x")))
    assert store.reset() == 2500
    assert server.ask("DBSIZE") == b":1"
    assert store.reset() == 0


def test_a_database_of_its_own(server: Valkey, store: ValkeyStore) -> None:
    with contextlib.closing(opened(f"valkey://{LOOPBACK}:{server.port}/5")) as other:
        assert write(other, keys_of(1)) == [DONE]
        assert read(other, keys_of(1)) == [DONE] and read(store, keys_of(1)) == [MISSING]


def test_usage_and_persist_ask_nobody() -> None:
    with contextlib.closing(opened(f"valkey://{LOOPBACK}:1")) as store:
        assert store.usage().num_slots is None
        store.persist()


# ---------------------------------------------------------------------------------------------------- damaged


def damages(server: Valkey, key: bytes) -> dict[str, Callable[[], object]]:
    name = name_of(key)
    other = name_of(keys_of(1, first=500)[0])
    return {
        "a bit of the payload": lambda: server.ask(
            "SETBIT", name, str(8 * envelope.HEADER_BYTES + 4001), "1"
        ),
        "a byte of the header": lambda: server.ask("SETRANGE", name, "40", b"\xff\xfe"),
        "all of the header": lambda: server.ask("SETRANGE", name, "0", bytes(envelope.HEADER_BYTES)),
        "longer": lambda: server.ask("APPEND", name, "x"),
        "much longer": lambda: server.ask("SETRANGE", name, str(3 << 20), "x"),
        "shorter": lambda: server.ask("SET", name, bytes(100)),
        "empty": lambda: server.ask("SET", name, ""),
        "another block": lambda: server.ask("COPY", other, name, "REPLACE"),
        "a list": lambda: (server.ask("DEL", name), server.ask("LPUSH", name, "x")),
    }


DAMAGES = sorted(damages(None, b""))  # type: ignore[arg-type]


# Holds invariant 23: a damaged value in Valkey or Redis is a miss and is removed.
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_value_is_never_served_and_is_removed(
    store: ValkeyStore, server: Valkey, damage: str
) -> None:
    keys = keys_of(3)
    write(store, [*keys, *keys_of(1, first=500)])
    damages(server, keys[1])[damage]()
    assert read(store, keys) == [DONE, CORRUPT, DONE]
    assert server.ask("EXISTS", name_of(keys[1])) == b":0"
    assert read(store, keys) == [DONE, MISSING, DONE]
    assert write(store, keys) == [DONE] * 3 and read(store, keys) == [DONE] * 3


def test_without_the_checksum_damaged_bytes_would_be_served(
    store: ValkeyStore, server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    (key,) = keys_of(1)
    write(store, [key])
    damages(server, key)["a bit of the payload"]()
    monkeypatch.setattr(envelope.Envelope, "fits", lambda self, payload: True)
    with pytest.raises(AssertionError, match="wrong bytes"):
        read(store, [key])


def test_without_the_key_in_the_header_another_block_would_be_served(
    store: ValkeyStore, server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    (key,) = keys_of(1)
    write(store, [key, *keys_of(1, first=500)])
    damages(server, key)["another block"]()
    honest = envelope.unpack
    credulous = lambda header: (found := honest(header)) and found._replace(key=key)  # noqa: E731
    monkeypatch.setattr("penstock.kv.tiers.remote.unpack", credulous)
    with pytest.raises(AssertionError, match="wrong bytes"):
        read(store, [key])


# ------------------------------------------------------------------------------------------- full and refused


def test_a_server_without_room_says_full_and_keeps_what_it_has() -> None:
    with valkey_or_skip(settings=("--maxmemory", "6mb", "--maxmemory-policy", "noeviction")) as small:
        keys = keys_of(3000)
        with contextlib.closing(opened(small.url())) as store:
            outcomes = write(store, keys)
            assert set(outcomes) == {DONE, Outcome.FULL}
            kept = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is DONE]
            assert read(store, kept) == [DONE] * len(kept)
            store.probe()


def test_what_the_server_evicts_is_a_miss() -> None:
    with valkey_or_skip(settings=("--maxmemory", "6mb", "--maxmemory-policy", "allkeys-lru")) as small:
        keys = keys_of(3000)
        with contextlib.closing(opened(small.url())) as store:
            assert set(write(store, keys)) == {DONE}
            assert set(read(store, keys)) == {DONE, MISSING}


def test_a_refusal_is_a_failure_with_its_kind_alone(server: Valkey) -> None:
    server.ask("ACL", "SETUSER", "reader", "on", f">{SECRET}", "~*", "+@read", "+ping", "+touch")
    url = f"valkey://reader:{SECRET}@{LOOPBACK}:{server.port}"
    with contextlib.closing(opened(url)) as store:
        store.probe()
        assert read(store, keys_of(1)) == [MISSING]
        with pytest.raises(StoreFailed, match="NOPERM") as refused:
            write(store, keys_of(1))
        assert "reader" not in str(refused.value)
        server.ask("SET", name_of(keys_of(1)[0]), "x")
        with pytest.raises(StoreFailed, match="NOPERM"):
            store.reset()
        # it may not remove it, and the connection is in order
        assert read(store, keys_of(2)) == [CORRUPT, MISSING]


def test_a_server_that_takes_no_writes_is_a_failure_for_writes(server: Valkey, store: ValkeyStore) -> None:
    write(store, keys_of(1))
    server.ask("CONFIG", "SET", "min-replicas-to-write", "1")
    try:
        with pytest.raises(StoreFailed, match="NOREPLICAS"):
            write(store, keys_of(1, first=7))
        assert read(store, keys_of(1)) == [DONE]
    finally:
        server.ask("CONFIG", "SET", "min-replicas-to-write", "0")


def test_a_manifest_is_forgotten_by_the_server_when_its_time_is_over(
    store: ValkeyStore, server: Valkey
) -> None:
    store.write_manifest("aa-1", b"short", 99.5)
    store.write_manifest("aa-2", b"long", None)
    times = [server.ask("TTL", store._manifest_prefix + id) for id in (b"aa-1", b"aa-2")]
    assert times[0] in (b":99", b":100", b"99", b"100") and times[1] in (b":-1", b"-1")
