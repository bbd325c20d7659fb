"""Fences that come back with slots: whatever their order, and however many slots there are, none that counts
is lost."""

from __future__ import annotations

import pytest

from penstock.kv.blocks.pool import LastUse
from penstock.kv.blocks.slots import as_run
from tests.pure.kv.kv_fakes import FakeLane

SIZES = pytest.mark.parametrize("num", [1, 40])


@SIZES
def test_an_older_fence_that_comes_later_hides_none_that_came_before(num: int) -> None:
    """A table that rested is given back with the fence of a step long ago, after others have used its shared
    slots."""
    lane, last_use, slots = FakeLane("compute"), LastUse(128), as_run(range(num))
    first, second, third = (lane.record() for _ in range(3))
    for fence in (first, second, third, second, first):
        last_use.note(slots, fence)
    assert last_use.after(slots) == (first, second, third)
    lane.num_passed = 2
    assert last_use.after(slots) == (third,)
    lane.pass_all()
    assert last_use.after(slots) == ()


@SIZES
def test_slots_carry_their_own_fences_and_those_of_no_others(num: int) -> None:
    lanes = FakeLane("compute"), FakeLane("load")
    last_use = LastUse(128)
    mine, others = as_run(range(num)), as_run(range(num, 2 * num))
    early, load, late = lanes[0].record(), lanes[1].record(), lanes[0].record()
    last_use.note(mine, early)
    last_use.note(mine, load)
    last_use.note(others, late)
    assert last_use.after(mine) == (early, load)
    assert last_use.after(others) == (early, late), (
        "on one lane those before are taken along: they are over sooner"
    )
    assert last_use.after(as_run(range(2 * num, 3 * num))) == ()
    assert set(last_use.after(as_run(range(2 * num)))) == {early, load, late}
