"""What the cache answers when parameters meet: a start with blocks in several tiers, a cache without reuse on the device beside others who
compute or load the same, and a retention that is looked after more than once."""

from __future__ import annotations

import pytest
from storage_rig import LAYOUT
from test_cache_tiers import BLOCKS, PROMPT, Cached

from penstock.contract import Match

PER_TOKEN_S, PER_DEPTH_S, LINK = 1e-3, 1e-6, 1e6


def measured(rig: Cached) -> None:
    """Rates that are known exactly."""
    for num, depth in ((1000, 500.0), (1000, 5000.0), (2000, 9000.0)):
        rig.loads.prefill.add(num, depth, num * (PER_TOKEN_S + PER_DEPTH_S * depth))
    rig.loads.link.add(int(LINK), 1.0)


@pytest.mark.parametrize(("on_device", "colder", "num_left"), [(0, 0, 100), (3, 0, 88), (0, 4, 84), (3, 4, 72), (20, 5, 1), (25, 0, 1)])
def test_a_start_takes_as_long_as_what_is_left_and_what_is_loaded(on_device: int, colder: int, num_left: int) -> None:
    """What either tier has is not computed; what is left lies at the end of the prompt."""
    rig = Cached()
    measured(rig)
    compute_s = num_left * (PER_TOKEN_S + PER_DEPTH_S * (100 - num_left / 2))
    expected = compute_s + colder * LAYOUT.block_bytes / LINK
    assert rig.cache.start_s(100, Match(on_device, 0, False, colder)) == pytest.approx(expected, rel=1e-6)
    rig.end()


# ------------------------------------------------------------------------------------------------ nothing is reused on the device


def test_without_a_device_cache_nobody_waits_for_what_another_computes() -> None:
    """It gets a key for colder tiers alone: it will never be found on the device."""
    rig = Cached(prefix_cache=False)
    table = rig.cache.open("first", rig.prefix(), 0)
    assert rig.cache.try_extend(table, 3)
    assert not rig.cache.is_pending(rig.prefix().keys) and rig.cache.match(rig.prefix().keys) == Match(0, 0, False, 0)
    rig.cache.release(table, None)
    rig.end()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_what_lands_for_a_table_that_has_gone_is_kept_only_where_it_can_be_found(prefix_cache: bool) -> None:
    rig = Cached(prefix_cache=prefix_cache)
    rig.remembered()
    table, _ = rig.loading()
    rig.cache.release(table, None)
    rig.finish()
    stats = rig.cache.stats()
    kept = len(BLOCKS) if prefix_cache else 0
    assert (stats.num_keys, stats.slots["device"].idle, stats.slots["device"].free) == (kept, kept, 8 - kept)
    rig.end()


# ------------------------------------------------------------------------------------------------------------------ retained


def test_a_retention_that_is_looked_after_often_leaves_nothing_wanted_at_its_end() -> None:
    rig = Cached(num_device=4, num_host=4)
    rig.cache.release(rig.run("request", PROMPT[:8]), None)
    rig.finish()
    retention = rig.cache.retain(rig.prefix(), 5.0)
    for _ in range(3):
        retention.look_again()
        assert (rig.pool.num_unwanted, rig.host.num_spare) == (2, 2)
    more = rig.run("more", PROMPT[:8] + list(range(50, 58)))  # moves nothing, and lands behind it
    rig.cache.release(more, None)
    rig.finish()
    retention.look_again()
    retention.end()
    assert (rig.pool.num_unwanted, rig.host.num_spare) == (4, 4), "a want that was replaced has ended, too"
    rig.end()


def test_a_retention_whose_blocks_come_and_go_ends_every_want_it_had() -> None:
    """Each look finds another number of blocks, so that each makes another want."""
    rig = Cached(num_device=8, num_host=8)
    tokens = list(range(16))
    rig.cache.release(rig.run("request", tokens), None)
    rig.finish()
    retention = rig.cache.retain(rig.prefix(tokens), 5.0)
    for num_left in (3, 1):
        for memory in (rig.pool, rig.host._pool):
            memory.forget([slot for slot in memory.find_each(rig.prefix(tokens).keys)[num_left:] if slot >= 0])
        retention.look_again()
        assert (rig.pool.num_unwanted, rig.host.num_spare) == (8 - num_left, 8 - num_left)
    retention.end()
    assert (rig.pool.num_unwanted, rig.host.num_spare) == (8, 8)
    rig.end()


# ------------------------------------------------------------------------------------------------------------------- balance


def test_between_two_turns_the_states_of_both_memories_are_told() -> None:
    rig = Cached(num_device=6, num_host=5)
    rig.cache.release(rig.run("request", PROMPT[:8]), None)
    rig.finish()
    table = rig.run("running", PROMPT[:4])
    lease = rig.host.lease(rig.prefix(PROMPT[:8]).keys, "other")
    assert lease is not None and rig.host.claim(lease, 0, 1)
    told: dict[str, dict[str, int]] = {}

    class Observer:
        def balanced(self, pool: str, counts: dict[str, int]) -> None:
            assert pool not in told
            assert pool != "host" or rig.host._lock.locked(), "what was seen and what is counted belong to one moment"
            told[pool] = counts

    rig.cache.tell_balance(Observer())  # type: ignore[arg-type]
    assert told == {"device": rig.pool.counts._asdict(), "host": rig.host.slots._asdict()}
    assert [sum(counts.values()) for counts in told.values()] == [6, 5] and told["host"]["pinned"] == 1
    lease.end()
    rig.cache.release(table, None)
    rig.finish()
    rig.end()
