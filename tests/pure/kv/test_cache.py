"""The cache and its tables: named cases of matching, announcing, sealing and releasing."""

from __future__ import annotations

import pytest

from penstock.contract import TOKEN_IN_FLIGHT, Match, Prefix
from penstock.errors import HandleEnded, InvariantBroken, Leaked
from penstock.kv.blocks.key import Scope, prefix_keys
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.blocks.slots import SlotCounts
from penstock.kv.cache import KvCache
from penstock.kv.table import BlockTable
from tests.pure.kv.kv_fakes import FakeLane

BLOCK = 4
SCOPE = Scope(weights=b"w", kv_dtype="float32", layout=b"l", block_tokens=BLOCK, position_scheme="rope")
PROMPT = list(range(10))  # two full blocks and a half


def new_cache(num_slots: int = 16, prefix_cache: bool = True) -> KvCache:
    return KvCache(BlockPool(num_slots, "device"), SCOPE, prefix_cache)


def run(cache: KvCache, owner: str, tokens: list[int], num_prompt: int | None = None) -> BlockTable:
    """A request that has computed all of `tokens`, of which the first `num_prompt` were its prompt."""
    prefix = cache.prefix_of(tokens[:num_prompt])
    table = cache.open(owner, prefix, 0)
    assert table.try_extend(-(-len(tokens) // BLOCK))
    table.seal(tokens, len(tokens), None)
    return table


def match(cache: KvCache, tokens: list[int]) -> Match:
    return cache.match(cache.prefix_of(tokens).keys)


# Holds invariant 15: the second copy is dropped and counted.
def test_an_identical_prompt_computed_twice_keeps_the_first_copy_and_frees_the_second():
    cache = new_cache()
    one, two = run(cache, "one", PROMPT), run(cache, "two", PROMPT)
    assert cache.stats().duplicate_seals_total == 2
    two.release(None)
    assert cache.stats().slots["device"] == SlotCounts(free=13, reserved=0, active=3, pinned=0, idle=0)
    one.release(None)
    assert cache.stats().slots["device"] == SlotCounts(free=14, reserved=0, active=0, pinned=0, idle=2)
    cache.check()


def test_with_the_prefix_cache_off_nothing_is_matched_sealed_or_announced():
    cache = new_cache(prefix_cache=False)
    assert cache.prefix_of(PROMPT) is None
    scope = SCOPE.digest()
    prefix = Prefix(scope, prefix_keys(PROMPT, BLOCK, scope))
    table = cache.open("a", prefix, 0)
    table.try_extend(3)
    assert not cache._tables.announcing
    table.seal(PROMPT, 10, None)
    assert cache.match(prefix.keys) == Match(0, 0, False)
    table.release(None)
    assert cache.stats().slots["device"].free == 16
    with pytest.raises(InvariantBroken):
        cache.open("b", prefix, 1)


def test_opening_with_blocks_that_are_not_here_changes_nothing():
    cache = new_cache()
    run(cache, "a", PROMPT[:4]).release(None)
    before = cache.stats()
    for prefix, num in ((cache.prefix_of(PROMPT), 2), (None, 1), (cache.prefix_of(PROMPT), 3)):
        with pytest.raises(InvariantBroken, match="of which"):
            cache.open("b", prefix, num)
    assert cache.stats() == before
    cache.close()


def test_sealing_more_than_is_there_raises_and_changes_nothing():
    cache = new_cache()
    table = cache.open("a", cache.prefix_of(PROMPT), 0)
    table.try_extend(2)
    before = cache.stats()
    for tokens, num_computed in (
        (list(range(12)), 12),  # three full blocks where the table has two
        (PROMPT[:6], 8),  # fewer tokens than are said to be computed
    ):
        with pytest.raises(InvariantBroken):
            table.seal(tokens, num_computed, None)
    assert cache.stats() == before
    assert table.num_keyed == 0


# Holds invariant 14: a block with an unknown token is not full.
def test_a_block_with_a_token_in_flight_is_not_sealed():
    cache = new_cache()
    table = cache.open("a", cache.prefix_of(PROMPT), 0)
    table.try_extend(3)
    with pytest.raises(InvariantBroken):
        table.seal([*PROMPT, 11, TOKEN_IN_FLIGHT], 12, None)
    assert cache.stats().num_keys == 0
    table.seal([*PROMPT, 11, 12], 12, None)
    assert cache.stats().num_keys == 3


@pytest.mark.parametrize("use", ["release", "extend", "seal", "slots"])
def test_a_released_table_is_of_no_use(use):
    cache = new_cache()
    table = cache.open("a", cache.prefix_of(PROMPT), 0)
    table.try_extend(3)
    table.release(None)
    before = cache.stats()
    uses = {
        "release": lambda: table.release(None),
        "extend": lambda: table.try_extend(1),
        "seal": lambda: table.seal(PROMPT, 10, None),
        "slots": lambda: table.slots(1),
    }
    with pytest.raises(HandleEnded):
        uses[use]()
    assert cache.stats() == before


def test_closing_with_a_table_out_raises_and_names_its_request():
    cache = new_cache()
    table = run(cache, "request-5", PROMPT)
    with pytest.raises(Leaked, match="request-5"):
        cache.close()
    table.release(None)
    cache.close()
    cache.close()


def test_a_table_keeps_no_fence_that_has_passed():
    cache, compute = new_cache(num_slots=2), FakeLane("compute")
    tables = [cache.open(owner, None, 0) for owner in ("a", "b")]
    for table in tables:
        table.try_extend(1)
    for table in tables:
        table.release(compute.record())
    table = cache.open("c", None, 0)
    table.try_extend(1)
    compute.num_passed = 1
    table.try_extend(1)
    assert [fence.number for fence in table.take_after()] == [2]


def test_stats_count_hits_and_misses_in_blocks():
    cache = new_cache()
    run(cache, "a", PROMPT).release(None)
    table = cache.open("b", cache.prefix_of([*PROMPT[:8], 1, 2, 3, 4]), 2)
    stats = cache.stats()
    assert (stats.hits_total, stats.misses_total, stats.num_tables, stats.num_keys) == (2, 3, 1, 2)
    table.release(None)


def test_a_table_announces_the_blocks_of_its_prompt_and_none_behind() -> None:
    keys = tuple(bytes([number]) * 16 for number in range(3))
    table = new_cache().open("request", Prefix(b"scope", keys[:2]), 0)
    assert [table.announces(number, key) for number, key in enumerate(keys)] == [True, True, False]
    table.release(None)


def test_the_first_block_that_is_not_shared_has_a_key_under_the_tables_own_scope() -> None:
    cache = new_cache()
    table, other = (cache.open("request", Prefix(b"scope", ()), 0) for _ in range(2))
    assert table.try_extend(2)
    table.own_scope, table.num_shared = b"own", 1
    own, shared = table.next_keys(range(8), 2), other.next_keys(range(8), 2)
    assert own[0] == shared[0] and own[1] != shared[1]
    table.release(None)
    other.release(None)
    cache.close()


def test_tenants_with_different_salts_share_nothing():
    cache = new_cache()
    run(cache, "a", PROMPT).release(None)
    assert cache.match(cache.prefix_of(PROMPT, salt="tenant").keys) == Match(0, 0, False)
    assert cache.match(cache.prefix_of(PROMPT, salt="").keys).num_blocks == 2
