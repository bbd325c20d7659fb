"""The pool: named cases of ownership, eviction, sealing and fences."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError, HandleEnded, IllegalTransition, InvariantBroken, Leaked
from penstock.kv.blocks.handles import Hold
from penstock.kv.blocks.pool import BlockPool, LastUse
from penstock.kv.blocks.slots import SlotCounts, as_run
from tests.pure.kv.kv_fakes import FakeLane, Heard

KEYS = [bytes([i]) * 16 for i in range(32)]


def draw(pool: BlockPool, num: int, owner: str = "request") -> Hold:
    hold = pool.hold(owner)
    reservation = pool.try_reserve(num, owner)
    assert reservation is not None
    reservation.commit(hold)
    return hold


def idle(pool: BlockPool, keys: list[bytes], owner: str = "earlier") -> list[int]:
    """Leave sealed blocks behind, as a finished request does; returns their slots."""
    hold = draw(pool, len(keys), owner)
    slots = list(hold.slots)
    pool.seal(slots, keys)
    hold.end()
    return slots


def test_a_drawn_slot_goes_from_free_over_reserved_to_active_and_back():
    pool = BlockPool(4, "device")
    reservation = pool.try_reserve(3, "a")
    assert pool.counts == SlotCounts(free=1, reserved=3, active=0, pinned=0, idle=0)
    hold = pool.hold("a")
    reservation.commit(hold)
    assert pool.counts == SlotCounts(free=1, reserved=0, active=3, pinned=0, idle=0)
    hold.end()
    assert pool.counts == SlotCounts(free=4, reserved=0, active=0, pinned=0, idle=0)
    pool.check()


def test_a_reservation_that_does_not_fit_changes_nothing():
    pool = BlockPool(4, "device")
    idle(pool, KEYS[:2])
    hold = draw(pool, 1)
    before = pool.counts
    assert pool.try_reserve(4, "b") is None
    assert pool.counts == before
    assert len(pool.find(KEYS[:2])) == 2
    hold.end()


def test_a_rolled_back_reservation_leaves_no_trace():
    pool = BlockPool(4, "device")
    pool.try_reserve(4, "a").rollback()
    assert pool.counts.free == 4
    pool.close()


# Holds invariant 11: a handle ends once.
@pytest.mark.parametrize("kind", ["rollback", "commit", "hold", "pin"])
def test_ending_a_handle_twice_raises_and_changes_nothing(kind):
    pool = BlockPool(4, "device")
    hold = draw(pool, 1)
    reservation = pool.try_reserve(2, "a")
    pin = pool.pin(hold.slots, "t")
    end = {
        "rollback": reservation.rollback,
        "commit": lambda: reservation.commit(hold),
        "hold": hold.end,
        "pin": pin.end,
    }[kind]
    end()
    before = pool.counts
    for again in (end, reservation.rollback) if kind == "commit" else (end,):
        with pytest.raises(HandleEnded):
            again()
    assert pool.counts == before
    pool.check()


def test_a_hold_that_has_ended_takes_no_more_slots():
    pool = BlockPool(4, "device")
    hold = draw(pool, 1)
    hold.end()
    reservation = pool.try_reserve(1, "a")
    with pytest.raises(HandleEnded):
        reservation.commit(hold)
    reservation.rollback()
    pool.close()


def test_a_reservation_is_not_committed_into_a_hold_of_another_pool():
    here, there = BlockPool(4, "here"), BlockPool(4, "there")
    reservation, foreign = here.try_reserve(1, "a"), there.hold("b")
    with pytest.raises(InvariantBroken, match="not out of pool 'here'"):
        reservation.commit(foreign)
    assert here.counts.reserved == 1
    assert foreign.num_slots == 0


# Holds invariant 11: close names what is out.
def test_closing_with_something_out_raises_and_names_the_owners():
    pool = BlockPool(8, "device")
    hold = draw(pool, 2, "request-7")
    pin = pool.pin(hold.slots[:1], "demote-3")
    reservation = pool.try_reserve(3, "promote-4")
    with pytest.raises(Leaked) as caught:
        pool.close()
    for named in (
        "'device'",
        "hold of 'request-7' (2 slots)",
        "pin of 'demote-3' (1 slots)",
        "reservation of 'promote-4' (3 slots)",
    ):
        assert named in str(caught.value)
    for end in (hold.end, pin.end, reservation.rollback):
        end()
    pool.close()
    pool.close()


@pytest.mark.parametrize(
    ("num", "end"), [(16, "'request-15' (1 slots)"), (17, "'request-15' (1 slots), and 1 more")]
)
def test_of_many_that_are_out_the_first_are_named_and_the_others_counted(num, end):
    pool = BlockPool(num, "device")
    holds = [draw(pool, 1, f"request-{number}") for number in range(num)]
    with pytest.raises(Leaked) as caught:
        pool.close()
    assert str(caught.value).endswith(end)
    for hold in holds:
        hold.end()
    pool.close()


def test_a_closed_pool_lends_nothing():
    pool = BlockPool(4, "device")
    pool.close()
    for lend in (lambda: pool.try_reserve(1, "a"), lambda: pool.hold("a"), lambda: pool.pin([], "a")):
        with pytest.raises(HandleEnded, match="closed"):
            lend()
    assert pool.counts.free == 4


def test_a_pool_may_hold_nothing_and_cannot_hold_less():
    """It is the host tier of a cache that has the device alone."""
    pool = BlockPool(0, "host")
    assert pool.try_reserve(1, "a") is None and pool.find_each([b"k"]) == [-1] and sum(pool.counts) == 0
    pool.check()
    pool.close()
    with pytest.raises(ConfigError):
        BlockPool(-1, "host")


def test_a_sealed_block_is_idle_after_its_last_holder_and_active_for_the_next():
    pool = BlockPool(4, "device")
    first = draw(pool, 2)
    pool.seal(first.slots, KEYS[:2])
    second = pool.hold("second", pool.find(KEYS[:2]))
    first.end()
    assert pool.counts.active == 2
    second.end()
    assert pool.counts == SlotCounts(free=2, reserved=0, active=0, pinned=0, idle=2)
    third = pool.hold("third", pool.find(KEYS[:1]))
    assert pool.counts == SlotCounts(free=2, reserved=0, active=1, pinned=0, idle=1)
    third.end()


# Holds invariant 15: the first copy keeps the key.
def test_the_first_writer_of_a_key_wins_and_the_later_copy_leaks_nothing():
    pool = BlockPool(4, "device")
    one, two = draw(pool, 2, "one"), draw(pool, 2, "two")
    assert pool.seal(one.slots, KEYS[:2]) == 2
    assert pool.seal(two.slots, [KEYS[0], KEYS[5]]) == 1
    assert pool.num_duplicates == 1
    assert pool.find(KEYS[:1]) == [one.slots[0]]
    two.end()
    assert pool.counts == SlotCounts(free=1, reserved=0, active=2, pinned=0, idle=1)
    one.end()
    pool.check()
    pool.close()


def test_eviction_takes_the_least_recently_used_request_and_its_deepest_block_first():
    heard = Heard()
    pool = BlockPool(6, "device", heard)
    idle(pool, KEYS[0:3])
    idle(pool, KEYS[10:13])
    pool.hold("again", pool.find(KEYS[0:3])).end()  # used again: now the newer of the two
    pool.try_reserve(5, "new").rollback()
    assert [key for event, *rest, key in heard.events if event == "evicted"] == [
        KEYS[12],
        KEYS[11],
        KEYS[10],
        KEYS[2],
        KEYS[1],
    ]
    assert len(pool.find(KEYS[:3])) == 1


def test_free_slots_go_before_idle_ones():
    pool = BlockPool(4, "device")
    idle(pool, KEYS[:2])
    draw(pool, 2)
    assert pool.num_evicted == 0
    draw(pool, 1)
    assert pool.num_evicted == 1


def test_free_slots_that_were_used_before_go_first_the_longest_unused_of_them_first():
    pool = BlockPool(6, "device")
    one, two = draw(pool, 1), draw(pool, 2)
    two.end()  # slots 1 and 2
    one.end()  # slot 0
    assert list(draw(pool, 1).slots) == [1]
    assert list(draw(pool, 3).slots) == [0, 2, 3], "and those that never were when there are no others"
    pool.check()


def test_a_slot_that_was_never_used_goes_before_a_block_that_is_of_use():
    pool = BlockPool(4, "device")
    idle(pool, KEYS[:2])
    assert list(draw(pool, 2).slots) == [2, 3] and pool.num_evicted == 0


def test_requests_one_after_the_other_stay_in_the_slots_of_the_first():
    """Memory of a slot that was never used is yet to be found."""
    pool = BlockPool(64, "device")
    seen: set[int] = set()
    for number in range(50):
        hold = draw(pool, 1 + number % 4)
        seen.update(hold.slots)
        pool.seal(hold.slots[:1], KEYS[number % 32 :][:1])
        hold.end()
        pool.evict(1)
    assert seen == {0, 1, 2, 3}


def test_taking_free_slots_in_the_order_in_which_they_came_to_be_free_would_be_noticed(monkeypatch):
    make = BlockPool.__init__

    def one_queue(self, *args):
        make(self, *args)
        self._free, self._fresh = self._fresh, self._free

    monkeypatch.setattr(BlockPool, "__init__", one_queue)
    for test in (
        test_free_slots_that_were_used_before_go_first_the_longest_unused_of_them_first,
        test_requests_one_after_the_other_stay_in_the_slots_of_the_first,
    ):
        with pytest.raises(AssertionError):
            test()


def test_a_held_or_pinned_block_cannot_be_evicted():
    pool = BlockPool(6, "device")
    idle(pool, KEYS[:4])
    held = pool.hold("reader", pool.find(KEYS[:1]))
    pin = pool.pin(pool.find(KEYS[:2])[1:], "demote")
    assert pool.try_reserve(5, "greedy") is None
    greedy = pool.try_reserve(4, "greedy")
    assert set(greedy.slots).isdisjoint([*held.slots, *pin.slots])
    assert pool.evict(6) == 0
    assert len(pool.find(KEYS[:2])) == 2
    for end in (held.end, pin.end, greedy.rollback):
        end()


@pytest.mark.parametrize("protection", ["hold", "pin", "reservation"])
def test_an_order_that_offers_a_protected_block_is_stopped_by_the_transition_table(protection):
    pool = BlockPool(4, "device")
    slots = idle(pool, KEYS[:1])
    if protection == "hold":
        pool.hold("reader", slots)
    elif protection == "pin":
        pool.pin(slots, "demote")
    else:
        slots = list(pool.try_reserve(1, "promote").slots)
    pool.idle.add(as_run(slots))
    with pytest.raises(IllegalTransition, match="EVICT"):
        pool.evict(2)


def test_a_pin_outlives_the_release_of_its_request():
    pool = BlockPool(4, "device")
    hold = draw(pool, 2)
    pool.seal(hold.slots[:1], KEYS[:1])
    pin = pool.pin(hold.slots, "demote")
    hold.end()
    assert pool.counts == SlotCounts(free=2, reserved=0, active=0, pinned=2, idle=0)
    pin.end()
    assert pool.counts == SlotCounts(free=3, reserved=0, active=0, pinned=0, idle=1)


def test_pins_are_counted():
    pool = BlockPool(2, "device")
    slots = idle(pool, KEYS[:1])
    one, two = pool.pin(slots, "a"), pool.pin(slots, "b")
    one.end()
    assert pool.counts.pinned == 1
    two.end()
    assert pool.counts.idle == 1


def test_a_destination_that_is_given_up_while_a_transfer_writes_stays_pinned_until_the_transfer_ends():
    pool = BlockPool(2, "device")
    reservation = pool.try_reserve(2, "promote")
    pin = pool.pin(reservation.slots, "promote")
    assert pool.counts.reserved == 2
    reservation.rollback()
    assert pool.counts.pinned == 2
    assert pool.try_reserve(1, "other") is None
    pin.end()
    assert pool.counts.free == 2


def test_a_block_that_landed_after_its_request_was_cancelled_may_still_be_sealed():
    pool = BlockPool(2, "device")
    reservation = pool.try_reserve(1, "promote")
    pin = pool.pin(reservation.slots, "promote")
    reservation.rollback()
    pool.seal(pin.slots, KEYS[:1])
    pin.end()
    assert pool.counts.idle == 1
    assert pool.find(KEYS[:1]) == list(pin.slots)


def test_what_is_not_trusted_yet_can_be_neither_sealed_nor_shared():
    pool = BlockPool(4, "device")
    reservation = pool.try_reserve(1, "promote")
    with pytest.raises(IllegalTransition, match="SEAL is not legal in state RESERVED"):
        pool.seal(reservation.slots, KEYS[:1])
    with pytest.raises(IllegalTransition, match="SHARE is not legal in state RESERVED"):
        pool.hold("b", reservation.slots)
    with pytest.raises(IllegalTransition, match="PIN is not legal in state FREE"):
        pool.pin([3], "b")
    hold = draw(pool, 1)
    with pytest.raises(InvariantBroken, match="not sealed"):
        pool.hold("b", hold.slots)
    assert pool.num_keys == 0
    pool.check()


@pytest.mark.parametrize(
    ("slots", "message"), [([0, 0], "twice"), ([-1], "slots 0 to 3"), ([4], "slots 0 to 3")]
)
def test_a_run_with_impossible_slots_is_refused_and_changes_nothing(slots, message):
    pool = BlockPool(4, "device")
    idle(pool, KEYS[:4])
    for use in (
        lambda: pool.pin(slots, "a"),
        lambda: pool.hold("a", slots),
        lambda: pool.seal(slots, KEYS[: len(slots)]),
    ):
        with pytest.raises(InvariantBroken, match=message):
            use()
    pool.check()
    assert pool.counts.idle == 4


def test_a_slot_is_sealed_once():
    pool = BlockPool(4, "device")
    hold = draw(pool, 2)
    pool.seal(hold.slots[:1], KEYS[:1])
    with pytest.raises(InvariantBroken, match="sealed already"):
        pool.seal(hold.slots, KEYS[1:3])
    assert pool.num_keys == 1
    with pytest.raises(InvariantBroken, match="1 slots cannot be sealed with 2 keys"):
        pool.seal(hold.slots[1:], KEYS[1:3])


def test_the_fence_of_its_last_use_travels_with_a_slot():
    pool, compute = BlockPool(2, "device"), FakeLane("compute")
    hold = draw(pool, 2)
    fence = compute.record()
    hold.end(fence)
    reservation = pool.try_reserve(1, "next")
    assert reservation.after == (fence,)
    reservation.rollback()  # nobody waited for it: it still counts for whoever comes next
    again = pool.try_reserve(2, "next")
    assert again.after == (fence,)
    again.rollback()
    compute.pass_all()
    assert pool.try_reserve(2, "last").after == ()


def test_each_lane_that_used_a_slot_has_its_fence_handed_out():
    pool, compute, demote = BlockPool(1, "device"), FakeLane("compute"), FakeLane("demote")
    hold = draw(pool, 1)
    pin = pool.pin(hold.slots, "demote")
    fences = {compute.record(), demote.record()}
    for end, fence in zip((hold.end, pin.end), sorted(fences, key=lambda f: f.lane), strict=True):
        end(fence)
    assert set(pool.try_reserve(1, "next").after) == fences


def test_a_slot_waits_for_no_fence_of_later_users_of_other_slots():
    pool, compute = BlockPool(2, "device"), FakeLane("compute")
    one, two = draw(pool, 1), draw(pool, 1)
    first, second = compute.record(), compute.record()
    one.end(first)
    two.end(second)
    assert pool.try_reserve(1, "next").after == (first,)


def test_an_evicted_block_hands_on_the_fence_of_its_last_reader():
    pool, compute = BlockPool(1, "device"), FakeLane("compute")
    slots = idle(pool, KEYS[:1])
    fence = compute.record()
    pool.hold("reader", slots).end(fence)
    assert pool.try_reserve(1, "next").after == (fence,)


def test_a_late_release_with_an_old_fence_does_not_hide_a_newer_one():
    pool, compute = BlockPool(1, "device"), FakeLane("compute")
    slots = idle(pool, KEYS[:1])
    rested, ran = pool.hold("rested", slots), pool.hold("ran", slots)
    old, new = compute.record(), compute.record()
    ran.end(new)
    rested.end(old)
    assert new in pool.try_reserve(1, "next").after


def test_keeping_only_the_last_fence_to_arrive_would_be_noticed(monkeypatch):
    after = LastUse.after
    monkeypatch.setattr(
        LastUse,
        "after",
        lambda self, slots: tuple({fence.lane: fence for fence in after(self, slots)}.values()),
    )
    with pytest.raises(AssertionError):
        test_a_late_release_with_an_old_fence_does_not_hide_a_newer_one()


def test_what_a_hold_has_shown_never_changes_and_cannot_be_written():
    pool = BlockPool(64, "device")
    hold = draw(pool, 10)
    seen = hold.first(10)
    before = seen.tolist()
    for _ in range(20):
        pool.try_reserve(2, "request").commit(hold)
    assert seen.tolist() == before == hold.first(50)[:10].tolist()
    assert hold.num_slots == 50
    with pytest.raises(ValueError):
        seen[0] = 1
    hold.end()
    assert seen.tolist() == before


def test_an_observer_hears_every_change_of_state_seal_and_eviction():
    heard = Heard()
    pool = BlockPool(2, "device", heard)
    hold = draw(pool, 2, "a")
    pool.seal(hold.slots[:1], KEYS[:1])
    hold.end()
    pool.evict(1)
    assert heard.events == [
        ("moved", (0, 1), "free", "reserved", "a"),
        ("moved", (0, 1), "reserved", "active", "a"),
        ("sealed", 0, KEYS[0]),
        ("moved", (0,), "active", "idle", "a"),
        ("moved", (1,), "active", "free", "a"),
        ("moved", (0,), "idle", "free", "device"),
        ("evicted", 0, KEYS[0]),
    ]


def test_an_observer_hears_who_gets_and_gives_back_slots_also_where_their_state_stays():
    heard = Heard()
    lane = FakeLane("compute")
    pool = BlockPool(2, "device", heard)
    hold = draw(pool, 2, "a")
    pool.seal(hold.slots, KEYS[:2])
    pins = [pool.pin([1], owner) for owner in ("b", "c")]
    shared = pool.hold("d", [0])
    fence = lane.record()
    run = pool.pin(hold.first(0 + 1)[0:], "e")
    run.end()
    hold.end(fence)
    for handle in (*pins, shared):
        handle.end()
    pool.close()
    lent = [("lent", (1,), "b"), ("lent", (1,), "c"), ("lent", (0,), "d"), ("lent", (0,), "e")]
    returned = [("returned", (0,), "e", None), ("returned", (0, 1), "a", fence)]
    returned += [("returned", (1,), "b", None), ("returned", (1,), "c", None), ("returned", (0,), "d", None)]
    assert [event for event in heard.handed_over if event[1]] == lent + returned
    assert heard.left == ()


def test_an_observer_hears_of_handles_that_a_close_finds():
    heard = Heard()
    pool = BlockPool(2, "device", heard)
    draw(pool, 1, "a")
    with pytest.raises(Leaked):
        pool.close()
    assert heard.left == ("hold of 'a' (1 slots)",)


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool.book.holds.__setitem__(0, 2),
        lambda pool: pool.book.pins.__setitem__(3, 1),
        lambda pool: pool.book.num_in.__setitem__(0, 2),
        lambda pool: pool._free.append(0),
        lambda pool: pool.idle.pop(1),
        lambda pool: pool.index.key_of.__setitem__(0, KEYS[1]),
        lambda pool: pool._out.clear(),
    ],
)
def test_a_check_notices_books_that_do_not_add_up(damage):
    pool = BlockPool(4, "device")
    hold = draw(pool, 2)
    pool.seal(hold.slots, KEYS[:2])
    idle(pool, KEYS[2:3])
    pool.check()
    damage(pool)
    with pytest.raises(InvariantBroken):
        pool.check()
