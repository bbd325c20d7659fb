"""Plans and results are plain data: nothing in them lives, equal ones are equal, and a file gives them
back."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock.contract import (
    Adapter,
    Chunk,
    Echo,
    FenceId,
    Grammar,
    KeptSums,
    PartScores,
    Sampled,
    SamplingParams,
    Scoring,
    Start,
    StepFailure,
    StepPlan,
    StepResult,
    Thought,
    TokenLogprob,
    TokenScores,
    Waits,
)
from penstock.errors import InvariantBroken
from tests.pure.engine.scheduling.scheduler_tiers import land_in_parts
from tests.pure.engine.scheduling.scheduler_walks import Walker, choose
from tests.pure.engine.scheduling.scheduler_world import World

NUM_WALKS = 20
PLAIN = (type(None), bool, int, float, str)
RECORDS = (
    *(StepPlan, Chunk, Scoring, KeptSums, Echo, Adapter, Start, SamplingParams, Grammar, Thought, FenceId),
    *(StepResult, Sampled, TokenLogprob, TokenScores, PartScores, StepFailure),
)


@pytest.fixture(autouse=True)
def _transfers_land_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    land_in_parts(monkeypatch)


def walked(seed: int) -> World:
    """A walk through cancels, retractions, failures and loads, every other one with stores behind host
    memory."""
    shape, events = choose(seed, behind=seed % 2 == 1)
    walker = Walker(shape)
    for event in events:
        walker.do(event)
    walker.end()
    return walker.world


def fields_of(record: Any) -> list[str]:
    return (
        list(record._fields)
        if issubclass(record, tuple)
        else [field.name for field in dataclasses.fields(record)]
    )


def living(value: Any, where: str) -> Iterator[str]:
    """Where in it something is that is no plain data."""
    if type(value) in PLAIN or (type(value) is np.ndarray and value.dtype in (np.int32, np.float32)):
        return
    if type(value) in (tuple, frozenset):
        for number, one in enumerate(value):
            yield from living(one, f"{where}[{number}]")
    elif type(value) in RECORDS:
        for name in fields_of(type(value)):
            yield from living(getattr(value, name), f"{where}.{name}")
    else:
        yield f"{where} is a {type(value).__name__}"


def test_no_field_of_a_plan_or_result_holds_what_lives() -> None:
    seen = {"plans": 0, "waits": 0, "loads": 0, "echoes": 0, "starts again": 0, "failures": 0, "scores": 0}
    for seed in range(NUM_WALKS):
        world = walked(seed)
        assert [found for plan in world.log.plans for found in living(plan, "plan")] == []
        assert [found for result in world.log.results for found in living(result, "result")] == []
        seen["plans"] += len(world.log.plans)
        seen["waits"] += sum(len(plan.after) for plan in world.log.plans)
        seen["loads"] += sum(len(plan.loads) for plan in world.log.plans)
        seen["echoes"] += sum(plan.echoes for plan in world.log.plans)
        seen["starts again"] += sum(bool(start.output) for plan in world.log.plans for start in plan.starts)
        seen["failures"] += sum(result.error is not None for result in world.log.results)
        seen["scores"] += sum(bool(result.prompt_logprobs) for result in world.log.results)
    assert seen["plans"] > 500 and all(seen.values()), (
        f"the walks did not meet what this test is about: {seen}"
    )


def test_the_same_walk_makes_the_same_plans_and_results_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def walked_by_the_clock(seed: int) -> World:
        """Rates of links are measured, and transfers may be late: on a busy machine the time is another one
        each time."""
        ticks = itertools.count()
        with monkeypatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: 1000.0 + 1e-6 * next(ticks))
            return walked(seed)

    for seed in range(8):
        once, again = walked_by_the_clock(seed), walked_by_the_clock(seed)
        assert (
            once.log.plans == again.log.plans
            and once.log.results == again.log.results
            and once.log.plans is not again.log.plans
        )
        assert list(map(repr, once.log.plans)) == list(map(repr, again.log.plans))


def test_plans_are_equal_where_all_that_they_say_is() -> None:
    def plan(**changes: Any) -> StepPlan:
        chunk = Chunk("r", 0, 4, (1, 2), np.array([5, 6], np.int32), True, 1)._replace(**changes)
        seen = np.array([1, 2], np.int32)
        return StepPlan(1, (chunk,), 0, (Start(0, "r", SamplingParams(max_tokens=1), (), seen),))

    assert plan() == plan() and operator.ne(plan().chunks[0], plan().chunks[0]) is False
    for change in (
        {"slots": np.array([5, 7], np.int32)},
        {"slots": np.array([5], np.int32)},
        {"tokens": (1, 3)},
        {"echo": Echo((2,), 0)},
    ):
        assert plan(**change) != plan() and operator.eq(plan(**change).chunks[0], plan().chunks[0]) is False
    (start,) = plan().starts
    assert start != start._replace(prompt_tokens=None) and start._replace(prompt_tokens=None) != start
    assert plan().chunks[0] != tuple(plan().chunks[0]), "a record is no tuple of its fields"


def test_what_a_plan_waits_for_is_looked_up_by_its_names() -> None:
    plan = StepPlan(3, (), 0, after=(FenceId("save", 2),), loads=("r",))
    fence, load = object(), object()
    waits = Waits({FenceId("save", 2): fence, FenceId("save", 3): object()}, {"r": load, "other": object()})  # type: ignore[dict-item]
    assert waits.of(plan) == ((fence,), (load,))
    for missing in (Waits(waits.fences, {}), Waits({}, waits.loads)):
        with pytest.raises(InvariantBroken, match="step 3 is to wait for"):
            missing.of(plan)
