"""Prompts, and short ways to say what a plan holds, for tests of the scheduler."""

from __future__ import annotations

from scheduler_world import World

from penstock.contract import StepPlan
from penstock.engine.scheduling.scheduler import Scheduler

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
