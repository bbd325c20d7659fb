"""Policies of eviction and transfers at their edges: the dearest chain, a slot's next block, several
arrivals."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.contract import Arrival
from penstock.figures import Traffic
from penstock.kv.blocks.eviction import _COSTS, _NUM_CLASSES, TOKENS_TO_DOUBLE, CostOrder, LruOrder
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.blocks.slots import as_run
from penstock.kv.tiers.calls import Tally, Way
from penstock.kv.tiers.host import HostTier
from penstock.kv.tiers.loads import BlockLoad, Copy
from penstock.kv.tiers.store import Outcome
from penstock.kv.transfer import Group
from tests.pure.kv.kv_fakes import FakeLane


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def sealed(order: CostOrder, slot: int, number: int, depth: int = 0) -> None:
    order.sealed(as_run([slot]), [key(number)], [depth])


def test_cost_several_of_one_queue_that_go_together_leave_the_floor_at_the_last() -> None:
    """What comes next ranks above all of them."""
    order = CostOrder(8, block_tokens=16)
    sealed(order, 0, 0)
    order.add(as_run([0]))
    order._floor = 5.0  # as others that went meanwhile have left it
    sealed(order, 1, 1)
    order.add(as_run([1]))
    assert order.pop(2) == [0, 1] and order._floor == 5.0 + _COSTS[0]


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


def test_cost_a_chain_of_one_block_is_as_dear_as_its_tokens() -> None:
    """On average they cost twice the first, which is one doubling."""
    order = CostOrder(1, block_tokens=2 * TOKENS_TO_DOUBLE)
    sealed(order, 0, 0)
    order.add(as_run([0]))
    assert _COSTS[order._class_of[0]] == 2.0


def test_cost_a_short_chain_behind_a_long_one_that_ends_where_it_begins_is_cheap() -> None:
    order = CostOrder(3, block_tokens=2 * TOKENS_TO_DOUBLE)
    for slot, depth in enumerate([1, 0, 0]):
        sealed(order, slot, slot, depth)
    order.add(as_run([0, 1, 2]))
    assert order.pop(3) == [2, 0, 1]


@pytest.mark.parametrize(("num_arrivals", "num_passed", "nearly"), [
    (0, 0, True), (1, 0, True), (2, 0, False), (2, 1, True), (3, 1, False), (3, 2, True), (4, 2, False), (4,
    3, True), (4, 4, True),
])  # fmt: skip
def test_a_load_is_nearly_there_when_at_most_its_last_part_is_on_its_way(
    num_arrivals: int, num_passed: int, nearly: bool
) -> None:
    lane = FakeLane("load")
    pool = BlockPool(1, "device")
    hold = pool.hold("request")
    reservation = pool.try_reserve(1, "request")
    assert reservation is not None
    reservation.commit(hold)
    load = BlockLoad(hold, 0, 1, (), (), float("inf"))
    groups = [Group((n, n + 1)) for n in range(num_arrivals)]
    load.copies.append(
        Copy(load, [pool.pin(hold.first(0 + 1)[0:], "request")], np.zeros(1, np.int64), groups)
    )
    load.num_sent = 1
    assert not load.nearly_landed(), "before its fences exist nobody knows"
    load.copies[0].launched(None, [Arrival((n, n + 1), lane.record()) for n in range(num_arrivals)])
    lane.num_passed = num_passed
    assert load.nearly_landed() is nearly


def test_every_block_that_a_store_has_no_room_for_is_counted() -> None:
    tally = Tally(100, lambda: 0.0)
    tally.ended(Way.WRITE, [Outcome.FULL, Outcome.DONE, Outcome.FULL, Outcome.FULL])
    tally.skip("queue", 2)
    traffic = Traffic({}, {}, {}, {}, {}, 0)
    tally.report("ssd", traffic)
    assert traffic.skipped == {"full": 3, "queue": 2} and traffic.bytes["host", "ssd"] == 100


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
