"""The host tier's books in named cases: leases, room for new blocks, memory that becomes ready."""

from __future__ import annotations

import threading

import pytest

from penstock.errors import InvariantBroken, Leaked
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.blocks.slots import SlotCounts
from penstock.kv.tiers.host import ABSENT, HostLease, HostTier, Taken

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


def test_a_lease_covers_every_block_that_is_here_and_knows_the_gaps() -> None:
    tier = new_tier()
    fill(tier, [KEYS[0], KEYS[1], KEYS[3]])
    lease = leased(tier, KEYS[:5])
    assert [slot == ABSENT for slot in lease.slots] == [False, False, True, False, True]
    assert [lease.num_from(block) for block in range(7)] == [2, 1, 0, 1, 0, 0, 0]
    assert lease.num_tokens == 5 * BLOCK and lease.ready and not lease.expired
    assert (len(tier.leases), tier.pool.counts.pinned, tier.pool.num_unwanted) == (1, 0, 5), (
        "its blocks are wanted, and not held"
    )
    assert lease.claim(0, 5) and tier.pool.counts.pinned == 3
    lease.end()
    assert (len(tier.leases), tier.pool.counts.pinned, tier.pool.counts.idle, tier.pool.num_unwanted) == (
        0,
        0,
        3,
        8,
    )
    tier.close()


def test_a_lease_from_a_block_on_leaves_those_before_alone() -> None:
    tier = new_tier()
    fill(tier, KEYS[:4])
    lease = tier.lease(KEYS[:4], "request", 3)
    assert lease is not None and tier.pool.num_unwanted == 7
    assert [lease.num_from(block) for block in range(5)] == [0, 0, 0, 1, 0]
    lease.end()


def test_there_is_no_lease_where_nothing_is_here() -> None:
    tier = new_tier()
    assert tier.lease(KEYS[:3], "request") is None and tier.lease([], "request") is None
    assert len(tier.leases) == 0


def test_a_claim_of_some_blocks_holds_those_and_no_others() -> None:
    tier = new_tier()
    fill(tier, KEYS[:4])
    lease = leased(tier, KEYS[:4])
    assert lease.claim(1, 2) and tier.pool.counts.pinned == 2
    tier.pool.evict(99)
    assert [tier.has_each([key])[0] for key in KEYS[:4]] == [False, True, True, False]
    lease.end()


def test_a_claimed_block_is_never_evicted() -> None:
    tier = new_tier(num_slots=4)
    fill(tier, KEYS[:4])
    lease = leased(tier, KEYS[:2])
    assert lease.claim(0, 2)
    fill(tier, KEYS[10:14])
    assert [tier.has_each([key])[0] for key in KEYS[:2]] == [True, True] and not any(tier.has_each(KEYS[2:4]))
    assert tier.pool.evict(99) == 2 and all(tier.has_each(KEYS[:2]))
    lease.end()
    assert tier.pool.evict(99) == 2 and tier.pool.num_keys == 0


def test_a_wanted_block_is_forgotten_after_all_others_and_no_save_takes_its_place() -> None:
    tier = new_tier(num_slots=4)
    fill(tier, KEYS[:4])
    lease = leased(tier, KEYS[:2])
    fill(tier, KEYS[10:14])
    assert [tier.has_each([key])[0] for key in KEYS[:2]] == [True, True] and not any(tier.has_each(KEYS[2:4]))
    assert tier.counts.skipped_full == 2 and tier.pool.num_unwanted == 2
    lease.refresh()
    assert lease.num_from(0) == 2
    assert tier.pool.evict(99) == 4, "nobody has a table for them: they are held by nobody"
    assert lease.num_from(0) == 2 and not lease.claim(0, 2), (
        "it does not know yet, and finds out before anybody relies on it"
    )
    assert lease.num_from(0) == 0 and tier.pool.counts.pinned == 0 and len(tier.leases) == 1
    lease.end()
    tier.close()


def test_two_leases_on_a_block_are_two() -> None:
    tier = new_tier(num_slots=1)
    fill(tier, KEYS[:1])
    one, two = leased(tier, KEYS[:1]), leased(tier, KEYS[:1])
    one.end()
    one.end()  # has ended: nothing more to give back
    fill(tier, KEYS[1:2])
    assert tier.has_each([KEYS[0]])[0] and tier.counts.skipped_full == 1
    two.end()
    tier.close()


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


def test_leases_are_looked_at_now_and_then_and_not_every_time() -> None:
    clock = Clock()
    tier = new_tier(clock=clock)
    tier.expire()
    fill(tier, KEYS[:1])
    lease = leased(tier, KEYS[:1])
    lease.deadline_s = clock.now_s
    clock.now_s += 0.5
    tier.expire()
    assert not lease.expired
    clock.now_s += 0.6
    tier.expire()
    assert lease.expired


# --------------------------------------------------------------------------------------------- writing blocks


def test_a_block_is_found_when_it_has_landed_and_not_before() -> None:
    tier = new_tier()
    coming = taken(tier, KEYS[:2])
    assert coming.places == [0, 1] and tier.pool.counts.reserved == 2
    assert tier.pool.num_keys == 0 and tier.lease(KEYS[:2], "request") is None
    tier.land(coming)
    assert all(tier.has_each(KEYS[:2])) and tier.pool.counts == SlotCounts(
        free=6, reserved=0, active=0, pinned=0, idle=2
    )
    assert tier.counts.landed == 2
    tier.close()


def test_a_block_that_did_not_arrive_publishes_nothing_and_can_be_tried_again() -> None:
    tier = new_tier()
    tier.drop(taken(tier, KEYS[:2]))
    assert tier.pool.num_keys == 0 and tier.pool.counts.free == 8 and tier.counts.landed == 0
    assert taken(tier, KEYS[:2]).places == [0, 1]


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


def test_a_full_tier_takes_the_first_blocks_and_counts_the_others() -> None:
    tier = new_tier(num_slots=3)
    fill(tier, KEYS[:1])
    lease = leased(tier, KEYS[:1])
    some = taken(tier, KEYS[10:14])
    assert some.places == [0, 1] and tier.counts.skipped_full == 2
    none = taken(tier, KEYS[20:22])
    assert none.places == [] and none.reservation is None and tier.counts.skipped_full == 4
    for each in (some, none):
        tier.land(each)
    lease.end()
    tier.close()


def test_room_for_one_request_alone_is_all_or_nothing_and_never_found() -> None:
    tier = new_tier(num_slots=3)
    private = tier.take_private(2, "retract")
    assert private is not None and tier.take_private(2, "retract") is None
    assert tier.counts.skipped_full == 2 and tier.pool.num_keys == 0
    lease = HostLease(tier, "request", private.run, 20)
    lease.open(0, private)
    assert len(tier.leases) == 1
    lease.end()
    assert tier.pool.counts.free == 3
    tier.close()


def test_each_key_asked_for_is_pinned_where_it_is_here() -> None:
    tier = new_tier()
    fill(tier, [KEYS[0], KEYS[2]])
    slots, pin = tier.pin_each(KEYS[:3], "retract")
    assert pin is not None and slots[1] == ABSENT and sorted(pin.slots) == sorted([slots[0], slots[2]])
    assert tier.pin_each(KEYS[5:6], "retract") == ([ABSENT], None)
    pin.end()


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


def test_a_lease_regains_its_first_block_when_that_has_landed_again() -> None:
    tier = new_tier(num_slots=6)
    fill(tier, KEYS[:2])
    lease = leased(tier, KEYS[:2])
    tier.pool.evict(99)
    lease.refresh()
    assert lease.num_from(0) == 0
    fill(tier, KEYS[:2])
    lease.grow()
    assert lease.num_from(0) == 2
    lease.end()


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
