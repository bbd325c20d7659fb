"""Requests that write more than was expected of them: all of them end, none is pushed out again and again,
and promises are kept."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from penstock.engine.scheduling.budget import blocks_for
from penstock.engine.scheduling.stages import State
from tests.pure.engine.scheduling.scheduler_cases import A, B, C
from tests.pure.engine.scheduling.scheduler_device import BLOCK
from tests.pure.engine.scheduling.scheduler_tiers import Cold
from tests.pure.engine.scheduling.scheduler_world import World
from tests.support.guesses import Guess

NUM_SLOTS = 16
HOSTS = {"host memory": 64, "little host memory": 3, "no host memory": 0}


def a_world(num_more: int = 1, num_slots: int = NUM_SLOTS, num_host: int = 64, **settings: int) -> World:
    cold = Cold(num_host, postpones=True) if num_host else None
    sizes = {"num_slots": num_slots, "prefill_chunk": 8, "max_batch": 8, **settings}
    return World(**sizes, cold=cold, lengths=Guess(num_more))


def ask(world: World, prompt: list[int], max_tokens: int, priority: int = 0) -> str:
    return world.submit(prompt, max_tokens, priority, ignore_eos=True)


def num_retractions(world: World) -> Counter[str]:
    return Counter(request_id for request_id, state in world.moves if state is State.RETRACTED)


def states(world: World, *request_ids: str) -> list[str]:
    return [world.state_of(request_id) for request_id in request_ids]


# Holds invariant 17: what was promised at admission can be drawn, however many outlive their promises.
def test_as_many_run_as_fit_by_what_they_are_expected_to_write() -> None:
    world = a_world(num_slots=8)
    for at in range(4):
        ask(world, A[at : at + 4], 24)
    world.plan()
    assert len(world.cache.tables) == 4, "their whole lives take seven blocks each"
    world.close()


def test_a_request_that_outlives_its_promise_gets_more_where_there_is_room() -> None:
    world = a_world()
    ask(world, A[:4], 40)
    world.close()
    assert world.scheduler.counts.retractions == 0


def test_one_that_has_outlived_its_promise_leaves_and_one_within_its_own_stays() -> None:
    """The younger one was promised all of its life. The older one needs a block more than there is: it makes
    way itself."""
    world = a_world(num_more=8, num_slots=10)
    older = ask(world, A[:4], 24)
    younger = ask(world, [*B, *C][:20], 8)
    while not world.scheduler.counts.retractions:
        assert world.step()
    assert states(world, older, younger) == ["retracted", "running"]
    world.close()
    assert num_retractions(world) == {older: 1}


def test_of_those_that_have_outlived_their_promises_the_youngest_leaves() -> None:
    world = a_world(num_slots=8)
    first, second, third = (ask(world, prompt[:4], 24) for prompt in (A, B, C))
    while not world.scheduler.counts.retractions:
        assert world.step()
    assert states(world, first, second, third) == ["running", "running", "retracted"]
    world.close()


def test_a_lower_priority_leaves_first_though_it_came_first() -> None:
    world = a_world(num_slots=8)
    low, high, other = (ask(world, prompt[:4], 24, priority) for prompt, priority in ((A, 1), (B, 0), (C, 0)))
    while not world.scheduler.counts.retractions:
        assert world.step()
    assert states(world, low, high, other) == ["retracted", "running", "running"]
    world.close()


def test_one_that_was_pushed_out_comes_back_when_there_is_room_for_twice_what_it_has_written() -> None:
    world = a_world(num_slots=8)
    for prompt in (A, B, C):
        ask(world, prompt[:4], 24)
    while not world.scheduler.counts.retractions:
        assert world.step()
    pushed_out = next(iter(num_retractions(world)))
    num_written = len(world.asked[pushed_out].got) + world.samples_in_flight(pushed_out)
    while world.state_of(pushed_out) == "retracted":
        assert world.step()
    running = world.scheduler.running.requests[pushed_out]
    assert running.promised >= blocks_for(4 + min(24, 2 * num_written) - 1, BLOCK)
    world.close()


@pytest.mark.parametrize("num_host", HOSTS.values(), ids=HOSTS)
@pytest.mark.parametrize("seed", range(12))
def test_what_a_request_has_written_doubles_from_one_retraction_to_the_next(seed: int, num_host: int) -> None:
    """All write to the end of the context, and the estimate is always wrong. So no request is retracted
    often, and all end."""
    r = random.Random(seed)
    num_slots = r.randint(6, 2 * NUM_SLOTS)
    world = a_world(r.choice((1, 2, 5)), num_slots, num_host, max_batch=r.choice((4, 8, 16)))
    for at in range(r.randint(6, 16)):
        prompt = (A, B, C)[at % 3][: r.randint(1, 9)]
        ask(world, prompt, num_slots * BLOCK - len(prompt) - r.choice((0, 0, 5)), r.choice((0, 0, 0, 1)))
        for _ in range(r.randint(0, 6)):
            world.step()
    written: dict[str, int] = {}
    while world.scheduler.has_work():
        num_seen = len(world.moves)
        world.step()
        world.check()
        for request_id, state in world.moves[num_seen:]:
            if state is State.RETRACTED:
                num_written = len(world.asked[request_id].got) + world.samples_in_flight(request_id)
                assert num_written >= 2 * written.get(request_id, 0), f"{request_id} left too soon"
                written[request_id] = num_written
    world.close()
    assert num_slots < 12 or written, "some were pushed out"


@pytest.mark.parametrize("num_host", HOSTS.values(), ids=HOSTS)
def test_one_that_was_pushed_out_is_not_starved_by_those_that_keep_coming(num_host: int) -> None:
    """Another request comes whenever one has ended; all write far more than was expected."""
    world = a_world(num_slots=10, num_host=num_host)
    first = ask(world, A[:4], 36)
    num_turns = 0
    while world.state_of(first) != "ended":
        if len(world.scheduler.lives) < 6:
            ask(world, [*B[: 1 + num_turns % 7], *C[:3]], 20)
        assert world.step()
        world.check()
        num_turns += 1
        assert num_turns < 400, "it is starved"
    world.close()


@pytest.mark.parametrize("num_host", HOSTS.values(), ids=HOSTS)
def test_what_is_computed_again_is_no_more_than_what_is_written(num_host: int) -> None:
    """Of each request, prompts aside: since what it has written doubles between two retractions."""
    world = a_world(num_slots=10, num_host=num_host)
    for at in range(6):
        ask(world, A[at : at + 4], 36)
    world.close()
    computed = Counter[str]()
    for plan in world.plans:
        for chunk in plan.chunks:
            computed[chunk.request_id] += len(chunk.tokens)
    retractions = num_retractions(world)
    assert sum(retractions.values()) > 0
    for request_id, num in computed.items():
        assert num <= 2 * 36 + 4 * (1 + retractions[request_id]) + retractions[request_id] * BLOCK
    if num_host > 10:
        most = 6 * (36 + 4) + 2 * sum(retractions.values())
        assert sum(computed.values()) <= most, "what was saved is not computed again"
