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
