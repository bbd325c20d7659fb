"""How long steps take, by a clock of the test's own: which of them count for what, and from when to when."""

from __future__ import annotations

import dataclasses

import numpy as np

from penstock.contract import Chunk, Scoring, StepPlan
from penstock.engine.pace import Pace, Prefill, ScoringCost


class Clock:
    """Says what it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def plan(*chunks: tuple[int, int], loads: tuple[str, ...] = ()) -> StepPlan:
    """A step of chunks that are (start, tokens)."""
    ordered = sorted(chunks, key=lambda chunk: chunk[1] > 1)
    made = tuple(
        Chunk(f"r{i}", i, start, (0,) * num, np.zeros(1, np.int32), writes=True, num_logits=1)
        for i, (start, num) in enumerate(ordered)
    )
    return StepPlan(1, made, sum(num == 1 for _, num in chunks), loads=loads)


def taken(pace: Pace, clock: Clock, step: StepPlan, seconds: float) -> Prefill | None:
    """What one step by itself says that took so long."""
    pace.launched(step)
    clock.now_s += seconds
    return pace.read()


def test_a_step_runs_from_the_end_of_the_one_before_it() -> None:
    """Two steps are launched together: the second waits for the first, and that wait is none of its own
    time."""
    clock = Clock()
    pace = Pace(ScoringCost(), clock)
    clock.now_s = 10.0
    pace.launched(plan((0, 64)))
    clock.now_s = 11.0
    pace.launched(plan((64, 128)))
    clock.now_s = 14.0
    assert pace.read() == Prefill(64, 32.0, 4.0)
    clock.now_s = 16.0
    assert pace.read() == Prefill(128, 128.0, 2.0)


def test_a_step_that_waits_for_a_load_says_nothing_about_prefills() -> None:
    clock = Clock()
    pace = Pace(ScoringCost(), clock)
    assert taken(pace, clock, plan((0, 64), loads=("r",)), 1.0) is None
    assert taken(pace, clock, plan((0, 64)), 1.0) is not None, "the next one does"


def test_a_step_that_is_not_mostly_prefill_says_what_prompts_take_at_most() -> None:
    clock = Clock()
    pace = Pace(ScoringCost(), clock)
    decodes = [(50, 1)] * 10
    assert taken(pace, clock, plan(*decodes, (0, 90)), 1.0) == Prefill(90, 45.0, 1.0)
    assert taken(pace, clock, plan(*decodes, (0, 89)), 1.0) == Prefill(89, 44.5, 1.0, at_most=True)
    assert taken(pace, clock, plan(*[(50_000, 1)] * 6, (0, 512)), 1.0) == Prefill(512, 256.0, 1.0), (
        "a least chunk beside six that decode"
    )
    assert taken(pace, clock, plan((0, 32)), 1.0) == Prefill(32, 16.0, 1.0)
    assert taken(pace, clock, plan((0, 31)), 1.0) is None
    assert (
        taken(pace, clock, plan(*decodes, (0, 31)), 1.0) is None
        and taken(pace, clock, plan(*decodes), 1.0) is None
    )


def decode(*, paged: bool = False, scores: bool = False) -> StepPlan:
    step = plan((50, 1))
    (chunk,) = step.chunks
    slots = np.zeros(1, np.int32)
    scoring = Scoring(1, 4, 0, slots, paged, 1) if scores else None
    return dataclasses.replace(
        step, chunks=(chunk._replace(paged=slots if paged else None, scoring=scoring),)
    )


def test_what_scoring_takes_is_compared_with_steps_that_bring_nothing_up() -> None:
    """A step that reads blocks of host memory, or waits for some, takes many times as long: scoring would
    look as if it cost nothing."""
    clock = Clock()
    pace = Pace(ScoringCost(), clock)
    taken(pace, clock, decode(), 1.0)
    taken(pace, clock, decode(paged=True), 100.0)
    taken(pace, clock, decode(paged=True, scores=True), 100.0)
    taken(pace, clock, dataclasses.replace(decode(), loads=("r",)), 100.0)
    taken(pace, clock, dataclasses.replace(decode(scores=True), loads=("r",)), 100.0)
    assert pace.scoring.seconds == 0.0
    taken(pace, clock, decode(scores=True), 1.5)
    assert pace.scoring.seconds == 0.5


def test_the_time_that_scoring_took_never_falls() -> None:
    """It is a counter that operators read."""
    cost = ScoringCost()
    cost.add(1.0, scores=False)
    for seconds in (1.5, 0.25):  # the second is quicker than a step that does not score
        cost.add(seconds, scores=True)
        assert cost.seconds == 0.5


def test_what_scoring_costs_follows_the_newest_times_and_forgets_the_oldest() -> None:
    cost = ScoringCost()
    for seconds in (1.0, 2.0):
        cost.add(seconds, scores=False)  # 1.2 lately
    taus = list[int]()
    for seconds in (1.77, 1.2):
        cost.add(seconds, scores=True)  # 0.57 longer, and no longer: 0.456 lately
        taus.append(cost.tau)
    assert taus == [10, 8]
