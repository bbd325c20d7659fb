"""A load that was not waited for: whoever it was for computes, also where it gets room later, and asks for no
other."""

from __future__ import annotations

import pytest

from penstock.contract import KvSource
from tests.pure.engine.scheduling.scheduler_cases import A, remembered, source_of, tiers_of
from tests.pure.engine.scheduling.scheduler_tiers import Cold
from tests.pure.engine.scheduling.scheduler_world import World


@pytest.mark.parametrize("lands", [True, False])
def test_one_that_had_waited_too_long_for_a_load_asks_for_no_other(lands: bool) -> None:
    world = remembered(A[:8], num_slots=4)
    late = world.submit([*A[:8], 1], 3, ignore_eos=True)
    assert world.plan() is None and world.state_of(late) == "loading"
    tiers_of(world).make_late()
    assert world.plan() is None and world.state_of(late) == "waiting", (
        "half of the device is still being loaded into"
    )
    assert world.scheduler.lives[late].running is None
    tiers_of(world).promotions.fail_next = 0 if lands else 1
    world.close()
    assert world.seen["promotion"] == 1
    assert source_of(world, late) == (KvSource(device=8, computed=1) if lands else KvSource(computed=9)), (
        "what came after all is there"
    )


def test_one_that_waited_too_long_keeps_the_place_of_its_arrival() -> None:
    world = remembered(A[:8], num_slots=4, max_batch=1)
    late = world.submit([*A[:8], 1], 3, ignore_eos=True)
    assert world.plan() is None
    others = [world.submit([2, 2, 2], 9, ignore_eos=True), world.submit([3, 3, 3], 9, ignore_eos=True)]
    tiers_of(world).make_late()
    world.plan()
    assert world.in_line() == [late, *others] and world.scheduler.num_by_state()["waiting"] == 3
    world.close()
    assert [i for i in world.admitted if i in (late, *others)] == [late, late, *others]


def pushed_out() -> tuple[World, str]:
    """A request that was retracted, and loads what it had; and nobody else."""
    world = World(num_slots=6, overcommit=2.0, cold=Cold(24))
    first, second = (
        world.submit(A[:8], 9, ignore_eos=True),
        world.submit([6, 5, 4, 3, 2, 1, 6, 5], 9, ignore_eos=True),
    )
    while world.state_of(second) != "retracted":
        world.step()
    while world.state_of(second) != "loading":
        if world.outcome(first)[1] is None:
            world.step()
        else:
            for lane in world.device.lanes:
                while not lane.name.endswith("to device") and lane.step():
                    pass
            world.settle()
            world.plan()
    assert len(world.asked[second].got) > 0
    return world, second


def test_one_that_was_pushed_out_before_it_waited_too_long_computes_as_well() -> None:
    world, second = pushed_out()
    tiers_of(world).make_late()
    world.plan()
    life = world.scheduler.lives[second]
    assert life.computes and (life.waiting is None or life.waiting.lease is None)
    world.close()
    assert world.scheduler.counts.retractions == 1, "it left of its own accord the second time"


def test_one_that_was_pushed_out_before_it_waited_too_long_comes_back_when_all_of_it_fits() -> None:
    """As after any retraction: a second one would be thrashing."""
    world, second = pushed_out()
    tiers_of(world).make_late()
    urgent = world.submit([1, 2, 3], 8, priority=-1, ignore_eos=True)
    world.plan()
    assert (world.state_of(urgent), world.state_of(second)) == ("running", "retracted")
    assert world.scheduler.num_by_state() == {"waiting": 0, "loading": 0, "running": 1, "retracted": 1}
    world.close()
    assert world.scheduler.counts.retractions == 1
