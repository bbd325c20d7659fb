"""Who may start, when, in which order and with which cached blocks; and what admission asks of storage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from penstock.contract import FinishReason, KvSource, Match
from penstock.engine.scheduling import admission as admission_module
from penstock.engine.scheduling import conversations
from penstock.engine.scheduling.admission import Admission
from penstock.engine.scheduling.line import want_rank
from penstock.engine.scheduling.running import Running
from penstock.engine.scheduling.stages import State, WaitingRequest
from penstock.kv.cache import KvCache
from penstock.kv.table import BlockTable
from penstock.kv.tiers.host import HostLease
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
    num_before = len(world.admitted)
    world.cancel(world.admitted[-1])
    world.finish()
    return world.admitted[num_before:]


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


def test_a_request_of_a_higher_priority_goes_first_however_late_it_comes_and_whatever_it_costs() -> None:
    world = busy(A[:8])
    first = world.submit([*A[:8], 1], 1)
    world.submit(B[:5], 1, priority=1)
    urgent = later(world, 1000.0, C, 1, priority=-1)
    assert order_of(world) == [urgent, first, "r3"]
    world.close()


# ------------------------------------------------------------------------------------- what changes meanwhile


def test_a_request_whose_blocks_are_lost_goes_back_behind_those_that_came_before_it() -> None:
    world = busy(A[:8])
    dear, cheap = world.submit(B, 1), later(world, 1.0, [*A[:8], 1], 1)
    world.plan()
    assert world.in_line() == [cheap, dear]
    world.cache.reset(["device", "host"])
    world.plan()
    assert world.in_line() == [dear, cheap], "it is looked at again while it waits"
    assert order_of(world) == [dear, cheap]
    world.close()


def test_a_request_whose_blocks_come_goes_ahead_of_those_that_find_nothing() -> None:
    world = busy()
    running = world.asked[world.admitted[-1]]
    dear, cheap = world.submit(B, 1), later(world, 1.0, [*running.request.prompt, *running.tokens[:5], 1], 1)
    world.plan()
    assert world.in_line() == [dear, cheap]
    while len(running.got) < 8:
        world.step()
    assert world.in_line() == [cheap, dear], "what it begins with was generated meanwhile"
    assert order_of(world) == [cheap, dear]
    assert source_of(world, cheap).device == 8
    world.close()


def test_whoever_is_next_is_matched_as_things_are_then_and_lets_others_pass_where_it_got_dearer() -> None:
    world = busy(A[:8])
    dear, cheap = world.submit(B, 1), later(world, 1.0, [*A[:8], 1], 1)
    world.plan()
    world.scheduler.admission.line.look_again = lambda most: []  # type: ignore[method-assign]
    world.cache.reset(["device", "host"])
    assert world.in_line() == [cheap, dear], "nobody has looked"
    assert order_of(world) == [dear, cheap]
    world.close()


def test_alone_in_line_a_request_that_others_memory_would_have_to_go_for_makes_room_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither what the running ones were promised nor what only the device has is free."""
    asked: list[bool] = []
    has_room = Running.has_room
    monkeypatch.setattr(
        Running, "has_room", lambda self, track, match: asked.append(True) or has_room(self, track, match)
    )
    for num_more, asks in ((0, []), (1, [True])):
        world = World(num_slots=10, max_batch=4, prefill_chunk=64, max_overtaken_s=BOUND_S)
        world.submit(A[:8], 1)
        world.finish()
        runs = world.submit([2, 2, 2], 8, ignore_eos=True)  # of three blocks, of which it has one
        planned(world)
        num_blocks = world.cache.num_free - 2 + num_more
        asked.clear()
        world.submit([*B, *B][: num_blocks * BLOCK], 1)
        planned(world)
        assert world.state_of(runs) == "running" and asked == asks
        world.finish()
        world.close()


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


def num_wants(world: World) -> tuple[int, int]:
    return len(world.cache.pool.idle.wants), len(tiers_of(world).host.pool.idle.wants)


def _cancelled(world: World, waits: str) -> None:
    world.cancel(waits)


def _admitted(world: World, waits: str) -> None:
    world.cancel(world.admitted[-1])
    world.plan()
    assert world.state_of(waits) in ("running", "loading")


def _cancelled_while_it_runs(world: World, waits: str) -> None:
    _admitted(world, waits)
    world.cancel(waits)


def _failed(world: World, waits: str) -> None:
    _admitted(world, waits)
    world.step()
    while world.in_flight:
        world.commit(RuntimeError("device lost"))
    assert world.state_of(waits) == "ended"


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("ends", [_cancelled, _admitted, _cancelled_while_it_runs, _failed])
def test_what_a_request_in_line_wants_is_wanted_until_it_leaves_the_line(
    ends: Callable[[World, str], None], tier: str
) -> None:
    world = busy(A[:8])
    if tier == "host":
        world.cache.reset(["device"])
    waits = world.submit([*A[:8], 1], 4, ignore_eos=True)
    world.plan()
    assert num_wants(world) == ((1, 0) if tier == "device" else (1, 1))
    ends(world, waits)
    assert num_wants(world) == (0, 0)
    world.check()
    for request_id in list(world.scheduler.lives):
        world.cancel(request_id)
    world.close()


def test_a_retracted_request_wants_what_was_saved_of_it_until_it_runs_again() -> None:
    world = World(num_slots=6, overcommit=3.0, cold=Cold(24), max_overtaken_s=BOUND_S)
    tiers_of(world).loads.costs.prefill.add(100, 0.0, 100.0)
    first, second = world.submit(A[:8], 9, ignore_eos=True), later(world, 1.0, B[:8], 9, ignore_eos=True)
    while world.state_of(second) != "retracted":
        world.step()
    third = later(world, 1.0, [*A[:4], 1], 1)
    while world.state_of(second) == "retracted":
        world.step()
        world.check()
        assert world.state_of(second) != "retracted" or world.in_line()[0] == second, (
            "it has the place of its arrival"
        )
    assert (
        world.admitted.index(third) > 2
        and world.admitted[2] == second
        and world.outcome(first)[1] is not None
    )
    world.close()


def test_blocks_that_somebody_in_line_wants_are_forgotten_last() -> None:
    world = busy(A[:8], B[:8], C[:8], num_slots=20, num_host=1)
    waits = world.submit([*A[:8], 1], 1)  # of those cached the one that was used longest ago
    world.plan()
    assert world.cache.pool.evict(4) == 4
    assert world.in_line() == [waits] == order_of(world)
    assert source_of(world, waits).device == 8
    world.close()


def test_blocks_that_were_lost_and_came_back_between_two_looks_are_wanted_again() -> None:
    world = busy(A[:8])
    waits = world.submit([*A[:8], 1], 1)
    world.plan()
    pool, line = world.cache.pool, world.scheduler.admission.line
    num_wanted = pool.num_available - pool.num_unwanted
    assert num_wanted == 2
    line.look_again = lambda most: []  # type: ignore[method-assign]
    assert world.cache.forget(world.cache.prefix_of(A[:8]).keys) == 4, "on the device and in host memory"
    world.cancel(world.admitted[-1])
    urgent = world.submit([*A[:8], 5], 40, priority=-1, ignore_eos=True)
    for _ in range(3):
        world.step()
    assert world.admitted[-1] == urgent and world.in_line() == [waits]
    del line.look_again  # type: ignore[method-assign]
    world.plan()
    world.device.lanes.run_all()
    world.settle()
    world.cancel(urgent)
    assert pool.num_available - pool.num_unwanted == num_wanted
    world.finish()
    assert source_of(world, waits).device == 8
    world.close()


# ----------------------------------------------------------------------------- whoever has just been answered


def answered(
    monkeypatch: pytest.MonkeyPatch, bound_s: float = BOUND_S, dear_tokens: int = 8
) -> tuple[World, str]:
    """Of two that run, the one with a conversation of two blocks has just been answered; a third, of which
    nothing is cached, is in line and fits from now on."""
    monkeypatch.setattr(conversations, "LONG_TOKENS", dear_tokens)
    world = World(num_slots=32, max_batch=2, prefill_chunk=64, cold=Cold(24), max_overtaken_s=bound_s)
    tiers_of(world).loads.costs.prefill.add(100, 0.0, 100.0)
    talk, _ = world.submit(A[:8], 2, ignore_eos=True), world.submit([2, 2, 2], 40, ignore_eos=True)
    planned(world)
    other = world.submit(B, 1)
    while world.outcome(talk)[1] is None:
        planned(world)
        world.commit()
    return world, other


def test_the_room_of_a_conversation_that_was_just_answered_is_kept_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, other = answered(monkeypatch)
    for _ in range(conversations.GRACE - 1):
        planned(world)
        world.commit()
        assert world.in_line() == [other]
    goes_on = world.submit([*A[:8], 1], 1)
    planned(world)
    assert world.admitted[-1] == goes_on
    world.finish()
    assert world.outcome(other)[1] is not None
    world.close()


def test_the_room_is_kept_no_longer_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    world, other = answered(monkeypatch)
    num_plans = 0
    while other in world.in_line():
        planned(world)
        world.commit()
        num_plans += 1
    assert num_plans == conversations.GRACE + 1
    world.close()


@pytest.mark.parametrize("tier", ["device", "host"])
def test_what_a_request_of_a_higher_priority_wants_is_forgotten_after_what_others_want(tier: str) -> None:
    world = busy(A[:8], B[:8], num_slots=20, num_host=4)
    if tier == "host":
        world.cache.reset(["device"])
    ordinary = world.submit([*A[:8], 1], 1)
    urgent = later(world, 5.0, [*B[:8], 1], 1, priority=-1)  # it came later, and goes first
    world.plan()
    assert world.in_line() == [urgent, ordinary]
    pool = world.cache.pool if tier == "device" else tiers_of(world).host.pool
    assert pool.num_unwanted == pool.num_free and pool.evict(2) == 2
    assert [len(pool.find(world.cache.prefix_of(prompt[:8]).keys)) for prompt in (A, B)] == [0, 2]
    order_of(world)
    world.close()


def noted(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[tuple[Any, ...]]:
    """The arguments of every such call from now on."""
    calls: list[tuple[Any, ...]] = []
    call = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda self, *args: calls.append(args) or call(self, *args))
    return calls


def test_room_is_asked_for_what_was_promised_and_what_is_new_and_nothing_that_others_may_draw_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(num_slots=24, prefill_chunk=64, cold=Cold(24))
    world.submit(B[:8], 1)
    world.finish()  # two blocks that nobody holds
    asked = noted(monkeypatch, KvCache, "make_room")
    world.submit(A[:4], 9, ignore_eos=True)  # three blocks, of which it draws one at once
    world.submit([*B[:8], *C[:8]], 9, ignore_eos=True)  # six, of which two are there
    planned(world)
    assert asked == [(3, 0), (2 + 4, 2 + 2)]
    world.close()


def test_a_load_is_told_how_much_is_computed_over_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    world = remembered(A[:8], prefill_chunk=8, num_slots=16)
    asked = noted(monkeypatch, BlockTable, "promote")
    for num_own, num_next in ((3, 3), (8, 8), (11, 8)):
        last = world.submit([*A[:8], *C[:num_own]], 1)
        world.plan()
        assert [args[1:] for args in asked] == [(2, num_next)]
        asked.clear()
        world.cancel(last)
        world.device.lanes.run_all()
        world.settle()
        world.cache.reset(["device"])
    world.close()


def test_a_store_is_not_asked_again_what_it_has_answered_to_an_earlier_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = remembered(A[:8])
    world.submit(B[:8], 9, ignore_eos=True)
    world.submit([*A[:8], 1], 8 * BLOCK - 16, ignore_eos=True)
    world.step()
    waiting = next(iter(world.scheduler.admission.line))
    before = waiting.lease
    assert before is not None
    asked = noted(monkeypatch, KvCache, "lease")
    tiers_of(world).expire()
    world.step()
    assert [args[2] for args in asked] == [before] and waiting.lease is not before
    world.close()


def test_a_lease_and_a_want_know_how_late_their_request_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: list[float] = []
    set_rank = HostLease.set_rank
    monkeypatch.setattr(HostLease, "set_rank", lambda self, rank: ranks.append(rank) or set_rank(self, rank))
    world = World(num_slots=16, max_batch=1, prefill_chunk=64, cold=Cold(24), max_overtaken_s=20.0)
    world.submit(A[:8], 1)
    world.finish()
    world.cache.reset(["device"])
    tiers_of(world).loads.costs.prefill.add(100, 0.0, 100.0)
    world.submit([2, 2, 2], 40, ignore_eos=True)
    planned(world)
    world.now_s = 5.0
    waits = world.submit([*A[:8], 1], 1, priority=2)
    ranks.clear()
    world.plan()
    waiting = world.scheduler.lives[waits].waiting
    assert waiting is not None and waiting.want is not None
    assert ranks == [want_rank(waiting.request, waiting.rank)] == [waiting.want.rank] and ranks[0] > 5.0
    world.close()


def test_one_that_relies_on_colder_tiers_no_more_saves_nothing_there_when_it_is_pushed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(num_slots=6, overcommit=2.0, cold=Cold(24))
    first, second = world.submit(A[:8], 9, ignore_eos=True), world.submit(B[:8], 9, ignore_eos=True)
    planned(world)
    world.scheduler.lives[second].computes = True
    retracted, released = noted(monkeypatch, BlockTable, "retract"), noted(monkeypatch, BlockTable, "release")
    while world.state_of(second) == "running":
        world.step()
    assert world.state_of(second) == State.RETRACTED.value and retracted == [] and len(released) == 1
    waiting = world.scheduler.lives[second].waiting
    assert waiting is not None and waiting.lease is None
    world.close()
    assert all(world.outcome(i)[1] is not None for i in (first, second))


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


def test_matched_blocks_that_nobody_holds_are_room_no_more_and_those_of_others_cost_nothing() -> None:
    world = World(num_slots=4)
    waiting = waiting_of(life_of([1] * 13, 4))
    fits = {
        (num, idle): world.scheduler.running.fits(waiting, Match(num, idle, False))
        for num in range(4)
        for idle in range(num + 1)
    }
    assert all(fits.values()), "four blocks: what is matched is either room or there already"
    longer = waiting_of(life_of([1] * 13, 5))
    fits = {
        (num, idle): world.scheduler.running.fits(longer, Match(num, idle, False))
        for num in range(4)
        for idle in range(num + 1)
    }
    assert fits == {(num, idle): idle < num for num, idle in fits}, (
        "one more: it fits where somebody else holds one of them"
    )


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
    assert shape(plan) == [(again, 0, 8)] and fence in world.waits[plan.number].of(plan)[0]
    world.close()
