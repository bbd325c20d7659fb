"""A slot that gets another block ranks as one that never had any: nothing that an order keeps by slot
outlives the block it was about."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import get_args

import pytest

from penstock.config import EvictionName
from penstock.kv.blocks.eviction import EvictionOrder, make_order
from penstock.kv.blocks.slots import as_run

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
