"""What snapshots pin on disk stays there, across restarts, and their manifests are there whole or not at
all."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import StoreFailed
from penstock.kv.blocks.key import prefix_keys, tenant_of
from penstock.kv.tiers.manifest import Manifest, pack
from penstock.kv.tiers.ssd.store import SsdStore
from penstock.kv.tiers.store import Outcome, Written
from tests.cpu.kv.ssd.ssd_rig import (
    BLOCK_BYTES,
    SPACE,
    HookedDisk,
    QuickDisk,
    abandon,
    fails,
    key_of,
    open_at,
    read,
    those_in,
    write,
)

NUM_SLOTS = 64
TOKENS = np.arange(8 * 16, dtype=np.uint32)


def manifest(name: str = "talk", space: bytes = SPACE.digest, **fields: Any) -> Manifest:
    scope = b"x" * 32
    keys = b"".join(prefix_keys(TOKENS, 16, scope))
    rest = {"created_s": 1e9, "made_with": {}, **fields}
    return Manifest(
        name, tenant_of(""), space, scope, block_tokens=16, tokens=TOKENS.tobytes(), keys=keys, **rest
    )


def block(number: int) -> memoryview:
    return memoryview(number.to_bytes(8, "big") * (BLOCK_BYTES // 8))


def write_keys(store: SsdStore, keys: tuple[bytes, ...]) -> list[Outcome]:
    return store.write(keys, range(len(keys)), [block(number) for number in range(len(keys))])


def churn(store: SsdStore, first: int = 1000, num: int = 4 * NUM_SLOTS) -> list[Outcome]:
    """More blocks than it has room for, none of them wanted by anybody."""
    return [outcome for number in range(first, first + num) for outcome in write(store, number)]


@pytest.fixture
def store(tmp_path: Path) -> SsdStore:
    return open_at(tmp_path, NUM_SLOTS)


def test_nothing_is_written_over_what_is_pinned_even_where_nothing_else_is_left(tmp_path: Path) -> None:
    store = open_at(tmp_path, NUM_SLOTS)
    numbers = range(store.usage().num_slots or 0)
    write(store, *numbers)
    store.pin_keys("all", [number.to_bytes(16, "big") for number in numbers])
    assert write(store, 10_000, 10_001) == [Outcome.FULL, Outcome.FULL]
    assert those_in(store, numbers) == set(numbers)


@pytest.mark.parametrize("killed", [False, True])
def test_after_a_restart_they_are_pinned_before_anything_is_written(tmp_path: Path, killed: bool) -> None:
    """The directory is read in the background, and full: what is written meanwhile must not take their
    slots."""
    store, taken = open_at(tmp_path, NUM_SLOTS), manifest()
    write_keys(store, taken.block_keys)
    store.pin_keys(taken.id, taken.block_keys)
    churn(store)
    store.persist()
    store.write_manifest(taken.id, pack(taken), None)
    (abandon if killed else SsdStore.close)(store)
    again = open_at(tmp_path, NUM_SLOTS, scanned=False)
    churn(again, 5000)
    assert again.wait_scanned(60.0)
    churn(again, 9000)
    assert again.num_leading(taken.block_keys) == len(taken.block_keys)
    again.close()


def test_manifests_are_read_as_they_were_written(store: SsdStore, tmp_path: Path) -> None:
    one, two = manifest("one"), manifest("two")
    store.write_manifest(one.id, pack(one), None)
    store.write_manifest(two.id, pack(two), None)
    assert sorted(store.manifests()) == sorted([one.id, two.id])
    assert store.manifests("f" * 32) == []
    assert store.read_manifest(one.id) == pack(one)
    assert (
        store.write_manifest(one.id, b"other", None)
        is store.write_manifest(one.id, b"other", None, b"no")
        is Written.TAKEN
    )
    assert store.write_manifest(one.id, b"other", None, pack(one)) is Written.DONE
    store.remove_manifest(one.id, pack(one))
    assert store.read_manifest(one.id) == b"other"
    store.remove_manifest(one.id, b"other")
    assert store.read_manifest(one.id) is None
    store.write_manifest(one.id, b"other", None)
    store.remove_manifest(one.id)
    store.remove_manifest(one.id)
    assert store.read_manifest(one.id) is None and store.manifests() == [two.id]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.glob("*.snapshot"))


def test_a_manifest_has_its_name_only_when_all_of_it_is_on_disk(tmp_path: Path) -> None:
    store = open_at(tmp_path, NUM_SLOTS, disk := HookedDisk())
    disk.calls.clear()
    store.write_manifest(manifest().id, pack(manifest()), None)
    done = [(name, args) for name, args in disk.calls if name in ("pwritev", "fsync", "rename")]
    assert [name for name, _ in done] == ["pwritev", "fsync", "rename", "fsync"]
    assert [args[0] for name, args in done if name == "fsync"] == [done[0][1][0], store.directory.fd]
    assert [path.suffix for path in done[2][1][:2]] == [".new", ".snapshot"]
    store.close()


@pytest.mark.parametrize("call", ["pwritev", "fsync"])
def test_a_disk_that_fails_leaves_no_part_of_a_manifest(tmp_path: Path, call: str) -> None:
    store = open_at(tmp_path, NUM_SLOTS, disk := HookedDisk())
    disk.hooks[call] = fails(errno.EIO)
    with pytest.raises(StoreFailed, match="cannot be written"):
        store.write_manifest(manifest().id, pack(manifest()), None)
    disk.hooks[call] = fails(errno.ENOSPC)
    assert store.write_manifest(manifest().id, pack(manifest()), None) is Written.FULL
    disk.hooks.clear()
    assert not list(tmp_path.glob("*.new"))
    store.close()


def test_what_a_killed_process_has_begun_is_removed(tmp_path: Path) -> None:
    open_at(tmp_path, NUM_SLOTS).close()
    begun = tmp_path / f"penstock-{manifest().id}.new"
    begun.write_bytes(b"half of")
    begun.chmod(0o600)
    other = tmp_path / "mine.new"
    other.write_bytes(b"somebody's")
    store = open_at(tmp_path, NUM_SLOTS)
    assert not begun.exists() and other.exists() and store.manifests() == []
    store.close()


@pytest.mark.parametrize("what", ["damaged", "empty", "foreign"])
def test_a_manifest_that_cannot_be_used_pins_nothing_and_stays(tmp_path: Path, what: str) -> None:
    store, taken = (
        open_at(tmp_path, NUM_SLOTS),
        manifest(space=b"o" * 32 if what == "foreign" else SPACE.digest),
    )
    write_keys(store, taken.block_keys)
    data = pack(taken)
    store.write_manifest(
        taken.id, {"damaged": data[:-1] + b"\xff", "empty": b"", "foreign": data}[what], None
    )
    store.close()
    again = open_at(tmp_path, NUM_SLOTS)
    churn(again)
    assert again.num_leading(taken.block_keys) == 0
    assert again.manifests() == [taken.id]
    again.close()


# ------------------------------------------------------------------------------------- any order of all of it

OPS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 39), st.integers(1, 8)),
    st.tuples(st.just("churn"), st.integers(0, 400), st.integers(1, 20)),
    st.tuples(
        st.just("pin"), st.integers(0, 3), st.lists(st.integers(0, 39), min_size=1, max_size=8, unique=True)
    ),
    st.tuples(st.just("unpin"), st.integers(0, 3)),
    st.tuples(st.just("read"), st.integers(0, 39)),
    st.tuples(st.just("reset")),
    st.tuples(st.just("reopen")),
)


class Pinned:
    """A store, and what must be in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = open_at(path, 24, QuickDisk())
        self.pins: dict[int, list[int]] = {}
        self.there: set[int] = set()  # pinned when they were written, or written when they were pinned

    def run(self, op: tuple[Any, ...]) -> None:
        getattr(self, op[0])(*op[1:])
        pinned = {number for numbers in self.pins.values() for number in numbers}
        self.there &= pinned
        assert self.there <= those_in(self.store, range(40)), (op, self.there)
        self.store._now.index.check()

    def write(self, first: int, num: int) -> None:
        numbers = [number % 40 for number in range(first, first + num)]
        done = [
            number
            for number, outcome in zip(numbers, write(self.store, *numbers), strict=True)
            if outcome is Outcome.DONE
        ]
        self.there |= {number for number in done if any(number in numbers for numbers in self.pins.values())}

    def churn(self, first: int, num: int) -> None:
        write(self.store, *range(1000 + first, 1000 + first + num))

    def pin(self, id: int, numbers: list[int]) -> None:
        if id not in self.pins:
            self.pins[id] = numbers
            self.there |= those_in(self.store, numbers)
            self.store.pin_keys(str(id), [key_of(number) for number in numbers])

    def unpin(self, id: int) -> None:
        self.pins.pop(id, None)
        self.store.unpin_keys(str(id))

    def read(self, number: int) -> None:
        read(self.store, number)

    def reset(self) -> None:
        self.store.reset()
        self.there.clear()

    def reopen(self) -> None:
        """As after its directory was gone for a moment: who pins has not been asked."""
        self.store._open_anew()
        assert self.store.wait_scanned(60.0)


@settings(deadline=None, max_examples=60)
@given(st.lists(OPS, max_size=40))
def test_what_is_pinned_is_there_in_any_order_of_calls(ops: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        walk = Pinned(Path(folder) / "ssd")
        for op in ops:
            walk.run(op)
        walk.store.close()


def test_a_manifest_under_another_name_pins_nothing(tmp_path: Path) -> None:
    """It is refused, so nobody counts what it pins, and deleting the one that it is of would not let go of
    it."""
    store, one = open_at(tmp_path, NUM_SLOTS), manifest()
    write_keys(store, one.block_keys)
    other = manifest("other").id
    assert store.write_manifest(other, pack(one), None)
    store.close()
    store = open_at(tmp_path, NUM_SLOTS)
    churn(store)
    assert store.num_leading(one.block_keys) == 0
    store.close()
