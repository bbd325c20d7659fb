"""The Mooncake store against a real master and node on loopback: what is written is read, what is wrong is
never served, and trouble ends in time, whatever the library does."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import penstock_mooncake as mooncake_module
from penstock.errors import StoreFailed
from penstock.kv.tiers import remote
from penstock.kv.tiers.remote import open_store
from penstock.kv.tiers.store import FORMAT, HEADER_BYTES, Outcome, pack
from penstock_mooncake import MooncakeClient, MooncakeStore
from tests.cpu.kv.remote_rig import BLOCK_BYTES, LATE_S, Slots, assert_fails, block_of, keys_of, wait_usable
from tests.support.servers import Mooncake, ServerMissing, mooncake_environment

DONE, MISSING, CORRUPT = Outcome.DONE, Outcome.MISSING, Outcome.CORRUPT
VALUE_BYTES = HEADER_BYTES + BLOCK_BYTES
SHORT_S = 0.6
TIMEOUT_S = 5.0  # a process is started in this time, on a machine that has other things to do


@pytest.fixture(scope="module")
def mooncake() -> Iterator[Mooncake]:
    try:
        environment = mooncake_environment()
        server = Mooncake()
    except ServerMissing as error:
        pytest.skip(f"no Mooncake: {error}")
    with server, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(scope="module")
def slots() -> Slots:
    return Slots()


def opened(mooncake: Mooncake, slots: Slots, options: str = "") -> MooncakeStore:
    store = open_store(mooncake.url(options), slots.space, TIMEOUT_S)
    assert isinstance(store, MooncakeStore)
    wait_usable(store)
    return store


@pytest.fixture(scope="module")
def store(mooncake: Mooncake, slots: Slots) -> Iterator[MooncakeStore]:
    """One for all, since each has processes of its own; every test has its own keys."""
    store = opened(mooncake, slots)
    yield store
    store.close()


def client_of(store: MooncakeStore) -> MooncakeClient:
    return store._clients.connected(time.monotonic() + LATE_S)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + LATE_S
    while not condition():
        assert time.monotonic() < until, f"{what} never came"
        time.sleep(0.02)


class Intruder:
    """Somebody who puts anything under any name: values of one length."""

    def __init__(self, mooncake: Mooncake, value_bytes: int) -> None:
        self._client = MooncakeClient(
            ("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", f"127.0.0.1:{mooncake.port}"),
            value_bytes,
            {},
        )

    def put(self, store: MooncakeStore, key: bytes, value: bytes) -> None:
        until = time.monotonic() + LATE_S
        self._client.wait_ready(until)
        with self._client.lane(until) as lane:
            lane.call("remove", store._names([key]), until)
            lane.values[0][:] = value
            assert lane.call("write", store._names([key]), until) == [0]

    def get(self, store: MooncakeStore, key: bytes) -> bytes:
        until = time.monotonic() + LATE_S
        self._client.wait_ready(until)
        with self._client.lane(until) as lane:
            assert lane.call("read", store._names([key]), until)[0] > 0
            return bytes(lane.values[0])

    def close(self) -> None:
        self._client.close()


@pytest.fixture(scope="module")
def intruder(mooncake: Mooncake) -> Iterator[Intruder]:
    intruder = Intruder(mooncake, VALUE_BYTES)
    yield intruder
    intruder.close()


# ----------------------------------------------------------------------------------------------------- blocks


def test_a_value_is_the_header_and_the_bytes(store: MooncakeStore, slots: Slots, intruder: Intruder) -> None:
    (key,) = keys_of("layout", 1)
    slots.write(store, [key])
    assert intruder.get(store, key) == pack(key, slots.space.digest, block_of(key)) + block_of(key)
    assert store._names([key]) == [f"penstock:{FORMAT}:{slots.space.digest.hex()}:{key.hex()}"]


WRONG = {
    "a bit flipped in the bytes": lambda value, other: value[:-1] + bytes([value[-1] ^ 4]),
    "a bit flipped in the header": lambda value, other: value[:50] + bytes([value[50] ^ 1]) + value[51:],
    "the block of another key": lambda value, other: other,
    "the bytes of another key": lambda value, other: value[:HEADER_BYTES] + other[HEADER_BYTES:],
    "no header": lambda value, other: bytes(HEADER_BYTES) + value[HEADER_BYTES:],
}


# Holds invariant 23: a damaged value in Mooncake is a miss and is removed.
def test_what_is_wrong_is_never_served_and_is_removed(
    store: MooncakeStore, slots: Slots, intruder: Intruder
) -> None:
    keys = keys_of("wrong", len(WRONG))
    good, *_ = others = keys_of("right", 2)
    slots.write(store, [*keys, *others])
    for key, spoil in zip(keys, WRONG.values(), strict=True):
        intruder.put(store, key, spoil(intruder.get(store, key), intruder.get(store, good)))
    assert dict(zip(WRONG, slots.read(store, keys), strict=True)) == dict.fromkeys(WRONG, CORRUPT)
    assert slots.read(store, [*keys, *others]) == [MISSING] * len(keys) + [DONE, DONE]
    assert slots.write(store, keys) == [DONE] * len(keys)
    assert slots.read(store, keys) == [DONE] * len(keys)


def test_a_damaged_value_that_cannot_be_removed_is_corrupt_all_the_same(
    store: MooncakeStore, slots: Slots, intruder: Intruder, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = keys_of("cannot be removed", 2)
    slots.write(store, [good, bad])
    intruder.put(store, bad, bytes(VALUE_BYTES))
    ask = MooncakeClient.ask

    def refuses(client: MooncakeClient, what: str, names: Sequence[str], until: float) -> list[int]:
        if what == "remove":
            raise StoreFailed("not now")
        return ask(client, what, names, until)

    with monkeypatch.context() as patch:
        patch.setattr(MooncakeClient, "ask", refuses)
        assert slots.read(store, [good, bad]) == [DONE, CORRUPT]
    assert slots.read(store, [good, bad]) == [DONE, CORRUPT], "the next one to read it tries again"
    assert slots.read(store, [good, bad]) == [DONE, MISSING]


@pytest.mark.parametrize("length", [VALUE_BYTES - 1, VALUE_BYTES + 1])
def test_a_value_of_the_wrong_length_is_never_served_and_is_removed(
    mooncake: Mooncake, store: MooncakeStore, slots: Slots, length: int
) -> None:
    bad, good = keys_of(f"length {length}", 2)
    slots.write(store, [good])
    other = Intruder(mooncake, length)
    other.put(store, bad, (pack(bad, slots.space.digest, block_of(bad)) + block_of(bad) + b"\0")[:length])
    other.close()
    assert slots.read(store, [good, bad]) == [DONE, CORRUPT]
    assert slots.read(store, [good, bad]) == [DONE, MISSING]


def test_what_lies_in_the_slot_is_checked_and_not_what_was_received(
    store: MooncakeStore, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may write into the shared memory at any time, also between the copy and the check."""
    keys = keys_of("late writer", 2)
    slots.write(store, keys)
    unpack = remote.unpack

    def spoiling(header: bytes) -> object:
        for view in slots.views(1):
            view[100] ^= 1
        return unpack(header)

    monkeypatch.setattr(remote, "unpack", spoiling)
    assert slots.read(store, keys[:1]) == [CORRUPT]


PROCESS = """
import sys
from tests.cpu.kv.remote_rig import Slots, keys_of, wait_usable
from penstock.kv.tiers.remote import open_store
slots = Slots()
store = open_store(sys.argv[1], slots.space, 10.0)
wait_usable(store)
print([outcome.value for outcome in slots.read(store, keys_of("shared", 5))])
print(slots.write(store, keys_of("back", 2))[0].value, store._clients._client.pid, flush=True)
sys.stdin.read()
"""


def test_what_one_process_writes_another_reads_and_its_client_ends_with_it(
    mooncake: Mooncake, store: MooncakeStore, slots: Slots
) -> None:
    slots.write(store, keys_of("shared", 4))
    path = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-c", PROCESS, mooncake.url()]
    with subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "['done', 'done', 'done', 'done', 'missing']\n"
        outcome, pid = other.stdout.readline().split()
        assert outcome == "done"
        assert slots.read(store, keys_of("back", 2)) == [DONE, DONE]
        other.kill()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the other engine's client")


# ---------------------------------------------------------------------------------------------------- trouble


def test_a_paused_node_fails_in_time_touches_no_slot_and_comes_back(
    mooncake: Mooncake, store: MooncakeStore, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of("paused node", 4)
    slots.write(store, keys)
    before = client_of(store).pid
    mooncake.node.pause()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(store, "_timeout_s", SHORT_S)
            assert_fails(lambda: slots.read(store, keys))
        slots.memory[:] = b"\x55" * len(slots.memory)  # somebody else has the slots now
    finally:
        mooncake.node.resume()
    wait_usable(store)
    assert slots.memory == b"\x55" * len(slots.memory)
    assert slots.read(store, keys) == [DONE] * 4
    assert not Path(f"/proc/{before}").exists()


def test_a_paused_master_fails_in_time_and_comes_back(
    mooncake: Mooncake, store: MooncakeStore, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of("paused master", 3)
    slots.write(store, keys)
    mooncake.master.pause()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(store, "_timeout_s", SHORT_S)
            for call in (
                lambda: slots.read(store, keys),
                lambda: slots.write(store, keys),
                lambda: store.find(keys),
                store.probe,
            ):
                assert_fails(call)
    finally:
        mooncake.master.resume()
    wait_usable(store)
    assert slots.read(store, keys) == [DONE] * 3


def test_a_call_that_is_overdue_ends_its_process(
    store: MooncakeStore, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of("overdue", 2)
    slots.write(store, keys)
    client = client_of(store)
    os.kill(client.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(store, "_timeout_s", SHORT_S)
        assert_fails(lambda: slots.read(store, keys))
    assert not client.alive and not Path(f"/proc/{client.pid}").exists()
    wait_usable(store)
    assert slots.read(store, keys) == [DONE] * 2


def test_a_library_that_cannot_be_loaded_is_told(
    mooncake: Mooncake, slots: Slots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "store.py").write_text("raise ImportError('libibverbs.so.1: no such file')")
    (tmp_path / "mooncake" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    store = open_store(mooncake.url(), slots.space, LATE_S / 2)
    assert "libibverbs.so.1: no such file" in str(assert_fails(store.probe))
    store.close()


def test_memory_is_lent_until_the_store_is_closed(mooncake: Mooncake, slots: Slots) -> None:
    before = mooncake.capacity_bytes()
    store = opened(mooncake, slots, "segment_gib=0.03125")
    lent = 32 << 20
    wait_until(lambda: mooncake.capacity_bytes() == before + lent, "the memory that is lent")
    client_of(store).kill()  # as after a call that was overdue
    wait_usable(store)
    assert mooncake.capacity_bytes() == before + lent
    store.close()
    assert mooncake.capacity_bytes() == before
    assert_fails(store.probe)


def test_a_killed_master_fails_then_is_empty_then_works(
    mooncake: Mooncake, store: MooncakeStore, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of("killed", 3)
    slots.write(store, keys)
    mooncake.master.kill()
    with monkeypatch.context() as patch:
        patch.setattr(store, "_timeout_s", SHORT_S)
        for call in (
            lambda: slots.read(store, keys),
            lambda: slots.write(store, keys),
            lambda: store.find(keys),
            store.probe,
            store.reset,
        ):
            assert_fails(call)
    mooncake.start_master()
    wait_usable(store)
    assert slots.read(store, keys) == [MISSING] * 3
    wait_until(lambda: mooncake.capacity_bytes() > 0, "the node")
    assert slots.write(store, keys) == [DONE] * 3
    assert slots.read(store, keys) == [DONE] * 3


def test_a_store_without_memory_is_full(
    mooncake: Mooncake, slots: Slots, caplog: pytest.LogCaptureFixture
) -> None:
    with Mooncake(node_mib=0) as empty:
        store = opened(empty, slots)
        assert slots.write(store, keys_of("full", 2)) == [Outcome.FULL] * 2
        assert slots.write(store, keys_of("full", 2)) == [Outcome.FULL] * 2
        assert caplog.text.count("no room") == 1
        store.close()


def test_one_block_whose_node_is_gone_is_one_failed_block() -> None:
    failed = Outcome.FAILED
    assert mooncake_module._some_worked([DONE, failed, MISSING]) == [DONE, failed, MISSING]
    with pytest.raises(StoreFailed):
        mooncake_module._some_worked([failed, failed])


# --------------------------------------------------------------------- processes that are none, or do not end


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def spawned(*command: str, wait: bool = False) -> Callable[..., subprocess.Popen[bytes]]:
    """Another program in place of ours, with what ours would get."""

    def spawn(descriptors: Sequence[int], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, pass_fds=descriptors, env={**os.environ, **environment})
        if wait:
            process.wait()
        return process

    return spawn


@pytest.mark.parametrize("fails", ["memfd_create", "socketpair", "_spawn"])
def test_a_process_that_cannot_be_started_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """It is tried again at every probe."""

    def refuses(*args: object, **more: object) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    def later(*args: object) -> Any:
        if len(made) == 3:
            refuses()
        made.append(socketpair())
        return made[-1]

    made: list[Any] = []
    socketpair = mooncake_module.socket.socketpair
    before = num_open()
    with monkeypatch.context() as patch:
        if fails == "memfd_create":
            patch.setattr(mooncake_module.os, "memfd_create", refuses)
        elif fails == "socketpair":
            patch.setattr(mooncake_module.socket, "socketpair", later)
        else:
            patch.setattr(mooncake_module, "_spawn", refuses)
        with pytest.raises(OSError, match="Too many open files"):
            MooncakeClient((), VALUE_BYTES, {})
    assert num_open() == before
    assert all(end.fileno() == -1 for pair in made for end in pair)


def test_a_process_that_does_not_leave_is_killed_and_can_be_closed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mooncake_module, "_spawn", spawned("sleep", "1000"))
    monkeypatch.setattr(mooncake_module, "_LEAVE_S", 0.01)
    before = num_open()
    client = MooncakeClient((), VALUE_BYTES, {})
    client.close()
    assert not client.alive and num_open() == before
    client.close()


def test_more_calls_than_lanes_are_refused_until_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_module, "_spawn", spawned("sleep", "1000"))
    monkeypatch.setattr(mooncake_module, "_LEAVE_S", 0.01)
    client = MooncakeClient((), VALUE_BYTES, {})
    with contextlib.ExitStack() as calls:
        for _ in range(mooncake_module._LANES):
            calls.enter_context(client.lane(time.monotonic() + LATE_S))
        with pytest.raises(StoreFailed, match="too many calls"), client.lane(time.monotonic()):
            pass
    for _ in range(mooncake_module._LANES + 1):
        with pytest.raises(MemoryError), client.lane(time.monotonic()):
            raise MemoryError  # a lane comes back however its call ends
    assert client.alive
    client.close()
