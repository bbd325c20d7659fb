"""Blocks that are copied from host memory to the device before anybody has a table for them: which, into what
slots, and what is left whatever becomes of the copy."""

from __future__ import annotations

import pytest

from penstock.contract import Match
from penstock.errors import LaneClosed
from penstock.kv.tiers.loads import BlockLoad
from tests.pure.kv.test_cache_tiers import BLOCK, BLOCKS, PROMPT, Cached

LONG = list(range(18))  # four full blocks and a half


def remembering(tokens: list[int] = PROMPT, prefix_cache: bool = True, **rig: int) -> Cached:
    made = Cached(prefix_cache, **rig)
    made.remembered(tokens)
    return made


def ahead(rig: Cached, first: int = 0, num_blocks: int = 9, tokens: list[int] = PROMPT) -> BlockLoad:
    promotion = rig.cache.promote_ahead("request", rig.prefix(tokens), first, num_blocks)
    assert promotion is not None
    return promotion


def test_they_are_idle_blocks_when_they_have_landed_and_no_hit_or_miss_was_counted() -> None:
    rig = remembering()
    before = rig.cache.stats()
    promotion = ahead(rig)
    assert rig.pool.counts.pinned == 2 and rig.cache.num_settling == 2 and not rig.content()
    assert rig.cache.match(rig.prefix().keys) == Match(0, 0, pending=True)
    rig.cache.check()
    assert rig.finish() and promotion.settled
    assert rig.content() == BLOCKS and rig.pool.counts.idle == 2
    after = rig.cache.stats()
    assert (after.hits_total, after.misses_total) == (before.hits_total, before.misses_total)
    assert after.promoted_total == before.promoted_total + 2
    rig.end()


def test_the_lease_of_whoever_waits_is_left_alone() -> None:
    rig = remembering(LONG)
    lease = rig.cache.lease("request", rig.prefix(LONG))
    assert lease is not None
    ahead(rig, 0, 2, LONG)
    assert lease.num_from(0) == 4
    rig.finish()
    match = rig.cache.match(rig.prefix(LONG).keys, lease)
    assert match == Match(2, 2, pending=False, num_colder=2)
    table = rig.cache.open("request", rig.prefix(LONG), 2)
    table.promote(lease, 2, 1)
    rig.finish()
    assert rig.content(LONG) == [tuple(LONG[i : i + BLOCK]) for i in range(0, 16, BLOCK)]
    table.release(None)
    rig.end()


def test_they_follow_what_the_device_has() -> None:
    rig = remembering(LONG)
    promotion = ahead(rig, 1, 2, LONG)
    assert promotion.first == 1 and promotion.keys == rig.prefix(LONG).keys[1:3]
    rig.finish()
    assert rig.content(LONG) == [], "nothing is found without the first"
    ahead(rig, 0, 1, LONG)
    rig.finish()
    assert rig.content(LONG) == [tuple(LONG[i : i + BLOCK]) for i in range(0, 12, BLOCK)]
    assert rig.pool.depths_of(rig.pool.find(rig.prefix(LONG).keys)) == [0, 1, 2]  # type: ignore[arg-type]
    rig.end()


def test_only_free_slots_are_filled() -> None:
    rig = remembering(num_device=4)
    other = rig.run("other", list(range(20, 32)))
    other.release(None)
    rig.finish()
    assert (rig.pool.num_free, rig.pool.counts.idle) == (1, 3)
    assert ahead(rig).num_blocks == 1
    assert rig.cache.promote_ahead("request", rig.prefix(), 1, 9) is None, "none is free any more"
    assert rig.pool.num_evicted == 2, "when the device had forgotten it"
    rig.finish()
    rig.end()


def test_they_end_where_host_memory_has_a_gap() -> None:
    rig = remembering(LONG)
    rig.host.forget(rig.prefix(LONG).keys[2:3])
    assert ahead(rig, 0, 4, LONG).num_blocks == 2
    assert rig.cache.promote_ahead("request", rig.prefix(LONG), 2, 4) is None
    rig.finish()
    rig.end()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_there_is_nothing_to_copy_where_nothing_is_shared(prefix_cache: bool) -> None:
    rig = remembering(prefix_cache=prefix_cache)
    if prefix_cache:
        rig.cache.reset(["host"])
    assert rig.cache.promote_ahead("request", rig.prefix(), 0, 9) is None
    assert rig.pool.num_free == rig.pool.num_slots and rig.host.slots.pinned == 0
    rig.end()


def test_they_are_written_after_the_last_step_that_used_their_slots() -> None:
    rig = remembering(num_device=3)
    other = rig.cache.open("other", None, 0)
    assert other.try_extend(3)
    fence = rig.step()
    other.release(fence)
    assert ahead(rig).after == (fence,)
    for lane in ("launch load", "load"):
        while rig.lane(lane).step():
            pass
    assert not rig.cache.settle(), "the step has not run"
    rig.finish()
    assert rig.content() == BLOCKS
    rig.end()


def test_a_copy_that_fails_leaves_free_slots() -> None:
    rig = remembering()
    rig.load_copier.fail_next = 1
    promotion = ahead(rig)
    rig.finish()
    assert promotion.error() is not None and promotion.num_landed == 0
    assert rig.pool.num_free == rig.pool.num_slots and rig.host.slots.pinned == 0 and not rig.content()
    assert not rig.cache.is_pending(rig.prefix().keys)
    rig.end()


def test_a_copy_that_cannot_be_submitted_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = remembering()

    def refuse(transfer: object) -> None:
        raise LaneClosed("the lane is closed")

    with monkeypatch.context() as patch:
        patch.setattr(rig.loads.mover, "submit", refuse)
        with pytest.raises(LaneClosed):
            ahead(rig)
    assert rig.pool.num_free == rig.pool.num_slots and rig.host.slots.pinned == 0
    rig.end()


def test_a_block_that_somebody_computes_meanwhile_is_not_there_twice() -> None:
    rig = remembering()
    ahead(rig)
    table = rig.run("other")
    rig.finish()
    assert rig.content() == BLOCKS and rig.cache.stats().duplicate_seals_total == 2
    assert rig.pool.counts.active == 3 and rig.pool.counts.pinned == rig.pool.counts.idle == 0
    table.release(None)
    rig.end()


def test_a_drain_of_their_slots_waits_for_them() -> None:
    rig = remembering()
    promotion = ahead(rig)
    slots = promotion.copies[0].dest_slots.tolist()
    rig.cache.drain(10.0, [slot for slot in range(rig.pool.num_slots) if slot not in slots])
    assert not promotion.settled and rig.cache._is_touched(slots)
    rig.cache.drain(10.0, slots[:1])
    assert promotion.settled and rig.content() == BLOCKS
    rig.end()


@pytest.mark.parametrize("tiers", [("device",), ("device", "host"), ("host",)])
def test_a_reset_of_the_device_is_not_undone_by_what_was_on_its_way(tiers: tuple[str, ...]) -> None:
    rig = remembering()
    ahead(rig)
    rig.cache.reset(tiers)
    rig.cache.check()
    assert rig.cache.is_pending(rig.prefix().keys) == ("device" not in tiers), (
        "nobody waits for what is not going to be found"
    )
    rig.finish()
    assert rig.content() == ([] if "device" in tiers else BLOCKS)
    rig.end()


def test_a_reset_is_not_undone_by_the_load_of_a_table_that_has_ended_either() -> None:
    rig = remembering()
    table, _ = rig.loading()
    table.release(None)
    rig.cache.reset(["device"])
    rig.finish()
    assert rig.content() == [] and rig.pool.num_free == rig.pool.num_slots
    rig.end()


def test_a_reset_leaves_the_load_of_an_open_table_alone() -> None:
    rig = remembering()
    table, _ = rig.loading()
    rig.cache.reset(["device"])
    rig.finish()
    assert rig.content() == BLOCKS and table.num_keyed == 2
    table.release(None)
    rig.end()


def test_closing_waits_for_them_and_leaves_nothing() -> None:
    rig = remembering()
    promotion = ahead(rig)
    rig.end()
    assert promotion.settled and promotion.error() is None


def test_slots_are_made_free_only_where_host_memory_has_what_goes() -> None:
    rig = remembering(num_device=4)
    ahead(rig)
    rig.finish()
    assert rig.pool.counts.idle == 2 and rig.pool.num_free == 2
    rig.cache.free_up(2)
    assert rig.pool.num_free == 2, "there are so many already"
    rig.cache.free_up(3)
    assert rig.pool.num_free == 3, "host memory has both, and one is enough"
    rig.cache.reset(["host"])
    rig.cache.free_up(4)
    assert rig.pool.num_free == 3 and rig.pool.counts.idle == 1
    rig.end()
