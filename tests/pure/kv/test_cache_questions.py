"""What the cache answers when parameters meet: a start with blocks in several tiers, a cache without reuse on
the device beside others who compute or load the same, and a retention that is looked after more than once."""

from __future__ import annotations

import pytest

from penstock.contract import Match
from penstock.errors import InvariantBroken
from penstock.kv.table import BlockTable
from penstock.kv.tiers.policy import TierLimits
from tests.pure.kv.storage_rig import BLOCK, LAYERS, LAYOUT
from tests.pure.kv.test_cache_tiers import PROMPT, Cached

PER_TOKEN_S, PER_DEPTH_S, LINK = 1e-3, 1e-6, 1e6


def measured(rig: Cached) -> None:
    """Rates that are known exactly."""
    for num, depth in ((1000, 500.0), (1000, 5000.0), (2000, 9000.0)):
        rig.loads.costs.prefill.add(num, depth, num * (PER_TOKEN_S + PER_DEPTH_S * depth))
    rig.loads.costs.link.add(int(LINK), 1.0)


@pytest.mark.parametrize(
    ("on_device", "colder", "num_left"),
    [(0, 0, 100), (3, 0, 88), (0, 4, 84), (3, 4, 72), (20, 5, 1), (25, 0, 1)],
)
def test_a_start_takes_as_long_as_what_is_left_and_what_is_loaded(
    on_device: int, colder: int, num_left: int
) -> None:
    """What either tier has is not computed; what is left lies at the end of the prompt."""
    rig = Cached()
    measured(rig)
    compute_s = num_left * (PER_TOKEN_S + PER_DEPTH_S * (100 - num_left / 2))
    expected = compute_s + colder * LAYOUT.block_bytes / LINK
    assert rig.cache.start_s(100, Match(on_device, 0, False, colder)) == pytest.approx(expected, rel=1e-6)
    rig.end()


# --------------------------------------------------------------------------------------------------- retained


def test_a_retention_whose_blocks_come_and_go_ends_every_want_it_had() -> None:
    """Each look finds another number of blocks, so that each makes another want."""
    rig = Cached(num_device=8, num_host=8)
    tokens = list(range(16))
    rig.run("request", tokens).release(None)
    rig.finish()
    retention = rig.cache.retain(rig.prefix(tokens), 5.0)
    for num_left in (3, 1):
        for memory in (rig.pool, rig.host.pool):
            memory.forget(
                [slot for slot in memory.find_each(rig.prefix(tokens).keys)[num_left:] if slot >= 0]
            )
        retention.look_again()
        assert (rig.pool.num_unwanted, rig.host.pool.num_unwanted) == (8 - num_left, 8 - num_left)
    retention.end()
    assert (rig.pool.num_unwanted, rig.host.pool.num_unwanted) == (8, 8)
    rig.end()


# ---------------------------------------------------------------------------------------------------- balance


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_one_in_eight_slots_of_host_memory_is_not_promised_to_contexts_that_stay_there(
    prefix_cache: bool,
) -> None:
    rig = Cached(prefix_cache, num_host=24)
    assert rig.cache.num_pageable == (21 if prefix_cache else 0)
    rig.end()


@pytest.mark.parametrize(
    ("most_resident", "expected"), [(1, Match(0, 0, False)), (2, Match(2, 2, False)), (3, Match(2, 2, False))]
)
def test_a_deep_request_begins_with_what_the_device_has_as_far_as_all_of_it_may_stay(
    most_resident: int, expected: Match
) -> None:
    rig = Cached()
    rig.run("earlier").release(None)
    rig.finish()
    rig.cache.reset(["host"])
    assert rig.cache.match(rig.prefix().keys, most_resident=most_resident) == expected
    rig.end()


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("deep", [False, True])
def test_blocks_of_a_scope_of_their_own_are_forgotten_that_land_when_their_table_has_ended(
    sent: bool, deep: bool
) -> None:
    rig = Cached()
    table = rig.cache.open("request", rig.prefix(), 0)
    table.is_deep = deep
    table.close_scope(2 * BLOCK - 1)
    table.close_scope(2 * BLOCK)  # it is closed already
    assert table.try_extend(2)
    table.seal(PROMPT, 2 * BLOCK, None)
    if sent:
        rig.cache.submit_saves()
    table.release(None)
    rig.cache.settle()
    rig.cache.submit_saves()
    rig.finish()
    assert list(rig.host.pool.keys()) == list(rig.pool.keys()) == list(rig.prefix().keys[:1]), (
        "the first is everybody's"
    )
    assert not rig.writeback._unshared and not rig.writeback.unwanted, "nothing is known of it any more"
    rig.end()


def test_parts_that_are_fetched_are_counted_until_they_are_dropped() -> None:
    rig = Cached()
    table = rig.run("request")
    rig.finish()
    assert table.page_out(2, None) == 2
    one, other = table.fetch([0, 1], 1)
    assert table.num_fetched == 2 and len(rig.cache.loads.mover.flying) == 1
    with pytest.raises(InvariantBroken, match="still on their way"):
        one.end(None)
    rig.finish()
    one.end(None)
    assert table.num_fetched == 1 and table.fetched == {other}
    with pytest.raises(InvariantBroken, match="has not fetched"):
        one.end(None)
    table.release(None)
    rig.end()


def full_host(rig: Cached) -> None:
    """It has other blocks to its last slot, and what only the device has stays there meanwhile."""
    rig.set_limits(TierLimits(0, 1e9, postpones=True))
    for number in range(rig.host.num_slots // 2):
        rig.remembered([*range(100 + 20 * number, 108 + 20 * number)])
    assert rig.host.pool.counts.free == 0


def test_blocks_of_a_deep_request_are_saved_though_host_memory_is_full_and_others_are_not() -> None:
    """It goes on when they have landed."""
    rig = Cached(num_host=4)
    full_host(rig)
    table = rig.cache.open("request", rig.prefix(), 0, 0)
    assert table is not None
    other = rig.cache.open("other", rig.prefix([*range(50, 60)]), 0)
    for one, tokens in ((table, PROMPT), (other, [*range(50, 60)])):
        assert one.try_extend(2)
        one.seal(tokens, 2 * BLOCK, None)
    rig.cache.submit_saves()
    rig.finish()
    assert (
        rig.host.absent(rig.prefix().keys) == [False] * 2
        and rig.host.absent(rig.prefix([*range(50, 60)]).keys) == [True] * 2
    )
    assert table.page_out(2, None) == 2
    for one in (table, other):
        one.release(None)
    rig.end()


def test_what_is_to_be_paged_out_and_was_not_saved_is_saved_though_host_memory_is_full() -> None:
    """Else its request would wait for its room for ever."""
    rig = Cached(num_host=4)
    full_host(rig)
    table = rig.run("request")
    rig.finish()
    assert rig.host.absent(rig.prefix().keys) == [True] * 2
    assert table.page_out(2, None) == 0
    rig.finish()
    assert table.page_out(2, None) == 2
    table.release(None)
    rig.end()


def test_slots_of_fetched_parts_are_drawn_behind_the_step_that_read_them() -> None:
    """Also where their request ends with them."""
    rig = Cached(num_device=3)
    table = rig.run("request")
    rig.finish()
    assert table.page_out(2, None) == 2
    assert len(table.fetch([0], 2)) == 1
    rig.finish()
    fence = rig.step()
    table.release(fence)
    drawn = [rig.pool.try_reserve(1, owner) for owner in ("one", "two", "three")]
    assert [None if one is None else one.after for one in drawn] == [(fence,)] * 3, "all of them were its own"
    for one in drawn:
        assert one is not None
        one.end()
    rig.end()


THREE = [*range(12)]  # full blocks


def paged_out(rig: Cached, num_blocks: int = 3) -> BlockTable:
    """A request of three full blocks, the first of them in host memory alone."""
    table = rig.run("request", THREE)
    rig.finish()
    assert table.page_out(num_blocks, None) == num_blocks
    return table


@pytest.mark.parametrize("num_lost", [1, 2])
def test_a_deep_request_does_not_begin_where_host_memory_has_lost_a_part_of_it(num_lost: int) -> None:
    rig = Cached()
    rig.remembered()
    rig.host.forget(rig.prefix().keys[2 - num_lost :])
    assert rig.cache.open("deep", rig.prefix(), 0, 2) is None
    assert rig.host.pool.counts.pinned == 0
    rig.end()


def test_of_what_is_to_be_paged_out_that_is_saved_once_more_which_host_memory_lacks() -> None:
    """Under its own key: what lies behind a gap is there already."""
    rig = Cached()
    table = rig.run("request", THREE)
    rig.finish()
    keys = rig.prefix(THREE).keys
    rig.host.forget(keys[1:2])
    assert table.page_out(3, None) == 1
    rig.finish()
    assert table.page_out(3, None) == 2
    assert rig.saves.mover.counts.num_blocks == (3 + 1)
    assert rig.in_host([*keys]) == [tuple(THREE[at : at + BLOCK]) for at in (0, 4, 8)]
    table.release(None)
    rig.end()


def test_a_part_that_is_fetched_is_the_one_that_was_asked_for() -> None:
    rig = Cached()
    table = paged_out(rig)
    (fetched,) = table.fetch([1], 1)
    assert fetched is not None
    rig.finish()
    assert [rig.device.cells[slot] for slot in fetched.hold.slots] == [[(4, 5, 6, 7)] * LAYERS]
    table.release(None)
    rig.end()


def test_nothing_is_fetched_without_room_nor_what_was_not_paged_out() -> None:
    rig = Cached(num_device=4)
    table = paged_out(rig, 2)
    with pytest.raises(InvariantBroken, match="of which 2 were paged out"):
        table.fetch([0, 1], 2)
    taken = rig.pool.try_reserve(2, "others")
    assert taken is not None and table.fetch([0], 2) == []
    assert rig.host.pool.counts.pinned == 2, "what the table itself has"
    taken.end()
    table.release(None)
    rig.end()


def test_a_deep_request_that_is_retracted_takes_nothing_along() -> None:
    """What host memory has of it is matched again."""
    rig = Cached()
    table = paged_out(rig, 2)
    table.is_deep = True
    assert table.retract(len(THREE), None) is None
    assert rig.cache.num_in_flight == 0
    rig.end()


def test_keys_that_two_contexts_had_are_forgotten_once() -> None:
    """Both may be dropped at the same time."""
    rig = Cached()
    table = rig.run("request", PROMPT[:4])
    table.close_scope(0)
    rig.finish()
    keys = list(table.sealed_keys)
    before = rig.host.pool.counts.free
    rig.cache.forget_closed([*keys, *keys])
    assert rig.host.pool.counts.free == before + len(keys) and rig.host.num_leading(keys) == 0
    rig.cache.check()
    table.release(None)
    rig.end()


def test_blocks_of_a_scope_of_their_own_that_have_landed_leave_host_memory_with_their_table() -> None:
    rig = Cached()
    table = rig.cache.open("request", rig.prefix(), 0)
    table.close_scope(BLOCK)
    assert table.try_extend(2)
    table.seal(PROMPT, 2 * BLOCK, None)
    rig.cache.submit_saves()
    rig.finish()
    assert len(list(rig.host.pool.keys())) == 2
    table.release(None)
    assert list(rig.host.pool.keys()) == list(rig.prefix().keys[:1]), "the first is everybody's"
    rig.end()


def test_in_units_of_two_a_block_waits_for_the_one_behind_it_which_is_saved_once_more() -> None:
    rig = Cached()
    table = rig.run("request", THREE)
    rig.finish()
    rig.host.forget(rig.prefix(THREE).keys[1:2])
    assert table.page_out(2, None, unit=2) == 0 and table.num_paged == 0
    rig.finish()
    assert table.page_out(3, None, unit=2) == 2 == table.num_paged
    assert rig.saves.mover.counts.num_blocks == (3 + 1)
    table.release(None)
    rig.end()
