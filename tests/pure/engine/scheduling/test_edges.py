"""The scheduler at the edges of its limits: how far it looks ahead, and what takes room in a step."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.contract import Chunk, FinishReason
from penstock.engine.scheduling.admission import _LOOK_AHEAD
from penstock.engine.scheduling.steps import NextStep
from tests.pure.engine.scheduling.scheduler_cases import A, B, C, planned, remembered, shape, tiers_of
from tests.pure.engine.scheduling.scheduler_world import World
from tests.pure.engine.scheduling.staged import life_of, waiting_of


@pytest.mark.parametrize("num_waiting", [1, _LOOK_AHEAD - 1, _LOOK_AHEAD, _LOOK_AHEAD + 1])
def test_others_go_ahead_of_so_many_that_wait_for_a_prefix_and_not_of_more(num_waiting: int) -> None:
    world = World(num_slots=40, max_batch=3, prefill_chunk=8)
    first = world.submit(A[:12], 1)
    assert shape(planned(world)) == [(first, 0, 8)]
    for _ in range(num_waiting):
        world.submit(A[:12], 1)
    other = world.submit(B[:3], 1)
    ahead = [(other, 0, 3)] if num_waiting < _LOOK_AHEAD else []
    assert shape(planned(world)) == [(first, 8, 4), *ahead]
    world.finish()
    world.close()


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


def test_what_one_prompt_leaves_of_a_chunk_is_the_next_ones_and_no_more() -> None:
    world = World(num_slots=40, max_batch=5, prefill_chunk=8)
    first, second, third = (world.submit(prompt, 1) for prompt in (A[:5], B[:6], C[:4]))
    assert shape(planned(world)) == [(first, 0, 5), (second, 0, 3)]
    assert shape(planned(world)) == [(second, 3, 3), (third, 0, 4)]
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


def test_a_request_that_leaves_before_a_step_is_launched_takes_no_part_in_it() -> None:
    step, no_slots = NextStep(), np.empty(0, np.int32)
    chunks = {name: Chunk(name, 0, 0, (1,), no_slots, True, 1) for name in ("stays", "leaves")}
    step.decodes, step.prefills = list(chunks.values()), list(chunks.values())
    step.drop("leaves")
    assert step.decodes == step.prefills == [chunks["stays"]]


@pytest.mark.parametrize(
    ("num_generated", "extended"), [(0, False), (3, False), (4, True), (7, True), (8, True)]
)
def test_keys_are_extended_with_every_block_that_was_generated(num_generated: int, extended: bool) -> None:
    """A prompt of two blocks of four, and what a request had generated when it was retracted."""
    world = World(num_slots=8)
    prompt = A[:8]
    prefix = world.cache.prefix_of(prompt)
    assert prefix is not None and len(prefix.keys) == 2
    life = life_of(prompt, 20, prefix=prefix)
    life.tokens += [3] * num_generated
    world.scheduler.admission.is_pending(waiting_of(life))
    assert life.prefix is not None and len(life.prefix.keys) == 2 + num_generated // 4
    assert (life.prefix is not prefix) == extended and tuple(life.prefix.keys[:2]) == tuple(prefix.keys)
