"""`drain(slots)`: when it returns, nothing that was handed over before touches these slots any more, launched
or not, of whatever kind; it waits for nothing else, and it never gives up quietly.

Holds invariant 10: a drain covers everything that may touch its slots, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import pytest

from penstock.errors import DeadlineExceeded, InvariantBroken
from penstock.kv.table import BlockTable
from penstock.kv.tiers import reads as reads_module
from tests.pure.kv.stacked_rig import Stacked

EIGHT = 8
Story = Callable[[Stacked], BlockTable]


def touched(rig: Stacked, act: Callable[[], None]) -> set[int]:
    """Device slots that lanes touch while `act` goes on."""
    seen: set[int] = set()
    begin = rig.lanes.begin

    def watched(item):  # type: ignore[no-untyped-def]
        for access in item.accesses:
            if access.arena == "device":
                seen.update(int(slot) for slot in access.slots)
        begin(item)

    rig.lanes.begin = watched  # type: ignore[method-assign]
    try:
        act()
    finally:
        rig.lanes.begin = begin  # type: ignore[method-assign]
    return seen


@contextmanager
def held(rig: Stacked, *kinds: str) -> Iterator[None]:
    """Lanes whose names begin so stop where they are."""
    lanes = [lane for lane in rig.lanes if lane.name.startswith(kinds)]
    for lane in lanes:
        lane.step = lambda: False  # type: ignore[method-assign]
    try:
        yield
    finally:
        for lane in lanes:
            del lane.step


# ---------------------------------------------------------------------------------------------- kinds of work


def an_offer_that_was_not_sent(rig: Stacked) -> BlockTable:
    table = rig.cache.open("request", rig.prefix(4), 0)
    send, rig.cache.submit_saves = rig.cache.submit_saves, lambda: None  # type: ignore[method-assign]
    rig.fill(table, 4)
    rig.cache.submit_saves = send  # type: ignore[method-assign]
    return table


def a_demotion(rig: Stacked) -> BlockTable:
    return rig.ran(4, owner="request")


def a_launched_demotion(rig: Stacked) -> BlockTable:
    table = rig.ran(4, owner="request")
    rig.lane("launch save").step()
    return table


def a_retraction(rig: Stacked) -> BlockTable:
    table = rig.ran(4, owner="request")
    rig.flow()
    assert table.try_extend(1)
    lease = table.retract(4 * 4 + 2, None)
    assert lease is not None
    lease.end()
    return table


def a_promotion(rig: Stacked) -> BlockTable:
    rig.remembered(4, tiers=("host",))
    return rig.promote_all(4)[0]


def a_load_of_which_nothing_is_sent(rig: Stacked) -> BlockTable:
    rig.remembered(EIGHT, tiers=("ssd",))
    return rig.load(EIGHT)[0]


def a_load_of_which_some_was_sent(rig: Stacked) -> BlockTable:
    table = a_load_of_which_nothing_is_sent(rig)
    rig.read(0)
    return table


def a_load_of_which_some_has_landed(rig: Stacked) -> BlockTable:
    table = a_load_of_which_some_was_sent(rig)
    rig.copy()
    return table


def a_load_that_reads_a_little_at_a_time(rig: Stacked) -> BlockTable:
    """So that some of it is not even asked for when it is waited for."""
    rig.remembered(EIGHT, tiers=("ssd",))
    before = reads_module._READ_AHEAD, reads_module._READ_AT_ONCE
    reads_module._READ_AHEAD = reads_module._READ_AT_ONCE = 1
    try:
        table, load = rig.load(EIGHT)
        assert load.unread
    finally:
        reads_module._READ_AHEAD, reads_module._READ_AT_ONCE = before
    return table


def a_load_that_ends_short(rig: Stacked) -> BlockTable:
    table = a_load_of_which_nothing_is_sent(rig)
    rig.stores["ssd"].lose(rig.keys(EIGHT)[5])
    return table


def a_load_from_three_tiers(rig: Stacked) -> BlockTable:
    keys = rig.keys(EIGHT)
    rig.remembered(EIGHT, tiers=("host",))
    rig.host.pool.forget(rig.host.pool.find_each(keys[2:]))
    rig.put("ssd", keys[2:6])
    rig.put("remote", keys[6:])
    prefix = rig.prefix(EIGHT)
    lease = rig.cache.lease("request", prefix)
    assert lease is not None
    rig.run("ask remote")
    table = rig.cache.open("request", prefix, 0)
    table.promote(lease, EIGHT, 1)
    return table


STORIES: list[Story] = [
    an_offer_that_was_not_sent,
    a_demotion,
    a_launched_demotion,
    a_retraction,
    a_promotion,
    a_load_of_which_nothing_is_sent,
    a_load_of_which_some_was_sent,
    a_load_of_which_some_has_landed,
    a_load_that_reads_a_little_at_a_time,
    a_load_that_ends_short,
    a_load_from_three_tiers,
]


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_nothing_touches_the_slots_of_any_kind_of_work_after_a_drain(story: Story) -> None:
    rig = Stacked("ssd", "remote")
    table = story(rig)
    slots = list(table.hold.slots)
    rig.cache.drain(1.0, slots)
    assert not touched(rig, rig.flow) & set(slots)
    rig.end(*(() if table.hold.ended else (table,)))


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_a_drain_of_everything_leaves_nothing_under_way_in_any_tier(story: Story) -> None:
    rig = Stacked("ssd", "remote")
    table = story(rig)
    persisting = rig.cache.persist()
    rig.cache.drain(1.0)
    assert persisting is not None and persisting.settled, "also what goes from host memory to the disk"
    assert not touched(rig, rig.flow) and not rig.loads.reads and not rig.cache.num_in_flight
    rig.end(*(() if table.hold.ended else (table,)))


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_a_drain_that_cannot_come_to_its_end_says_so(story: Story) -> None:
    rig = Stacked("ssd", "remote")
    table = story(rig)
    with held(rig, "load", "save", "read", "launch"):
        assert touched(rig, lambda: drain_in_vain(rig, table.hold.slots)) == set()
    rig.end(*(() if table.hold.ended else (table,)))


def drain_in_vain(rig: Stacked, slots: Iterable[int]) -> None:
    with pytest.raises(DeadlineExceeded):
        rig.cache.drain(1.0, list(slots))


# ------------------------------------------------------------------------------------------ nothing unrelated


def test_a_drain_waits_for_no_load_but_that_of_its_slots() -> None:
    rig = Stacked("ssd", "remote", num_device=16)
    rig.remembered(4, "a", tiers=("ssd",))
    rig.put("remote", rig.keys(4, "b"))
    prefix = rig.prefix(4, "b")
    lease = rig.cache.lease("other", prefix)
    rig.run("ask remote")
    assert lease is not None and lease.ready
    other = rig.cache.open("other", prefix, 0)
    slow = other.promote(lease, 4, 1)
    table, load = rig.load(4, "a")
    with held(rig, "read remote"):
        rig.cache.drain(1.0, table.hold.slots)
        assert load.settled and not slow.settled and slow.num_sent == 0  # type: ignore[union-attr]
    rig.end(table, other)


def test_slots_of_a_table_that_has_ended_are_not_the_loads_any_more() -> None:
    rig = Stacked()
    rig.remembered(EIGHT, tiers=("ssd",))
    table, load = rig.load(EIGHT)
    slots = list(table.hold.slots)
    with held(rig, "read"):
        table.release(None)
        rig.cache.drain(0.0, slots)
        assert not load.over, "it still reads into host memory"
    assert not touched(rig, rig.flow)
    rig.end()


def test_a_pin_that_no_drain_knows_is_a_defect() -> None:
    rig = Stacked()
    table = rig.ran(2)
    rig.flow()
    pin = rig.cache._pool.pin(table.hold.slots[:1], "something else")
    with pytest.raises(InvariantBroken, match="something else"):
        rig.cache.check()
    pin.end()
    rig.end(table)
