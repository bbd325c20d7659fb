"""The scheduler at the edges of its limits: how far it looks ahead, and what takes room in a step."""

from __future__ import annotations

import pytest
from scheduler_cases import A, B, C, planned, shape
from scheduler_world import World

from penstock.engine.scheduling.scheduler import _LOOK_AHEAD


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
    """Three decode, and a prompt has the whole chunk beside them; so has one whose last token is left, beside a full chunk of another."""
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
    """Two blocks of four are left: a prompt of four and five tokens, of which the last is not fed back, fill them."""
    world = World(num_slots=4, max_batch=2, prefill_chunk=16)
    world.submit(B[:4], 5, ignore_eos=True)
    planned(world)
    second = world.submit(A[:4], max_tokens, ignore_eos=True)
    started = {request for request, _, _ in shape(world.plan())}
    assert (second in started) == fits
    world.finish()
    world.close()
