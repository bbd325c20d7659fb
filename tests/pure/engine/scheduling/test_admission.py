"""Who may start, when, in which order and with which cached blocks; and what admission asks of storage."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from penstock.contract import FinishReason, KvSource, Match
from penstock.engine.scheduling import admission as admission_module
from penstock.engine.scheduling.admission import Admission
from penstock.engine.scheduling.running import Running
from penstock.engine.scheduling.stages import State, WaitingRequest
from tests.pure.engine.scheduling.scheduler_cases import (
    A,
    B,
    C,
    planned,
    remembered,
    shape,
    source_of,
    tiers_of,
)
from tests.pure.engine.scheduling.scheduler_device import BLOCK
from tests.pure.engine.scheduling.scheduler_tiers import Cold
from tests.pure.engine.scheduling.scheduler_world import StepFence, World
from tests.pure.engine.scheduling.staged import life_of, waiting_of

# --------------------------------------------------------------------------------------------------- matching


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


# ----------------------------------------------------------------------------------------------------- faults


BOUND_S = 20.0


def busy(*known: list[int], bound_s: float = BOUND_S, num_host: int = 24, **world: Any) -> World:
    """One request runs, which has all rows; `known` are cached on the device, and a token takes a second to
    compute."""
    made = World(
        **{"num_slots": 16, "max_batch": 1, "prefill_chunk": 64, **world},
        cold=Cold(num_host),
        max_overtaken_s=bound_s,
    )
    for prompt in known:
        made.submit(prompt, 1, ignore_eos=True)
        made.finish()
    tiers_of(made).loads.costs.prefill.add(100, 0.0, 100.0)
    made.submit([2, 2, 2], 40, ignore_eos=True)
    planned(made)
    return made


def order_of(world: World) -> list[str]:
    """In which those in line are admitted."""
    num_before = len(world.log.admitted)
    world.cancel(world.log.admitted[-1])
    world.finish()
    return world.log.admitted[num_before:]


def later(world: World, seconds: float, *args: Any, **sampling: Any) -> str:
    world.now_s += seconds
    return world.submit(*args, **sampling)


# -------------------------------------------------------------------------------------------------- the bound


@pytest.mark.parametrize(
    ("bound_s", "late_s", "overtakes"),
    [(20.0, 15.0, True), (20.0, 21.0, False), (60.0, 21.0, True), (0.0, 0.0, False)],
)
def test_whoever_is_cached_goes_first_unless_it_arrived_later_than_the_bound(
    bound_s: float, late_s: float, overtakes: bool
) -> None:
    world = busy(A[:8], bound_s=bound_s)
    dear = world.submit(B, 1)
    cheap = later(world, late_s, [*A[:8], 1], 1)
    assert order_of(world) == ([cheap, dear] if overtakes else [dear, cheap])
    assert source_of(world, cheap).device == 8
    world.close()


# ------------------------------------------------------------------------------------- what changes meanwhile


def loses_what_was_found(world: World, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Between the match of whoever is next and its admission host memory forgets everything, once: a read for
    somebody else took it."""
    lost: list[str] = []
    fits = Running.fits

    def faulty(self: Running, waiting: WaitingRequest, match: Match) -> bool:
        if match.num_colder and not lost:
            lost.append(waiting.request.id)
            assert tiers_of(world).host.pool.evict(99) > 0
        return fits(self, waiting, match)

    monkeypatch.setattr(Running, "fits", faulty)
    return lost


def test_a_request_whose_blocks_go_between_its_match_and_its_admission_is_matched_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = busy(A[:8])
    world.cache.reset(["device"])
    waits = world.submit([*A[:8], 1], 1)
    lost = loses_what_was_found(world, monkeypatch)
    assert order_of(world) == [waits] == lost
    assert source_of(world, waits).computed == 9
    world.close()


# --------------------------------------------------------------------------------------- what a plan looks at


def test_behind_those_that_wait_for_a_prefix_others_go_ahead_and_a_plan_looks_at_a_few_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission_module, "_LOOK_AHEAD", 3)
    tried: list[str] = []
    try_match = Admission._try_match
    monkeypatch.setattr(
        Admission, "_try_match", lambda self, one: tried.append(one.request.id) or try_match(self, one)
    )
    for num_waiting, goes_ahead in ((2, True), (3, False), (9, False)):
        world = World(num_slots=16, max_batch=4, prefill_chunk=64)
        computes = world.submit(A[:8], 9, ignore_eos=True)
        planned(world)
        for _ in range(num_waiting):
            world.submit([*A[:8], 1], 1)
        other = world.submit(B[:3], 1)
        tried.clear()
        plan = planned(world)
        assert [i for i, _, _ in shape(plan)] == [computes, *([other] if goes_ahead else [])]
        assert len(tried) <= 4
        world.close()


# ------------------------------------------------------------------------------------------------------ wants


def test_blocks_that_somebody_in_line_wants_are_forgotten_last() -> None:
    world = busy(A[:8], B[:8], C[:8], num_slots=20, num_host=1)
    waits = world.submit([*A[:8], 1], 1)  # of those cached the one that was used longest ago
    world.plan()
    assert world.cache.pool.evict(4) == 4
    assert world.in_line() == [waits] == order_of(world)
    assert source_of(world, waits).device == 8
    world.close()


# ----------------------------------------------------------------------------- whoever has just been answered


@pytest.mark.parametrize(
    ("num_blocks", "state", "fits"),
    [
        (3, State.WAITING, True),
        (6, State.WAITING, True),
        (7, State.WAITING, False),
        (3, State.RETRACTED, True),
        (4, State.RETRACTED, False),
    ],
)
def test_promises_may_exceed_memory_but_not_to_one_that_was_pushed_out(
    num_blocks: int, state: State, fits: bool
) -> None:
    """A second time would be thrashing: it comes back when all of its life fits."""
    world = World(num_slots=3, overcommit=2.0)
    waiting = waiting_of(life_of([1], num_blocks * BLOCK), state)
    assert waiting.life.lifetime_tokens == num_blocks * BLOCK
    assert world.scheduler.running.fits(waiting, Match(0, 0, False)) == fits


def test_what_a_load_that_failed_was_to_write_is_computed_behind_its_earlier_users() -> None:
    """The slots are the request's already, so that nothing is drawn which would ask for them."""
    world = remembered(A[:8])
    again = world.submit([*A[:8], 1], 1)
    world.plan()
    tiers_of(world).promotions.fail_next = 1
    world.device.lanes.run_all()
    world.settle()
    fence = StepFence(world, 0)
    world.cache.tables[again].hold.add_after((fence,))
    plan = planned(world)
    assert shape(plan) == [(again, 0, 8)] and fence in world.log.waits[plan.number].of(plan)[0]
    world.close()
