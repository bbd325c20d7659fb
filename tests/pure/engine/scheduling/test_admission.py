"""Who may start, when, and with which cached blocks; and defects that turn these tests red."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from penstock.contract import FinishReason, KvSource
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.errors import InvariantBroken
from tests.pure.engine.scheduling import scheduler_faults as faults
from tests.pure.engine.scheduling.scheduler_cases import A, B, C, Make, planned, shape
from tests.pure.engine.scheduling.scheduler_device import BLOCK
from tests.pure.engine.scheduling.scheduler_world import World


@pytest.fixture
def make() -> Make:
    return Scheduler


# --------------------------------------------------------------------------------------------------- matching


# Holds invariant 14: exactly one token is computed, without a write.
def test_a_full_match_of_whole_blocks_computes_the_last_token_and_writes_nothing(make: Make) -> None:
    world = World(make=make)
    world.submit(A[:8], 2)
    world.finish()
    again = world.submit(A[:8], 3, ignore_eos=True)
    plan = planned(world)
    chunk = plan.chunks[0]
    assert (
        shape(plan) == [(again, 7, 1)]
        and not chunk.writes
        and chunk.num_logits
        and list(chunk.tokens) == A[7:8]
    )
    plan = planned(world)
    assert shape(plan) == [(again, 8, 1)] and plan.chunks[0].writes and len(plan.chunks[0].slots) == 3
    world.close()
    source = world.asked[again].first.source  # type: ignore[union-attr]
    assert source is not None and (source.device, source.computed) == (7, 1)


def test_a_partial_match_computes_what_follows_it() -> None:
    world = World()
    world.submit(A[:12], 1)
    world.finish()
    longer, other = world.submit([*A[:8], 6, 6], 1), world.submit([*A[:6], 6], 1)
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


# Holds invariant 21: a request that scores its prompt has no match, no hold, no credit.
def test_an_echo_request_neither_holds_nor_uses_a_prefix_it_cannot_use(make: Make) -> None:
    world = World(num_slots=6, make=make)
    world.submit(A[:8], 1)
    world.finish()
    busy = world.submit(B[:8], 9, ignore_eos=True)
    planned(world)
    echo = world.submit(A[:8], 9, prompt_logprobs=1)
    assert world.step() and shape(world.plan()) == [(busy, 9, 1)]
    assert echo not in world.cache.tables and world.cache.stats().slots["device"].idle == 2, (
        "what waits holds nothing"
    )
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


# Holds invariant 21: with the cache off nothing is matched or kept.
def test_with_the_prefix_cache_off_nothing_is_shared_and_nothing_stays() -> None:
    world = World(prefix_cache=False)
    for _ in range(2):
        world.submit(A[:8], 2)
    assert shape(planned(world)) == [("r0", 0, 8)]
    world.close()
    assert world.cache.stats().slots[
        "device"
    ].idle == 0 and world.scheduler.counts.prompt_tokens == dataclasses.asdict(KvSource(computed=16))


def test_a_prefix_that_a_running_request_computes_is_waited_for_and_shared() -> None:
    world = World(prefill_chunk=64)
    first, second, other = (
        world.submit(A[:8], 3, ignore_eos=True),
        world.submit(A[:10], 1),
        world.submit(B[:5], 1),
    )
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


# -------------------------------------------------------------------------------------------------- admission


# Holds invariant 17: a promise is made only where memory can keep it.
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


def test_a_request_that_needs_all_of_a_large_device_runs_alone() -> None:
    """One slot in sixty-four is spared for transfers while others run, and for nobody otherwise: it would
    wait for ever."""
    world = World(num_slots=130)
    small = world.submit(A[:4], 5, ignore_eos=True)
    large = world.submit(B[:4], 130 * BLOCK - 4, ignore_eos=True)
    assert shape(planned(world)) == [(small, 0, 4)]
    while world.asked[small].ended is None:
        world.step()
    world.step()
    assert large in world.cache.tables
    world.cancel(large)
    world.close()


def test_the_last_generated_token_needs_no_room() -> None:
    world = World(num_slots=2)
    first, second = world.submit(A[:4], 1), world.submit(B[:4], 1)
    assert shape(planned(world)) == [(first, 0, 4), (second, 0, 4)]
    world.close()


# Holds invariant 18: matched blocks count once.
def test_matched_idle_blocks_are_not_counted_as_room_as_well(make: Make) -> None:
    world = World(num_slots=6, make=make)
    world.submit(A[:8], 1)
    world.finish()
    assert world.cache.stats().slots["device"].idle == 2
    busy = world.submit(B[:8], 9, ignore_eos=True)  # four blocks, two of them drawn at once
    assert shape(planned(world)) == [(busy, 0, 8)]
    # two more than the two it finds, and those two are promised
    late = world.submit(A[:8], 9, ignore_eos=True)
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


# Holds invariant 19: a request in line holds nothing.
def test_two_waiting_requests_do_not_starve_each_other() -> None:
    world = World(num_slots=5)
    running = world.submit(C[:4], 9, ignore_eos=True)
    planned(world)
    # five blocks each: the whole pool
    waiting = [world.submit(prompt[:12], 8, ignore_eos=True) for prompt in (A, B)]
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
    assert [(s.request_id, s.row) for s in plan.starts] == [(ids[0], 0), (ids[1], 1)]
    world.cancel(ids[0])
    assert [(s.request_id, s.row) for s in planned(world).starts] == [(ids[2], 0)]
    world.close()


# ----------------------------------------------------------------------------------------------------- faults

RED: list[tuple[Make, Callable[..., None]]] = [
    (faults.WritesOnAFullMatch, test_a_full_match_of_whole_blocks_computes_the_last_token_and_writes_nothing),
    (
        faults.LeavesNothingToCompute,
        test_a_full_match_of_whole_blocks_computes_the_last_token_and_writes_nothing,
    ),
    (faults.LetsEchoUseTheCache, test_an_echo_request_neither_holds_nor_uses_a_prefix_it_cannot_use),
    (faults.CountsIdleBlocksTwice, test_matched_idle_blocks_are_not_counted_as_room_as_well),
]


@pytest.mark.parametrize(
    ("fault", "test"), RED, ids=[f"{fault.__name__}-{test.__name__}" for fault, test in RED]
)
def test_a_broken_scheduler_turns_its_test_red(fault: Make, test: Callable[[Make], None]) -> None:
    with pytest.raises((AssertionError, InvariantBroken)):
        test(fault)
