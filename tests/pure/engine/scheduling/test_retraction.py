"""Requests that give way under pressure or outlive their promises, what they take into their next life, and
defects that turn these tests red."""

from __future__ import annotations

import random

import pytest

from penstock.contract import KvSource, Match, Sampled
from penstock.engine.scheduling.events import Events, SchedulerCounts
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.stages import State, begin
from tests.pure.engine.scheduling.scheduler_cases import A, B, C, Make, planned, shape
from tests.pure.engine.scheduling.scheduler_device import BLOCK
from tests.pure.engine.scheduling.scheduler_tiers import Cold
from tests.pure.engine.scheduling.scheduler_world import World
from tests.pure.engine.scheduling.staged import NoTable, life_of, waiting_of
from tests.support.guesses import Guess


@pytest.fixture
def make() -> Make:
    return Scheduler


# ------------------------------------------------------------------------------------------------- retraction


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


# ----------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("scored", [False, True])
def test_what_a_request_has_is_saved_for_its_next_life_where_that_can_use_it(scored: bool) -> None:
    """One that scores its prompt computes all of it anew: it would wait for a copy that nobody reads."""
    world = World(num_slots=6, prefill_chunk=8, overcommit=4.0, cold=Cold(24))
    world.submit(A[:8], 9, ignore_eos=True)
    pushed = world.submit(B[:16], 4, ignore_eos=True, **({"prompt_logprobs": 0} if scored else {}))
    while not world.scheduler.counts.retractions:
        world.plan()
        if len(world.in_flight) > 1:
            world.commit()
    waiting = world.scheduler.lives[pushed].waiting
    assert waiting is not None and (waiting.lease is None) == scored
    world.close()


def sources(*lives: int) -> KvSource:
    """Of a prompt of four blocks, which finds so many on the device in each of its lives and is pushed out
    inside its prompt."""
    life = life_of(range(4 * BLOCK))
    for num_blocks in lives:
        begin(waiting_of(life), 0, NoTable(), Match(num_blocks, 0, False), BLOCK)  # type: ignore[arg-type]
        life.ran = True
    event = Events((), SchedulerCounts()).of_tokens(life, Sampled("r", (7,)))
    assert event.source is not None
    return event.source


def test_what_is_found_no_more_was_computed_and_what_is_found_later_was_its_own() -> None:
    assert sources(3) == KvSource(device=12, computed=4)
    assert sources(3, 1) == KvSource(device=4, computed=12)
    assert sources(1, 3) == KvSource(device=4, computed=12)
    assert sources(2, 0, 2) == KvSource(computed=16)


NUM_SLOTS = 16
HOSTS = {"host memory": 64, "little host memory": 3, "no host memory": 0}


def a_world(num_more: int = 1, num_slots: int = NUM_SLOTS, num_host: int = 64, **settings: int) -> World:
    cold = Cold(num_host, postpones=True) if num_host else None
    sizes = {"num_slots": num_slots, "prefill_chunk": 8, "max_batch": 8, **settings}
    return World(**sizes, cold=cold, lengths=Guess(num_more))


def ask(world: World, prompt: list[int], max_tokens: int, priority: int = 0) -> str:
    return world.submit(prompt, max_tokens, priority, ignore_eos=True)


def states(world: World, *request_ids: str) -> list[str]:
    return [world.state_of(request_id) for request_id in request_ids]


def test_a_lower_priority_leaves_first_though_it_came_first() -> None:
    world = a_world(num_slots=8)
    low, high, other = (ask(world, prompt[:4], 24, priority) for prompt, priority in ((A, 1), (B, 0), (C, 0)))
    while not world.scheduler.counts.retractions:
        assert world.step()
    assert states(world, low, high, other) == ["retracted", "running", "running"]
    world.close()


@pytest.mark.parametrize("num_host", HOSTS.values(), ids=HOSTS)
@pytest.mark.parametrize("seed", range(5))
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
        num_seen = len(world.log.moves)
        world.step()
        world.check()
        for request_id, state in world.log.moves[num_seen:]:
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
