"""The pool at its edges: slots that it does not have, blocks that are forgotten though somebody wants them,
and what it names as the next to go when everything is wanted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from penstock.errors import InvariantBroken
from penstock.kv.blocks.handles import Hold
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.blocks.slots import Run, as_run
from tests.pure.kv.kv_fakes import FakeLane

NUM = [2, 35]  # slots of a run


def keys(num: int, first: int = 0) -> list[bytes]:
    return [(first + number).to_bytes(16, "big") for number in range(num)]


def sealed(pool: BlockPool, num: int, first: int = 0, owner: str = "request") -> Hold:
    """A table of so many blocks, whose depths are their numbers."""
    hold, reservation = pool.hold(owner), pool.try_reserve(num, owner)
    assert reservation is not None
    reservation.commit(hold)
    pool.seal(hold.slots, keys(num, first), range(num))
    return hold


def idle(pool: BlockPool, num: int, first: int = 0) -> Run:
    sealed(pool, num, first).end()
    return pool.find(keys(num, first))


USES: dict[str, Callable[[BlockPool, list[int]], object]] = {
    "pin": lambda pool, slots: pool.pin(slots, "transfer"),
    "hold": lambda pool, slots: pool.hold("request", slots),
    "seal": lambda pool, slots: pool.seal(slots, keys(len(slots), 1000)),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("num", NUM)
def test_a_slot_that_the_pool_does_not_have_is_refused_and_nothing_has_changed(use: str, num: int) -> None:
    pool = BlockPool(num, "device")
    idle(pool, num)
    before = pool.counts
    others = list(range(num - 1))
    for wrong in (num, num + 1, -1):
        with pytest.raises(InvariantBroken, match=f"has slots 0 to {num - 1}"):
            USES[use](pool, [*others, wrong])
    assert pool.counts == before and pool.num_keys == num
    pool.check()
    pool.close()


# --------------------------------------------------------------------------------------- wanted and forgotten


@pytest.mark.parametrize("way", ["evict_these", "forget", "evict"])
@pytest.mark.parametrize("num", NUM)
def test_what_comes_into_the_slot_of_a_wanted_block_that_went_is_not_wanted(way: str, num: int) -> None:
    """However it went, its want has lost it, and its key is told as gone."""
    pool = BlockPool(num, "device")
    pool.gone = []
    slots = np.asarray(idle(pool, num)).tolist()
    want = pool.want(as_run(slots), 1.0)
    assert pool.num_unwanted == 0
    if way == "evict":
        assert pool.evict(num) == num
    else:
        assert getattr(pool, way)(slots) == num
    assert sorted(pool.gone) == keys(num) and want.gone.all() and not want.protects
    idle(pool, num, 100)
    assert pool.num_unwanted == num, "nobody has asked for these"
    want.end()
    assert pool.num_unwanted == num
    pool.check()
    pool.close()


def test_both_parts_of_a_reservation_wait_for_those_who_had_its_slots() -> None:
    pool, lane = BlockPool(4, "host"), FakeLane("copy")
    earlier = pool.try_reserve(4, "earlier")
    assert earlier is not None
    fence = lane.record()
    earlier.rollback(fence)  # type: ignore[arg-type]
    rest = pool.try_reserve(4, "later")
    assert rest is not None
    first = rest.split(1)
    assert first.after == rest.after == (fence,) and first.owner == rest.owner == "later"
    assert sorted([*first.slots, *rest.slots]) == [0, 1, 2, 3] and len(first.slots) == 1
    first.rollback()
    rest.rollback()
    pool.close()
