"""What loads decide where two things meet: a saved request and a lane that is late, a tier that is broken
before one that is not, a store that is slow though everything is to be loaded, and several requests that
could give way."""

from __future__ import annotations

import pytest

from penstock.contract import Match
from penstock.kv.tiers import reads
from penstock.kv.tiers.host import HostLease
from tests.pure.kv.stacked_rig import Stacked
from tests.pure.kv.storage_rig import BLOCK, KEYS, LAYERS, Rig
from tests.pure.kv.test_load_times import measured
from tests.pure.kv.test_loads import retracted
from tests.pure.kv.test_moves import Full


def test_a_saved_request_does_not_wait_for_a_lane_that_is_late_either() -> None:
    rig = Rig(num_host=16)
    lease = retracted(rig, 2, 1, 2 * BLOCK + 1)
    rig.land()
    rig.save(KEYS[10:12], "other").end()
    rig.pool.evict(8)
    other, hold = rig.host.lease(KEYS[10:12], "other"), rig.hold(2, "other")
    assert other is not None
    promotion = rig.promote(hold, other, 2)
    assert rig.loads.worth(lease, 0) == 3
    promotion.deadline_s = 0.0
    assert rig.loads.worth(lease, 0) == 0
    rig.land()
    assert rig.loads.worth(lease, 0) == 3
    lease.end()
    hold.end()
    rig.close()


@pytest.mark.parametrize("dead", ["ssd", "remote"])
def test_nothing_behind_a_tier_that_has_broken_since_is_worth_loading(dead: str) -> None:
    """A prefix is of use up to its first gap: what a tier behind it has is nothing without what it has
    lost."""
    rig = Stacked("ssd", "remote", num_host=24)
    rig.put("ssd", rig.keys(2))
    rig.put("remote", rig.keys(4))
    measured(rig)
    lease = rig.cache.lease("request", rig.prefix(4))
    rig.run("ask remote")
    assert isinstance(lease, HostLease) and lease.runs_from(0) == [("ssd", 2), ("remote", 2)]
    assert rig.cache.match(rig.prefix(4).keys, lease) == Match(0, 0, False, 4)
    rig.stores[dead].die()
    rig.tiers[dead].find(rig.keys(1, "z"), 1e9)
    rig.run("ask remote")
    assert not rig.tiers[dead].usable
    assert rig.cache.match(rig.prefix(4).keys, lease).num_colder == (0 if dead == "ssd" else 2)
    rig.stores[dead].raises = None
    lease.end()
    rig.end()


def test_where_everything_is_loaded_a_store_is_waited_for_though_computing_is_faster() -> None:
    rig = Stacked("remote")
    limits = rig.saves.limits
    measured(rig)
    assert limits.load_always and not rig.saves.limits.load_always
    for chosen, expected in ((rig.saves.limits, BLOCK * 1e-3 * (1 + BLOCK / 2)), (limits, reads.PATIENCE_S)):
        rig.set_limits(chosen)
        lease = rig.cache.lease("request", rig.prefix(1))
        assert isinstance(lease, HostLease)
        assert lease.parts[0].finding.deadline_s - rig.clock() == pytest.approx(expected)
        rig.flow()
        lease.end()
    rig.end()


@pytest.mark.parametrize("postpones", [True, False])
def test_blocks_that_make_room_keep_their_places_in_their_prefixes(postpones: bool) -> None:
    """Host memory forgets the deepest of a prefix first, whichever way it came there."""
    rig = Full(num_device=4) if postpones else Rig(num_device=4)
    hold = rig.hold(4)
    rig.device.write(hold.slots, (0, LAYERS), [[key] * LAYERS for key in KEYS[:4]])
    rig.pool.seal(hold.slots, KEYS[:4], [7, 8, 9, 10])
    hold.end()
    assert not rig.cache.make_room(3, 0)
    rig.land()
    moved = [
        (key, depth)
        for key, depth in zip(KEYS[:4], (7, 8, 9, 10), strict=True)
        if rig.host.has_each([key])[0]
    ]
    assert len(moved) == 3
    assert rig.host.pool.depths[rig.host.pool.find_each([key for key, _ in moved])].tolist() == [
        depth for _, depth in moved
    ]
    rig.close()
