"""The host tier's books in named cases: leases, room for new blocks, memory that becomes ready."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from penstock.errors import InvariantBroken, Leaked
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.tiers.cold import Finding
from penstock.kv.tiers.host import ABSENT, Displaces, HostLease, HostTier, Part, Taken

BLOCK = 16
LEASE_S = 10.0
KEYS = [bytes([i]) * 16 for i in range(40)]


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def new_tier(num_slots: int = 8, clock: Clock | None = None) -> HostTier:
    return HostTier(BlockPool(num_slots, "host"), BLOCK, LEASE_S, clock or Clock())


def taken(tier: HostTier, keys: list[bytes]) -> Taken:
    return tier.take(keys, range(len(keys)), "demote")


def fill(tier: HostTier, keys: list[bytes]) -> None:
    tier.land(taken(tier, keys))


def leased(tier: HostTier, keys: list[bytes], owner: str = "request") -> HostLease:
    lease = tier.lease(keys, owner)
    assert lease is not None
    return lease


# ----------------------------------------------------------------------------------------------------- leases


# Holds invariant 12: time frees a lease that nobody used.
def test_a_lease_nobody_came_for_expires_and_covers_nothing() -> None:
    clock = Clock()
    tier = new_tier(clock=clock)
    fill(tier, KEYS[:2])
    lease = leased(tier, KEYS[:2])
    clock.now_s += LEASE_S - 1
    tier.expire()
    assert not lease.expired and lease.num_from(0) == 2
    clock.now_s += 2
    tier.expire()
    assert lease.expired and lease.num_from(0) == 0 and tier.pool.counts.pinned == 0
    assert tier.counts.leases_expired == 1 and lease.take() is None
    lease.end()
    tier.close()


# Holds invariant 12: time frees nothing that a transfer reads.
def test_what_a_transfer_reads_has_left_its_lease_and_does_not_expire() -> None:
    clock = Clock()
    tier = new_tier(clock=clock)
    fill(tier, KEYS[:2])
    lease = leased(tier, KEYS[:2])
    kept = lease.take()
    assert kept is not None and len(tier.leases) == 0
    clock.now_s += 10 * LEASE_S
    tier.expire()
    lease.end()
    assert tier.pool.counts.pinned == 2 and not lease.expired, "its time is no business of the transfer's"
    for handle in kept:
        handle.end()
    assert tier.pool.counts.idle == 2
    tier.close()


# --------------------------------------------------------------------------------------------- writing blocks


def test_what_is_here_or_on_its_way_is_not_taken_again() -> None:
    tier = new_tier()
    fill(tier, KEYS[:1])
    first = taken(tier, KEYS[:3])
    assert first.places == [1, 2] and first.keys == KEYS[1:3] and first.depths == [1, 2]
    second = taken(tier, [KEYS[0], KEYS[2], KEYS[3], KEYS[3]])
    assert second.places == [2], "one is here, one is on its way, one is named twice"
    assert tier.counts.deduplicated == 4
    for each in (first, second):
        tier.land(each)
    assert taken(tier, KEYS[:4]).reservation is None
    tier.close()


def test_no_lock_is_held_after_a_failed_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = new_tier()
    with monkeypatch.context() as patch:
        patch.setattr(BlockPool, "try_reserve", lambda self, num_slots, owner: None)
        with pytest.raises(InvariantBroken, match="vanished"):
            taken(tier, KEYS[:2])
        with pytest.raises(InvariantBroken, match="vanished"):
            tier.take_private(1, "retract")
    done = threading.Thread(target=lambda: fill(tier, KEYS[:2]), daemon=True)
    done.start()
    done.join(10.0)
    assert not done.is_alive() and tier.pool.num_keys == 2, (
        "nobody waits for a lock that somebody left locked"
    )


# ----------------------------------------------------------------------------------------------------- memory


def test_memory_that_is_not_ready_is_not_lent() -> None:
    tier = new_tier(num_slots=150)
    tier.withhold()
    assert taken(tier, KEYS[:2]).reservation is None and tier.counts.skipped_full == 2
    assert tier.take_private(1, "retract") is None
    tier.ready(range(63))
    assert tier.pool.counts.free == 0, "the last slot of the first piece is not ready"
    tier.ready(range(63, 70))
    first = taken(tier, KEYS[:2])
    assert first.reservation is not None and max(first.reservation.slots) < 70
    assert tier.pool.counts.free == 62 and tier.pool.counts.reserved == 88
    tier.ready(range(70, 150))
    assert tier.pool.counts.free == 148
    tier.land(first)
    tier.close()


def test_a_tier_whose_memory_never_became_ready_closes() -> None:
    tier = new_tier(num_slots=100)
    tier.withhold()
    tier.close()
    tier.ready(range(100))
    tier.close()


@pytest.mark.parametrize("out", ["lease", "taken", "private", "transfer"])
def test_closing_with_something_out_raises(out: str) -> None:
    tier = new_tier()
    fill(tier, KEYS[:1])
    if out == "lease":
        leased(tier, KEYS[:1], "request-7")
    elif out == "taken":
        taken(tier, KEYS[5:6])
    elif out == "private":
        tier.take_private(1, "retract")
    else:
        leased(tier, KEYS[:1]).take()
    with pytest.raises(Leaked):
        tier.close()


def test_a_lease_grows_by_what_lands_behind_its_blocks_while_its_request_waits() -> None:
    tier = new_tier(num_slots=6)
    fill(tier, KEYS[:2])
    lease = leased(tier, KEYS[:4])
    assert lease.num_from(0) == 2
    fill(tier, KEYS[3:4])
    lease.grow()
    assert lease.num_from(0) == 2, "what lies behind a gap is of no use yet"
    fill(tier, KEYS[2:3])
    lease.set_rank(7.0)
    lease.grow()
    assert lease.num_from(0) == 4 and lease.want is not None and lease.want.rank == 7.0
    assert tier.pool.num_unwanted == tier.num_slots - 4, "all of them are wanted"
    lease.end()
    assert tier.pool.num_unwanted == tier.num_slots


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


def test_a_lease_that_has_run_out_has_nothing_in_any_tier_and_cannot_be_claimed() -> None:
    clock = Clock()
    tier = new_tier(clock=clock)
    fill(tier, KEYS[:2])
    found = Finding()
    found.answer(2)
    waiting, claimed = leased(tier, KEYS[:4]), leased(tier, KEYS[:4])
    waiting.parts = claimed.parts = (Part("ssd", [2, 3], found),)
    assert waiting.runs_from(0) == [("host", 2), ("ssd", 2)] and claimed.claim(0, 2)
    clock.now_s += LEASE_S + 2.0
    tier.expire()
    for lease in (waiting, claimed):
        assert lease.runs_from(0) == [] and lease.num_from(0) == 0 and lease.ready and not lease.parts
        assert not lease.claim(0, 0) and lease.take() is None
    assert tier.pool.num_unwanted == tier.num_slots
    tier.close()
