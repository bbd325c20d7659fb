"""A cache that has the device alone: its host tier holds nothing, so nothing is offered to it, found in it or
ever under way."""

from __future__ import annotations

import threading

import pytest

from penstock.contract import Match, Prefix
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.cache import KvCache
from penstock.kv.table import BlockTable
from tests.pure.kv.storage_rig import BLOCK, SCOPE

TOKENS = list(range(4 * BLOCK))


def prefix_of(cache: KvCache) -> Prefix:
    prefix = cache.prefix_of(TOKENS)
    assert prefix is not None
    return prefix


def computed(cache: KvCache, num_blocks: int = 4) -> BlockTable:
    table = cache.open("request", prefix_of(cache), 0)
    assert table.try_extend(num_blocks)
    table.seal(TOKENS, num_blocks * BLOCK, None)
    cache.submit_saves()
    return table


@pytest.fixture
def cache() -> KvCache:
    return KvCache(BlockPool(4, "device"), SCOPE)


def test_there_is_one_tier_and_no_thread_for_another() -> None:
    before = threading.active_count()
    cache = KvCache(BlockPool(4, "device"), SCOPE)
    assert threading.active_count() == before
    assert (
        list(cache.stats().slots) == ["device"] and not cache.stats().cold and cache.stats().traffic is None
    )
    assert cache.reset(["device", "host", "ssd"]).forgotten == {"device": 0}
    cache.close()


def test_what_is_sealed_is_saved_nowhere_and_found_on_the_device_alone(cache: KvCache) -> None:
    table = computed(cache)
    assert cache._pool.counts.pinned == 0 and cache.num_in_flight == 0 and not cache.settle()
    assert cache.submit_saves() is None and cache.persist() is None
    cache.drain(0.0)
    cache.check()
    table.release(None)
    assert cache.match(prefix_of(cache).keys) == Match(4, 4, False, 0)
    assert (
        cache.lease("other", prefix_of(cache)) is None and cache.prefetch(prefix_of(cache), "other") is None
    )
    cache.reset()
    assert cache.lease("other", prefix_of(cache)) is None
    cache.close()


def test_room_is_there_and_no_want_is_dropped_for_it(cache: KvCache) -> None:
    """Whatever is evicted is lost in any case: nobody waits for it to be saved, and nothing is evicted before
    it has to be."""
    computed(cache).release(None)
    want = cache.want(prefix_of(cache).keys, 1.0)
    assert want is not None and cache.make_room(4, 0, 2)
    cache.free_up(4)
    assert want.protects and cache.num_free == 0 and cache._pool.counts.idle == 4
    want.end()
    cache.close()


def test_the_order_of_requests_does_not_follow_what_computing_takes(cache: KvCache) -> None:
    cache.prefill.add(1000, 0.0, 1.0)
    assert cache.start_s(64, Match(0, 0, False, 0)) is None, "nothing is cheaper to start than anything else"
    cache.close()
