"""The SSD store over files of an earlier life: what was there is found again, what is not ours is not
served."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from penstock.kv.tiers.ssd import segments as format_module
from penstock.kv.tiers.ssd.directory import SECTOR_BYTES, DiskIo
from penstock.kv.tiers.ssd.segments import slot_bytes
from penstock.kv.tiers.ssd.store import open_ssd
from penstock.kv.tiers.store import Outcome, Space
from tests.cpu.kv.ssd.ssd_rig import (
    SPACE,
    WAIT_S,
    HookedDisk,
    abandon,
    max_bytes_for,
    num_bytes_in,
    open_at,
    read,
    segment_paths,
    those_in,
    until,
    write,
)

DONE = Outcome.DONE


def test_the_order_of_eviction_survives_a_restart(tmp_path: Path) -> None:
    store = open_at(tmp_path, num_slots=16)
    num_slots = store.usage().num_slots or 0
    for number in range(num_slots):
        write(store, number)
    write(store, 50, 51, 52)  # over 0, 1 and 2
    store.close()
    store = open_at(tmp_path, num_slots=16)
    write(store, 60, 61, 62)
    assert those_in(store, range(num_slots)) == set(range(6, num_slots))
    write(store, *range(70, 70 + num_slots - 5))  # of what was written together the end goes first
    assert those_in(store, [50, 51, 52]) == {50, 51}
    store.close()


def test_what_was_used_during_the_scan_outlives_what_was_not(tmp_path: Path) -> None:
    store = open_at(tmp_path, num_slots=16)
    num_slots = store.usage().num_slots or 0
    write(store, *range(num_slots))
    store.close()
    io = _Paced()
    store = open_at(tmp_path, num_slots=16, io=io, scanned=False)
    io.let_some_through()
    until(lambda: len(those_in(store, range(num_slots))) >= io.SOME)
    # the last of what was written together would be the first to go
    used = sorted(those_in(store, range(num_slots)))[-2:]
    read(store, *used)
    io.let_all_through()
    assert store.wait_scanned(WAIT_S)
    write(store, *range(100, 100 + num_slots - 2))
    assert those_in(store, range(num_slots)) == set(used)
    store.close()


class _Paced(DiskIo):
    """Stops a scan before it reads; the tests' own reads pass."""

    SOME = 6  # pieces, of one block at least

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._num_left = 0

    def let_some_through(self) -> None:
        with self._lock:
            self._num_left = self.SOME
            self._lock.notify_all()

    def let_all_through(self) -> None:
        with self._lock:
            self._num_left = 1 << 30
            self._lock.notify_all()

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if threading.current_thread().name.startswith("ssd-scan"):
            with self._lock:
                assert self._lock.wait_for(lambda: self._num_left > 0, WAIT_S)
                self._num_left -= 1
        return super().preadv(fd, buffers, offset)


def test_the_store_serves_while_it_scans_and_what_is_not_scanned_is_neither_found_nor_taken(
    tmp_path: Path,
) -> None:
    store = open_at(tmp_path, num_slots=40)
    num_slots = store.usage().num_slots or 0
    write(store, *range(num_slots // 2))
    store.close()
    io = _Paced()
    store = open_at(tmp_path, num_slots=40, io=io, scanned=False)
    assert not store.wait_scanned(0.0)
    assert those_in(store, range(num_slots)) == set() and read(store, 1) == [Outcome.MISSING]
    outcomes = write(store, *range(100, 100 + num_slots))
    num_room = outcomes.count(DONE)
    assert 0 < num_room < num_slots and outcomes.count(Outcome.FULL) == num_slots - num_room
    assert read(store, *range(100, 100 + num_room)) == [DONE] * num_room
    io.let_all_through()
    assert store.wait_scanned(WAIT_S)
    assert read(store, *range(num_slots // 2)) == [DONE] * (num_slots // 2)
    store._now.index.check()
    store.close()


def test_a_store_can_be_closed_in_the_middle_of_its_scan(tmp_path: Path) -> None:
    store = open_at(tmp_path, num_slots=40)
    write(store, *range(30))
    store.close()
    io = _Paced()
    store = open_at(tmp_path, num_slots=40, io=io, scanned=False)
    threading.Timer(0.01, io.let_all_through).start()
    store.close()
    store = open_at(tmp_path, num_slots=40)
    assert read(store, *range(30)) == [DONE] * 30
    store.close()


# ------------------------------------------------------------------------------------ torn in an earlier life


def _tear(path: Path, slot: int) -> None:
    """The head of a block is whole, its payload is not."""
    with segment_paths(path)[0].open("r+b") as file:
        file.seek(SECTOR_BYTES + slot * slot_bytes(SPACE.block_bytes) + SECTOR_BYTES)
        file.write(b"torn")


def _write_over_a_torn_block(path: Path) -> list[Outcome]:
    store = open_at(path)
    write(store, *range(4))
    store.close()
    _tear(path, 2)
    store = open_at(path)
    assert write(store, *range(4)) == [DONE] * 4
    store.persist()
    abandon(store)
    store = open_at(path)
    outcomes = read(store, *range(4))
    store.close()
    return outcomes


def test_a_block_that_an_earlier_life_has_torn_is_written_again_before_its_write_counts_as_done(
    tmp_path: Path,
) -> None:
    assert _write_over_a_torn_block(tmp_path) == [DONE] * 4


@pytest.mark.parametrize("first", [read, write])
def test_a_block_of_an_earlier_life_is_verified_once(
    tmp_path: Path, first: Callable[..., list[Outcome]]
) -> None:
    store = open_at(tmp_path)
    write(store, *range(4))
    store.close()
    store = open_at(tmp_path, io=(io := HookedDisk()))
    assert first(store, *range(4)) == [DONE] * 4
    io.calls.clear()
    assert write(store, *range(4)) == [DONE] * 4 and not io.calls, "nothing is read or written for that"
    store.close()


def test_what_an_earlier_life_left_unsynced_is_synced_by_the_first_persist(tmp_path: Path) -> None:
    store = open_at(tmp_path)
    write(store, *range(4))
    abandon(store)
    store = open_at(tmp_path, io=(io := HookedDisk()))
    store.persist()
    assert io.count("fdatasync") == len(segment_paths(tmp_path)) > 0
    store.close()


# --------------------------------------------------------------------------------------------------- not ours


@pytest.mark.parametrize("other", [Space(b"t" * 32, SPACE.block_bytes), Space(b"s" * 32, 9000)])
def test_blocks_of_another_space_or_size_are_misses_and_make_room(tmp_path: Path, other: Space) -> None:
    store = open_at(tmp_path, num_slots=16)
    write(store, *range(16))
    store.close()
    store = open_ssd(tmp_path, max_bytes_for(16), other, "lru")
    assert store.wait_scanned(WAIT_S)
    assert those_in(store, range(16)) == set() and store.usage().num_used == 0
    size = other.block_bytes
    assert read(store, *range(16), num_bytes=size) == [Outcome.MISSING] * 16
    assert DONE in write(store, *range(16), num_bytes=size) and num_bytes_in(tmp_path) <= max_bytes_for(16)
    store.close()
    store = open_at(tmp_path, num_slots=16)
    assert those_in(store, range(16)) == set()
    store.close()


def test_blocks_of_another_format_are_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_at(tmp_path)
    write(store, *range(10))
    store.close()
    monkeypatch.setattr(format_module, "FORMAT", format_module.FORMAT + 1)
    store = open_at(tmp_path)
    assert those_in(store, range(10)) == set() and write(store, 1) == [DONE]
    store.close()
