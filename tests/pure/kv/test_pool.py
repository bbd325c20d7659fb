"""The pool: named cases of ownership, eviction, sealing and fences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from penstock.errors import ConfigError, HandleEnded, IllegalTransition, InvariantBroken, Leaked
from penstock.kv.blocks.handles import Hold
from penstock.kv.blocks.pool import BlockPool, LastUse
from penstock.kv.blocks.slots import Run, as_run
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


def test_a_slot_is_sealed_once():
    pool = BlockPool(4, "device")
    hold = draw(pool, 2)
    pool.seal(hold.slots[:1], KEYS[:1])
    with pytest.raises(InvariantBroken, match="sealed already"):
        pool.seal(hold.slots, KEYS[1:3])
    assert pool.num_keys == 1
    with pytest.raises(InvariantBroken, match="1 slots cannot be sealed with 2 keys"):
        pool.seal(hold.slots[1:], KEYS[1:3])


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


NUM = [2, 35]  # slots of a run


def keys(num: int, first: int = 0) -> list[bytes]:
    return [(first + number).to_bytes(16, "big") for number in range(num)]


def sealed(pool: BlockPool, num: int, first: int = 0, owner: str = "request") -> Hold:
    """A table of so many blocks, whose depths are their numbers."""
    hold, reservation = pool.hold(owner), pool.try_reserve(num, owner)
    assert reservation is not None
    reservation.commit(hold)
    pool.seal(hold.slots, keys(num, first), range(num))
    return hold


def idle_run(pool: BlockPool, num: int, first: int = 0) -> Run:
    sealed(pool, num, first).end()
    return pool.find(keys(num, first))


USES: dict[str, Callable[[BlockPool, list[int]], object]] = {
    "pin": lambda pool, slots: pool.pin(slots, "transfer"),
    "hold": lambda pool, slots: pool.hold("request", slots),
    "seal": lambda pool, slots: pool.seal(slots, keys(len(slots), 1000)),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("num", NUM)
def test_a_slot_that_the_pool_does_not_have_is_refused_and_nothing_has_changed(use: str, num: int) -> None:
    pool = BlockPool(num, "device")
    idle_run(pool, num)
    before = pool.counts
    others = list(range(num - 1))
    for wrong in (num, num + 1, -1):
        with pytest.raises(InvariantBroken, match=f"has slots 0 to {num - 1}"):
            USES[use](pool, [*others, wrong])
    assert pool.counts == before and pool.num_keys == num
    pool.check()
    pool.close()


# --------------------------------------------------------------------------------------- wanted and forgotten


@pytest.mark.parametrize("way", ["evict_these", "forget", "evict"])
@pytest.mark.parametrize("num", NUM)
def test_what_comes_into_the_slot_of_a_wanted_block_that_went_is_not_wanted(way: str, num: int) -> None:
    """However it went, its want has lost it, and its key is told as gone."""
    pool = BlockPool(num, "device")
    pool.gone = []
    slots = np.asarray(idle_run(pool, num)).tolist()
    want = pool.want(as_run(slots), 1.0)
    assert pool.num_unwanted == 0
    if way == "evict":
        assert pool.evict(num) == num
    else:
        assert getattr(pool, way)(slots) == num
    assert sorted(pool.gone) == keys(num) and want.gone.all() and not want.protects
    idle_run(pool, num, 100)
    assert pool.num_unwanted == num, "nobody has asked for these"
    want.end()
    assert pool.num_unwanted == num
    pool.check()
    pool.close()


def test_both_parts_of_a_reservation_wait_for_those_who_had_its_slots() -> None:
    pool, lane = BlockPool(4, "host"), FakeLane("copy")
    earlier = pool.try_reserve(4, "earlier")
    assert earlier is not None
    fence = lane.record()
    earlier.rollback(fence)  # type: ignore[arg-type]
    rest = pool.try_reserve(4, "later")
    assert rest is not None
    first = rest.split(1)
    assert first.after == rest.after == (fence,) and first.owner == rest.owner == "later"
    assert sorted([*first.slots, *rest.slots]) == [0, 1, 2, 3] and len(first.slots) == 1
    first.rollback()
    rest.rollback()
    pool.close()


SIZES = pytest.mark.parametrize("num", [1, 40])


@SIZES
def test_an_older_fence_that_comes_later_hides_none_that_came_before(num: int) -> None:
    """A table that rested is given back with the fence of a step long ago, after others have used its shared
    slots."""
    lane, last_use, slots = FakeLane("compute"), LastUse(128), as_run(range(num))
    first, second, third = (lane.record() for _ in range(3))
    for fence in (first, second, third, second, first):
        last_use.note(slots, fence)
    assert last_use.after(slots) == (first, second, third)
    lane.num_passed = 2
    assert last_use.after(slots) == (third,)
    lane.pass_all()
    assert last_use.after(slots) == ()


@SIZES
def test_slots_carry_their_own_fences_and_those_of_no_others(num: int) -> None:
    lanes = FakeLane("compute"), FakeLane("load")
    last_use = LastUse(128)
    mine, others = as_run(range(num)), as_run(range(num, 2 * num))
    early, load, late = lanes[0].record(), lanes[1].record(), lanes[0].record()
    last_use.note(mine, early)
    last_use.note(mine, load)
    last_use.note(others, late)
    assert last_use.after(mine) == (early, load)
    assert last_use.after(others) == (early, late), (
        "on one lane those before are taken along: they are over sooner"
    )
    assert last_use.after(as_run(range(2 * num, 3 * num))) == ()
    assert set(last_use.after(as_run(range(2 * num)))) == {early, load, late}


@pytest.mark.parametrize("num", NUM)
def test_the_fence_of_a_pin_that_ends_under_its_hold_reaches_the_next_owner(num: int) -> None:
    pool, lane = BlockPool(num, "device"), FakeLane("copy")
    hold = sealed(pool, num)
    pin = pool.pin(hold.run, "transfer")
    fence = lane.record()
    pin.end(fence)  # type: ignore[arg-type]
    hold.end()
    assert pool.last_use.after(as_run(range(num))) == (fence,)
    pool.evict(num)
    reservation = pool.try_reserve(num, "next")
    assert reservation is not None and reservation.after == (fence,)
    reservation.rollback()
    pool.close()
