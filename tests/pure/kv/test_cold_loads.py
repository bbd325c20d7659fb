"""Blocks on their way from cold tiers through host memory to the device: in any order of reads, copies and
ends, what comes is right, what does not come is known, and nothing is left."""

from __future__ import annotations

import pytest

from penstock.contract import Match
from penstock.errors import TransferFailed
from tests.pure.kv.stacked_rig import GROUP, PART, Stacked

EIGHT = 8  # blocks: four groups, two on each lane


def from_ssd(num_blocks: int = EIGHT, **rig: int) -> Stacked:
    """A prefix that is on disk alone."""
    made = Stacked(**rig)
    made.remembered(num_blocks, tiers=("ssd",))
    return made


def test_the_first_blocks_are_promoted_while_later_ones_are_read() -> None:
    rig = from_ssd()
    table, load = rig.load(EIGHT)
    seen = []
    for lane in (0, 1, 0, 1):
        seen.append(
            (load.num_ready, load.num_sent, load.num_landed, load.arrivals, load.settled, load.error())
        )
        rig.read(lane)
        assert load.num_sent == load.num_ready == seen[-1][0] + GROUP
        rig.copy()
    assert seen == [(num, num, num, None, False, None) for num in (0, 2, 4, 6)]
    assert (
        load.settled
        and load.over
        and load.arrivals == ()
        and load.num_landed == EIGHT
        and load.error() is None
    )
    assert rig.device_has(EIGHT) == [True] * EIGHT and table.num_keyed == EIGHT
    assert rig.cache.stats().promoted_total == EIGHT
    rig.end(table)


def test_it_can_be_waited_for_once_everything_is_sent_and_is_nearly_there_before_its_last_part() -> None:
    rig = from_ssd(6)
    table, load = rig.load(6)
    rig.read(0, 1, 0)
    assert (
        load.num_sent == 6 and len(load.copies) == 3 and load.arrivals is None and not load.nearly_landed()
    ), "not launched"
    for _ in range(3):
        rig.lane("launch load").step()
    arrivals = load.arrivals
    assert arrivals is not None and len(arrivals) == 3 and not load.nearly_landed(), (
        "two of them come before the last"
    )
    rig.lane("load").step()
    rig.lane("load").step()
    assert not load.nearly_landed()
    rig.lane("load").step()
    rig.lane("load").step()
    assert load.nearly_landed() and [arrival.fence.passed() for arrival in arrivals] == [True, True, False]
    rig.cache.settle()
    assert (
        load.arrivals == arrivals[2:] and load.nearly_landed() and not load.settled and load.num_landed == 4
    )
    rig.copy()
    assert load.settled and load.arrivals == () and load.nearly_landed()
    rig.end(table)


def test_what_the_host_has_comes_first_and_in_between() -> None:
    rig = Stacked("ssd", "remote")
    keys = rig.keys(EIGHT)
    rig.remembered(EIGHT, tiers=("host",))
    slots = rig.host.pool.find_each([*keys[2:4], *keys[5:]])
    rig.host.pool.forget(slots)
    rig.put("ssd", keys[2:4])
    rig.put("remote", keys[5:7])
    lease = rig.cache.lease("request", rig.prefix(EIGHT))
    assert lease is not None and not lease.ready, "the store far away has not answered"
    assert lease.runs_from(0) == [("host", 2), ("ssd", 2), ("host", 1)]
    rig.run("ask remote")
    assert (
        lease.ready
        and lease.runs_from(0) == [("host", 2), ("ssd", 2), ("host", 1), ("remote", 2)]
        and lease.num_from(0) == 7
    )
    assert lease.runs_from(3) == [("ssd", 1), ("host", 1), ("remote", 2)]
    assert rig.cache.match(rig.prefix(EIGHT).keys, lease) == Match(0, 0, False, 7)
    table = rig.cache.open("request", rig.prefix(EIGHT), 0)
    load = table.promote(lease, 7, 1)
    rig.cache.settle()
    assert load.num_sent == 2, "what is in host memory need not wait"
    rig.flow()
    assert load.settled and load.num_landed == 7 and rig.device_has(7) == [True] * 7
    assert rig.store_has(keys[5:7]) == [True] * 2, "what came from the second tier is written to the first"
    rig.end(table)


# --------------------------------------------------------------------------------------------- the table ends


@pytest.mark.parametrize("num_read", range(5))
@pytest.mark.parametrize("copied", [False, True])
def test_a_cancel_at_any_moment_keeps_what_is_under_way_and_brings_nothing_more(
    num_read: int, copied: bool
) -> None:
    rig = from_ssd()
    table, load = rig.load(EIGHT)
    for number in range(num_read):
        rig.read(number % 2)
        if copied:
            rig.copy()
    sent = load.num_sent
    table.release(None)
    rig.cache.settle()
    rig.check()
    assert load.limit == load.num_sent == sent == num_read * GROUP
    assert load.settled == (copied or num_read == 0), "copies that were sent go on"
    assert rig.pool.counts.pinned == (0 if copied else sent) and rig.pool.counts.active == 0
    assert load.over == (load.settled and num_read == 4)
    rig.flow()
    assert load.over and rig.host_has(rig.keys(EIGHT)) == [True] * EIGHT, (
        "what was being read is in host memory"
    )
    assert rig.device_has(EIGHT) == [True] * sent + [False] * (EIGHT - sent), (
        "and what was sent is on the device"
    )
    rig.end()


# --------------------------------------------------------------------------------------- something is missing


@pytest.mark.parametrize("lost", range(EIGHT))
@pytest.mark.parametrize("how", ["lost", "spoiled", "failing"])
def test_it_ends_before_a_block_that_does_not_come(lost: int, how: str) -> None:
    rig = from_ssd()
    keys = rig.keys(EIGHT)
    table, load = rig.load(EIGHT)
    if how == "failing":
        rig.stores["ssd"].fails.add(keys[lost])
    else:
        (rig.stores["ssd"].lose if how == "lost" else rig.stores["ssd"].spoil)(keys[lost])
    rig.flow()
    assert load.settled and load.over and load.num_landed == load.limit == lost
    assert isinstance(load.error(), TransferFailed) and f"{lost} of {EIGHT} blocks came" in str(load.error())
    assert rig.device_has(EIGHT) == [True] * lost + [False] * (EIGHT - lost) and table.num_keyed == lost
    assert rig.host_has(keys) == [place != lost for place in range(EIGHT)], (
        "those behind it are in host memory"
    )
    rig.fill(table, EIGHT)
    assert rig.device_has(EIGHT) == [True] * EIGHT
    rig.end(table)


def test_a_table_that_computes_at_once_waits_for_the_earlier_users_itself() -> None:
    rig = from_ssd(2, num_device=2)
    earlier = rig.cache.open("earlier", None, 0)
    assert earlier.try_extend(2)
    fence = rig.step()
    earlier.release(fence)
    rig.stores["ssd"].lose()
    table = rig.cache.open("request", rig.prefix(2), 0)
    rig.put("ssd", rig.keys(2))
    lease = rig.cache.lease("request", rig.prefix(2))
    assert lease is not None
    load = table.promote(lease, 2, 1)
    rig.stores["ssd"].lose()
    rig.read(0)
    assert load.settled and table.take_after() == (fence,), "told once"
    rig.cache.settle()
    assert table.take_after() == ()
    rig.end(table)


# ----------------------------------------------------------------------------------------------- a copy fails


def test_a_part_that_cannot_be_sent_ends_it() -> None:
    rig = from_ssd(4)
    table, load = rig.load(4)
    rig.read(0)
    rig.copy()
    rig.lane("launch load").close()
    rig.read(1)
    assert load.settled and load.num_landed == 2 and isinstance(load.error(), TransferFailed)
    rig.end(table)


@pytest.mark.parametrize("failed", range(4))
def test_a_part_that_fails_while_later_ones_are_in_flight(failed: int) -> None:
    rig = from_ssd()
    table, load = rig.load(EIGHT)
    rig.read(0, 1, 0)
    for number in range(3):
        rig.load_copier.fail_next = number == failed
        rig.lane("launch load").step()
        rig.lane("load").step()
        rig.lane("load").step()
    rig.cache.settle()
    rig.check()
    came = min(failed, 3) * PART
    assert load.num_landed == came
    if failed < 3:
        assert isinstance(load.error(), TransferFailed) and load.settled and load.limit == 6, (
            "what is not sent is not sent any more"
        )
    assert table.num_keyed == came and rig.device_has(EIGHT) == [True] * came + [False] * (EIGHT - came), (
        "no key for what lies behind it"
    )
    rig.load_copier.fail_next = failed == 3
    rig.flow()
    assert load.over and load.num_landed == came and rig.device_has(EIGHT)[came:] == [False] * (EIGHT - came)
    rig.fill(table, EIGHT)
    assert rig.device_has(EIGHT) == [True] * EIGHT
    rig.end(table)
