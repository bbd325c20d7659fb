"""Passwords, TLS and clusters of real Valkey servers; credentials appear nowhere."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from penstock.kv.tiers.store import Written
from penstock_valkey import PASSWORD_VARIABLE
from tests.cpu.kv.remote_rig import wait_usable
from tests.cpu.kv.valkey_rig import (
    DONE,
    MISSING,
    SECRET,
    SHORT_S,
    fails,
    failure_of,
    keys_of,
    name_of,
    opened,
    read,
    space,
    write,
)
from tests.store_servers import valkey_or_skip
from tests.support.servers import LOOPBACK, SlotRange, Valkey, free_port

# ------------------------------------------------------------------------------------------------ credentials


def test_a_password_opens_the_store_and_appears_nowhere(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    with valkey_or_skip(password=SECRET) as guarded:
        with opened(guarded.url()) as store:
            assert write(store, keys_of(1)) == [DONE] and read(store, keys_of(1)) == [DONE]
            assert SECRET not in repr(store)
        without = f"valkey://{LOOPBACK}:{guarded.port}"
        said = [
            failure_of(url)
            for url in (
                without,
                guarded.url(password=f"{SECRET}x"),
                f"valkey://joe:{SECRET}@{LOOPBACK}:{guarded.port}",
            )
        ]
        monkeypatch.setenv(PASSWORD_VARIABLE, SECRET)
        with opened(without) as store:
            assert read(store, keys_of(1)) == [DONE]
        guarded.kill()
        said.append(failure_of(guarded.url()))
    assert "password" in said[0] and "password" in said[1] and "password" in said[2]
    assert SECRET not in "".join(said) and "joe" not in said[2] and SECRET not in caplog.text


# -------------------------------------------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def encrypted() -> Iterator[Valkey]:
    with valkey_or_skip(tls=True, password=SECRET, settings=("--bind", LOOPBACK, "127.0.0.2")) as server:
        yield server


def test_an_encrypted_store_serves_what_was_written(encrypted: Valkey) -> None:
    size = 3 << 20
    with opened(encrypted.url(), of=space(block_bytes=size)) as store:
        data, into = memoryview(os.urandom(size)), memoryview(bytearray(size))
        assert store.write(keys_of(1), [0], [data]) == [DONE]
        for _ in range(2):
            assert store.read(keys_of(1), [into]) == [DONE] and into == data
        assert store.reset() == 1
        assert "TLS" in repr(store)


def test_a_certificate_that_is_not_trusted_or_for_another_name_is_refused(encrypted: Valkey) -> None:
    trusting = encrypted.url()
    for url in (trusting.partition("?")[0], trusting.replace(LOOPBACK, "127.0.0.2")):
        said = failure_of(url)
        assert "certificate" in said and SECRET not in said


def test_verification_ends_only_where_that_was_asked_for(encrypted: Valkey) -> None:
    with opened(encrypted.url().partition("?")[0] + "?verify=none") as store:
        store.probe()


# --------------------------------------------------------------------------------------------------- clusters


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[list[Valkey]]:
    with (
        valkey_or_skip(slots=SlotRange(0, 8191)) as low,
        valkey_or_skip(slots=SlotRange(8192, 16383)) as high,
    ):
        low.join(high)
        low.wait_cluster()
        high.wait_cluster()
        yield [low, high]


def stored(server: Valkey) -> int:
    return int(server.ask("DBSIZE")[1:])


def test_a_cluster_keeps_each_block_where_it_belongs(two_nodes: list[Valkey]) -> None:
    low, high = two_nodes
    keys = keys_of(40)
    with opened(high.url()) as store:
        assert (
            write(store, keys) == [DONE] * 40
            and read(store, [*keys, *keys_of(2, first=900)]) == [DONE] * 40 + [MISSING] * 2
        )
        assert store.find(keys) == 40
        assert min(stored(low), stored(high)) > 5 and stored(low) + stored(high) == 40
        store.probe()
        assert store.reset() == 40
        assert stored(low) + stored(high) == 0


def test_what_is_in_a_slot_that_moved_is_asked_for_where_it_is_now(two_nodes: list[Valkey]) -> None:
    low, high = two_nodes
    with opened(low.url()) as store:
        store.probe()
        key = next(key for key in keys_of(100) if slot_of_name(low, name_of(key)) < 8192)
        slot = str(slot_of_name(low, name_of(key)))
        for target in (high, low):
            owner = target.ask("CLUSTER", "MYID").decode()
            for node in (target, low, high):
                node.ask("CLUSTER", "SETSLOT", slot, "NODE", owner)
            assert read(store, [key]) == [MISSING]
            assert write(store, [key]) == [DONE]
            assert read(store, [key]) == [DONE]
            assert stored(target) == 1
            assert store.reset() == 1
            id = next(
                id
                for id in map(str, range(100))
                if slot_of_name(low, store._manifest_prefix.decode() + id) < 8192
            )
            assert store.write_manifest(id, b"old", None) is Written.DONE
            assert store.write_manifest(id, b"new", None, b"old") is Written.DONE
            assert store.manifests() == [id] and store.read_manifest(id) == b"new"
            store.remove_manifest(id, b"new")
            assert store.manifests() == []


def slot_of_name(server: Valkey, name: str) -> int:
    return int(server.ask("CLUSTER", "KEYSLOT", name)[1:])


def test_a_cluster_with_a_dead_node_fails_until_it_answers(two_nodes: list[Valkey]) -> None:
    low, high = two_nodes
    # the first that is asked is not there
    url = f"valkey://{LOOPBACK}:{free_port()},{LOOPBACK}:{low.port}?cluster=1"
    with opened(url, SHORT_S) as store:
        wait_usable(store)
        assert write(store, keys_of(40)) == [DONE] * 40
        high.pause()
        try:
            for call in (
                lambda: store.find(keys_of(40)),
                lambda: read(store, keys_of(40)),
                lambda: write(store, keys_of(40)),
                store.probe,
            ):
                with fails():
                    call()
        finally:
            high.resume()
        for node in two_nodes:
            node.wait_cluster()
        wait_usable(store)
        assert read(store, keys_of(40)) == [DONE] * 40
        store.reset()
