"""What went wrong in other systems where a scheduler met colder tiers, each by its name: that it does not
happen here, and that the test would tell if it did."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.contract import FinishReason, KvSource, Mode
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
from tests.pure.engine.scheduling.scheduler_tiers import Cold
from tests.pure.engine.scheduling.scheduler_world import World

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


# Holds invariant 18: blocks that are restored count once.
def test_restored_blocks_counted_twice_at_admission() -> None:
    world = remembered(A[:8], num_slots=6)
    busy = world.submit(B[:8], LONG, ignore_eos=True)  # four blocks, two of them drawn at once
    assert shape(planned(world)) == [(busy, 0, 8)]
    late = world.submit(A[:8], LONG, ignore_eos=True)  # four: the two that it would restore take room as well
    for _ in range(3):
        world.step()
        world.check()
        assert late not in world.cache.tables
    world.close()
    assert source_of(world, late).host == 7


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


# Holds invariant 21: a request that scores its prompt has no lease.
def test_echo_request_holds_a_prefix_it_cannot_use() -> None:
    world = remembered(A[:8])
    echo = world.submit(A[:8], 2, prompt_logprobs=1, ignore_eos=True)
    host = tiers_of(world).host
    assert len(host.leases) == 0 and host.pool.counts.pinned == 0
    assert shape(planned(world)) == [(echo, 0, 8)]
    world.close()
    assert source_of(world, echo) == KvSource(computed=8) and world.seen["promotion"] == 0


# Holds invariant 14: the last token is computed, and nothing is written.
def test_page_aligned_full_match_leaves_nothing_to_compute() -> None:
    world = remembered(A[:8])
    again = world.submit(A[:8], 3, ignore_eos=True)
    assert world.plan() is None
    world.device.lanes.run_all()
    world.settle()
    plan = planned(world)
    assert shape(plan) == [(again, 7, 1)] and not plan.chunks[0].writes and plan.chunks[0].num_logits
    world.close()
    assert source_of(world, again) == KvSource(host=7, computed=1)


# ------------------------------------------------------------------------------------------- ends of requests


# Holds invariant 20: a cancel in line gives everything back.
def test_cancelled_waiting_request_keeps_its_blocks() -> None:
    world = remembered(A[:8], num_slots=6)
    busy = world.submit(B[:8], LONG, ignore_eos=True)
    planned(world)
    waiting = world.submit(A[:8], LONG, ignore_eos=True)
    host = tiers_of(world).host
    assert (host.pool.num_unwanted, host.pool.num_available) == (
        22,
        24,
    ) and waiting not in world.cache.tables, "wanted, and not held"
    world.cancel(waiting)
    assert host.pool.num_unwanted == 24 and len(host.leases) == 0
    world.cancel(busy)
    world.close()


# Holds invariant 7: destinations stay with the load when its request is cancelled.
# Holds invariant 20: a request that is loading leaves at once.
def test_cancel_during_load_frees_destinations() -> None:
    world, request_id = loading(num_slots=4)
    destinations = set(world.cache.tables[request_id].hold.slots[:2])  # the third is for its last token
    world.cancel(request_id)
    assert world.cache.stats().slots["device"].pinned == len(destinations) == 2
    other = world.submit(B[:8], 1)
    plan = planned(world)
    assert shape(plan) == [(other, 0, 8)] and destinations.isdisjoint(plan.chunks[0].slots.tolist())
    world.commit()
    world.device.lanes.run_all()
    world.settle()
    assert world.cache.stats().slots["device"].pinned == 0
    third = world.submit([*A[:8], 2], 1)
    assert shape(planned(world)) == [(third, 8, 1)], "what came all the same is of use to others"
    world.close()


# Holds invariant 7: a load that is late keeps its destinations.
def test_time_out_returns_destinations_while_io_is_still_writing() -> None:
    world, request_id = loading(num_slots=5)
    destinations = set(world.cache.tables[request_id].hold.slots[:2])
    tiers_of(world).make_late()
    plan = planned(world)
    assert shape(plan) == [(request_id, 0, 8)] and destinations.isdisjoint(plan.chunks[0].slots.tolist())
    assert world.cache.stats().slots["device"].pinned == 2
    turn_without(world, "device", 8)
    assert world.outcome(request_id)[1] is FinishReason.LENGTH, "it does not need what is late"
    world.close()
    assert source_of(world, request_id) == KvSource(computed=9)


# Holds invariant 12: a load that fails leaves no lease.
def test_lease_leaked_on_the_failure_path() -> None:
    world, request_id = loading()
    tiers = tiers_of(world)
    tiers.promotions.fail_next = 1
    world.device.lanes.run_all()
    world.settle()
    assert tiers.loads.mover.counts.failures == {"copy": 1}
    assert tiers.host.pool.counts.pinned == 0 and len(tiers.host.leases) == 0
    world.close()
    assert source_of(world, request_id) == KvSource(computed=9)


# -------------------------------------------------------------------------------------------------- transfers


# Holds invariant 3: a decode step carries the load that it reads.
def test_decode_graph_reads_kv_mid_reload() -> None:
    world, request_id = loading()
    plan = planned(world)
    assert plan.is_decode and plan.loads == (request_id,), "the one step that the load is waited for by"
    assert planned(world).loads == (), "what comes behind it on the lane needs no wait of its own"
    world.close()


# Holds invariant 2: the copy waits for a cancelled request's step.
def test_load_lands_in_a_slot_the_previous_step_still_writes() -> None:
    world = remembered(A[:8], num_slots=3)
    writing = world.submit(B[:8], 1)
    assert shape(planned(world)) == [(writing, 0, 8)]
    world.cancel(writing)
    again = world.submit([*A[:8], 1], 1)
    assert world.plan() is None and world.state_of(again) == "loading"
    tiers = tiers_of(world)
    tiers.launch("device")
    assert not tiers.move("device"), "the copy waits on its lane for the step"
    world.commit()
    assert tiers.move("device")
    world.close()


# Holds invariant 1: a retraction's copy waits for the step in flight.
def test_save_starts_before_the_producing_kernel_ended() -> None:
    world = World(num_slots=3, prefill_chunk=6, overcommit=4.0, cold=Cold(24))
    world.submit(A[:4], 5, ignore_eos=True)
    world.submit(B[:8], 2, ignore_eos=True)
    assert shape(planned(world)) == [("r0", 0, 4), ("r1", 0, 2)]
    planned(world)
    assert world.state_of("r1") == "retracted", (
        "the step that computes what is saved of it is still in flight"
    )
    tiers = tiers_of(world)
    tiers.launch("host")
    assert not tiers.move("host")
    world.close()


# Holds invariant 7: what a save reads is not drawn.
def test_slot_reused_while_a_save_reads_it() -> None:
    world = World(num_slots=3, cold=Cold(24))
    first = world.submit(A[:8], 1, ignore_eos=True)
    planned(world)
    world.commit()
    assert world.outcome(first)[1] is FinishReason.LENGTH
    tiers = tiers_of(world)
    tiers.launch("host")
    while (item := tiers.lane("host").begun()) is None:
        assert tiers.move("host")
    read = {int(slot) for access in item.accesses if access.mode is Mode.READ for slot in access.slots}
    assert len(read) == 2
    second = world.submit(B[:4], 1)
    plan = planned(world)
    assert shape(plan) == [(second, 0, 4)] and read.isdisjoint(plan.chunks[0].slots.tolist())
    third = world.submit(C[:8], 1)
    assert world.plan() is None and world.state_of(third) == "waiting"
    world.close()


def test_one_completion_flag_per_request_hides_an_earlier_transfer() -> None:
    world = World(num_slots=8, prefill_chunk=4, cold=Cold(24))
    request_id = world.submit(A[:12], 4, ignore_eos=True)
    for _ in range(4):
        planned(world)
        world.commit()
    tiers = tiers_of(world)
    assert len(tiers.saves.mover.flying) >= 2, "one transfer for each step that has sealed a block"
    for _ in range(2):
        tiers.launch("host")
    while tiers.host.pool.num_keys == 0:
        assert tiers.move("host")
        world.settle()
    assert len(tiers.saves.mover.flying) >= 1 and tiers.host.pool.num_keys == 1
    world.cancel(request_id)
    world.settle()
    world.check()
    assert world.cache.stats().slots["device"].pinned >= 1, "what the second reads stays with it"
    world.close()


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


# Holds invariant 24: requests end as if the pool had room.
def test_full_host_pool_aborts_a_request() -> None:
    world = remembered(A[:8], num_slots=6, num_host=2)
    busy = world.submit(B[:8], LONG, ignore_eos=True)
    planned(world)
    # its lease keeps both blocks of the host from everybody else
    waiting = world.submit([*A[:8], 1], LONG, ignore_eos=True)
    while world.asked[busy].ended is None:
        world.step()
    traffic = world.cache.stats().traffic
    assert traffic is not None and traffic.skipped["full"] == tiers_of(world).host.counts.skipped_full >= 3
    world.close()
    assert [world.outcome(i)[1] for i in (busy, waiting)] == [FinishReason.LENGTH] * 2


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

RED: list[tuple[faults.Fault, Callable[[], None]]] = [
    (faults.counts_restored_blocks_twice, test_restored_blocks_counted_twice_at_admission),
    (faults.forgets_what_is_promised, test_two_waiting_requests_starve_each_other),
    (faults.lets_echo_use_a_prefix, test_echo_request_holds_a_prefix_it_cannot_use),
    (faults.leaves_nothing_to_compute, test_page_aligned_full_match_leaves_nothing_to_compute),
    (faults.forgets_the_lease_of_whoever_ends, test_cancelled_waiting_request_keeps_its_blocks),
    (faults.frees_the_slots_of_a_transfer_with_its_table, test_cancel_during_load_frees_destinations),
    (
        faults.takes_back_the_slots_of_a_late_load,
        test_time_out_returns_destinations_while_io_is_still_writing,
    ),
    (faults.forgets_the_sources_of_a_load_that_failed, test_lease_leaked_on_the_failure_path),
    (faults.computes_over_what_has_not_come, test_decode_graph_reads_kv_mid_reload),
    (
        faults.promotes_into_slots_that_a_step_still_uses,
        test_load_lands_in_a_slot_the_previous_step_still_writes,
    ),
    (faults.saves_a_tail_before_its_step_has_ended, test_save_starts_before_the_producing_kernel_ended),
    (faults.frees_the_slots_of_a_transfer_with_its_table, test_slot_reused_while_a_save_reads_it),
    (faults.takes_one_end_for_the_end_of_all, test_one_completion_flag_per_request_hides_an_earlier_transfer),
    (faults.waits_for_ever_for_a_late_load, test_prefetch_waits_for_one_stuck_load),
    (faults.keeps_others_waiting_for_a_late_load, test_prefetch_waits_for_one_stuck_load),
    (faults.refuses_to_save_into_a_full_host, test_full_host_pool_aborts_a_request),
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
