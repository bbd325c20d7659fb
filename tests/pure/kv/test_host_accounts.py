"""What the host tier counts and tells: every total in every way in which blocks come or do not come, each
block that leaves told once, and what a lease that has run out still says."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.kv.tiers.host import ABSENT, Displaces
from tests.pure.kv.test_host_tier import KEYS, fill, leased, new_tier, taken


@pytest.mark.parametrize(
    ("displaces", "most", "num_taken", "expected"),
    [
        (Displaces.UNWANTED, None, 4, {"deduplicated": 2, "skipped_full": 1}),
        (Displaces.NOTHING, None, 2, {"deduplicated": 2, "postponed": 3}),
        (Displaces.ANYTHING, None, 5, {"deduplicated": 2}),
        # those beyond are not wanted: nothing has become of them
        (Displaces.UNWANTED, 3, 3, {"deduplicated": 2}),
        (Displaces.NOTHING, 3, 2, {"deduplicated": 2, "postponed": 1}),
        (Displaces.UNWANTED, 0, 0, {"deduplicated": 2}),
        (Displaces.ANYTHING, 9, 5, {"deduplicated": 2}),
    ],
)
def test_each_block_that_finds_no_room_is_counted_once_and_under_its_reason(
    displaces: Displaces, most: int | None, num_taken: int, expected: dict[str, int]
) -> None:
    """Of eight slots one is pinned, one is of a block that somebody wants, two are of others, two are
    reserved and two are free."""
    tier = new_tier(num_slots=8)
    fill(tier, KEYS[:4])
    _, pin = tier.pin_each(KEYS[:1], "transfer")
    lease = leased(tier, KEYS[1:2])
    coming = tier.take(KEYS[20:22], range(2), "demote")
    before = dataclasses.asdict(tier.counts)
    took = tier.take([KEYS[0], KEYS[20], *KEYS[10:15]], range(7), "demote", displaces, most)
    assert took.keys == KEYS[10 : 10 + num_taken] and took.depths == list(range(2, 2 + num_taken))
    changed = {
        name: num - before[name]
        for name, num in dataclasses.asdict(tier.counts).items()
        if num != before[name]
    }
    assert changed == expected
    lease.end()
    for each in (took, coming):
        tier.drop(each)
    assert pin is not None
    pin.end()
    tier.close()


@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_every_block_that_leaves_is_told_once_and_in_order_however_few_are_asked_for(most: int) -> None:
    tier = new_tier()
    tier.take_gone(0)
    fill(tier, KEYS[:5])
    lost = [0, 3, 1, 4]
    for place in lost:
        tier.forget(KEYS[place : place + 1])
    fill(tier, KEYS[3:4])  # it is here again: nobody has lost it
    told: list[bytes] = []
    while bool(tier.pool.gone):
        some = tier.take_gone(most)
        assert len(some) <= most
        told += some
    assert told == [KEYS[0], KEYS[1], KEYS[4]] and tier.take_gone(most) == []
    tier.close()


@pytest.mark.parametrize("before_are_here", [True, False])
def test_a_lease_from_a_block_on_grows_behind_it_and_never_before(before_are_here: bool) -> None:
    """The device has what lies before: whether host memory has it, too, says nothing about what may come
    behind."""
    tier = new_tier()
    if before_are_here:
        fill(tier, KEYS[:2])
    fill(tier, KEYS[2:3])
    lease = tier.lease(KEYS[:5], "request", first=2)
    assert lease is not None and lease.num_from(2) == 1
    fill(tier, KEYS[3:5])
    lease.grow()
    assert lease.num_from(2) == 3 and lease.slots[:2].tolist() == [ABSENT, ABSENT]
    assert tier.pool.num_unwanted == tier.num_slots - 3, "those before are nobody's wish"
    lease.end()
    tier.close()


def test_blocks_that_land_in_part_keep_their_own_places_in_their_prefixes() -> None:
    """An order of eviction and a store are told how deep a block lies: not which of those it came with it
    is."""
    tier = new_tier()
    some = tier.take(KEYS[:4], [5, 6, 7, 8], "read")
    pin = tier.land(some, [1, 3], "read")
    slots = tier.pool.find_each([KEYS[1], KEYS[3]])
    assert pin is not None and tier.pool.depths[slots].tolist() == [6, 8]
    pin.end()
    tier.close()


@pytest.mark.parametrize("in_part", [False, True], ids=["saved", "read from a store"])
def test_a_block_that_a_snapshot_pins_stays_however_it_comes(in_part: bool) -> None:
    tier = new_tier()
    tier.pin_keys("snapshot", KEYS[:2])
    some = taken(tier, KEYS[:3])
    if in_part:
        pin = tier.land(some, [0, 2], "read")
        assert pin is not None
        pin.end()
    else:
        tier.land(some)
    pinned = 1 if in_part else 2
    assert (
        tier.pool.evict(99) == 1
        and tier.pool.num_keys == tier.pool.counts.pinned == pinned
        and tier.has_each([KEYS[0]])[0]
    )
    tier.unpin_keys("snapshot")
    assert tier.pool.evict(99) == pinned
    tier.close()
