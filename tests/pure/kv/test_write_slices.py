"""Blocks that are written in slices, one in each turn: what waits for its turn is under way, also behind a
slice that came to nothing."""

from __future__ import annotations

import pytest

from penstock.kv.tiers import writeback
from tests.pure.kv.stacked_rig import Stacked


def test_a_drain_ends_behind_the_last_slice_also_where_one_before_it_has_nothing_to_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writeback, "_WRITE_AT_ONCE", 2)
    rig = Stacked("ssd")
    for name in "ac":
        rig.remembered(2, name)
    keys = [*rig.keys(2, "a"), *rig.keys(2, "b"), *rig.keys(2, "c")]
    rig.writeback.landed(keys, range(6))  # those in the middle have left host memory since
    rig.cache.drain(10.0)
    assert rig.cache.num_in_flight == 0 and rig.store_has(keys) == [True, True, False, False, True, True]
    rig.end()


@pytest.mark.parametrize("tier", ["ssd", "remote"])
def test_what_waits_for_its_turn_is_forgotten_by_a_reset_with_what_was_queued_before_it(
    monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    monkeypatch.setattr(writeback, "_WRITE_AT_ONCE", 2)
    rig = Stacked("ssd", "remote")
    rig.remembered(6, tiers=("host",))
    rig.tiers["remote"].calls.known.clear()
    keys = rig.keys(6)
    rig.writeback.landed(keys, range(6))
    assert {one.name for one, _, _ in rig.writeback.later} == {"ssd", "remote"}
    rig.cache.reset([tier])
    rig.flow()
    other = "remote" if tier == "ssd" else "ssd"
    assert rig.store_has(keys, tier) == [False] * 6 and rig.store_has(keys, other) == [True] * 6
    rig.end()


def test_a_flush_fails_where_blocks_of_a_slice_have_left_host_memory_however_many_others_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What has left is taken note of some at a time. A flush of a few blocks is over before that."""
    monkeypatch.setattr(writeback, "_GONE_AT_ONCE", 1)
    rig = Stacked("ssd", admission="reuse")
    for name in "ba":
        rig.ran(4, name).release(None)
        rig.flow()
        rig.forget_device()
        if name == "b":
            assert rig.persisted().error is None
    flush = rig.cache.persist()
    assert flush is not None
    _, pin = rig.host.pin_each(rig.keys(4)[:1], "a request")
    rig.cache.reset(["host"])
    rig.flow()
    assert rig.store_has(rig.keys(4)) == [True, False, False, False]
    assert flush.settled and flush.error is not None and "3 of 4 blocks" in str(flush.error)
    pin.end()
    rig.end()
