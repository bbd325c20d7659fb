"""What every shared store does, each against a real server. A new kind is one entry in `SERVERS`; what it
alone does has its own file."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import pytest

from penstock.kv.tiers.remote import KINDS, open_store
from penstock.kv.tiers.store import BlockStore, ManifestStore, Outcome, SparseStore, Written, pack
from tests.cpu.kv.remote_rig import BLOCK_BYTES, Slots, keys_of, wait_usable
from tests.store_servers import valkey_or_skip
from tests.support.servers import Bucket, Mooncake, ServerMissing, mooncake_environment

DONE, MISSING, CORRUPT = Outcome.DONE, Outcome.MISSING, Outcome.CORRUPT
TIMEOUT_S = 10.0  # a busy machine may take a second for a request


@contextmanager
def valkey() -> Iterator[str]:
    with valkey_or_skip() as server:
        yield server.url()


@contextmanager
def s3() -> Iterator[str]:
    pytest.importorskip(
        "obstore", reason="the client library is missing: pip install obstore", exc_type=ImportError
    )
    with Bucket() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server.url("every-store")


@contextmanager
def mooncake() -> Iterator[str]:
    environment = mooncake_environment()
    with Mooncake() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield server.url()


# A real server while the context lasts, and the URL of its store.
SERVERS: dict[str, Callable[[], AbstractContextManager[str]]] = {
    "valkey": valkey,
    "s3": s3,
    "mooncake": mooncake,
}


def test_every_kind_is_tried() -> None:
    assert set(KINDS.values()) == set(SERVERS)


@pytest.fixture(scope="module", params=SERVERS)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with contextlib.ExitStack() as stack:
        try:
            yield stack.enter_context(SERVERS[request.param]())
        except ServerMissing as error:
            pytest.skip(f"no server: {error}")


@pytest.fixture
def slots(request: pytest.FixtureRequest) -> Slots:
    """Every test has a space of its own."""
    return Slots(request.node.name.encode())


@contextmanager
def opened(url: str, slots: Slots) -> Iterator[BlockStore]:
    with contextlib.closing(open_store(url, slots.space, TIMEOUT_S)) as store:
        wait_usable(store)
        yield store


@pytest.fixture
def store(url: str, slots: Slots) -> Iterator[BlockStore]:
    with opened(url, slots) as store:
        yield store


def test_what_was_written_is_found_and_read(store: BlockStore, slots: Slots) -> None:
    keys = keys_of("round trip", 20)
    assert slots.write(store, keys) == [DONE] * 20
    assert slots.read(store, keys, first=20) == [DONE] * 20
    assert store.find(keys) == 20
    assert slots.write(store, keys) == [DONE] * 20, "one that is there already counts as written"


def test_what_is_not_there_is_missing(store: BlockStore, slots: Slots) -> None:
    there, missing = keys_of("there", 2), keys_of("not there", 2)
    slots.write(store, there)
    assert slots.read(store, [missing[0], there[0], missing[1], there[1]]) == [MISSING, DONE, MISSING, DONE]
    assert (store.find([*there, *missing]), store.find(missing), store.find([])) == (2, 0, 0)
    assert slots.read(store, []) == slots.write(store, []) == []


def test_the_last_one_that_is_there_is_found_behind_others_that_are_not(
    store: BlockStore, slots: Slots
) -> None:
    """Of few boundaries a state is kept."""
    keys = keys_of("sparse", 300)
    slots.write(store, [keys[99], keys[250]])
    assert isinstance(store, SparseStore)
    found = [store.find_last(keys[:end]) for end in (300, 251, 250, 100, 99, 0)]
    assert found == [251, 251, 100, 100, 0, 0]


WRONG: dict[str, Callable[[bytes, bytes, memoryview], bytes]] = {
    "of another key": lambda key, space, block: pack(bytes(16), space, block),
    "of another space": lambda key, space, block: pack(key, bytes(32), block),
    "of other bytes": lambda key, space, block: pack(key, space, bytes(BLOCK_BYTES)),
    "that is none": lambda key, space, block: bytes(len(pack(key, space, block))),
}


@pytest.mark.parametrize("header", WRONG)
def test_a_block_behind_a_header_that_is_wrong_is_corrupt_and_is_removed(
    store: BlockStore, slots: Slots, monkeypatch: pytest.MonkeyPatch, header: str
) -> None:
    good, bad = keys_of("wrong", 2)
    slots.write(store, [good])
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[type(store).__module__], "pack", WRONG[header])
        assert slots.write(store, [bad]) == [DONE]
    assert slots.read(store, [good, bad]) == [DONE, CORRUPT]
    assert slots.read(store, [good, bad]) == [DONE, MISSING]
    assert slots.write(store, [bad]) == [DONE]
    assert slots.read(store, [good, bad]) == [DONE, DONE]


def test_a_reset_forgets_the_blocks_of_its_space_and_no_others(
    url: str, store: BlockStore, slots: Slots
) -> None:
    others, keys = Slots(b"another model"), keys_of("spaces", 5)
    with opened(url, others) as other:
        slots.write(store, keys)
        assert (other.find(keys), others.read(other, keys)) == (0, [MISSING] * 5)
        others.write(other, keys[:3])
        assert store.reset() == 5
        assert (store.find(keys), slots.read(store, keys)) == (0, [MISSING] * 5)
        assert (other.find(keys), others.read(other, keys)) == (3, [DONE] * 3 + [MISSING] * 2)
        assert store.reset() == 0


def test_several_threads_at_once(store: BlockStore, slots: Slots) -> None:
    failures: list[BaseException] = []

    def work(lane: int) -> None:
        try:
            for turn in range(3):
                own, common = keys_of(f"lane {lane} turn {turn}", 4), keys_of(f"turn {turn}", 4)
                assert (
                    slots.write(store, own, first=8 * lane)
                    == slots.write(store, common, first=8 * lane + 4)
                    == [DONE] * 4
                )
                assert slots.read(store, own, first=8 * lane) == [DONE] * 4 and store.find(own) == 4
                # missing: another one is still writing it
                assert set(slots.read(store, common, first=8 * lane + 4)) <= {DONE, MISSING}
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert slots.read(store, keys_of("turn 2", 4)) == [DONE] * 4


READER = """
import sys
from tests.cpu.kv.remote_rig import Slots, keys_of, wait_usable
from penstock.kv.tiers.remote import open_store
slots = Slots(sys.argv[2].encode())
store = open_store(sys.argv[1], slots.space, 10.0)
wait_usable(store)
print([outcome.value for outcome in slots.read(store, keys_of("shared", 5))])
print(slots.write(store, keys_of("back", 2))[0].value)
store.close()
"""


def test_what_one_process_writes_another_reads(
    url: str, store: BlockStore, slots: Slots, request: pytest.FixtureRequest
) -> None:
    slots.write(store, keys_of("shared", 4))
    path = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-c", READER, url, request.node.name]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.stdout.split("\n")[:2] == ["['done', 'done', 'done', 'done', 'missing']", "done"], done.stderr
    assert slots.read(store, keys_of("back", 2)) == [DONE, DONE]


# -------------------------------------------------------------------------------------------------- manifests


@pytest.fixture
def manifests(store: BlockStore) -> ManifestStore:
    if not isinstance(store, ManifestStore):
        pytest.skip("this store has blocks alone: snapshots in front of it end with their process")
    return store


def test_a_manifest_is_read_as_it_was_written_and_goes_when_it_is_removed(manifests: ManifestStore) -> None:
    long = os.urandom(3 << 20)
    assert manifests.read_manifest("aa-1") is None and manifests.manifests() == []
    assert manifests.write_manifest("aa-1", long, None) is Written.DONE
    manifests.write_manifest("ab-2", b"short", 1000.0)
    assert manifests.read_manifest("aa-1") == long and manifests.read_manifest("ab-2") == b"short"
    assert sorted(manifests.manifests()) == ["aa-1", "ab-2"] and manifests.manifests("aa") == ["aa-1"]
    manifests.remove_manifest("aa-1")
    manifests.remove_manifest("aa-1")
    assert manifests.read_manifest("aa-1") is None and manifests.manifests() == ["ab-2"]


def test_a_manifest_is_written_and_removed_only_where_what_is_there_is_as_its_writer_says(
    manifests: ManifestStore,
) -> None:
    assert (
        manifests.write_manifest("aa-1", b"new", None, b"old") is Written.TAKEN
        and manifests.read_manifest("aa-1") is None
    )
    assert manifests.write_manifest("aa-1", b"old", 1000.0) is Written.DONE
    for instead_of in (None, b"ol", b"older"):
        assert manifests.write_manifest("aa-1", b"new", None, instead_of) is Written.TAKEN
    assert manifests.read_manifest("aa-1") == b"old"
    assert manifests.write_manifest("aa-1", b"new", None, b"old") is Written.DONE
    manifests.remove_manifest("aa-1", b"old")
    assert manifests.read_manifest("aa-1") == b"new" and manifests.manifests() == ["aa-1"]
    manifests.remove_manifest("aa-1", b"new")
    assert manifests.read_manifest("aa-1") is None and manifests.manifests() == []
    assert (
        manifests.write_manifest("aa-1", b"again", None) is Written.DONE
        and manifests.read_manifest("aa-1") == b"again"
    )


@pytest.mark.parametrize("instead_of", [None, b"old"])
def test_of_writers_of_one_manifest_at_once_exactly_one_is_told_that_it_is_there(
    url: str, slots: Slots, manifests: ManifestStore, instead_of: bytes | None
) -> None:
    if url.startswith("s3:"):
        pytest.skip(
            "this server ignores conditions; test_s3_store.py has the same for a bucket that honours them"
        )
    values, start = [f"by {number}".encode() for number in range(8)], threading.Barrier(8)

    def write(value: bytes) -> Written:
        with opened(url, slots) as own:
            assert isinstance(own, ManifestStore)
            start.wait(60.0)
            return own.write_manifest("aa-1", value, None, instead_of)

    if instead_of is not None:
        manifests.write_manifest("aa-1", instead_of, None)
    with ThreadPoolExecutor(len(values)) as threads:
        outcomes = list(threads.map(write, values))
    assert sorted(outcome.name for outcome in outcomes) == ["DONE", *["TAKEN"] * 7]
    assert manifests.read_manifest("aa-1") == values[outcomes.index(Written.DONE)]


def test_manifests_are_no_blocks_and_a_reset_leaves_them(
    store: BlockStore, manifests: ManifestStore, slots: Slots
) -> None:
    keys = keys_of("beside a manifest", 3)
    assert slots.write(store, keys) == [DONE] * 3
    manifests.write_manifest("aa-1", b"here", None)
    assert store.reset() == 3
    assert manifests.read_manifest("aa-1") == b"here" and store.find(keys) == 0


def test_another_space_has_manifests_of_its_own(url: str, manifests: ManifestStore) -> None:
    manifests.write_manifest("aa-1", b"mine", None)
    with opened(url, Slots(b"another")) as other:
        assert isinstance(other, ManifestStore)
        assert other.read_manifest("aa-1") is None and "aa-1" not in other.manifests()
