"""Requests whose prefix comes from the host tier, or whose own KV went there and comes back, also where loads
are late; and defects that turn these tests red."""

from __future__ import annotations

import pytest

from penstock.contract import FinishReason, KvSource
from tests.pure.engine.scheduling.scheduler_cases import (
    A,
    B,
    C,
    planned,
    remembered,
    shape,
    source_of,
    tiers_of,
    turn_without,
)
from tests.pure.engine.scheduling.scheduler_device import BLOCK
from tests.pure.engine.scheduling.scheduler_tiers import Cold
from tests.pure.engine.scheduling.scheduler_world import World

# --------------------------------------------------------------------------------------------------- a prefix


def test_a_prefix_in_the_host_tier_is_promoted_and_the_rest_computed() -> None:
    world = remembered(A[:8])
    again = world.submit([*A[:8], 6, 6], 2, ignore_eos=True)
    assert world.plan() is None and world.state_of(again) == "loading"
    assert world.scheduler.num_by_state() == {"waiting": 0, "loading": 1, "running": 0, "retracted": 0}
    world.device.lanes.run_all()
    world.settle()
    plan = planned(world)
    assert shape(plan) == [(again, 8, 2)] and plan.loads == () and plan.chunks[0].writes
    world.close()
    assert source_of(world, again) == KvSource(host=8, computed=2)


def test_a_step_begins_on_a_load_that_is_under_way_where_nobody_else_computes() -> None:
    world = remembered(A[:8])
    again = world.submit([*A[:8], 6, 6], 1)
    assert world.plan() is None and world.state_of(again) == "loading"
    assert world.plan() is None, "there is no fence to wait for before the copies are launched"
    tiers_of(world).launch("device")
    plan = planned(world)
    assert shape(plan) == [(again, 8, 2)] and plan.loads == (again,)
    assert [arrival.layers for arrival in world.log.waits[plan.number].loads[again].arrivals or ()] == [
        (0, 3),
        (3, 6),
    ]
    world.commit()
    world.close()


def test_a_step_never_waits_for_a_load_while_others_could_be_computed() -> None:
    world = remembered(A[:8])
    busy = world.submit(B[:4], 9, ignore_eos=True)
    planned(world)
    loading = world.submit([*A[:8], 6], 1)
    world.step()
    tiers_of(world).launch("device")
    plan = planned(world)
    assert shape(plan) == [(busy, 5, 1)] and plan.loads == () and world.state_of(loading) == "loading"
    world.close()


def test_a_load_that_fails_before_a_step_had_room_for_its_request_is_computed_instead() -> None:
    world = remembered(A[:4], B[:8], C[:4], num_slots=4, prefill_chunk=64, overcommit=4.0)
    first = world.submit([*A[:4], 1, 1], 1)  # wants a block behind the one that comes
    others = [world.submit([*B[:8], 1], 1), world.submit(C[:4], 1)]
    assert world.plan() is None and [world.state_of(i) for i in (first, *others)] == ["loading"] * 3
    tiers = tiers_of(world)
    tiers.launch("device")
    assert world.plan() is None, (
        "it has set off; the youngest gives way, and its block is free when its load is over"
    )
    assert [world.state_of(i) for i in (first, *others)] == ["running", "loading", "retracted"]
    tiers.promotions.fail_next = 1
    world.close()
    assert source_of(world, first) == KvSource(computed=6)


# ----------------------------------------------------------------------------------------- retract and resume


def crowded(**world: int) -> World:
    """Two requests of four blocks each in a pool of six, promised twice over, until the second has been
    pushed out."""
    made = World(num_slots=6, overcommit=2.0, cold=Cold(24), **world)
    for prompt in (A[:4], B[:3]):
        made.submit(prompt, 12, ignore_eos=True)
    while not made.scheduler.counts.retractions:
        made.settle()
        made.plan()
        if len(made.in_flight) > 1:
            made.commit()
            made.device.lanes.run_all()
    return made


def test_a_retracted_request_resumes_with_nothing_computed_again() -> None:
    world = crowded()
    while not world.asked["r1"].lives[1:]:
        assert world.step()
        world.check()
    life = world.asked["r1"].lives[-1]
    known = len(world.asked["r1"].known)
    chunk = next(c for plan in world.in_flight for c in plan.chunks if c.request_id == "r1")
    assert (chunk.start, chunk.num_tokens) == (known - 1, 1) and chunk.start % BLOCK and life.end == known
    world.close()
    alone = World(num_slots=64)
    for prompt in (A[:4], B[:3]):
        alone.submit(prompt, 12, ignore_eos=True)
    alone.close()
    assert [world.outcome(i) for i in world.asked] == [alone.outcome(i) for i in alone.asked]
    assert world.scheduler.counts.retractions == 1 and world.seen["resume with its tail"] == 1


def test_nobody_is_pushed_out_while_transfers_under_way_free_enough() -> None:
    world = World(num_slots=6, overcommit=4.0, prefill_chunk=64, cold=Cold(24))
    gone = world.submit(C[:8], 1, ignore_eos=True)
    stays = [world.submit(A[:4], 9, ignore_eos=True), world.submit(B[:4], 9, ignore_eos=True)]
    turn_without(world, "host", 3)
    assert world.outcome(gone)[1] is FinishReason.LENGTH and world.cache.stats().slots["device"].pinned == 2
    turn_without(world, "host", 6)
    assert world.scheduler.counts.retractions == 0, "two blocks are about to be free"
    assert [world.state_of(i) for i in stays] == ["running"] * 2
    world.close()


LONG = 9  # tokens to generate: two more blocks than the prompt's


def loading(*prompts: list[int], **world: object) -> tuple[World, str]:
    """A world in which the last request waits for two blocks, and the first of their copies has begun to
    write."""
    made = remembered(A[:8], *prompts, **world)
    request_id = made.submit([*A[:8], 1], 4, ignore_eos=True)
    assert made.plan() is None and made.state_of(request_id) == "loading"
    tiers = tiers_of(made)
    tiers.launch("device")
    while tiers.lane("device").begun() is None:
        assert tiers.move("device")
    return made, request_id


# -------------------------------------------------------------------------------------------------- admission


# Holds invariant 19: a request in line holds nothing that another needs.
def test_two_waiting_requests_starve_each_other() -> None:
    world = remembered(A[:12], B[:12], num_slots=8)
    # seven blocks, and five
    first, second = world.submit(A[:12], 16, ignore_eos=True), world.submit(B[:12], 8, ignore_eos=True)
    world.plan()
    assert set(world.cache.tables) == {first}, "what waits holds nothing that the other needs"
    assert len(tiers_of(world).host.leases) == 1
    world.close()
    assert [world.outcome(i)[1] for i in (first, second)] == [FinishReason.LENGTH] * 2
    assert [source_of(world, i).host for i in (first, second)] == [11, 11]


# -------------------------------------------------------------------------------------------------- transfers


def test_prefetch_waits_for_one_stuck_load() -> None:
    world, stuck = loading(B[:8], num_slots=10, max_batch=4)
    same, other, new = (
        world.submit([*A[:8], 2], 1),
        world.submit([*B[:8], 2], 1),
        world.submit(C[:5], 2, ignore_eos=True),
    )
    turn_without(world, "device", 3)
    assert world.outcome(new)[1] is FinishReason.LENGTH, "others run while it is waited for"
    tiers_of(world).make_late()
    turn_without(world, "device", 16)
    assert [world.outcome(i)[1] for i in (stuck, same, other)] == [FinishReason.LENGTH] * 3
    assert world.cache.stats().slots["device"].pinned == 2, "it is still stuck, with its slots"
    world.close()


# -------------------------------------------------------------------------------------------------- host pool


def test_evicting_a_leased_block() -> None:
    world = remembered(A[:8], num_slots=6, num_host=4)
    # seals four blocks, and the host has room for two beside those of A
    busy = world.submit(B[:8], LONG, ignore_eos=True)
    planned(world)
    waiting = world.submit([*A[:8], 1], LONG, ignore_eos=True)
    while world.asked[busy].ended is None:
        world.step()
        world.check()
    assert tiers_of(world).host.counts.landed > 4, "more came than there is room for"
    world.close()
    assert source_of(world, waiting).host == 8


# ----------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("lands", [True, False])
def test_one_that_had_waited_too_long_for_a_load_asks_for_no_other(lands: bool) -> None:
    world = remembered(A[:8], num_slots=4)
    late = world.submit([*A[:8], 1], 3, ignore_eos=True)
    assert world.plan() is None and world.state_of(late) == "loading"
    tiers_of(world).make_late()
    assert world.plan() is None and world.state_of(late) == "waiting", (
        "half of the device is still being loaded into"
    )
    assert world.scheduler.lives[late].running is None
    tiers_of(world).promotions.fail_next = 0 if lands else 1
    world.close()
    assert world.seen["promotion"] == 1
    assert source_of(world, late) == (KvSource(device=8, computed=1) if lands else KvSource(computed=9)), (
        "what came after all is there"
    )
