"""Policies of eviction: worked cases of what goes first, and what they may cost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from hashlib import blake2b
from itertools import permutations
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import EVICTIONS, EvictionName
from penstock.errors import ConfigError, InvariantBroken
from penstock.kv.blocks import eviction
from penstock.kv.blocks.eviction import (
    EvictionOrder,
    LruOrder,
    make_order,
)
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.blocks.slots import as_run
from penstock.kv.tiers.host import HostTier

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


def test_returning_a_block_that_left_by_another_way_than_eviction_is_known_as_well():
    """One that was moved to another tier and comes from there again."""
    pool = BlockPool(8, "device", eviction=make_order("returning", 8))
    run(pool, [key("moved")])
    assert pool.evict_these(pool.find([key("moved")])) == 1
    run(pool, [key("moved")])
    for number in range(6):
        run(pool, [key(number)])
    assert pool.evict(6) == 6 and len(pool.find([key("moved")])) == 1


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


# ------------------------------------------------------------------------------------------------------- cost


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


class Listening:
    """An order that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def __len__(self) -> int:
        return 0

    def __iter__(self):
        return iter(())

    def sealed(self, slots, keys, depths):
        self.told.append(("sealed", list(slots), list(keys), list(depths)))

    def hit(self, slots):
        self.told.append(("hit", list(slots)))

    def add(self, slots):
        self.told.append(("add", list(slots)))

    def remove(self, slots):
        self.told.append(("remove", list(slots)))

    def pop(self, num):
        return []


def test_the_pool_tells_key_and_depth_at_seal_and_every_hit():
    order = Listening()
    pool = BlockPool(4, "device", eviction=order)
    hold = pool.hold("a")
    pool.try_reserve(2, "a").commit(hold)
    pool.seal([0, 1], [key(0), key(1)], [5, 6])
    sharer = pool.hold("b", [0])
    hold.end()
    sharer.end()
    pool.note_hits([1])
    assert order.told == [
        ("sealed", [0, 1], [key(0), key(1)], [5, 6]),
        ("remove", []),
        ("hit", [0]),
        ("add", [1]),
        ("add", [0]),
        ("hit", [1]),
    ]


def test_a_block_whose_key_lives_elsewhere_is_not_told():
    order = Listening()
    pool = BlockPool(4, "device", eviction=order)
    hold = pool.hold("a")
    pool.try_reserve(4, "a").commit(hold)
    assert pool.seal([0], [key(1)]) == 1
    assert pool.seal([1, 2, 3], [key(0), key(1), key(2)], [7, 8, 9]) == 2
    assert [told for told in order.told if told[0] == "sealed"] == [
        ("sealed", [0], [key(1)], [0]),
        ("sealed", [1, 3], [key(0), key(2)], [7, 9]),
    ]


NUM = 4
KEYS = [bytes([7 * number + 1, number, 3 * number, 5 * number]) * 4 for number in range(NUM + 1)]


def forgotten_block(order: EvictionOrder) -> None:
    """Deep, used again and again, in slot 0; then it is forgotten while somebody has it, and not by
    eviction."""
    order.sealed(as_run([0]), KEYS[NUM:], [100_000])
    for _ in range(3):
        order.add(as_run([0]))
        order.remove(as_run([0]))
        order.hit(as_run([0]))


def order_of(order: EvictionOrder, slots: Sequence[int]) -> list[int]:
    """Blocks of equal worth, in all slots, one after the other."""
    for slot in slots:
        order.sealed(as_run([slot]), [KEYS[slot]], [0])
        order.add(as_run([slot]))
    return order.pop(NUM)


@pytest.mark.parametrize("slots", list(permutations(range(NUM))))
@pytest.mark.parametrize("name", get_args(EvictionName))
def test_a_slot_keeps_nothing_of_a_block_that_was_forgotten(name: EvictionName, slots: Sequence[int]) -> None:
    used, fresh = make_order(name, NUM), make_order(name, NUM)
    forgotten_block(used)
    assert len(used) == 0
    assert order_of(used, slots) == order_of(fresh, slots) and len(used) == 0


def test_what_a_lease_finds_is_told_to_the_order_of_eviction() -> None:
    """A block that is read under a pin is used as much as one that a table holds."""
    order = LruOrder(8)
    told: list[int] = []
    order.hit = lambda slots: told.extend(int(slot) for slot in slots)  # type: ignore[method-assign]
    tier = HostTier(BlockPool(8, "host", eviction=order), block_tokens=4, lease_s=9.0, clock=lambda: 0.0)
    keys = [key(number) for number in range(3)]
    taken = tier.take(keys, [0, 1, 2], "a save")
    assert taken.reservation is not None
    slots = list(taken.reservation.slots)
    tier.land(taken)
    told.clear()
    lease = tier.lease([*keys, key(9)], "a request", first=1)
    assert lease is not None and told == slots[1:]
    lease.end()
