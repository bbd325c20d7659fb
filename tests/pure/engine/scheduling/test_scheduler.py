"""Steps, turns of prompts, ends of requests, and the books of the scheduler."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.contract import (
    Request,
    Sampled,
    SamplingParams,
    StepResult,
)
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.errors import InvariantBroken
from tests.pure.engine.scheduling.scheduler_cases import A, B, C, planned, shape
from tests.pure.engine.scheduling.scheduler_world import World

# -------------------------------------------------------------------------------------------------------- end


def test_an_id_can_be_used_again_while_a_step_of_its_former_owner_is_in_flight() -> None:
    world = World()
    sampling = SamplingParams(max_tokens=3)
    world.scheduler.add(Request("same", A[:4], sampling))
    old = world.scheduler.plan().plan
    assert old is not None and world.scheduler.cancel("same") is not None
    world.scheduler.add(Request("same", B[:4], sampling))
    assert world.scheduler.plan().plan is not None
    assert world.scheduler.commit(StepResult(old.number, (Sampled("same", (1,)),))).events == []
    events = world.scheduler.commit(StepResult(old.number + 1, (Sampled("same", (2,)),))).events
    assert [e.tokens for e in events] == [(2,)]


# -------------------------------------------------------------------------------------------------- its books


def test_an_id_cannot_be_added_twice() -> None:
    world = World()
    world.submit(A[:4])
    with pytest.raises(InvariantBroken, match="r0 was added twice"):
        world.scheduler.add(world.asked["r0"].request)
    world.close()


def test_a_result_without_the_token_it_should_have_is_refused() -> None:
    world = World()
    world.submit(A[:4], 4)
    plan = planned(world)
    with pytest.raises(InvariantBroken, match="sampled nothing for request r0"):
        world.scheduler.commit(StepResult(plan.number, ()))


def _promise_too_much(scheduler: Scheduler) -> None:
    scheduler.running._promises.num += 1


def _lose_a_row(scheduler: Scheduler) -> None:
    scheduler.running.free_rows.pop()


def _lend_a_row_twice(scheduler: Scheduler) -> None:
    scheduler.running.free_rows.append(0)


@pytest.mark.parametrize("damage", [_promise_too_much, _lose_a_row, _lend_a_row_twice])
def test_check_sees_books_that_do_not_add_up(damage: Callable[[Scheduler], None]) -> None:
    world = World()
    world.submit(A[:4], 9)
    planned(world)
    world.scheduler.check()
    damage(world.scheduler)
    with pytest.raises(InvariantBroken):
        world.scheduler.check()


# ----------------------------------------------------------------------------------------------------- faults


def test_decodes_take_no_room_from_prompts_and_need_none() -> None:
    """Three decode, and a prompt has the whole chunk beside them; so has one whose last token is left, beside
    a full chunk of another."""
    world = World(num_slots=40, max_batch=5, prefill_chunk=8)
    decoding = [world.submit(prompt[:2], 9, ignore_eos=True) for prompt in (A, B, C)]
    assert [tokens for _, _, tokens in shape(planned(world))] == [2, 2, 2]
    world.commit()
    long = world.submit([4] * 9, 1)
    chunks = shape(planned(world))
    assert chunks == [*((one, 2, 1) for one in decoding), (long, 0, 8)]
    other = world.submit([3] * 16, 1)
    chunks = shape(planned(world))
    assert chunks[-2:] == [(long, 8, 1), (other, 0, 8)] and len(chunks) == 5
    world.finish()
    world.close()


def test_nobody_is_admitted_in_the_plan_that_pushes_another_out() -> None:
    """What is freed is for the one that needed it; and the one that was pushed out comes before those that
    came later."""
    world = World(num_slots=6, overcommit=2.0)
    for prompt in (A, B):
        world.submit(prompt[:4], 12, ignore_eos=True)
    while world.plan() and not world.scheduler.counts.retractions:
        if len(world.in_flight) > 1:
            world.commit()
        if len(world.asked) == 2 and world.cache.num_available == 0:
            world.submit(C[:2], 1, ignore_eos=True)
    assert len(world.asked) == 3 and set(world.cache.tables) == {"r0"}, (
        "the third waits, though there is room for it"
    )
    world.close()


LONG = [1, 2, 3, 4, 5, 6] * 8  # six steps of eight tokens


def test_a_long_prompt_has_every_second_step_however_many_short_ones_come() -> None:
    world = World(num_slots=60, max_batch=4, prefill_chunk=8)
    long = world.submit(LONG, 1)
    computed = []
    for turn in range(12):
        world.submit([turn % 6, turn % 5, 1, 2, 3, 4, 5, 6], 1)  # a whole step each
        computed.append(sum(num for request_id, _, num in shape(world.plan()) if request_id == long))
        if len(world.in_flight) > 1:
            world.commit()
    assert sum(computed) == len(LONG), "six whole steps in twelve"
    assert set(computed) == {0, 8}, "and the others went to those that are shorter"
    world.close()
