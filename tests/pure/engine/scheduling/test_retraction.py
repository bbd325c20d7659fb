"""Requests that give way under pressure, and come back; and defects that turn these tests red."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.contract import FinishReason
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.errors import InvariantBroken
from tests.pure.engine.scheduling import scheduler_faults as faults
from tests.pure.engine.scheduling.scheduler_cases import A, B, Make, planned, shape
from tests.pure.engine.scheduling.scheduler_device import BLOCK
from tests.pure.engine.scheduling.scheduler_world import World


@pytest.fixture
def make() -> Make:
    return Scheduler


# ------------------------------------------------------------------------------------------------- retraction


def crowded(make: Make) -> World:
    """Two requests of four blocks each in a pool of six, promised twice over: the second is pushed out at its
    thirteenth token."""
    world = World(num_slots=6, overcommit=2.0, make=make)
    for prompt in (A, B):
        world.submit(prompt[:4], 12, ignore_eos=True)
    while world.plan() and not world.scheduler.counts.retractions:
        if len(world.in_flight) > 1:
            world.commit()
    return world


def test_under_pressure_the_youngest_gives_way_and_the_oldest_goes_on(make: Make) -> None:
    world = crowded(make)
    assert set(world.cache.tables) == {"r0"} and shape(world.in_flight[-1]) == [("r0", 12, 1)]
    assert world.scheduler.num_by_state() == {"waiting": 0, "loading": 0, "running": 1, "retracted": 1}
    world.close()
    assert world.scheduler.counts.retractions == 1


def test_a_retracted_request_resumes_with_the_tokens_it_had_and_ends_as_if_alone() -> None:
    world = crowded(Scheduler)
    while "r1" not in world.cache.tables:
        assert world.step()
    resumed = world.in_flight[-1]
    (start,) = resumed.starts
    assert start.request_id == "r1" and list(start.output) == world.outcome("r1")[0] and len(start.output) > 4
    assert resumed.chunks[0].start >= BLOCK, "what is left of its blocks is used"
    world.close()
    alone = World(num_slots=64)
    for prompt in (A, B):
        alone.submit(prompt[:4], 12, ignore_eos=True)
    alone.close()
    assert [world.outcome(i) for i in world.asked] == [alone.outcome(i) for i in alone.asked]
    assert world.scheduler.counts.generated_tokens == alone.scheduler.counts.generated_tokens == 24


def test_a_retracted_request_can_be_cancelled() -> None:
    world = crowded(Scheduler)
    world.cancel("r1")
    world.check()
    assert world.scheduler.num_by_state() == {"waiting": 0, "loading": 0, "running": 1, "retracted": 0}
    world.close()


def test_a_retracted_request_resumes_only_when_its_newest_token_is_known(make: Make) -> None:
    world = crowded(make)
    assert world.samples_in_flight("r1") == 1
    world.cancel("r0")  # now there is room
    assert world.plan() is None
    world.commit()
    (start,) = planned(world).starts
    assert start.request_id == "r1" and len(start.output) == len(world.outcome("r1")[0])
    world.close()


def pushed_out_inside_its_prompt(make: Make, **sampling: int) -> World:
    """The second request is pushed out when half its prompt is computed, by a step that is still in
    flight."""
    world = World(num_slots=6, prefill_chunk=8, overcommit=4.0, make=make)
    world.submit(A[:8], 9, ignore_eos=True)
    world.submit(B[:16], 4, ignore_eos=True, **sampling)
    assert shape(planned(world)) == [("r0", 0, 8)]
    assert shape(planned(world)) == [("r0", 8, 1), ("r1", 0, 8)]
    assert shape(planned(world)) == [("r0", 9, 1)] and world.scheduler.counts.retractions == 1
    return world


def test_a_step_from_before_a_retraction_seals_nothing_of_the_table_after_it(make: Make) -> None:
    world = pushed_out_inside_its_prompt(make)
    world.cancel("r0")
    assert shape(planned(world)) == [("r1", 0, 8)], "what it had computed was not known to be there yet"
    for _ in range(3):
        world.commit()
        world.check()
    world.close()


def test_prompt_logprobs_of_a_request_pushed_out_inside_its_prompt_are_not_doubled(make: Make) -> None:
    world = pushed_out_inside_its_prompt(make, prompt_logprobs=0)
    world.close()
    assert len(world.asked["r1"].lives) == 2 and world.outcome("r1")[1] is FinishReason.LENGTH


def test_prompt_logprobs_of_a_step_that_a_retraction_overtook_are_not_lost(make: Make) -> None:
    world = World(num_slots=5, prefill_chunk=8, overcommit=4.0, make=make)
    world.submit(A[:8], 8, ignore_eos=True)
    world.submit(B[:8], 8, ignore_eos=True, prompt_logprobs=0)
    planned(world)
    assert shape(planned(world)) == [("r0", 8, 1), ("r1", 0, 8)]
    assert shape(planned(world)) == [("r0", 9, 1)] and world.scheduler.counts.retractions == 1
    world.close()


def test_a_request_that_scores_its_prompt_ends_even_if_it_is_pushed_out_behind_its_last_step() -> None:
    world = World(num_slots=5, prefill_chunk=8, overcommit=4.0)
    world.submit(A[:8], 8, ignore_eos=True)
    scored = world.submit(B[:8], 0, prompt_logprobs=0)
    while not world.scheduler.counts.retractions:
        planned(world)
    assert shape(world.in_flight[1]) == [("r0", 8, 1), (scored, 0, 8)], "its whole prompt is in flight"
    world.close()
    assert world.outcome(scored) == ([], FinishReason.LENGTH) and len(world.asked[scored].lives) == 1


def test_a_request_pushed_out_of_the_plan_that_already_had_its_chunk_resumes(make: Make) -> None:
    """The older one came to run later, since it waited for a prefix: it draws after the younger one was
    planned."""
    world = World(num_slots=7, prefill_chunk=64, overcommit=4.0, make=make)
    world.submit(A[:8], 1)
    older, younger = world.submit(A[:8], 12, ignore_eos=True), world.submit(B[:7], 12, ignore_eos=True)
    while not world.scheduler.counts.retractions:
        assert world.step()
    assert list(world.cache.tables) == [older] and shape(world.in_flight[-1]) == [(older, 12, 1)]
    assert world.asked[younger].lives[-1].end == 13
    world.close()


def test_a_retraction_does_not_make_found_tokens_of_computed_ones() -> None:
    world = pushed_out_inside_its_prompt(Scheduler)
    world.close()
    source = world.asked["r1"].first.source  # type: ignore[union-attr]
    assert (
        world.seen["resume inside the prompt"] == 1
        and source is not None
        and (source.device, source.computed) == (0, 16)
    )


# ----------------------------------------------------------------------------------------------------- faults

RED: list[tuple[Make, Callable[..., None]]] = [
    (faults.RetractsTheOldest, test_under_pressure_the_youngest_gives_way_and_the_oldest_goes_on),
    (faults.ResumesWithATokenInFlight, test_a_retracted_request_resumes_only_when_its_newest_token_is_known),
    (faults.SealsForAnEarlierLife, test_a_step_from_before_a_retraction_seals_nothing_of_the_table_after_it),
    (
        faults.DoublesPromptLogprobs,
        test_prompt_logprobs_of_a_request_pushed_out_inside_its_prompt_are_not_doubled,
    ),
    (
        faults.LosesPromptLogprobsOfAnEarlierLife,
        test_prompt_logprobs_of_a_step_that_a_retraction_overtook_are_not_lost,
    ),
    (faults.ForgetsARetractedPlan, test_a_request_pushed_out_of_the_plan_that_already_had_its_chunk_resumes),
]


@pytest.mark.parametrize(
    ("fault", "test"), RED, ids=[f"{fault.__name__}-{test.__name__}" for fault, test in RED]
)
def test_a_broken_scheduler_turns_its_test_red(fault: Make, test: Callable[[Make], None]) -> None:
    with pytest.raises((AssertionError, InvariantBroken)):
        test(fault)
