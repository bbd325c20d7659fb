"""How long prefills take, by a clock of the test's own: which steps count, and from when to when."""

from __future__ import annotations

import numpy as np

from penstock.contract import Chunk, StepPlan
from penstock.engine.pace import Pace, Prefill


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
        Chunk(f"r{i}", i, start, (0,) * num, np.zeros(1, np.int32), writes=True, num_logits=1) for i, (start, num) in enumerate(ordered)
    )
    return StepPlan(1, made, sum(num == 1 for _, num in chunks), loads=loads)


def taken(pace: Pace, clock: Clock, step: StepPlan, seconds: float) -> Prefill | None:
    """What one step by itself says that took so long."""
    pace.launched(step)
    clock.now_s += seconds
    return pace.read()


def test_a_step_runs_from_the_end_of_the_one_before_it() -> None:
    """Two steps are launched together: the second waits for the first, and that wait is none of its own time."""
    clock = Clock()
    pace = Pace(clock)
    clock.now_s = 10.0
    pace.launched(plan((0, 64)))
    clock.now_s = 11.0
    pace.launched(plan((64, 128)))
    clock.now_s = 14.0
    assert pace.read() == Prefill(64, 32.0, 4.0)
    clock.now_s = 16.0
    assert pace.read() == Prefill(128, 128.0, 2.0)


def test_a_step_that_was_launched_late_runs_from_its_launch() -> None:
    clock = Clock()
    pace = Pace(clock)
    assert taken(pace, clock, plan((0, 64)), 1.0) == Prefill(64, 32.0, 1.0)
    clock.now_s += 100.0  # nothing to do
    assert taken(pace, clock, plan((0, 64)), 2.0) == Prefill(64, 32.0, 2.0)


def test_a_step_that_waits_for_a_load_says_nothing_about_prefills() -> None:
    clock = Clock()
    pace = Pace(clock)
    assert taken(pace, clock, plan((0, 64), loads=("r",)), 1.0) is None
    assert taken(pace, clock, plan((0, 64)), 1.0) is not None, "the next one does"


def test_a_step_that_is_not_mostly_prefill_says_what_prompts_take_at_most() -> None:
    clock = Clock()
    pace = Pace(clock)
    decodes = [(50, 1)] * 10
    assert taken(pace, clock, plan(*decodes, (0, 90)), 1.0) == Prefill(90, 45.0, 1.0)
    assert taken(pace, clock, plan(*decodes, (0, 89)), 1.0) == Prefill(89, 44.5, 1.0, at_most=True)
    assert taken(pace, clock, plan(*[(50_000, 1)] * 6, (0, 512)), 1.0) == Prefill(512, 256.0, 1.0), "a least chunk beside six that decode"
    assert taken(pace, clock, plan((0, 32)), 1.0) == Prefill(32, 16.0, 1.0)
    assert taken(pace, clock, plan((0, 31)), 1.0) is None
    assert taken(pace, clock, plan(*decodes, (0, 31)), 1.0) is None and taken(pace, clock, plan(*decodes), 1.0) is None


def test_the_depth_of_several_prompts_is_that_of_their_tokens() -> None:
    clock = Clock()
    assert taken(Pace(clock), clock, plan((0, 100), (1000, 300)), 1.0) == Prefill(400, (100 * 50 + 300 * 1150) / 400, 1.0)
