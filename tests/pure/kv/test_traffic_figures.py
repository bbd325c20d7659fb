"""What is said about traffic: a snapshot is of its moment, times are from submit to the end, and every tier's
skips count."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock.figures import Traffic
from penstock.kv import transfer as mover
from penstock.testing.stores import HandClock
from tests.pure.kv.cold_rig import BLOCK_BYTES, KEYS, Make, make
from tests.pure.kv.storage_rig import KEYS as BLOCKS
from tests.pure.kv.storage_rig import Rig

__all__ = ["make"]


def test_a_transfer_took_as_long_as_from_its_submit_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = HandClock()
    monkeypatch.setattr(mover, "time", SimpleNamespace(monotonic=clock))
    rig = Rig()
    hold = rig.computed(BLOCKS[:2])
    rig.saves.offer(hold, 0, BLOCKS[:2], None)
    rig.saves.submit()
    clock.advance(2.0)
    rig.settle()
    clock.advance(1.0)
    rig.land()
    assert rig.cache.stats().traffic.seconds["device", "host"].total == 3.0
    hold.end()
    rig.close()


def test_a_snapshot_of_the_traffic_stays_as_it_was() -> None:
    rig = Rig()
    rig.save(BLOCKS[:1]).end()
    before = rig.cache.stats().traffic
    seconds = before.seconds["device", "host"].copy()
    rig.save(BLOCKS[1:3]).end()
    assert before.seconds["device", "host"] == seconds and sum(seconds.counts) == 1
    assert sum(rig.cache.stats().traffic.seconds["device", "host"].counts) == 2
    rig.close()


def test_what_is_read_and_what_is_written_are_under_way_each_in_its_own_direction(make: Make) -> None:
    rig = make()
    rig.write(KEYS[:2])
    rig.store.gate.hold("read", "write")
    seen = []
    for begin in (
        lambda: rig.submit_write(KEYS[2:4]),
        lambda: rig.submit_read(KEYS[:1]),
        lambda: rig.submit_read(KEYS[1:2]),
    ):
        begin()
        traffic = Traffic({}, {}, {}, {}, {}, 0)
        rig.tier.report(traffic)
        seen.append((traffic.in_flight["host", "remote"], traffic.in_flight["remote", "host"]))
    assert seen == [(1, 0), (1, 1), (1, 2)]
    rig.store.gate.let()
    rig.settle()


def test_blocks_that_a_store_has_already_are_not_skipped_ones(make: Make) -> None:
    rig = make(queue_bytes=3 * BLOCK_BYTES)
    rig.write(KEYS[:2])
    assert rig.write(KEYS[:4]).done_keys == KEYS[:4]
    assert not rig.tier.counts.skipped
    assert rig.write(KEYS[:8]).done_keys == KEYS[:7]
    assert rig.tier.counts.skipped == {"queue": 1}, "of those that it lacks"
