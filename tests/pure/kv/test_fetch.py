"""Cold blocks on their way into host memory ahead of whoever wants them: they land there once, within limits,
and whatever goes wrong ends the fetch and nothing else."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import pytest

from penstock.contract import Match
from penstock.errors import DeadlineExceeded
from penstock.kv.blocks.handles import Pin
from penstock.kv.cache import KvCache
from penstock.kv.tiers import reads as reads_module
from penstock.kv.tiers.loads import BlockLoad
from penstock.kv.tiers.policy import LinkRate
from penstock.kv.tiers.reads import Fetch
from tests.pure.kv.stacked_rig import BLOCK_BYTES, GROUP, Stacked
from tests.pure.kv.test_drain import held

EIGHT = 8  # blocks: four groups, two on each lane
HOST = 4 * EIGHT  # slots, of which fetches may reserve eight


def from_ssd(num_blocks: int = EIGHT, num_host: int = HOST, **rig: int) -> Stacked:
    """A prefix that is on disk alone."""
    made = Stacked(num_host=num_host, **rig)
    made.put("ssd", made.keys(num_blocks))
    return made


def fetching(rig: Stacked, num_blocks: int = EIGHT, name: str = "a") -> Fetch:
    fetch = rig.cache.prefetch(rig.prefix(num_blocks, name), f"reader of {name}")
    assert fetch is not None
    rig.check()
    return fetch


def count_reads(rig: Stacked, tier: str = "ssd") -> Counter[bytes]:
    """How often the store is asked for each key from now on."""
    counted: Counter[bytes] = Counter()
    read = rig.stores[tier].read

    def counting(keys, into):  # type: ignore[no-untyped-def]
        counted.update(keys)
        return read(keys, into)

    rig.stores[tier].read = counting  # type: ignore[method-assign]
    return counted


# --------------------------------------------------------------------------------------------- what it brings


def test_it_brings_blocks_into_host_memory_and_leaves_them_to_themselves() -> None:
    rig = from_ssd()
    fetch = fetching(rig)
    assert not fetch.settled and fetch.num_blocks == EIGHT
    assert rig.cache.num_in_flight == 3, "itself, and two groups that are being read"
    assert rig.host.pool.counts.reserved == EIGHT and not any(rig.host_has(rig.keys(EIGHT))), (
        "nothing is found before it has landed"
    )
    rig.read(0)
    assert rig.host_has(rig.keys(EIGHT)) == [True] * GROUP + [False] * 6 and fetch.num_came == GROUP
    rig.flow()
    assert fetch.settled and fetch.num_came == fetch.num_blocks == EIGHT
    assert rig.host_has(rig.keys(EIGHT)) == [True] * EIGHT and not any(rig.device_has(EIGHT))
    assert (
        rig.host.pool.counts.idle == EIGHT
        and rig.host.pool.counts.pinned == rig.host.pool.counts.reserved == 0
    ), "ordinary blocks"
    assert rig.cache.num_in_flight == 0
    reads = count_reads(rig)
    table, load = rig.promote_all(EIGHT)
    assert isinstance(load, BlockLoad), "it comes from host memory alone"
    rig.flow()
    assert rig.device_has(EIGHT) == [True] * EIGHT and not reads
    rig.end(table)


def test_where_nothing_is_to_be_read_there_is_none() -> None:
    rig = Stacked(num_host=HOST)
    assert rig.cache.prefetch(rig.prefix(4), "reader") is None, "nobody has it"
    rig.remembered(4, tiers=("host", "ssd"))
    assert rig.cache.prefetch(rig.prefix(4), "reader") is None, "host memory has it"
    rig.cache.reset(["host"])
    table = rig.ran(4)
    assert rig.cache.prefetch(rig.prefix(4), "reader") is None, "the device has it"
    assert not rig.loads.reads and len(rig.tiers["ssd"].readings) == 0
    rig.end(table)
    assert KvCache(Stacked().pool, rig.cache.scope).prefetch(rig.prefix(4), "reader") is None, (
        "there are no other tiers"
    )


def test_it_is_not_begun_where_computing_is_faster() -> None:
    rig = from_ssd()
    rig.set_limits(dataclasses.replace(rig.saves.limits, load_always=False))
    rig.loads.costs.prefill.add(1000, 0.0, 0.001)
    rig.tiers["ssd"].counts.rate.bytes_per_s = 1.0
    assert rig.cache.prefetch(rig.prefix(EIGHT), "reader") is None and rig.host.pool.counts.reserved == 0
    rig.tiers["ssd"].counts.rate.bytes_per_s = 1e12
    assert fetching(rig).num_blocks == EIGHT
    rig.flow()
    rig.end()


# ------------------------------------------------------------------------------------------- a store far away


def far_away(num_blocks: int = EIGHT) -> Stacked:
    rig = Stacked("remote", num_host=HOST)
    rig.put("remote", rig.keys(num_blocks))
    return rig


def test_it_begins_when_a_store_far_away_has_answered() -> None:
    rig = far_away()
    fetch = fetching(rig)
    assert not fetch.settled and fetch.num_blocks == 0 and rig.host.pool.counts.reserved == 0, (
        "nobody knows yet how much room it needs"
    )
    rig.run("ask remote")
    assert fetch.num_blocks == EIGHT and rig.host.pool.counts.reserved == EIGHT
    rig.flow()
    assert (
        fetch.settled
        and fetch.num_came == fetch.num_blocks
        and rig.host_has(rig.keys(EIGHT)) == [True] * EIGHT
    )
    rig.end()


def test_a_store_that_has_nothing_or_never_answers_ends_it() -> None:
    rig = far_away(0)
    fetch = fetching(rig)
    rig.run("ask remote")
    assert fetch.settled and fetch.num_came == fetch.num_blocks == 0 and not rig.loads.reads
    rig.put("remote", rig.keys(EIGHT))
    fetch = fetching(rig)
    rig.clock.advance(10.0)
    rig.cache.settle()
    assert fetch.settled and fetch.num_blocks == 0 and not rig.loads.reads, "nobody waits for ever"
    rig.end()


def test_what_a_store_has_answered_to_a_lease_it_is_not_asked_again() -> None:
    rig = far_away()
    lease = rig.cache.lease("request", rig.prefix(EIGHT))
    rig.run("ask remote")
    fetch = rig.cache.prefetch(rig.prefix(EIGHT), "request", lease)
    assert fetch is not None and fetch.num_blocks == EIGHT and rig.stores["remote"].calls.count("find") == 1
    rig.flow()
    assert lease is not None
    lease.end()
    empty = rig.cache.lease("other", rig.prefix(EIGHT, "b"))
    rig.run("ask remote")
    assert rig.cache.prefetch(rig.prefix(EIGHT, "b"), "other", empty) is None, (
        "it has said that it has nothing"
    )
    assert empty is not None and rig.stores["remote"].calls.count("find") == 2
    rig.put("remote", rig.keys(EIGHT, "b"))
    rig.now_s += 1000.0
    rig.cache.settle()
    assert empty.expired and rig.cache.prefetch(rig.prefix(EIGHT, "b"), "other", empty) is not None, (
        "that was long ago"
    )
    rig.flow()
    assert rig.host_has(rig.keys(EIGHT, "b")) == [True] * EIGHT
    rig.end()


# ----------------------------------------------------------------------------------------------------- limits


def test_of_a_long_prefix_the_first_blocks_that_fit_are_read() -> None:
    rig = from_ssd(12)
    fetch = fetching(rig, 12)
    assert fetch.num_blocks == EIGHT == HOST // 4 and not rig.cache.may_prefetch
    rig.put("ssd", rig.keys(4, "b"))
    assert rig.cache.prefetch(rig.prefix(4, "b"), "other") is None, "no room is left for it"
    rig.read(0)
    assert fetching(rig, 4, "b").num_blocks == GROUP, "as much as has landed"
    rig.flow()
    assert rig.host_has(rig.keys(12)) == [True] * EIGHT + [False] * 4 and fetch.num_came == fetch.num_blocks
    rig.end()


def test_blocks_of_a_prefix_do_not_make_room_for_those_that_follow() -> None:
    rig = Stacked(num_host=8)
    rig.remembered(4, tiers=("host",))
    rig.put("ssd", rig.keys(6))
    private = rig.host.take_private(3, "somebody")
    assert private is not None
    fetch = fetching(rig, 6)
    assert fetch.num_blocks == 1 and rig.host_has(rig.keys(4)) == [True] * 4
    private.rollback()
    rig.flow()
    rig.end()


def test_no_more_is_queued_than_a_load_may_wait_for() -> None:
    rig = from_ssd()
    tier = rig.tiers["ssd"]
    tier.counts.rate.bytes_per_s = GROUP * BLOCK_BYTES / (0.75 * reads_module._FETCH_AHEAD_S)
    fetch = fetching(rig)
    assert len(fetch.staged) == 2, "one is less than that, two are more"
    rig.flow()
    assert fetch.num_came == EIGHT
    rig.end()


# ----------------------------------------------------------------------------------------------- what ends it


def test_one_that_is_late_reads_no_further_and_keeps_what_is_written_into() -> None:
    rig = from_ssd()
    fetch = fetching(rig)
    fetch.deadline_s = 0.0
    rig.cache.settle()
    rig.check()
    assert fetch.overdue and not fetch.settled and rig.host.pool.counts.reserved == 2 * GROUP, (
        "a deadline ends a wait, never an ownership"
    )
    rig.flow()
    assert fetch.settled and not fetch.overdue and fetch.num_came == 2 * GROUP < fetch.num_blocks
    rig.end()


@pytest.mark.parametrize("tier", ["host", "ssd"])
@pytest.mark.parametrize("num_read", range(4))
def test_what_is_forgotten_does_not_come_back_by_itself(tier: str, num_read: int) -> None:
    rig = from_ssd()
    fetch = fetching(rig)
    rig.read(*(number % 2 for number in range(num_read)))
    resetting = rig.cache.reset([tier])
    rig.check()
    landed = [True] * (0 if tier == "host" else num_read * GROUP)
    rig.flow()
    assert resetting.settled and fetch.settled and fetch.num_came < fetch.num_blocks
    assert (
        rig.host_has(rig.keys(EIGHT)) == landed + [False] * (EIGHT - len(landed))
        and rig.host.pool.counts.reserved == 0
    )
    assert rig.store_has(rig.keys(EIGHT)) == [tier == "host"] * EIGHT, "nor to the disk"
    assert (rig.cache.prefetch(rig.prefix(EIGHT), "next") is not None) == (tier == "host"), (
        "a later one is none of its business"
    )
    rig.flow()
    rig.end()


@pytest.mark.parametrize("later", ["ended again", "another reset", "a load"])
def test_what_a_reset_has_forgotten_is_not_published_whoever_ends_it_later(later: str) -> None:
    rig, tables = from_ssd(), []
    fetch = fetching(rig)
    rig.cache.reset(["host"])
    if later == "ended again":
        rig.loads.reader.end_fetches()
    elif later == "another reset":
        rig.cache.reset(["ssd"])
    else:
        tables.append(rig.load(2)[0])
    rig.read(0, 1)
    assert fetch.num_came == 0 and rig.host_has(rig.keys(EIGHT))[2:] == [False] * (EIGHT - 2)
    assert later == "a load" or not any(rig.host_has(rig.keys(EIGHT)))
    rig.flow()
    assert fetch.settled and fetch.num_came == 0 and rig.host.pool.counts.reserved == 0
    rig.end(*tables)


# -------------------------------------------------------------------------------------------- drain and check


def test_a_drain_of_everything_waits_for_it_and_one_of_slots_does_not() -> None:
    rig = from_ssd()
    table = rig.cache.open("idle", None, 0)
    assert table.try_extend(2)
    fetch = fetching(rig)
    assert rig.cache.num_in_flight and not any(
        one.touches(frozenset(table.hold.slots)) for one in rig.loads.reads
    )
    with held(rig, "read"):
        rig.cache.drain(0.0, table.hold.slots)
        assert not fetch.settled
        with pytest.raises(DeadlineExceeded):
            rig.cache.drain(0.1)
    rig.cache.drain(1.0)
    assert fetch.settled and fetch.num_came == EIGHT and rig.cache.num_in_flight == 0
    rig.end(table)


# ------------------------------------------------------------------------------------- a request comes for it


@pytest.mark.parametrize("num_read", range(5))
@pytest.mark.parametrize("longer", [0, 2])
def test_a_load_takes_over_and_nothing_is_read_twice(num_read: int, longer: int) -> None:
    num_blocks = EIGHT + longer
    rig = from_ssd(num_blocks)
    reads = count_reads(rig)
    fetch = fetching(rig, EIGHT)
    for number in range(num_read):
        rig.read(number % 2)
    table, load = rig.promote_all(num_blocks)
    rig.check()
    assert load.is_cold == (num_read < 4 or longer > 0)
    assert not fetch.unread and fetch.settled == (num_read == 4), (
        "what was not begun is the cold load's from now on"
    )
    rig.flow()
    assert load.settled and load.error() is None and load.num_landed == num_blocks
    assert reads == Counter(rig.keys(num_blocks)) and rig.device_has(num_blocks) == [True] * num_blocks
    rig.end(table)


def test_what_a_fetch_has_landed_is_not_evicted_before_the_load_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Saves take host slots on another thread, at any moment."""
    rig = from_ssd(2)
    fetching(rig, 2)
    table, load = rig.load(2)
    assert len(load.awaited) == 2
    pin_each = rig.host.pin_each

    def after_an_eviction(keys: Sequence[bytes], owner: str) -> tuple[list[int], Pin | None]:
        rig.host.pool.evict(99)
        return pin_each(keys, owner)

    monkeypatch.setattr(rig.host, "pin_each", after_an_eviction)
    rig.flow()
    assert load.num_landed == 2 and rig.device_has(2) == [True] * 2
    rig.end(table)


def test_fetches_of_others_make_room_for_a_load() -> None:
    rig = from_ssd(num_host=16)
    rig.put("ssd", rig.keys(EIGHT, "b"))
    rig.tiers["ssd"].counts.rate = LinkRate(1.0)  # one group at a time
    fetch = fetching(rig)
    assert fetch.num_blocks == 4 and rig.host.pool.counts.reserved == 4
    private = rig.host.take_private(6, "somebody")
    assert private is not None
    table, load = rig.load(EIGHT, "b")
    assert load.limit == EIGHT and not fetch.unread
    private.rollback()
    rig.flow()
    assert load.num_landed == EIGHT and fetch.num_came == GROUP
    rig.end(table)


def test_nobody_waits_for_a_read_that_hangs() -> None:
    """Others are matched, and whoever wants the same blocks is in line behind nothing."""
    rig = from_ssd()
    fetching(rig)
    with held(rig, "read"):
        lease = rig.cache.lease("request", rig.prefix(EIGHT))
        assert rig.cache.match(rig.prefix(EIGHT).keys, lease) == Match(0, 0, False, EIGHT)
        assert lease is not None
        lease.end()
        other = rig.ran(4, "b", "other")
        rig.run("launch save", "save")
        assert rig.host_has(rig.keys(4, "b")) == [True] * 4, "saves find room"
    rig.flow()
    rig.end(other)


def test_so_many_are_under_way_and_no_more() -> None:
    rig = Stacked(num_host=HOST)
    for name in "abcde":
        rig.put("ssd", rig.keys(1, name))
    first = [fetching(rig, 1, name) for name in "abcd"]
    assert rig.cache.prefetch(rig.prefix(1, "e"), "fifth") is None and not rig.cache.may_prefetch
    rig.flow()
    assert all(fetch.settled for fetch in first) and rig.cache.may_prefetch
    fetching(rig, 1, "e")
    rig.flow()
    rig.end()


def test_one_that_has_ended_while_a_store_was_asked_reads_nothing() -> None:
    rig = far_away()
    fetch = fetching(rig)
    fetch.end()
    assert fetch.settled
    rig.flow()
    assert rig.stores["remote"].calls.count("read") == 0 and not rig.loads.reads
    rig.end()


def test_a_close_under_way_reads_no_further_and_leaves_nothing() -> None:
    rig = from_ssd()
    reads = count_reads(rig)
    fetch = fetching(rig)
    rig.cache.close()
    assert (
        fetch.settled
        and reads == Counter(rig.keys(2 * GROUP))
        and all(store.closed for store in rig.stores.values())
    )


def test_a_close_over_a_read_that_hangs_says_so_and_can_be_tried_again() -> None:
    rig = from_ssd()
    fetch = fetching(rig)
    with held(rig, "read"), pytest.raises(DeadlineExceeded):
        rig.cache.close(0.0)
    assert not fetch.settled and rig.host.pool.counts.reserved == 2 * GROUP
    rig.cache.close()
    assert fetch.settled
