"""What a request that was pushed out takes into its next life, and what it has to ask for again."""

from __future__ import annotations

from collections import Counter

import pytest

from penstock.contract import KvSource, Match, Sampled
from penstock.engine.scheduling.events import Events, SchedulerCounts
from penstock.engine.scheduling.stages import begin
from tests.pure.engine.scheduling.scheduler_cases import A, B
from tests.pure.engine.scheduling.scheduler_tiers import Cold
from tests.pure.engine.scheduling.scheduler_world import World
from tests.pure.engine.scheduling.staged import BLOCK, NoTable, life_of, waiting_of


def test_colder_tiers_are_asked_once_in_each_life() -> None:
    """What another request has saved meanwhile may be what it needs to come back."""
    world = World(num_slots=6, overcommit=2.0)
    asked: Counter[str] = Counter()
    lease = world.cache.lease

    def counted(owner: str, *given: object) -> object:
        asked[owner] += 1
        return lease(owner, *given)  # type: ignore[arg-type]

    ids = [world.submit(prompt[:4], 12, ignore_eos=True) for prompt in (A, B)]
    world.cache.lease = counted  # type: ignore[method-assign,assignment]
    while not world.scheduler.counts.retractions:
        world.plan()
        if len(world.in_flight) > 1:
            world.commit()
    assert [asked[i] for i in ids] == [1, 1]
    world.cache.reset(["device"])  # it has as little there as when it was asked for
    world.close()
    assert [asked[i] for i in ids] == [1, 2]


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
