"""Requests whose prefix comes from the host tier, or whose own KV went there and comes back; and defects that
turn these tests red."""

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


def test_others_run_while_a_request_is_loading() -> None:
    world = remembered(A[:8])
    loading, other = world.submit([*A[:8], 1], 2, ignore_eos=True), world.submit(B[:5], 3, ignore_eos=True)
    assert shape(planned(world)) == [(other, 0, 5)]
    turn_without(world, "device", 4)
    assert world.outcome(other)[1] is FinishReason.LENGTH and world.state_of(loading) == "loading"
    world.close()


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


def test_an_identical_promotion_under_way_is_shared_and_not_repeated() -> None:
    world = remembered(A[:8])
    first, second = world.submit([*A[:8], 1], 1), world.submit([*A[:8], 2], 1)
    world.plan()
    assert [world.state_of(i) for i in (first, second)] == ["loading", "waiting"]
    world.device.lanes.run_all()
    world.settle()
    assert shape(planned(world)) == [(first, 8, 1), (second, 8, 1)]
    world.close()
    assert world.seen["promotion"] == 1
    assert (source_of(world, first).host, source_of(world, second).device) == (8, 8)


def test_a_prefix_that_is_not_worth_loading_is_computed() -> None:
    world = remembered(A[:8])
    tiers_of(world).worth = False
    again = world.submit([*A[:8], 1], 1)
    assert shape(planned(world))[0][:2] == (again, 0)
    world.close()
    assert source_of(world, again) == KvSource(computed=9)


def test_without_a_device_cache_every_prefix_comes_from_the_host() -> None:
    world = remembered(A[:8], prefix_cache=False)
    for _ in range(2):
        again = world.submit([*A[:8], 1], 1)
        world.finish()
        assert source_of(world, again) == KvSource(host=8, computed=1)
    assert world.cache.stats().slots["device"].idle == 0
    world.close()


def test_a_lease_that_has_expired_is_taken_again_when_its_request_is_planned() -> None:
    world = remembered(A[:8])
    busy = world.submit(B[:8], 9, ignore_eos=True)
    again = world.submit([*A[:8], 1], 8 * BLOCK - 16, ignore_eos=True)
    world.step()
    tiers_of(world).expire()
    world.step()
    assert tiers_of(world).host.counts.leases_expired == 1 and world.state_of(again) == "waiting"
    world.close()
    assert world.outcome(busy)[1] is FinishReason.LENGTH and source_of(world, again).host == 8


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


def test_a_load_that_fails_is_computed_instead_and_nobody_notices() -> None:
    world = remembered(A[:8])
    again = world.submit([*A[:8], 1], 3, ignore_eos=True)
    world.plan()
    tiers_of(world).promotions.fail_next = 1
    world.device.lanes.run_all()
    world.settle()
    assert shape(planned(world)) == [(again, 0, 8)]
    world.close()
    assert source_of(world, again) == KvSource(computed=9)


def test_a_load_that_fails_under_a_step_sets_its_requests_back() -> None:
    world = remembered(A[:8])
    again, other = world.submit([*A[:8], 1], 3, ignore_eos=True), world.submit(B[:3], 2, ignore_eos=True)
    world.cancel(other)
    world.plan()
    tiers = tiers_of(world)
    tiers.launch("device")
    late = world.submit(B[:3], 2, ignore_eos=True)
    assert shape(planned(world)) == [(again, 8, 1), (late, 0, 3)]
    planned(world)  # a second step, which computes on what the first has not
    tiers.promotions.fail_next = 1
    assert world.commit() == []
    world.close()
    assert [world.outcome(i)[1] for i in (again, late)] == [FinishReason.LENGTH] * 2
    assert (source_of(world, again), source_of(world, late)) == (KvSource(computed=9), KvSource(computed=3))


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


def test_a_load_that_is_late_is_waited_for_no_longer() -> None:
    world = remembered(A[:8])
    again = world.submit([*A[:8], 1], 1)
    world.plan()
    tiers_of(world).make_late()
    assert shape(planned(world)) == [(again, 0, 8)]
    assert world.cache.stats().slots["device"].pinned == 2, "its slots stay with it"
    turn_without(world, "device", 3)
    assert world.outcome(again)[1] is FinishReason.LENGTH
    world.close()


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


def test_the_blocks_of_a_retracted_request_are_free_when_they_are_saved_and_not_before() -> None:
    world = crowded()
    assert world.state_of("r1") == "retracted" and world.cache.num_settling > 0
    num_settling = world.cache.num_settling
    turn_without(world, "host", 2)
    assert world.cache.num_settling == num_settling, "nothing was read yet"
    while world.in_flight:
        world.commit()
    world.device.lanes.run_all()
    world.settle()
    assert world.cache.num_settling == 0
    world.close()


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


def test_what_was_saved_for_a_cancelled_request_goes_when_its_save_is_over() -> None:
    world = crowded()
    world.cancel("r1")
    tiers = tiers_of(world)
    assert len(tiers.saves.mover.flying)
    world.cancel("r0")
    world.close()
    assert tiers.host.pool.counts.reserved == 0


def test_a_tail_that_was_saved_half_full_gets_no_key() -> None:
    """Pushed out inside its prompt, at the second of eight tokens: the first block is half there, and its key
    is known."""
    world = World(num_slots=3, prefill_chunk=6, overcommit=4.0, cold=Cold(24))
    world.submit(A[:4], 5, ignore_eos=True)
    world.submit(B[:8], 2, ignore_eos=True)
    assert shape(planned(world)) == [("r0", 0, 4), ("r1", 0, 2)]
    assert shape(planned(world)) == [("r0", 4, 1)] and world.state_of("r1") == "retracted"
    world.cancel("r0")
    second = world.asked["r1"].request
    while world.in_flight:
        world.commit()
    world.device.lanes.run_all()
    world.settle()
    world.cache.reset(["device"])
    world.plan()
    world.device.lanes.run_all()
    world.settle()
    assert world.state_of("r1") in ("loading", "running") and second.prefix is not None
    assert world.asked["r1"].num_landed == BLOCK, "the half block came back"
    assert world.cache.match(second.prefix.keys).num_blocks == 0
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


def test_nobody_waits_for_the_slots_of_a_load_that_is_late() -> None:
    world = remembered(C[:8], num_slots=6, overcommit=4.0, prefill_chunk=64)
    gone = world.submit([*C[:8], 1], 1)
    world.plan()
    world.cancel(gone)
    tiers_of(world).make_late()
    older, younger = world.submit(A[:4], 9, ignore_eos=True), world.submit(B[:4], 9, ignore_eos=True)
    turn_without(world, "device", 16)
    assert world.cache.stats().slots["device"].pinned == 2, "it is stuck"
    assert world.outcome(older)[1] is FinishReason.LENGTH and world.scheduler.counts.retractions == 1
    world.close()
    assert world.outcome(younger)[1] is FinishReason.LENGTH


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
    (faults.believes_a_load_that_failed, test_a_load_that_fails_is_computed_instead_and_nobody_notices),
    (faults.reports_what_never_came, test_a_load_that_fails_is_computed_instead_and_nobody_notices),
    (faults.ends_requests_whose_load_failed, test_a_load_that_fails_under_a_step_sets_its_requests_back),
    (faults.goes_on_without_the_step_that_failed, test_a_load_that_fails_under_a_step_sets_its_requests_back),
    (
        faults.forgets_a_load_that_fails_when_it_has_set_off,
        test_a_load_that_fails_before_a_step_had_room_for_its_request_is_computed_instead,
    ),
    (faults.waits_for_ever_for_a_late_load, test_a_load_that_is_late_is_waited_for_no_longer),
    (faults.never_saves, test_a_retracted_request_resumes_with_nothing_computed_again),
    (faults.gives_a_half_saved_tail_a_key, test_a_tail_that_was_saved_half_full_gets_no_key),
    (
        faults.keeps_what_was_saved_for_one_request,
        test_what_was_saved_for_a_cancelled_request_goes_when_its_save_is_over,
    ),
    (
        faults.frees_the_slots_of_a_transfer_with_its_table,
        test_the_blocks_of_a_retracted_request_are_free_when_they_are_saved_and_not_before,
    ),
    (faults.keeps_others_waiting_for_a_late_load, test_nobody_waits_for_the_slots_of_a_load_that_is_late),
    (
        faults.pushes_out_while_transfers_free_enough,
        test_nobody_is_pushed_out_while_transfers_under_way_free_enough,
    ),
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
