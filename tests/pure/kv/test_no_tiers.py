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
