"""Policies of eviction and transfers at their edges: the dearest chain, a slot's next block, several
arrivals."""

from __future__ import annotations

import pytest

from penstock.kv.blocks.eviction import _NUM_CLASSES, CostOrder, LruOrder
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.blocks.slots import as_run
from penstock.kv.tiers.host import HostTier


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def sealed(order: CostOrder, slot: int, number: int, depth: int = 0) -> None:
    order.sealed(as_run([slot]), [key(number)], [depth])


@pytest.mark.parametrize("depth", [10**6, 10**8, 10**12])
def test_cost_no_chain_is_too_dear_for_the_dearest_class(depth: int) -> None:
    order = CostOrder(4, block_tokens=128)
    sealed(order, 0, 0, depth)
    sealed(order, 1, 1)
    for _ in range(40):
        order.hit(as_run([0]))
    order.add(as_run([0]))
    order.add(as_run([1]))
    assert order._class_of[0] == _NUM_CLASSES - 1
    assert order.pop(2) == [1, 0]


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
