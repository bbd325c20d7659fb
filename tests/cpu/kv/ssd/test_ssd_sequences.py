"""The numbers that writes to a disk get: by them the newer of two copies is known after a restart."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.kv.blocks.pool import BlockPool
from penstock.kv.tiers.ssd import index as index_module
from penstock.kv.tiers.ssd.directory import SECTOR_BYTES, DiskIo
from penstock.kv.tiers.ssd.index import SlotIndex
from penstock.kv.tiers.ssd.segments import SlotHead
from penstock.kv.tiers.store import Envelope, Outcome
from tests.cpu.kv.ssd.ssd_rig import WAIT_S, key_of, open_at, read, segment_paths, write


@pytest.mark.parametrize("step_ns", [0, 1, -1000])
def test_no_two_blocks_have_the_same_number_whatever_the_clock_says(
    monkeypatch: pytest.MonkeyPatch, step_ns: int
) -> None:
    """Clocks are coarse, and are set back."""
    now_ns = 10_000

    def clock() -> int:
        nonlocal now_ns
        now_ns += step_ns
        return now_ns

    monkeypatch.setattr(index_module.time, "time_ns", clock)
    index = SlotIndex(BlockPool(8, "ssd"), lambda slot: b"g" * 16)
    given: list[int] = []
    for num in (3, 1, 2, 2):
        first = index.claim([key_of(len(given) + place) for place in range(num)]).sequence
        given += range(first, first + num)
    assert given == sorted(set(given))


def test_what_is_written_now_is_newer_than_all_that_was_found_whatever_the_clock_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was set back since an earlier life: a block that is given up and written anew has an old copy in the
    files."""
    monkeypatch.setattr(index_module.time, "time_ns", lambda: 1000)
    index = SlotIndex(BlockPool(4, "ssd"), lambda slot: b"g" * 16)
    withheld = [index.withhold(1), index.withhold(1)]
    for slot, (reservation, sequence) in enumerate(zip(withheld, (5000, 3000), strict=True)):
        head = SlotHead(Envelope(key_of(slot), b"s" * 32, 100, sequence, b"c" * 16), b"g" * 16, 0, slot, 0)
        index.add_scanned(reservation, {slot: head})
    index.end_scan()
    assert index.claim([key_of(2)]).sequence > 5000


class LateScan(DiskIo):
    """Heads are read when the test says so."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if threading.current_thread().name.startswith("ssd-scan"):
            assert self.gate.wait(WAIT_S)
        return super().preadv(fd, buffers, offset)


def test_what_is_written_before_the_scan_is_newer_than_an_earlier_copy_though_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier copy is torn: if it counted after the next start, a block that was persisted would be
    lost."""
    store = open_at(tmp_path)
    assert write(store, 1) == [Outcome.DONE]
    store.close()
    (path, *_) = segment_paths(tmp_path)
    image = bytearray(path.read_bytes())
    image[2 * SECTOR_BYTES + 100] ^= 1
    path.write_bytes(image)
    monkeypatch.setattr(index_module.time, "time_ns", lambda: 1000)
    disk = LateScan()
    store = open_at(tmp_path, io=disk, scanned=False)
    assert write(store, 1) == [Outcome.DONE]
    store.persist()
    disk.gate.set()
    assert store.wait_scanned(WAIT_S)
    store.close()
    store = open_at(tmp_path)
    assert read(store, 1) == [Outcome.DONE]
    store.close()
