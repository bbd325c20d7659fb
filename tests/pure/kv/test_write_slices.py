"""Blocks that are written in slices, one in each turn: what waits for its turn is under way, also behind a slice that came to nothing."""

from __future__ import annotations

import pytest
from stacked_rig import Stacked

from penstock.kv.tiers import saves


def test_a_drain_ends_behind_the_last_slice_also_where_one_before_it_has_nothing_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves, "_WRITE_AT_ONCE", 2)
    rig = Stacked("ssd")
    for name in "ac":
        rig.remembered(2, name)
    keys = [*rig.keys(2, "a"), *rig.keys(2, "b"), *rig.keys(2, "c")]
    rig.saves.landed(keys, range(6))  # those in the middle have left host memory since
    rig.cache.drain(10.0)
    assert rig.cache.num_in_flight == 0 and rig.store_has(keys) == [True, True, False, False, True, True]
    rig.end()
