"""Prompts that are computed at once share the room of steps: the shortest first, in every other step the
oldest first."""

from __future__ import annotations

from tests.pure.engine.scheduling.scheduler_cases import A, B, planned, shape
from tests.pure.engine.scheduling.scheduler_tiers import Cold
from tests.pure.engine.scheduling.scheduler_world import World

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


def test_of_prompts_as_long_as_each_other_the_older_goes_first_in_every_step() -> None:
    world = World(num_slots=40, max_batch=4, prefill_chunk=8)
    first = world.submit(A, 1)
    world.submit(B, 1)
    assert [shape(planned(world)) for _ in range(2)] == [[(first, 0, 8)], [(first, 8, 8)]]
    world.close()


def test_requests_that_decode_are_part_of_every_step_whoever_has_its_room() -> None:
    world = World(num_slots=40, max_batch=4, prefill_chunk=8)
    decodes = world.submit(A[:4], 12, ignore_eos=True)
    planned(world)
    long, short = world.submit(LONG, 1), world.submit(B, 1)
    for _ in range(6):
        world.plan()
        plan = world.in_flight[-1]
        assert plan.chunks[0].request_id == decodes and plan.num_tokens == 9
        world.commit()
    assert {long, short} <= set(world.admitted)
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
