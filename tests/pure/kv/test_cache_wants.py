"""What the cache keeps for requests in line and for sessions: what they are matched with can be claimed or
has gone, what is retained is wanted wherever it is, and a saved request loses no more than what was
forgotten."""

from __future__ import annotations

import pytest

from penstock.contract import Match
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.cache import KvCache
from penstock.kv.tiers.host import Displaces, HostLease
from tests.pure.kv.stacked_rig import Stacked
from tests.pure.kv.test_cache_tiers import BLOCKS, PROMPT, SCOPE, Cached

OTHERS = [bytes([200 + i]) * 16 for i in range(16)]
LONG = list(range(16))  # four blocks


def fill_host(rig: Cached, num: int, displaces: Displaces = Displaces.UNWANTED) -> int:
    """Blocks of others come into host memory; returns how many found room."""
    taken = rig.host.take(OTHERS[:num], range(num), "others", displaces)
    rig.host.land(taken)
    return len(taken.keys)


def lease_of(rig: Cached | Stacked, prefix: object) -> HostLease:
    lease = rig.cache.lease("request", prefix)  # type: ignore[arg-type]
    assert isinstance(lease, HostLease)
    return lease


# ---------------------------------------------------------------------------------------- matched and claimed


def test_a_match_takes_note_of_what_has_gone_and_a_claim_of_what_goes_between_them() -> None:
    rig = Cached(num_host=4)
    rig.set_limits(rig.saves.limits.__class__(0, 1e9, load_always=True))
    rig.remembered(LONG)
    keys, lease = rig.prefix(LONG).keys, lease_of(rig, rig.prefix(LONG))
    assert rig.cache.match(keys, lease) == Match(0, 0, False, 4)
    rig.host.give_way(keys, 1)
    assert not lease.claim(0, 4) and rig.host.pool.counts.pinned == 0, "it was matched with four"
    assert rig.cache.match(keys, lease) == Match(0, 0, False, 3)
    assert lease.claim(0, 3) and lease.claim(0, 3) and rig.host.pool.counts.pinned == 3
    assert fill_host(rig, 4, Displaces.ANYTHING) == 1, "what is claimed is nobody's room"
    table = rig.cache.open("request", rig.prefix(LONG), 0)
    table.promote(lease, 3, 1)
    rig.finish()
    assert (
        rig.content(LONG) == [tuple(LONG[i : i + 4]) for i in (0, 4, 8)] and rig.host.pool.counts.pinned == 0
    )
    table.release(None)
    rig.end()


# -------------------------------------------------------------------------------------------------- retracted


@pytest.mark.parametrize("num_gone", [0, 1, 2])
def test_a_saved_request_comes_back_with_what_was_not_forgotten(num_gone: int) -> None:
    rig = Cached(num_host=4)
    table = rig.run("request")
    lease = table.retract(10, None)
    assert isinstance(lease, HostLease)
    rig.finish()
    rig.cache.reset(["device"])
    assert (rig.host.pool.num_unwanted, rig.host.pool.counts.reserved) == (1, 1), (
        "its blocks are wanted, the half of one is its own"
    )
    rig.host.give_way(rig.prefix().keys, num_gone)
    match = rig.cache.match(rig.prefix().keys, lease)
    assert match == Match(0, 0, False, {0: 3, 1: 1, 2: 0}[num_gone])
    again = rig.cache.open("request", rig.prefix(), 0)
    if match.num_colder:
        assert lease.claim(0, match.num_colder)
        again.promote(lease, match.num_colder, 1)
        rig.finish()
    else:
        lease.end()
    assert rig.content() == BLOCKS[: 2 - num_gone] and again.num_keyed == 2 - num_gone
    assert rig.host.pool.counts.reserved == 0, "its own half is given back, read or not"
    again.release(None)
    rig.end()


# --------------------------------------------------------------------------------------------------- retained


def test_what_is_retained_is_wanted_where_it_has_gone() -> None:
    rig = Cached(num_device=2, num_host=4)
    rig.run("request", PROMPT[:8]).release(None)
    rig.finish()
    rig.cache.reset(["host"])
    retention = rig.cache.retain(rig.prefix(), 1e12)
    assert (rig.pool.num_unwanted, rig.host.pool.num_unwanted) == (0, 4)
    assert not rig.cache.make_room(2, 0)
    rig.finish()
    assert rig.pool.num_free == 2 and rig.host.pool.num_unwanted == 4, (
        "it is in host memory, and nobody has looked"
    )
    retention.look_again()
    assert (
        rig.host.pool.num_unwanted == 2
        and fill_host(rig, 4) == 2
        and rig.host.pool.find_each(rig.prefix().keys) != [-1, -1]
    )
    retention.end()
    retention.end()
    assert rig.host.pool.num_unwanted == 4 and rig.pool.num_unwanted == 2
    rig.end()


# --------------------------------------------------------------------------------------------- room and times


@pytest.mark.parametrize("tiers", [True, False])
def test_where_nothing_on_the_device_is_found_again_room_is_always_there(tiers: bool) -> None:
    if tiers:
        rig = Cached(prefix_cache=False, num_device=4)
        rig.run("request").release(None)
        assert rig.cache.make_room(4, 0) and rig.cache.want(rig.prefix().keys, 1.0) is None
        rig.finish()
        rig.end()
    else:
        alone = KvCache(BlockPool(2, "alone"), SCOPE)
        assert alone.make_room(2, 0) and alone.start_s(100, Match(0, 0, False)) is None
