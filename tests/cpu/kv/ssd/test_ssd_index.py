"""Slots of the SSD tier that are forgotten by name: what that means for those who use them, and for the
books."""

from __future__ import annotations

import pytest

from penstock.config import EVICTIONS
from penstock.kv.blocks.eviction import make_order
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.blocks.slots import SlotCounts
from penstock.kv.tiers.ssd.index import SlotIndex
from penstock.kv.tiers.store import Outcome
from tests.cpu.kv.ssd.ssd_rig import key_of

GENERATION = b"g" * 16


def _pool(num_slots: int, num_blocks: int, eviction: str = "lru") -> BlockPool:
    pool = BlockPool(num_slots, "ssd", eviction=make_order(eviction, num_slots))
    index = SlotIndex(pool, lambda slot: GENERATION)
    keys = [key_of(number) for number in range(num_blocks)]
    claim = index.claim(keys)
    index.land(claim, keys, list(range(num_blocks)), dict.fromkeys(claim.places, GENERATION))
    return pool


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_an_idle_block_that_is_forgotten_is_free_at_once(eviction: str) -> None:
    pool = _pool(6, 4, eviction)
    assert pool.forget([1, 3]) == 2
    assert pool.find_each([key_of(number) for number in range(4)]) == [0, -1, 2, -1]
    assert pool.counts == SlotCounts(free=4, reserved=0, active=0, pinned=0, idle=2)
    pool.check()
    assert pool.evict(6) == 2
    pool.check()


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_pinned_block_that_is_forgotten_is_free_when_its_pin_ends(eviction: str) -> None:
    pool = _pool(4, 4, eviction)
    pin = pool.pin([2], "reader")
    assert pool.forget([2]) == 1 and pool.find_each([key_of(2)]) == [-1]
    assert pool.counts.pinned == 1
    pool.check()
    reservation = pool.try_reserve(3, "writer")
    assert reservation is not None and 2 not in reservation.slots
    pin.end()
    assert pool.counts.free == 1
    pool.check()


def test_a_slot_without_a_key_has_nothing_to_forget() -> None:
    pool = _pool(4, 2)
    assert pool.forget([3]) == 0 and pool.counts.free == 2
    pool.check()


def test_forgetting_a_block_that_has_moved_on_forgets_nothing() -> None:
    """A reader found damage in a slot; meanwhile everything was reset and the block was written elsewhere."""
    pool = _pool(4, 2)
    index = SlotIndex(pool, lambda slot: GENERATION)
    index.forget(key_of(0), 3)
    index.forget(key_of(9), 0)
    assert pool.find_each([key_of(0), key_of(1)]) == [0, 1]


def test_a_block_whose_generation_is_over_is_not_published() -> None:
    pool = BlockPool(4, "ssd")
    index = SlotIndex(pool, lambda slot: GENERATION)
    claim = index.claim([key_of(1), key_of(2)])
    index.land(claim, [key_of(1), key_of(2)], [0, 1], {0: b"o" * 16, 1: GENERATION})
    assert index.find([key_of(1)]) == 0 and index.find([key_of(2)]) == 1
    assert claim.outcomes == [Outcome.DONE] * 2
    pool.check()
