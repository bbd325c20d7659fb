"""Steps, ends of requests, and the books of the scheduler; and defects that turn these tests red."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.contract import TOKEN_IN_FLIGHT, FinishReason, Request, Sampled, SamplingParams, StepResult
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.errors import InvariantBroken
from tests.pure.engine.scheduling import scheduler_faults as faults
from tests.pure.engine.scheduling.scheduler_cases import A, B, Make, planned, shape
from tests.pure.engine.scheduling.scheduler_world import World


@pytest.fixture
def make() -> Make:
    return Scheduler


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


def test_a_step_is_planned_behind_a_token_that_is_not_known_yet() -> None:
    world = World()
    world.submit(A[:3], 9, ignore_eos=True)
    planned(world)
    assert list(planned(world).chunks[0].tokens) == [TOKEN_IN_FLIGHT]
    world.commit()
    world.commit()
    known = world.outcome("r0")[0]
    assert list(planned(world).chunks[0].tokens) == known[-1:] and len(known) == 2
    world.close()


def test_nothing_is_planned_past_the_last_token() -> None:
    world = World()
    world.submit(A[:3], 2, ignore_eos=True)
    assert [shape(world.plan()) for _ in range(3)] == [[("r0", 0, 3)], [("r0", 3, 1)], []]
    world.close()


def test_what_was_computed_behind_a_stop_token_is_thrown_away() -> None:
    world = World(num_slots=10)
    stops = next(n for n in range(1, 16) if world.asked[world.submit(A[:n], 9)].finish is FinishReason.STOP)
    request = world.asked[f"r{stops - 1}"]
    world.close()
    assert request.ended is FinishReason.STOP and request.got == request.tokens and len(request.got) < 9


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


# Holds invariant 20: a cancel gives everything back after any number of steps.
@pytest.mark.parametrize("steps", range(6))
def test_a_cancelled_request_gives_everything_back_at_once_wherever_it_is(steps: int, make: Make) -> None:
    world = World(num_slots=4, prefill_chunk=4, make=make)
    first, waiting = world.submit(A[:9], 4, ignore_eos=True), world.submit(B[:9], 4, ignore_eos=True)
    for _ in range(steps):
        world.step()
    for request_id in (first, waiting):
        world.cancel(request_id)
        world.check()
    assert world.cache.num_available == 4 and not world.scheduler.has_work()
    assert world.scheduler.cancel(first) is None
    world.close()


def test_slots_carry_the_fence_of_the_newest_step_to_their_next_user(make: Make) -> None:
    world = World(num_slots=2, prefill_chunk=64, make=make)
    first, second = world.submit(A[:8], 0), world.submit(B[:8], 0)
    planned(world)
    world.cancel(first)  # while its step is in flight
    plan = planned(world)
    assert shape(plan) == [(second, 0, 8)] and plan.after == (("compute", 1),)
    world.close()


def test_a_step_in_flight_for_a_cancelled_request_changes_nothing_later() -> None:
    world = World(num_slots=3, prefill_chunk=64)
    first = world.submit(A[:8], 4, ignore_eos=True)
    planned(world)
    planned(world)
    world.cancel(first)
    second = world.submit(B[:8], 4, ignore_eos=True)
    assert shape(planned(world)) == [(second, 0, 8)], (
        "the same row and the same slots, behind two steps of another request"
    )
    world.close()
    assert world.outcome(second)[1] is FinishReason.LENGTH


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


def test_a_failed_step_ends_its_own_requests_and_no_others() -> None:
    world = World(num_slots=10, prefill_chunk=8)
    first, second = world.submit(A[:8], 6, ignore_eos=True), world.submit(B[:8], 6, ignore_eos=True)
    planned(world)
    planned(world)
    world.commit()
    events = world.commit(RuntimeError("device lost"))
    assert {(e.request_id, e.finish) for e in events} == {
        (first, FinishReason.ERROR),
        (second, FinishReason.ERROR),
    }
    assert all(e.error == "RuntimeError: device lost" for e in events)
    third = world.submit(A[:10], 2, ignore_eos=True)
    world.close()
    assert world.outcome(third)[1] is FinishReason.LENGTH


def test_what_a_failed_step_wrote_is_never_shared() -> None:
    world = World()
    world.submit(A[:8], 3)
    planned(world)
    world.commit(RuntimeError("device lost"))
    world.submit(A[:8], 3)
    assert shape(planned(world)) == [("r1", 0, 8)]
    world.close()


# -------------------------------------------------------------------------------------------------- its books


def test_an_id_cannot_be_added_twice() -> None:
    world = World()
    world.submit(A[:4])
    with pytest.raises(InvariantBroken, match="r0 was added twice"):
        world.scheduler.add(world.asked["r0"].request)
    world.close()


def test_results_are_taken_in_the_order_of_their_steps() -> None:
    world = World()
    world.submit(A[:4], 4, ignore_eos=True)
    planned(world)
    second = planned(world)
    with pytest.raises(InvariantBroken, match="step 1 was due"):
        world.scheduler.commit(StepResult(second.number, ()))


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


def test_a_pool_in_which_nothing_runs_has_room_for_the_largest_request() -> None:
    world = World(num_slots=4)
    for _ in range(3):  # the second and third find blocks of the first, and must evict the rest
        largest = world.submit(A[:12], 4, ignore_eos=True)
        world.finish()
        assert world.outcome(largest)[1] is FinishReason.LENGTH
    world.close()


# ----------------------------------------------------------------------------------------------------- faults

RED: list[tuple[Make, Callable[..., None]]] = [
    (faults.GivesSlotsBackWithoutAFence, test_slots_carry_the_fence_of_the_newest_step_to_their_next_user),
    (
        faults.GivesSlotsBackWithTheFenceOfTheLastResult,
        test_slots_carry_the_fence_of_the_newest_step_to_their_next_user,
    ),
]


@pytest.mark.parametrize(
    ("fault", "test"), RED, ids=[f"{fault.__name__}-{test.__name__}" for fault, test in RED]
)
def test_a_broken_scheduler_turns_its_test_red(fault: Make, test: Callable[[Make], None]) -> None:
    with pytest.raises((AssertionError, InvariantBroken)):
        test(fault)


def test_a_scheduler_that_keeps_the_blocks_of_the_cancelled_turns_its_test_red() -> None:
    with pytest.raises((AssertionError, InvariantBroken)):
        test_a_cancelled_request_gives_everything_back_at_once_wherever_it_is(
            2, faults.KeepsTheBlocksOfTheCancelled
        )
