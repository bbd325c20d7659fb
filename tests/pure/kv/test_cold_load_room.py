"""How a load gets room in host memory, shares what others bring, and what leases and broken tiers do to it.
What becomes of its blocks is in `test_cold_loads`."""

from __future__ import annotations

import pytest

from penstock.contract import Match
from penstock.kv.table import BlockTable
from penstock.kv.tiers import reads as reads_module
from penstock.kv.tiers.loads import BlockLoad
from tests.pure.kv.stacked_rig import GROUP, Stacked
from tests.pure.kv.test_cold_loads import EIGHT, from_ssd

# ---------------------------------------------------------------------------------------------------- no room


def test_without_room_in_host_memory_it_ends_before_the_first_that_has_none() -> None:
    rig = from_ssd(num_host=EIGHT)
    private = rig.host.take_private(5, "somebody")
    assert private is not None
    table, load = rig.load(EIGHT)
    assert load.limit == 3 and len(rig.tiers["ssd"].readings) == 2
    rig.flow()
    assert load.settled and load.num_landed == 3 and rig.device_has(EIGHT) == [True] * 3 + [False] * 5
    private.rollback()
    rig.fill(table, EIGHT)
    rig.end(table)


# ----------------------------------------------------------------------------------------- a little at a time


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """One group is read at a time, and one more begun in each turn."""
    monkeypatch.setattr(reads_module, "_READ_AHEAD", 1)
    monkeypatch.setattr(reads_module, "_READ_AT_ONCE", 1)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("lost", range(EIGHT))
def test_what_lies_behind_a_block_that_does_not_come_is_not_read(lost: int) -> None:
    rig = from_ssd()
    table, load = rig.load(EIGHT)
    rig.stores["ssd"].lose(rig.keys(EIGHT)[lost])
    rig.flow()
    group = lost - lost % GROUP
    expected = [True] * group + [place != lost for place in range(group, group + GROUP)]
    assert (
        load.over and load.num_landed == lost and rig.host_has(rig.keys(EIGHT))[: group + GROUP] == expected
    )
    assert sum(rig.host_has(rig.keys(EIGHT)[group + GROUP :])) <= GROUP, "at most what was begun already"
    rig.end(table)


# ------------------------------------------------------------------------------------------- two for the same


def test_the_second_request_for_the_same_blocks_waits_for_the_first() -> None:
    rig = from_ssd()
    table, load = rig.load(EIGHT)
    keys = rig.prefix(EIGHT).keys
    lease = rig.cache.lease("second", rig.prefix(EIGHT))
    assert rig.cache.match(keys, lease) == Match(0, 0, True, 0)
    rig.read(0)
    rig.copy()
    assert rig.cache.match(keys, lease) == Match(GROUP, 0, True, 0)
    table.release(None)
    rig.cache.settle()
    assert rig.cache.match(keys, lease).pending, "what is being read is about to be in host memory"
    load.deadline_s = 0.0
    assert not rig.cache.match(keys, lease).pending, "nobody waits for what is late, whoever had asked for it"
    rig.flow()
    assert rig.cache.match(keys, lease) == Match(GROUP, GROUP, False, EIGHT - GROUP)
    second = rig.cache.open("second", rig.prefix(EIGHT), GROUP)
    assert lease is not None
    load = second.promote(lease, EIGHT - GROUP, 1)
    assert len(rig.tiers["ssd"].readings) == 0, "it is there by now"
    rig.flow()
    assert load.settled and load.error() is None and rig.device_has(EIGHT) == [True] * EIGHT
    rig.end(second)


def test_blocks_that_another_reads_at_the_moment_are_computed_where_nothing_is_shared() -> None:
    rig = from_ssd(prefix_cache=False, num_device=2 * EIGHT)
    one, first = rig.load(EIGHT, owner="one")
    two, second = rig.load(EIGHT, owner="two")
    assert second.limit == 0 and second.settled and not first.settled
    rig.fill(two, EIGHT)
    rig.flow()
    assert first.num_landed == EIGHT
    rig.end(one, two)


def some_in_host_since_the_match(**rig_of: int) -> tuple[Stacked, BlockTable, BlockLoad]:
    """A load of eight blocks that were all on disk when they were matched, the first three of which host
    memory has got since."""
    rig = from_ssd(**rig_of)
    lease = rig.cache.lease("request", rig.prefix(EIGHT))
    assert lease is not None and lease.runs_from(0) == [("ssd", EIGHT)]
    rig.ran(3, owner="other").release(None)
    rig.flow()
    rig.forget_device()
    table = rig.cache.open("request", rig.prefix(EIGHT), 0)
    return rig, table, table.promote(lease, EIGHT, 1)


def test_blocks_that_came_to_the_host_since_the_match_stay_until_they_are_copied() -> None:
    rig, table, load = some_in_host_since_the_match(num_host=EIGHT)
    # host memory has no slot that neither this load reads from nor reads into
    other = rig.ran(3, "b", "other")
    rig.run("launch save", "save")
    assert rig.host_has(rig.keys(3)) == [True] * 3 and not any(rig.host_has(rig.keys(3, "b")))
    rig.flow()
    assert load.num_landed == EIGHT and rig.device_has(EIGHT) == [True] * EIGHT
    rig.end(table, other)


# ----------------------------------------------------------------------------------------- leases and trouble


def test_a_load_that_nothing_came_of_keeps_nobody_waiting() -> None:
    rig = from_ssd()
    taken = rig.host.take_private(rig.host.pool.counts.free, "somebody")
    assert taken is not None
    table, load = rig.load(EIGHT)
    assert load.settled and load.over and load.num_landed == 0
    table.release(None)
    assert not rig.cache.is_pending(rig.keys(EIGHT)), "also before the next turn has taken note of its end"
    taken.rollback()
    rig.end()
