"""Policies of eviction and transfers at their edges: the dearest chain, a slot's next block, several
arrivals."""

from __future__ import annotations

from penstock.kv.blocks.eviction import LruOrder
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.tiers.host import HostTier


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


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
