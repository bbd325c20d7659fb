"""Steps, turns of prompts, ends of requests, and the books of the scheduler."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.contract import (
    FinishReason,
    Request,
    Sampled,
    SamplingParams,
    StepResult,
)
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.errors import InvariantBroken
from tests.pure.engine.scheduling.scheduler_cases import A, B, C, planned, remembered, shape, tiers_of
from tests.pure.engine.scheduling.scheduler_tiers import Cold
from tests.pure.engine.scheduling.scheduler_world import World

# ------------------------------------------------------------------------------------------------------ steps


def test_prompts_are_computed_in_chunks_beside_decodes_that_come_first() -> None:
    world = World(num_slots=10, prefill_chunk=6)
    short, long = world.submit(A[:3], 9, ignore_eos=True), world.submit(B[:13], 2)
    assert shape(planned(world)) == [(short, 0, 3), (long, 0, 3)]
    assert shape(planned(world)) == [(short, 3, 1), (long, 3, 6)]
    assert shape(planned(world)) == [(short, 4, 1), (long, 9, 4)]
    assert [c.num_logits for c in world.in_flight[0].chunks] == [1, 0] and all(
        c.num_logits for c in world.in_flight[2].chunks
    )
    world.close()


def test_a_request_for_no_tokens_ends_when_its_prompt_is_computed() -> None:
    world = World(prefill_chunk=5)
    scored, plain = world.submit(A[:8], 0, prompt_logprobs=2), world.submit(B[:2], 0)
    for _ in range(3):
        world.plan()
    assert not any(c.num_logits for plan in world.in_flight for c in plan.chunks)
    world.close()
    for request_id in (scored, plain):
        first = world.asked[request_id].first
        assert (
            first is not None
            and first.finish is FinishReason.LENGTH
            and first.tokens == ()
            and first.source is not None
        )


def test_the_sources_of_all_prompt_tokens_sum_to_the_prompts() -> None:
    world = World(num_slots=4, overcommit=3.0)
    ids = [world.submit(prompt[:n], 6, ignore_eos=True) for n in (3, 8, 5) for prompt in (A, B)]
    world.close()
    counted = world.scheduler.counts.prompt_tokens
    assert (
        sum(counted.values()) == sum(len(world.asked[i].request.prompt) for i in ids)
        and counted["device"] > 0
    )


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


# Holds invariant 17: what can be drawn is checked against what is promised.
def test_check_sees_promises_that_memory_cannot_keep() -> None:
    world = World(num_slots=4)
    world.submit(A[:4], 12)
    planned(world)
    taken = world.cache.pool.try_reserve(2, "somebody")
    assert taken is not None
    with pytest.raises(InvariantBroken, match="3 blocks are promised, 1 can be drawn"):
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


@pytest.mark.parametrize(("max_tokens", "fits"), [(1, True), (5, True), (6, False)])
def test_a_life_is_as_long_as_what_is_fed_back(max_tokens: int, fits: bool) -> None:
    """Two blocks of four are left: a prompt of four and five tokens, of which the last is not fed back, fill
    them."""
    world = World(num_slots=4, max_batch=2, prefill_chunk=16)
    world.submit(B[:4], 5, ignore_eos=True)
    planned(world)
    second = world.submit(A[:4], max_tokens, ignore_eos=True)
    started = {request for request, _, _ in shape(world.plan())}
    assert (second in started) == fits
    world.finish()
    world.close()


def test_a_request_decodes_beside_an_older_one_whose_prompt_takes_the_whole_chunk() -> None:
    """The older one was loading when the other began, and comes first from then on, in every other step."""
    world = remembered(A[:8], num_slots=40, overlap_tokens=100)
    older = world.submit([*A[:8], *[4] * 20], 1)
    younger = world.submit(B[:2], 9, ignore_eos=True)
    assert shape(planned(world)) == [(younger, 0, 2)]
    tiers_of(world).launch("device")
    for lane in world.device.lanes:
        while lane.step():
            pass
    world.settle()
    assert sorted(shape(planned(world))) == sorted([(older, 8, 8), (younger, 2, 1)])
    assert sorted(shape(planned(world))) == sorted([(older, 16, 8), (younger, 3, 1)])
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


def test_a_request_waits_while_its_first_step_has_no_room_however_much_may_be_promised() -> None:
    world = World(num_slots=4, max_batch=2, prefill_chunk=16, overcommit=8.0)
    first = world.submit(A[:9], 2, ignore_eos=True)
    assert shape(planned(world)) == [(first, 0, 9)]
    second = world.submit(B[:8], 2, ignore_eos=True)
    assert shape(world.plan()) == [(first, 9, 1)], "one block is left, and its prompt takes two"
    world.close()
    assert world.outcome(second)[1] is FinishReason.LENGTH


@pytest.mark.parametrize("when", ["waiting", "running"])
def test_a_request_that_ends_before_its_first_token_has_no_source_and_counts_nowhere(when: str) -> None:
    world = World(num_slots=8, max_batch=1)
    if when == "waiting":
        world.submit(B[:4], 9, ignore_eos=True)
        planned(world)
    cancelled = world.submit(A[:8], 4)
    world.plan()
    event = world.scheduler.cancel(cancelled)
    assert event is not None and (event.finish, event.source, event.tokens) == (
        FinishReason.CANCELLED,
        None,
        (),
    )
    assert sum(world.scheduler.counts.prompt_tokens.values()) == 0


LONG = [1, 2, 3, 4, 5, 6] * 8  # six steps of eight tokens


def test_a_short_prompt_behind_a_long_one_is_answered_in_its_first_or_second_step() -> None:
    world = World(num_slots=40, max_batch=4, prefill_chunk=8)
    long = world.submit(LONG, 1)
    assert shape(planned(world)) == [(long, 0, 8)]
    short = world.submit(B[:6], 1)
    steps = [shape(planned(world))]
    world.commit()
    steps.append(shape(planned(world)))
    assert steps == [[(long, 8, 8)], [(short, 0, 6), (long, 16, 2)]]
    world.close()


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


def test_a_plan_that_comes_to_nothing_takes_nobodys_turn() -> None:
    """The engine asks for a step without host memory first, and then for any: both prompts have half of the
    steps all the same."""
    world = World(num_slots=30, max_batch=4, prefill_chunk=8, cold=Cold(60), num_resident=8)
    older, shorter = world.submit([1, 2, 3, 4, 5, 6] * 15, 1), world.submit([6, 5, 4, 3, 2, 1] * 11, 1)
    turns: list[str] = []
    for _ in range(200):
        world.device.lanes.run_all()
        world.settle()
        plan = world.plan(reads_host=False) or world.plan()
        both = all(asked.lives and asked.lives[0].paged and not asked.ended for asked in world.asked.values())
        if plan is not None and both and not any(chunk.num_logits for chunk in plan.chunks):
            turns += [chunk.request_id for chunk in plan.chunks]
        if world.in_flight and (plan is None or len(world.in_flight) > 1):
            world.commit()
        if all(asked.ended for asked in world.asked.values()):
            break
    assert len(turns) > 6 and 3 * min(turns.count(older), turns.count(shorter)) >= len(turns), turns
    world.close()
