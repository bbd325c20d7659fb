"""Policies of eviction: worked cases of what goes first, and what they may cost."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from copy import deepcopy
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import EVICTIONS
from penstock.errors import ConfigError, IllegalTransition, InvariantBroken
from penstock.kv.blocks import eviction
from penstock.kv.blocks.eviction import (
    GHOSTS_PER_SLOT,
    TOKENS_TO_DOUBLE,
    CostOrder,
    EvictionOrder,
    Ghosts,
    LruOrder,
    ReturningOrder,
    make_order,
    prefill_cost,
)
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.blocks.slots import as_run

EVERY = pytest.mark.parametrize("name", EVICTIONS)


def key(*name: object) -> bytes:
    return blake2b(repr(name).encode(), digest_size=16).digest()


def come(order: EvictionOrder, slots: Sequence[int], name: object = "", first: int = 0) -> None:
    """A chain of blocks is computed and let go; the same `name` gives the same keys."""
    order.sealed(
        as_run(slots),
        [key(name, depth) for depth in range(first, first + len(slots))],
        range(first, first + len(slots)),
    )
    order.add(as_run(slots[::-1]))


def use(order: EvictionOrder, slots: Sequence[int]) -> None:
    order.remove(as_run(slots))
    order.hit(as_run(slots))
    order.add(as_run(slots[::-1]))


def run(pool: BlockPool, keys: Sequence[bytes]) -> int:
    """One request, from match to release."""
    shared = pool.find(keys)
    hold = pool.hold("request", shared)
    drawn = pool.try_reserve(min(len(keys) - len(shared), pool.num_available), "request")
    drawn.commit(hold)
    end = len(shared) + len(drawn.slots)
    pool.seal(drawn.slots, keys[len(shared) : end], range(len(shared), end))
    hold.end()
    return len(shared)


# ----------------------------------------------------------------------------------------------- every policy


def test_an_unknown_policy_is_refused_by_name():
    with pytest.raises(ConfigError, match=f"{', '.join(EVICTIONS)}, got 'random'"):
        make_order("random", 4)


@EVERY
def test_of_one_chain_the_deepest_goes_first(name):
    order = make_order(name, 8)
    come(order, [3, 1, 4, 0])
    assert order.pop(9) == [0, 4, 1, 3]


@EVERY
def test_what_is_in_use_is_not_popped_and_what_was_popped_is_forgotten(name):
    order = make_order(name, 6)
    come(order, [0, 1, 2])
    come(order, [3, 4, 5], "other")
    order.remove(as_run([0, 3]))
    assert sorted(order.pop(6)) == [1, 2, 4, 5] and len(order) == 0
    assert order.pop(1) == []
    order.add(as_run([3, 0]))
    assert sorted(order) == [0, 3] == sorted(order.pop(2))


@EVERY
def test_a_block_that_is_used_all_the_time_outlives_a_stream_of_others(name):
    order = make_order(name, 8)
    come(order, [0], "system prompt")
    free = list(range(1, 8))
    for number in range(200):
        use(order, [0])
        if len(free) < 2:
            free += order.pop(2 - len(free))
            assert 0 not in free, f"after {number} others"
        come(order, [free.pop(0), free.pop(0)], number)


@EVERY
def test_a_block_that_was_dear_and_popular_goes_when_nobody_wants_it_any_more(name):
    order = make_order(name, 8, block_tokens=512)
    come(order, [0], "once", first=200)
    for _ in range(20):
        use(order, [0])
    free = list(range(1, 8))
    for number in range(2000):
        slot = free.pop()
        come(order, [slot], number)
        use(order, [slot])
        if not free:
            free = order.pop(1)
            if free == [0]:
                return
    pytest.fail("it stayed for ever")


@EVERY
def test_the_pool_works_with_every_policy_and_its_books_stay_right(name):
    pool = BlockPool(16, "device", eviction=make_order(name, 16))
    chains = [[key(chain, depth) for depth in range(3 + chain)] for chain in range(5)]
    for number in range(100):
        run(pool, chains[number * 7 % 5])
        pool.check()
    assert pool.num_evicted > 0
    pool.close()


@EVERY
def test_a_pinned_block_cannot_be_evicted(name):
    pool = BlockPool(4, "device", eviction=make_order(name, 4))
    run(pool, [key(depth) for depth in range(4)])
    pin = pool.pin(pool.find([key(0), key(1)]), "transfer")
    assert pool.evict(4) == 2
    assert len(pool.find([key(0), key(1)])) == 2
    pin.end()
    assert pool.evict(4) == 2
    pool.close()


@EVERY
def test_a_policy_that_keeps_what_is_used_again_is_noticed(name, monkeypatch):
    order = make_order(name, 4)
    monkeypatch.setattr(type(order), "remove", lambda self, slots: None)
    pool = BlockPool(4, "device", eviction=order)
    run(pool, [key(depth) for depth in range(4)])
    pin = pool.pin(pool.find([key(0), key(1)]), "transfer")
    with pytest.raises(InvariantBroken):
        pool.check()
    with pytest.raises(IllegalTransition, match="EVICT is not legal in state PINNED"):
        pool.evict(4)
    assert pin.slots


prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), max_size=40)


@pytest.mark.parametrize("name", ["returning", "lru", "cost"])
@settings(max_examples=150, deadline=None)
@given(prompts=prompts)
def test_no_continuation_stays_without_its_beginning(name, prompts):
    """The other two keep what is used often, and count blocks one by one: with them this holds nearly always,
    not always."""
    pool = BlockPool(8, "device", eviction=make_order(name, 8, block_tokens=2048))
    for prompt in prompts:
        run(pool, [key(prompt[: depth + 1]) for depth in range(len(prompt))])
        for other in prompts:
            here = [len(pool.find([key(other[: depth + 1])])) > 0 for depth in range(len(other))]
            assert here == sorted(here, reverse=True), f"of {other} these blocks are here: {here}"
    assert pool.num_duplicates == 0


def test_ranking_blocks_by_their_own_depth_would_break_prefixes(monkeypatch):
    """Why `cost` ranks whole chains."""

    def by_depth(self, slots):
        for slot in slots:
            original(self, as_run([slot]))

    original = CostOrder.add
    monkeypatch.setattr(CostOrder, "add", by_depth)
    pool = BlockPool(8, "device", eviction=make_order("cost", 8, block_tokens=4096))
    keys = [key("chain", depth) for depth in range(8)]
    run(pool, keys)
    run(pool, [key("other")])
    assert not len(pool.find(keys)) and pool.num_keys == 8


# -------------------------------------------------------------------------------------------------- returning


def test_returning_a_conversation_that_came_back_outlives_a_scan_that_flushes_it_by_recency():
    kept = {}
    for name in ("returning", "lru"):
        pool = BlockPool(600, "device", eviction=make_order(name, 600))
        conversation = [key("conversation", depth) for depth in range(100)]
        run(pool, conversation[:80])
        run(pool, conversation)
        for document in range(20):
            run(pool, [key(document, depth) for depth in range(100)])
        kept[name] = len(pool.find(conversation))
        pool.check()
        pool.close()
    assert kept == {"returning": 100, "lru": 0}


def test_returning_a_block_that_came_back_may_be_idle_eight_times_as_long_and_then_goes():
    order = ReturningOrder(32)
    come(order, [0], "conversation")
    use(order, [0])
    popped: list[int] = []
    for number in range(40):
        come(order, [1 + number % 4], number)
        popped += order.pop(1) if len(order) > 4 else []
        if 0 in popped:
            break
    # Three fresh ones remain besides the oldest, whose turn it would be: its 4 that became idle since count
    # as 32.
    assert popped[-1] == 0 and number == 8 * 4 - 1


def test_returning_a_key_that_comes_again_after_it_was_forgotten_has_come_back():
    order = ReturningOrder(8)
    come(order, [0], "a")
    assert order.pop(1) == [0]
    come(order, [0], "a")
    for slot in (1, 2, 3):
        come(order, [slot], slot)
    assert order.pop(4) == [1, 2, 3, 0]


def test_returning_a_block_that_left_by_another_way_than_eviction_is_known_as_well():
    """One that was moved to another tier and comes from there again."""
    pool = BlockPool(8, "device", eviction=make_order("returning", 8))
    run(pool, [key("moved")])
    assert pool.evict_these(pool.find([key("moved")])) == 1
    run(pool, [key("moved")])
    for number in range(6):
        run(pool, [key(number)])
    assert pool.evict(6) == 6 and len(pool.find([key("moved")])) == 1


def test_returning_the_last_turn_of_a_conversation_stays_with_it():
    order = ReturningOrder(16)
    come(order, [0, 1, 2])
    order.remove(as_run([0, 1, 2]))
    order.hit(as_run([0, 1, 2]))
    order.sealed(as_run([3, 4]), [key("turn", 0), key("turn", 1)], [3, 4])
    order.add(as_run([4, 3, 2, 1, 0]))
    come(order, [5, 6, 7], "one-off")
    assert order.pop(4) == [7, 6, 5, 4]


@pytest.mark.parametrize("document", [[1], [1, 2, 3]])  # as long as the prompt, and longer
def test_returning_a_document_behind_a_prompt_that_many_share_does_not_stay_with_it(document):
    order = ReturningOrder(16)
    come(order, [4], "conversation")
    use(order, [4])
    come(order, [0])
    order.remove(as_run([0]))
    order.hit(as_run([0]))
    order.sealed(as_run(document), [key("document", depth) for depth in document], document)
    order.add(as_run([*reversed(document), 0]))
    assert order.pop(5) == [*reversed(document), 4, 0]


def test_returning_a_beginning_whose_key_was_not_remembered_does_not_go_before_its_continuation():
    order = ReturningOrder(8)
    keys = [key("chain", depth) for depth in range(4)]
    order.sealed(as_run([2, 3]), keys[2:], [2, 3])  # only these come again
    order.sealed(as_run(range(4)), keys, range(4))
    order.add(as_run([3, 2, 1, 0]))
    order.remove(as_run([1, 0]))
    order.add(as_run([1, 0]))  # a transfer had pinned them
    assert order.pop(4) == [3, 2, 1, 0]


@pytest.mark.parametrize("name", ["returning", "lru"])
def test_what_goes_next_is_said_as_it_goes(name):
    """What is about to be forgotten is moved to another tier first: that has to be the same blocks."""
    pool = BlockPool(40, "device", eviction=make_order(name, 40))
    for number in range(60):
        chain = number % 7 if number % 3 else number
        run(pool, [key(chain, depth) for depth in range(1 + chain % 6)])
        foretold = pool.keys(pool.coldest(5, drops_wants=True))
        pool.gone = []
        pool.evict(5)
        assert pool.gone == foretold


@pytest.mark.parametrize("num_blocks", [40, 4000])
def test_a_long_run_is_few_lots_however_long_it_is(num_blocks):
    """What is done for a run is done once: a conversation of many turns is in one lot, with what was new in
    its last turn."""
    pool = BlockPool(2 * num_blocks, "device", eviction=make_order("returning", 2 * num_blocks))
    keys = [key(depth) for depth in range(num_blocks)]
    for end in range(num_blocks // 2, num_blocks + 1, num_blocks // 10):
        run(pool, keys[:end])
        assert sum(map(len, pool.idle.others._queues)) == 1


def test_a_key_is_remembered_until_another_takes_its_place_and_no_key_for_another():
    seen = eviction.SeenKeys(8)
    assert seen.add([key("a")]).tolist() == [False]
    assert seen.add([key("a")]).tolist() == [True]
    place = key("a")[:8]
    assert seen.add([place + b"another "]).tolist() == [False]
    assert seen.add([key("a")]).tolist() == [False]
    assert len(seen._marks) == eviction.KEYS_PER_SLOT * 8


def test_as_many_keys_are_remembered_as_there_are_places():
    seen = eviction.SeenKeys(8)
    keys = [struct.pack("=2Q", place, place + 1) for place in range(eviction.KEYS_PER_SLOT * 8)]
    assert not any(seen.add(keys))
    assert all(seen.add([one]) == [True] for one in keys)


# ----------------------------------------------------------------------------------------------------- ghosts


def test_only_the_newest_ghosts_are_remembered():
    ghosts = Ghosts(num_slots=1)
    for number in range(5):
        ghosts.add(key(number), number)
    assert len(ghosts) == GHOSTS_PER_SLOT == 4
    ghosts.add(key(1), 7)
    ghosts.add(key(5), 5)
    assert [ghosts.take(key(number)) for number in range(6)] == [None, 7, None, 3, 4, 5]
    assert ghosts.take(key(1)) is None and len(ghosts) == 0


# ------------------------------------------------------------------------------------------------------- cost


def test_a_token_at_the_given_depth_costs_twice_the_first():
    first, there = prefill_cost(1), prefill_cost(TOKENS_TO_DOUBLE + 1) - prefill_cost(TOKENS_TO_DOUBLE)
    assert there / first == pytest.approx(2, rel=1e-3)


def test_cost_a_short_chain_goes_before_a_long_one_of_the_same_age():
    order = CostOrder(32, block_tokens=4096)
    come(order, list(range(16)), "long")
    come(order, [16, 17], "short")
    assert order.pop(3) == [17, 16, 15]


def test_cost_an_old_long_chain_goes_before_a_much_newer_short_one():
    order = CostOrder(32, block_tokens=4096)
    come(order, list(range(16)), "long")
    popped: list[int] = []
    for number in range(12):
        come(order, [16], number)
        popped += order.pop(1)
    assert popped[:2] == [16, 16] and 15 in popped


def test_cost_a_chain_that_was_evicted_too_early_ranks_higher_when_it_returns():
    order = CostOrder(8, block_tokens=16)
    come(order, [0], "again")
    assert order.pop(1) == [0]
    come(order, [0], "again")
    come(order, [1], "new")
    assert order.pop(1) == [1]


def test_cost_two_chains_let_go_in_one_call_are_ranked_apart():
    order = CostOrder(16, block_tokens=4096)
    order.sealed(as_run([0, 1]), [key("short", 0), key("short", 1)], [0, 1])
    order.sealed(as_run(range(2, 12)), [key("long", depth) for depth in range(10)], range(10))
    order.add(as_run([1, 0, *range(11, 1, -1)]))
    assert order.pop(3) == [1, 0, 11]


def test_cost_a_short_request_over_the_beginning_of_a_long_chain_does_not_make_it_cheap():
    order = CostOrder(32, block_tokens=4096)
    come(order, list(range(16)), "long")
    order.remove(as_run([0]))
    order.add(as_run([0]))  # without a hit: as if a transfer had pinned it
    assert order.pop(16) == [*range(15, 0, -1), 0]


def test_an_order_whose_books_are_wrong_says_so_instead_of_looking_for_ever() -> None:
    order = LruOrder(4)
    order.add(as_run([0, 1]))
    next(iter(order._queues[0].values())).num_left += 1
    with pytest.raises(InvariantBroken, match="none left"):
        order.pop(3)


@EVERY
@pytest.mark.parametrize("seed", range(8))
def test_slots_are_told_in_the_order_in_which_they_go(name: str, seed: int) -> None:
    """Blocks that are written when they are about to leave are the first of these: any other goes
    unwritten."""
    rng = random.Random(seed)
    order = make_order(name, 64, block_tokens=1024)
    free = list(range(64))
    for number in range(60):
        chain = [free.pop() for _ in range(min(len(free), rng.choice((1, 2, 16))))]
        if chain:
            come(order, chain, number)
        assert list(order) == deepcopy(order).pop(64)
        free += order.pop(rng.randrange(12))
