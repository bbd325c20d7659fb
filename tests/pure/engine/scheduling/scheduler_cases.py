"""Prompts, and short ways to say what a plan holds, for tests of the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.contract import KvSource, StepPlan
from penstock.engine.scheduling.scheduler import Scheduler
from tests.pure.engine.scheduling.scheduler_tiers import Cold, Tiers
from tests.pure.engine.scheduling.scheduler_world import World

A = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1, 2, 3, 4]
B = [6, 5, 4, 3, 2, 1, 6, 5, 4, 3, 2, 1, 6, 5, 4, 3]
C = [5, 5, 3, 3, 5, 5, 3, 3, 5, 5, 3, 3, 5, 5, 3, 3]

Make = type[Scheduler]


def planned(world: World) -> StepPlan:
    plan = world.plan()
    assert plan is not None
    return plan


def shape(plan: StepPlan | None) -> list[tuple[str, int, int]]:
    """Request, first position and number of tokens of every chunk."""
    return [] if plan is None else [(c.request_id, c.start, c.num_tokens) for c in plan.chunks]


def remembered(*prompts: Sequence[int], num_host: int = 24, overlap_tokens: int = 0, **world: Any) -> World:
    """A world in which `prompts` were computed and saved; the device has forgotten them, the host tier has
    not."""
    made = World(**world, cold=Cold(num_host, overlap_tokens))
    for prompt in prompts:
        made.submit(prompt, 1, ignore_eos=True)
        made.finish()
    made.cache.reset(["device"])
    assert made.tiers is not None and made.cache.stats().slots["host"].idle > 0
    return made


def tiers_of(world: World) -> Tiers:
    assert world.tiers is not None
    return world.tiers


def source_of(world: World, request_id: str) -> KvSource:
    first = world.asked[request_id].first
    assert first is not None and first.source is not None
    return first.source


def turn_without(world: World, stuck: str, turns: int) -> None:
    """Turns of the engine while nothing moves to tier `stuck`."""
    for _ in range(turns):
        for lane in world.device.lanes:
            while not lane.name.endswith(f"to {stuck}") and lane.step():
                pass
        world.settle()
        behind = bool(world.in_flight)
        world.plan()
        if behind:
            world.commit()
        world.check()
