"""The numbers that writes to a disk get: by them the newer of two copies is known after a restart."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.kv.tiers.ssd import index as index_module
from penstock.kv.tiers.ssd.directory import SECTOR_BYTES, DiskIo
from penstock.kv.tiers.store import Outcome
from tests.cpu.kv.ssd.ssd_rig import WAIT_S, open_at, read, segment_paths, write


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
