"""Whoever waits for reads, writes and answers of cold tiers is woken when one is over: nobody looks in the
meantime."""

from __future__ import annotations

import pytest

from tests.pure.kv.stacked_rig import Stacked


@pytest.mark.parametrize("tier", ["ssd", "remote"])
def test_a_read_that_is_over_wakes_who_waits_for_it(tier: str) -> None:
    rig = Stacked(tier)
    rig.remembered(2, tiers=[tier])
    woken: list[str] = []
    rig.cache.call_when_launched(lambda: woken.append("woken"))
    lease = rig.cache.lease("request", rig.prefix(2))
    assert lease is not None
    rig.lanes.run_all()
    assert lease.ready and len(woken) == (0 if tier == "ssd" else 1), "an answer from memory is there at once"
    woken.clear()
    table = rig.cache.open("request", rig.prefix(2), 0)
    table.promote(lease, 2, 1)
    rig.lanes.run_all()
    assert rig.cache.num_in_flight and len(woken) == 1
    rig.flow()
    woken.clear()
    rig.cache.persist()
    rig.cache.settle()
    rig.lanes.run_all()
    assert woken, "and so does a sync"
    rig.end(table)
