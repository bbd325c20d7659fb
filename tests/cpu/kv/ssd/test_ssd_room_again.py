"""A disk that was full and has room again: the tier counts on all of its files as before, and says so once
more when that ends."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.kv.tiers.ssd import segments
from penstock.kv.tiers.store import Outcome
from penstock.testing.stores import HandClock
from tests.cpu.kv.ssd.ssd_rig import FailingDisk, open_at, write


def test_a_disk_that_has_room_again_is_counted_on_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, disk = HandClock(), FailingDisk()
    monkeypatch.setattr(segments, "time", SimpleNamespace(monotonic=clock))
    store = open_at(tmp_path, 64, io=disk)
    planned = store.usage().num_slots
    assert planned is not None and planned >= 64
    with caplog.at_level(logging.WARNING):
        for number in range(2):
            disk.errors = {"fallocate": errno.ENOSPC}
            room = 0 if number == 0 else store._now.segments.num_slots // 8  # of the file that was made
            assert Outcome.FULL in write(store, *range(100 * number, 100 * number + planned))
            assert store.usage().num_slots in (room, store.usage().num_used)
            clock.advance(segments._GROW_AGAIN_S + 1)
            disk.errors = {}
            assert write(store, 1000 + number) == [Outcome.DONE]
            assert store.usage().num_slots == planned
    assert sum("stays at" in record.message for record in caplog.records) == 2
    store.close()
