"""Blocks that come back from the host, and requests whose own KV went there: what is protected until when,
and what it is worth."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from penstock.contract import Match
from penstock.errors import InvariantBroken
from penstock.kv.blocks.handles import Hold
from penstock.kv.tiers import loads as loads_module
from penstock.kv.tiers import reads
from penstock.kv.tiers.calls import Way
from penstock.kv.tiers.host import HostLease
from penstock.kv.tiers.saves import SavedLease
from tests.pure.kv.stacked_rig import Stacked
from tests.pure.kv.storage_rig import BLOCK, KEYS, LAYERS, LAYOUT, Rig, leased
from tests.pure.kv.test_moves import Full

# ---------------------------------------------------------------------------------------------------- promote


def test_a_promotion_comes_by_groups_of_layers_where_a_step_can_begin_on_the_first() -> None:
    rig = Rig(overlap_tokens=8)
    rig.save(KEYS[:2]).end()
    rig.pool.evict(8)
    hold = rig.hold(2)
    promotion = rig.promote(hold, leased(rig, KEYS[:2]), 2, num_next=8)
    assert promotion.layered and promotion.arrivals is None
    rig.lane("launch load").step()
    assert promotion.arrivals is not None and [arrival.layers for arrival in promotion.arrivals] == [
        (0, 3),
        (3, 6),
    ]
    assert not promotion.nearly_landed()
    for _ in range(2):
        rig.lane("load").step()
    assert promotion.nearly_landed() and [arrival.fence.passed() for arrival in promotion.arrivals] == [
        True,
        False,
    ]
    assert [cell is KEYS[0] for cell in rig.device.cells[hold.slots[0]]] == [True] * 3 + [False] * 3
    rig.land()
    short = rig.hold(1, "short")
    assert not rig.promote(short, leased(rig, KEYS[:1]), 1, num_next=7).layered
    rig.land()
    for each in (hold, short):
        each.end()
    rig.close()


def test_groups_cover_every_layer_of_every_block_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for last_bytes in (1, LAYOUT.block_bytes, 3 * LAYOUT.block_bytes, 1 << 30):
        monkeypatch.setattr(loads_module, "_LAST_BYTES", last_bytes)
        for num_blocks in range(1, 9):
            for layered in (True, False):
                groups = Rig().cache.loads._groups(num_blocks, layered)
                covered = [
                    (block, layer)
                    for group in groups
                    for block in range(num_blocks)[group.blocks]
                    for layer in range(*group.layers)
                ]
                assert sorted(covered) == [
                    (block, layer) for block in range(num_blocks) for layer in range(LAYERS)
                ]


@pytest.mark.parametrize("why", ["expired", "gap", "short"])
def test_a_promotion_of_what_the_lease_does_not_cover_is_refused_and_loses_nothing(why: str) -> None:
    rig = Rig()
    rig.save(KEYS[:3]).end()
    keys = {"expired": KEYS[:3], "gap": [KEYS[0], KEYS[9], KEYS[2]], "short": KEYS[:2]}[why]
    lease, hold = leased(rig, keys), rig.hold(3)
    if why == "expired":
        rig.now_s = 1000.0
        rig.host.expire()
    with pytest.raises(
        InvariantBroken, match="has expired" if why == "expired" else "does not have 3 blocks"
    ):
        rig.promote(hold, lease, 3)
    assert len(rig.host.leases) == (why != "expired")
    hold.end()
    lease.end()
    rig.close()


# Holds invariant 9: both ends stay until what was enqueued is over.
def test_mid_batch_submit_error_releases_buffers_in_flight() -> None:
    """The copy lane takes the first group of layers and refuses the second: the first is under way, and both
    ends stay until it is over."""
    rig = Rig(num_device=2)
    rig.save(KEYS[:2]).end()
    rig.pool.evict(2)
    lease, hold = leased(rig, KEYS[:2]), rig.hold(2)
    promotion = rig.promote(hold, lease, 2)
    lane, submit = rig.lane("load"), rig.lane("load").submit

    def once(*args: object, **kwargs: object) -> object:
        ticket = submit(*args, **kwargs)  # type: ignore[arg-type]
        lane.refuses = OSError("no more room on the lane")
        return ticket

    lane.submit = once  # type: ignore[method-assign, assignment]
    rig.lane("launch load").step()
    del lane.submit  # type: ignore[method-assign]
    hold.end()
    assert rig.settle() == [] and len(lane) == 1 and not promotion.settled
    assert rig.pool.counts.pinned == 2 and rig.host.pool.counts.pinned == 2
    assert rig.land() == [promotion] and isinstance(promotion.error(), OSError)
    assert rig.pool.counts.free == 2 and rig.host.pool.counts.idle == 2
    rig.close()


# ----------------------------------------------------------------------------------------- retract and resume


def retracted(
    rig: Rig, num_keyed: int, num_more: int, num_tokens: int, keys: list[bytes] = KEYS
) -> SavedLease:
    hold = rig.computed(keys[:num_keyed], num_more=num_more)
    lease = rig.saves.retract(hold, num_keyed + num_more, keys[:num_keyed], num_tokens, None)
    hold.end()
    assert lease is not None
    return lease


def test_a_retraction_saves_what_has_a_key_for_all_and_the_tail_for_its_request_alone() -> None:
    rig = Rig()
    lease = retracted(rig, 2, 1, 2 * BLOCK + 3)
    assert not lease.ready and lease.num_from(0) == 0 and rig.pool.counts.pinned == 3
    rig.land()
    assert lease.ready and lease.num_from(0) == 3 and lease.num_tokens == 2 * BLOCK + 3
    assert (
        rig.in_host(KEYS[:2]) == KEYS[:2]
        and rig.host.pool.num_keys == 2
        and rig.host.pool.counts.reserved == 1
    )
    rig.pool.evict(8)
    again = rig.hold(3)
    rig.promote(again, lease, 3)
    rig.land()
    assert [rig.device.cells[slot][0] for slot in again.slots] == [KEYS[0], KEYS[1], "request 0"]
    assert rig.host.pool.counts.reserved == 0 and len(rig.host.leases) == 0, "nobody else could use the tail"
    again.end()
    rig.close()


@pytest.mark.parametrize("launched", [False, True])
def test_a_saved_lease_given_up_under_way_returns_everything_when_the_copy_is_over(launched: bool) -> None:
    rig = Rig()
    lease = retracted(rig, 1, 1, 6)
    if launched:
        rig.lane("launch save").step()
        rig.lane("save").step()
    lease.end()
    lease.end()
    assert rig.pool.counts.pinned == 2, "the copy still reads"
    rig.land()
    assert (
        len(rig.host.leases) == 0 and rig.host.pool.counts.reserved == 0 and rig.in_host(KEYS[:1]) == KEYS[:1]
    )
    rig.close()


# ------------------------------------------------------------------------------------------------------ worth


def rated(rig: Rig, bytes_per_s: float, tokens_per_s: float) -> None:
    rig.loads.costs.link.add(1 << 20, (1 << 20) / bytes_per_s)
    rig.loads.costs.prefill.add(1000, 500, 1000 / tokens_per_s)


def test_a_hit_is_taken_where_fetching_is_faster_than_computing() -> None:
    rig = Rig()
    rig.save(KEYS[:4]).end()
    lease = leased(rig, KEYS[:4])
    assert rig.loads.worth(lease, 0) == 4, "nothing is known yet"
    bytes_per_token = LAYOUT.block_bytes / BLOCK
    rated(rig, 1000 * bytes_per_token, 500)
    assert [rig.loads.worth(lease, depth) for depth in range(5)] == [4, 3, 2, 1, 0]
    rig.loads.costs.link.bytes_per_s = 100 * bytes_per_token
    assert rig.loads.worth(lease, 0) == 0
    lease.end()
    rig.close()


@pytest.mark.parametrize(("speed", "num_colder"), [(0.6, 2), (0.3, 2), (0.2, 0)])
def test_a_window_is_worth_the_computing_of_all_that_the_device_lacks_up_to_its_end(
    speed: float, num_colder: int
) -> None:
    """Two blocks against eight. `speed`: of loading a token, against computing it."""
    rig = Rig(window=2 * BLOCK)
    prefix = rig.cache.prefix_of(range(8 * BLOCK))
    assert prefix is not None
    rig.save(list(prefix.keys)).end()
    rig.pool.evict(8)
    rated(rig, speed * 500 * LAYOUT.block_bytes / BLOCK, 500)
    lease = rig.cache.lease("request", prefix)
    assert lease is not None
    match = rig.cache.match(prefix.keys, lease)
    assert (match.num_blocks, match.num_colder) == ((6, 2) if num_colder else (0, 0))
    lease.end()
    rig.close()


@pytest.mark.parametrize(("speed", "num_read"), [(0.6, 2), (0.3, 2), (0.2, 0)])
def test_a_window_is_read_from_a_disk_for_the_same_reason(speed: float, num_read: int) -> None:
    rig = Stacked("ssd", window=2 * BLOCK)
    rig.put("ssd", rig.keys(8))
    rig.set_limits(replace(rig.saves.limits, load_always=False))
    rated(rig, 1e12, 500)
    rig.tiers["ssd"].counts.rate.bytes_per_s = speed * 500 * LAYOUT.block_bytes / BLOCK
    fetch = rig.cache.prefetch(rig.prefix(8), "reader")
    assert (0 if fetch is None else fetch.num_blocks) == num_read
    rig.flow()


def test_a_lane_that_is_late_is_not_worth_waiting_for_by_anybody() -> None:
    rig = Rig(load_always=True)
    rig.save(KEYS[:2]).end()
    rig.pool.evict(8)
    one, two, hold = leased(rig, KEYS[:2]), leased(rig, KEYS[:2]), rig.hold(2)
    promotion = rig.promote(hold, one, 2)
    assert rig.loads.worth(two, 0) == 2
    promotion.deadline_s = 0.0
    assert promotion.overdue and rig.loads.worth(two, 0) == 0
    rig.land()
    assert not promotion.overdue and rig.loads.worth(two, 0) == 2
    two.end()
    hold.end()
    rig.close()


def overdue_save(rig: Rig) -> Hold:
    """Of one block, that is on the lane and has not come."""
    hold = rig.computed(KEYS[:1])
    rig.saves.offer(hold, 0, KEYS[:1], None)
    rig.saves.submit()
    first = rig.saves.mover.flying[0]
    assert first is not None and not first.overdue
    first.deadline_s = 0.0
    return hold


def test_behind_a_save_that_is_overdue_nothing_is_sent_and_no_slot_is_kept() -> None:
    rig = Rig()
    stuck, other = overdue_save(rig), rig.computed(KEYS[1:3], "other", num_more=1)
    rig.saves.offer(other, 0, KEYS[1:3], None)
    rig.saves.submit()
    assert len(rig.saves.mover.flying) == 1 and rig.cache.stats().traffic.skipped["late"] == 2
    assert rig.saves.retract(other, 3, KEYS[1:3], 2 * BLOCK + 1, None) is None
    assert rig.cache.stats().traffic.skipped["late"] == 3
    for hold in (stuck, other):
        hold.end()
    assert rig.pool.counts.pinned == 1, "what is on the lane keeps what it reads"
    rig.land()
    again = rig.save(KEYS[3:4])
    assert rig.in_host(KEYS[:4]) == [KEYS[0], None, None, KEYS[3]], "once it is over, others are sent again"
    again.end()
    rig.close()


# Holds invariant 7: a deadline ends the wait, not the pins.
def test_a_retraction_that_is_overdue_is_waited_for_no_longer_and_keeps_its_slots() -> None:
    rig = Rig()
    lease = retracted(rig, 2, 1, 2 * BLOCK + 3)
    assert not lease.ready and time.monotonic() < lease.wait_until_s < float("inf")
    lease.wait_until_s = 0.0
    assert lease.ready and lease.num_from(0) == 0 and rig.pool.counts.pinned == 3
    lease.end()
    assert rig.pool.counts.pinned == 3
    rig.land()
    assert rig.pool.counts.pinned == 0 and rig.host.pool.counts.reserved == 0 and len(rig.host.leases) == 0
    assert rig.in_host(KEYS[:2]) == KEYS[:2]
    rig.close()


def test_what_a_request_saved_of_its_own_is_always_worth_it() -> None:
    rig = Rig()
    lease = retracted(rig, 1, 1, 6)
    rig.land()
    rated(rig, 1.0, 1e9)
    assert rig.loads.worth(lease, 0) == 2
    other = leased(rig, KEYS[:1])
    assert rig.loads.worth(other, 0) == 0
    for each in (lease, other):
        each.end()
    rig.close()


FOUR = 4  # blocks
# of these, where each token costs a millisecond, and one for each before it
COMPUTE_S = FOUR * BLOCK * (1e-3 + 1e-3 * FOUR / 2 * BLOCK)
LOAD_S = 0.7 * COMPUTE_S


def measured(rig: Rig) -> None:
    """A token at depth d takes 1 + d milliseconds, and nothing is loaded unasked."""
    rig.set_limits(replace(rig.saves.limits, load_always=False))
    for depth in (0, 100):
        rig.loads.costs.prefill.add(BLOCK, depth, BLOCK * 1e-3 * (1 + depth))
    assert rig.loads.costs.prefill.seconds(FOUR * BLOCK, FOUR / 2 * BLOCK) == pytest.approx(COMPUTE_S)


def test_a_load_is_weighed_against_tokens_as_deep_as_they_lie() -> None:
    rig = Rig()
    rig.save(KEYS[:FOUR]).end()
    measured(rig)
    rig.loads.costs.link.add(FOUR * LAYOUT.block_bytes, LOAD_S)
    lease = leased(rig, KEYS[:FOUR])
    assert rig.loads.worth(lease, 0) == FOUR
    lease.end()
    rig.close()


def test_what_others_are_reading_already_counts_in_the_time_of_a_load() -> None:
    rig = Stacked("ssd")
    for name in "ab":
        rig.remembered(FOUR, name, ["ssd"])
    measured(rig)
    tier = rig.tiers["ssd"]
    tier.counts.rate.bytes_per_s = FOUR * LAYOUT.block_bytes / LOAD_S
    lease = rig.cache.lease("second", rig.prefix(FOUR, "b"))
    assert lease is not None and rig.loads.worth(lease, 0) == FOUR
    table, _ = rig.load(FOUR, "a")
    assert tier.counts.queued_bytes[Way.READ] > 0 and rig.loads.worth(lease, 0) == 0
    lease.end()
    rig.flow()
    rig.end(table)


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


def test_what_is_ahead_on_the_lane_counts() -> None:
    rig = Rig(num_host=16)
    rig.save(KEYS[:4]).end()
    rig.pool.evict(8)
    rated(rig, 1000 * LAYOUT.block_bytes / BLOCK, 700)
    one, two = leased(rig, KEYS[:4]), leased(rig, KEYS[:2])
    assert rig.loads.worth(two, 0) == 2
    hold = rig.hold(4)
    rig.promote(hold, one, 4)
    assert rig.loads.worth(two, 0) == 0
    rig.land()
    assert rig.loads.worth(two, 0) == 2
    two.end()
    hold.end()
    rig.close()
