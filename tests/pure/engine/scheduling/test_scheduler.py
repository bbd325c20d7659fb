"""What the scheduler does in situations that others got wrong; and defects that turn these tests red."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import scheduler_faults as faults
from scheduler_world import BLOCK, World

from penstock.contract import TOKEN_IN_FLIGHT, FinishReason, Request, Sampled, SamplingParams, StepPlan, StepResult
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.errors import InvariantBroken

A = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1, 2, 3, 4]
B = [6, 5, 4, 3, 2, 1, 6, 5, 4, 3, 2, 1, 6, 5, 4, 3]
C = [5, 5, 3, 3, 5, 5, 3, 3, 5, 5, 3, 3, 5, 5, 3, 3]

Make = type[Scheduler]


@pytest.fixture
def make() -> Make:
    return Scheduler


def planned(world: World) -> StepPlan:
    plan = world.plan()
    assert plan is not None
    return plan


def shape(plan: StepPlan | None) -> list[tuple[str, int, int]]:
    """Request, first position and number of tokens of every chunk."""
    return [] if plan is None else [(c.request_id, c.start, c.num_tokens) for c in plan.chunks]


# ------------------------------------------------------------------------------------------------------------ matching


def test_a_full_match_of_whole_blocks_computes_the_last_token_and_writes_nothing(make: Make) -> None:
    world = World(make=make)
    world.submit(A[:8], 2)
    world.finish()
    again = world.submit(A[:8], 3, ignore_eos=True)
    plan = planned(world)
    chunk = plan.chunks[0]
    assert shape(plan) == [(again, 7, 1)] and not chunk.writes and chunk.samples and list(chunk.tokens) == A[7:8]
    plan = planned(world)
    assert shape(plan) == [(again, 8, 1)] and plan.chunks[0].writes and len(plan.chunks[0].slots) == 3
    world.close()
    source = world.asked[again].first.source  # type: ignore[union-attr]
    assert source is not None and (source.device, source.computed) == (7, 1)


def test_a_partial_match_computes_what_follows_it() -> None:
    world = World()
    world.submit(A[:12], 1)
    world.finish()
    longer, other = world.submit(A[:8] + [6, 6], 1), world.submit([*A[:6], 6], 1)
    assert shape(planned(world)) == [(longer, 8, 2), (other, 4, 3)]
    world.close()


def test_blocks_of_generated_tokens_are_found_by_the_next_turn() -> None:
    world = World()
    first = world.submit(A[:6], 7, ignore_eos=True)
    world.finish()
    turn = [*A[:6], *world.outcome(first)[0], 1, 1]
    second = world.submit(turn, 1)
    assert shape(planned(world)) == [(second, 12, 3)], "the newest token's KV was never computed"
    world.close()


def test_an_echo_request_neither_holds_nor_uses_a_prefix_it_cannot_use(make: Make) -> None:
    world = World(num_slots=6, make=make)
    world.submit(A[:8], 1)
    world.finish()
    busy = world.submit(B[:8], 9, ignore_eos=True)
    planned(world)
    echo = world.submit(A[:8], 9, prompt_logprobs=1)
    assert world.step() and shape(world.plan()) == [(busy, 9, 1)]
    assert echo not in world.cache.tables and world.cache.stats().slots.idle == 2, "what waits holds nothing"
    world.close()
    source = world.asked[echo].first.source  # type: ignore[union-attr]
    assert source is not None and (source.device, source.computed) == (0, 8)
    assert world.seen["full match"] == 0


def test_what_an_echo_request_computes_is_there_for_others() -> None:
    world = World()
    world.submit(A[:8], 1, prompt_logprobs=0)
    world.finish()
    assert shape(planned(world) if world.submit(A[:8], 1) else None) == [("r1", 7, 1)]
    world.close()


def test_with_the_prefix_cache_off_nothing_is_shared_and_nothing_stays() -> None:
    world = World(prefix_cache=False)
    for _ in range(2):
        world.submit(A[:8], 2)
    assert shape(planned(world)) == [("r0", 0, 8)]
    world.close()
    assert world.cache.stats().slots.idle == 0 and world.scheduler.counts.prompt_tokens == {"device": 0, "computed": 16}


def test_a_prefix_that_a_running_request_computes_is_waited_for_and_shared() -> None:
    world = World(prefill_chunk=64)
    first, second, other = world.submit(A[:8], 3, ignore_eos=True), world.submit(A[:10], 1), world.submit(B[:5], 1)
    assert shape(planned(world)) == [(first, 0, 8), (other, 0, 5)], "it does not hold up those behind it"
    assert shape(planned(world)) == [(first, 8, 1)]
    world.commit()
    assert shape(planned(world)) == [(first, 9, 1), (second, 8, 2)]
    world.close()


def test_nobody_waits_for_a_prefix_whose_computation_was_cancelled() -> None:
    world = World(prefill_chunk=64)
    first, second = world.submit(A[:8], 3), world.submit(A[:10], 1)
    assert shape(planned(world)) == [(first, 0, 8)]
    world.cancel(first)
    assert shape(planned(world)) == [(second, 0, 10)]
    world.close()


# ----------------------------------------------------------------------------------------------------------- admission


def test_a_request_is_admitted_only_where_its_whole_life_fits() -> None:
    world = World(num_slots=4)
    first = world.submit(A[:4], 5, ignore_eos=True)  # 8 tokens of KV: two blocks
    second = world.submit(B[:4], 6, ignore_eos=True)  # 9: three
    third = world.submit(C[:4], 1)  # one
    assert shape(planned(world)) == [(first, 0, 4)]
    for _ in range(4):
        world.step()
        assert second not in world.cache.tables and third not in world.cache.tables, "nobody overtakes"
    world.close()
    assert world.outcome(second)[1] is FinishReason.LENGTH


def test_the_last_generated_token_needs_no_room() -> None:
    world = World(num_slots=2)
    first, second = world.submit(A[:4], 1), world.submit(B[:4], 1)
    assert shape(planned(world)) == [(first, 0, 4), (second, 0, 4)]
    world.close()


def test_matched_idle_blocks_are_not_counted_as_room_as_well(make: Make) -> None:
    world = World(num_slots=6, make=make)
    world.submit(A[:8], 1)
    world.finish()
    assert world.cache.stats().slots.idle == 2
    busy = world.submit(B[:8], 9, ignore_eos=True)  # four blocks, two of them drawn at once
    assert shape(planned(world)) == [(busy, 0, 8)]
    late = world.submit(A[:8], 9, ignore_eos=True)  # two more than the two it finds, and those two are promised
    world.step()
    world.check()
    assert late not in world.cache.tables
    world.close()


def test_blocks_that_others_hold_cost_an_admitted_request_nothing() -> None:
    world = World(num_slots=6)
    first = world.submit(A[:8], 9, ignore_eos=True)  # four blocks
    planned(world)
    second = world.submit(A[:8], 9, ignore_eos=True)  # four, of which two are the same
    world.step()
    assert shape(planned(world)) == [(first, 9, 1), (second, 7, 1)]
    assert world.cache.num_available == 3, "one drawn by the first; the full match has drawn none"
    world.close()


def test_two_waiting_requests_do_not_starve_each_other() -> None:
    world = World(num_slots=5)
    running = world.submit(C[:4], 9, ignore_eos=True)
    planned(world)
    waiting = [world.submit(prompt[:12], 8, ignore_eos=True) for prompt in (A, B)]  # five blocks each: the whole pool
    for _ in range(3):
        world.step()
        assert set(world.cache.tables) == {running}, "what waits holds nothing that the other needs"
    world.close()
    assert [world.outcome(w)[1] for w in waiting] == [FinishReason.LENGTH] * 2


def test_a_large_request_is_not_starved_by_a_stream_of_small_ones() -> None:
    world = World(num_slots=4, max_batch=4)
    world.submit(A[:4], 4, ignore_eos=True)
    world.step()
    large = world.submit(B[:12], 4, ignore_eos=True)
    for turn in range(12):
        world.submit([turn % 6, 1, 2], 2)
        world.step()
        if large in world.cache.tables:
            break
    assert large in world.cache.tables, "those that came later went first"
    world.close()


def test_rows_bound_the_batch_and_come_back_lowest_first() -> None:
    world = World(num_slots=10, max_batch=2)
    ids = [world.submit(prompt[:4], 2, ignore_eos=True) for prompt in (A, B, C)]
    plan = planned(world)
    assert [(s.request.id, s.row) for s in plan.starts] == [(ids[0], 0), (ids[1], 1)]
    world.cancel(ids[0])
    assert [(s.request.id, s.row) for s in planned(world).starts] == [(ids[2], 0)]
    world.close()


# --------------------------------------------------------------------------------------------------------------- steps


def test_prompts_are_computed_in_chunks_beside_decodes_that_come_first() -> None:
    world = World(num_slots=10, prefill_chunk=6)
    short, long = world.submit(A[:3], 9, ignore_eos=True), world.submit(B[:13], 2)
    assert shape(planned(world)) == [(short, 0, 3), (long, 0, 3)]
    assert shape(planned(world)) == [(short, 3, 1), (long, 3, 6)]
    assert shape(planned(world)) == [(short, 4, 1), (long, 9, 4)]
    assert [c.samples for c in world.in_flight[0].chunks] == [True, False] and all(c.samples for c in world.in_flight[2].chunks)
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
    assert not any(c.samples for plan in world.in_flight for c in plan.chunks)
    world.close()
    for request_id in (scored, plain):
        first = world.asked[request_id].first
        assert first is not None and first.finish is FinishReason.LENGTH and first.tokens == () and first.source is not None


def test_the_sources_of_all_prompt_tokens_sum_to_the_prompts() -> None:
    world = World(num_slots=4, overcommit=3.0)
    ids = [world.submit(prompt[:n], 6, ignore_eos=True) for n in (3, 8, 5) for prompt in (A, B)]
    world.close()
    counted = world.scheduler.counts.prompt_tokens
    assert sum(counted.values()) == sum(len(world.asked[i].request.prompt) for i in ids) and counted["device"] > 0


# ----------------------------------------------------------------------------------------------------------------- end


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
    assert shape(plan) == [(second, 0, 8)] and [f.number for f in plan.after] == [1]  # type: ignore[attr-defined]
    world.close()


def test_a_step_in_flight_for_a_cancelled_request_changes_nothing_later() -> None:
    world = World(num_slots=3, prefill_chunk=64)
    first = world.submit(A[:8], 4, ignore_eos=True)
    planned(world)
    planned(world)
    world.cancel(first)
    second = world.submit(B[:8], 4, ignore_eos=True)
    assert shape(planned(world)) == [(second, 0, 8)], "the same row and the same slots, behind two steps of another request"
    world.close()
    assert world.outcome(second)[1] is FinishReason.LENGTH


def test_an_id_can_be_used_again_while_a_step_of_its_former_owner_is_in_flight() -> None:
    world = World()
    sampling = SamplingParams(max_tokens=3)
    world.scheduler.add(Request("same", A[:4], sampling))
    old = world.scheduler.plan()
    assert old is not None and world.scheduler.cancel("same") is not None
    world.scheduler.add(Request("same", B[:4], sampling))
    assert world.scheduler.plan() is not None
    assert world.scheduler.commit(StepResult(old.number, [Sampled("same", (1,))])) == []
    events = world.scheduler.commit(StepResult(old.number + 1, [Sampled("same", (2,))]))
    assert [e.tokens for e in events] == [(2,)]


def test_a_failed_step_ends_its_own_requests_and_no_others() -> None:
    world = World(num_slots=10, prefill_chunk=8)
    first, second = world.submit(A[:8], 6, ignore_eos=True), world.submit(B[:8], 6, ignore_eos=True)
    planned(world)
    planned(world)
    world.commit()
    events = world.commit(RuntimeError("device lost"))
    assert {(e.request_id, e.finish) for e in events} == {(first, FinishReason.ERROR), (second, FinishReason.ERROR)}
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


def test_a_failed_request_says_why_and_gives_everything_back() -> None:
    world = World()
    request_id = world.submit(A[:8], 3)
    planned(world)
    event = world.scheduler.fail(request_id, "out of luck")
    assert event is not None and event.finish is FinishReason.ERROR and event.error == "out of luck"
    assert world.cache.num_available == 8 and world.scheduler.fail(request_id, "again") is None


# ---------------------------------------------------------------------------------------------------------- retraction


def crowded(make: Make) -> World:
    """Two requests of four blocks each in a pool of six, promised twice over: the second is pushed out at its thirteenth token."""
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
    assert world.scheduler.num_by_state() == {"waiting": 0, "running": 1, "retracted": 1}
    world.close()
    assert world.scheduler.counts.retractions == 1


def test_a_retracted_request_resumes_with_the_tokens_it_had_and_ends_as_if_alone() -> None:
    world = crowded(Scheduler)
    while "r1" not in world.cache.tables:
        assert world.step()
    resumed = world.in_flight[-1]
    (start,) = resumed.starts
    assert start.request.id == "r1" and list(start.output) == world.outcome("r1")[0] and len(start.output) > 4
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
    assert world.scheduler.num_by_state() == {"waiting": 0, "running": 1, "retracted": 0}
    world.close()


def test_a_retracted_request_resumes_only_when_its_newest_token_is_known(make: Make) -> None:
    world = crowded(make)
    assert world.samples_in_flight("r1") == 1
    world.cancel("r0")  # now there is room
    assert world.plan() is None
    world.commit()
    (start,) = planned(world).starts
    assert start.request.id == "r1" and len(start.output) == len(world.outcome("r1")[0])
    world.close()


def pushed_out_inside_its_prompt(make: Make, **sampling: int) -> World:
    """The second request is pushed out when half its prompt is computed, by a step that is still in flight."""
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
    """The older one came to run later, since it waited for a prefix: it draws after the younger one was planned."""
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
    assert world.seen["resume inside the prompt"] == 1 and source is not None and (source.device, source.computed) == (0, 16)


# ----------------------------------------------------------------------------------------------------------- its books


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
    scheduler._num_promised += 1


def _lose_a_row(scheduler: Scheduler) -> None:
    scheduler._free_rows.pop()


def _lend_a_row_twice(scheduler: Scheduler) -> None:
    scheduler._free_rows.append(0)


@pytest.mark.parametrize("damage", [_promise_too_much, _lose_a_row, _lend_a_row_twice])
def test_check_sees_books_that_do_not_add_up(damage: Callable[[Scheduler], None]) -> None:
    world = World()
    world.submit(A[:4], 9)
    planned(world)
    world.scheduler.check()
    damage(world.scheduler)
    with pytest.raises(InvariantBroken):
        world.scheduler.check()


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


# -------------------------------------------------------------------------------------------------------------- faults

RED: list[tuple[Make, Callable[..., None]]] = [
    (faults.WritesOnAFullMatch, test_a_full_match_of_whole_blocks_computes_the_last_token_and_writes_nothing),
    (faults.LeavesNothingToCompute, test_a_full_match_of_whole_blocks_computes_the_last_token_and_writes_nothing),
    (faults.LetsEchoUseTheCache, test_an_echo_request_neither_holds_nor_uses_a_prefix_it_cannot_use),
    (faults.CountsIdleBlocksTwice, test_matched_idle_blocks_are_not_counted_as_room_as_well),
    (faults.GivesSlotsBackWithoutAFence, test_slots_carry_the_fence_of_the_newest_step_to_their_next_user),
    (faults.GivesSlotsBackWithTheFenceOfTheLastResult, test_slots_carry_the_fence_of_the_newest_step_to_their_next_user),
    (faults.RetractsTheOldest, test_under_pressure_the_youngest_gives_way_and_the_oldest_goes_on),
    (faults.ResumesWithATokenInFlight, test_a_retracted_request_resumes_only_when_its_newest_token_is_known),
    (faults.SealsForAnEarlierLife, test_a_step_from_before_a_retraction_seals_nothing_of_the_table_after_it),
    (faults.DoublesPromptLogprobs, test_prompt_logprobs_of_a_request_pushed_out_inside_its_prompt_are_not_doubled),
    (faults.LosesPromptLogprobsOfAnEarlierLife, test_prompt_logprobs_of_a_step_that_a_retraction_overtook_are_not_lost),
    (faults.ForgetsARetractedPlan, test_a_request_pushed_out_of_the_plan_that_already_had_its_chunk_resumes),
]


@pytest.mark.parametrize(("fault", "test"), RED, ids=[f"{fault.__name__}-{test.__name__}" for fault, test in RED])
def test_a_broken_scheduler_turns_its_test_red(fault: Make, test: Callable[[Make], None]) -> None:
    with pytest.raises((AssertionError, InvariantBroken)):
        test(fault)


def test_a_scheduler_that_keeps_the_blocks_of_the_cancelled_turns_its_test_red() -> None:
    with pytest.raises((AssertionError, InvariantBroken)):
        test_a_cancelled_request_gives_everything_back_at_once_wherever_it_is(2, faults.KeepsTheBlocksOfTheCancelled)
