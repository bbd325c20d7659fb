"""Requests whose prefix comes from the host tier, or whose own KV went there and comes back, also where loads
are late; and defects that turn these tests red."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.contract import FinishReason, KvSource
from penstock.errors import PenstockError
from tests.pure.engine.scheduling import tier_faults as faults
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


def test_a_device_prefix_and_a_host_continuation_stack_at_the_right_offset() -> None:
    world = remembered(A[:12])
    first = world.submit(A[:4], 1)
    world.finish()  # brings the first block back
    again = world.submit([*A[:12], 6], 1)
    assert world.plan() is None
    load = world.asked[again].load
    assert load is not None and load.num_blocks == 2 and world.cache.tables[again].num_slots == 4, (
        "with that of its last token"
    )
    world.close()
    assert source_of(world, again) == KvSource(device=4, host=8, computed=1)
    assert source_of(world, first).host == 3


def test_a_step_begins_on_a_load_that_is_under_way_where_nobody_else_computes() -> None:
    world = remembered(A[:8])
    again = world.submit([*A[:8], 6, 6], 1)
    assert world.plan() is None and world.state_of(again) == "loading"
    assert world.plan() is None, "there is no fence to wait for before the copies are launched"
    tiers_of(world).launch("device")
    plan = planned(world)
    assert shape(plan) == [(again, 8, 2)] and plan.loads == (again,)
    assert [arrival.layers for arrival in world.waits[plan.number].loads[again].arrivals or ()] == [
        (0, 3),
        (3, 6),
    ]
    world.commit()
    world.close()


def test_a_short_step_does_not_begin_before_its_load_is_nearly_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.kv.tiers.loads._LAST_BYTES", 1)
    world = remembered(A[:12], overlap_tokens=100)
    again = world.submit([*A[:12], 6], 1)
    world.plan()
    tiers = tiers_of(world)
    tiers.launch("device")
    assert world.plan() is None, "two copies are still to come"
    while not world.asked[again].load.nearly_landed():  # type: ignore[union-attr]
        assert tiers.move("device")
    plan = planned(world)
    assert shape(plan) == [(again, 12, 1)] and len(plan.loads) == 1
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


def test_a_request_that_waits_for_several_times_as_long_as_a_lease_lasts_still_finds_its_prefix() -> None:
    world = remembered(A[:8])
    busy = world.submit(B[:8], 9, ignore_eos=True)
    again = world.submit([*A[:8], 1], 8 * BLOCK - 16, ignore_eos=True)
    for num in range(1, 5):
        world.step()
        tiers_of(world).expire()
        world.step()
        assert tiers_of(world).host.counts.leases_expired == num and world.state_of(again) == "waiting"
    world.close()
    assert world.outcome(busy)[1] is FinishReason.LENGTH and source_of(world, again).host == 8


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


def test_a_retracted_request_waits_until_what_it_had_is_saved() -> None:
    world = crowded()
    world.cancel("r0")
    while world.in_flight:
        world.commit()
    turn_without(world, "host", 2)
    assert world.state_of("r1") == "retracted", "there is room, and what it had is on its way"
    world.device.lanes.run_all()
    world.settle()
    world.plan()
    assert world.state_of("r1") == "loading"
    world.close()


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

RED: list[tuple[faults.Fault, Callable[..., None]]] = [
    (
        faults.computes_over_what_has_not_come,
        test_a_step_begins_on_a_load_that_is_under_way_where_nobody_else_computes,
    ),
    (
        faults.begins_before_the_copies_are_launched,
        test_a_step_begins_on_a_load_that_is_under_way_where_nobody_else_computes,
    ),
    (
        faults.forgets_a_load_that_fails_when_it_has_set_off,
        test_a_load_that_fails_before_a_step_had_room_for_its_request_is_computed_instead,
    ),
    (faults.never_saves, test_a_retracted_request_resumes_with_nothing_computed_again),
    (
        faults.pushes_out_while_transfers_free_enough,
        test_nobody_is_pushed_out_while_transfers_under_way_free_enough,
    ),
    (faults.forgets_what_is_promised, test_two_waiting_requests_starve_each_other),
    (faults.waits_for_ever_for_a_late_load, test_prefetch_waits_for_one_stuck_load),
    (faults.keeps_others_waiting_for_a_late_load, test_prefetch_waits_for_one_stuck_load),
    (faults.evicts_what_is_leased, test_evicting_a_leased_block),
]


@pytest.mark.parametrize(
    ("fault", "test"), RED, ids=[f"{fault.__name__}-{test.__name__}" for fault, test in RED]
)
def test_a_defect_turns_its_test_red(
    fault: faults.Fault, test: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, PenstockError)):
        test()


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


def test_one_that_waited_too_long_keeps_the_place_of_its_arrival() -> None:
    world = remembered(A[:8], num_slots=4, max_batch=1)
    late = world.submit([*A[:8], 1], 3, ignore_eos=True)
    assert world.plan() is None
    others = [world.submit([2, 2, 2], 9, ignore_eos=True), world.submit([3, 3, 3], 9, ignore_eos=True)]
    tiers_of(world).make_late()
    world.plan()
    assert world.in_line() == [late, *others] and world.scheduler.num_by_state()["waiting"] == 3
    world.close()
    assert [i for i in world.admitted if i in (late, *others)] == [late, late, *others]


def pushed_out() -> tuple[World, str]:
    """A request that was retracted, and loads what it had; and nobody else."""
    world = World(num_slots=6, overcommit=2.0, cold=Cold(24))
    first, second = (
        world.submit(A[:8], 9, ignore_eos=True),
        world.submit([6, 5, 4, 3, 2, 1, 6, 5], 9, ignore_eos=True),
    )
    while world.state_of(second) != "retracted":
        world.step()
    while world.state_of(second) != "loading":
        if world.outcome(first)[1] is None:
            world.step()
        else:
            for lane in world.device.lanes:
                while not lane.name.endswith("to device") and lane.step():
                    pass
            world.settle()
            world.plan()
    assert len(world.asked[second].got) > 0
    return world, second


def test_one_that_was_pushed_out_before_it_waited_too_long_comes_back_when_all_of_it_fits() -> None:
    """As after any retraction: a second one would be thrashing."""
    world, second = pushed_out()
    tiers_of(world).make_late()
    urgent = world.submit([1, 2, 3], 8, priority=-1, ignore_eos=True)
    world.plan()
    assert (world.state_of(urgent), world.state_of(second)) == ("running", "retracted")
    assert world.scheduler.num_by_state() == {"waiting": 0, "loading": 0, "running": 1, "retracted": 1}
    world.close()
    assert world.scheduler.counts.retractions == 1
