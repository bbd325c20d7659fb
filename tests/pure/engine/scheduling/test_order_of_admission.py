"""Who is admitted next where starting costs something: within a bound whoever is cheapest, by what is cached
at that moment. And what those in line want is known to the pools for as long as they are in line, and no
longer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.contract import Match
from penstock.engine.scheduling import admission as admission_module
from penstock.engine.scheduling import conversations
from penstock.engine.scheduling.admission import Admission
from penstock.engine.scheduling.running import Running
from penstock.engine.scheduling.stages import WaitingRequest
from tests.pure.engine.scheduling.scheduler_cases import A, B, C, planned, shape, source_of, tiers_of
from tests.pure.engine.scheduling.scheduler_device import BLOCK
from tests.pure.engine.scheduling.scheduler_tiers import Cold
from tests.pure.engine.scheduling.scheduler_world import World

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


def test_requests_that_find_nothing_keep_the_order_of_their_arrival() -> None:
    world = busy(A[:8])
    ids = [world.submit(B, 1), later(world, 1.0, C[:2], 1), later(world, 1.0, [6, 6, 6], 1)]
    for _ in range(3):
        world.plan()
    assert world.in_line() == ids == order_of(world)
    world.close()


def test_where_nothing_was_measured_the_order_is_that_of_arrival() -> None:
    world = busy(A[:8])
    tiers_of(world).loads.costs.prefill._sums = [0.0] * 5
    dear, cheap = world.submit(B, 1), later(world, 1.0, [*A[:8], 1], 1)
    assert order_of(world) == [dear, cheap]
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


def test_alone_in_line_and_with_free_slots_a_request_is_neither_ranked_nor_wants_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = busy(A[:8])
    wanted: list[float] = []
    want = world.cache.want
    monkeypatch.setattr(
        world.cache, "want", lambda keys, rank, earlier=None: wanted.append(rank) or want(keys, rank, earlier)
    )
    alone = world.submit([*A[:8], 1], 1)
    assert order_of(world) == [alone] and not wanted
    world.submit([*A[:8], 1], 1)
    world.submit([*A[:8], 2], 1)
    order_of(world)
    assert wanted, "two are in line"
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


def test_all_in_line_are_looked_at_within_a_few_plans() -> None:
    world = busy(A, B)
    for number in range(10):
        world.submit([*(A, B)[number % 2][:8], number % 5, 1], 1)
    looked: list[set[str]] = []
    for _ in range(3):
        world.plan()
        looked.append({one.request.id for one in world.scheduler.admission.line if one.want is not None})
    assert [len(some) for some in looked] == [4, 8, 10], "four in a plan"
    order_of(world)
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


@pytest.mark.parametrize("why", ["in order of arrival", "a short conversation", "nobody else runs"])
def test_nobody_is_held_back_where_that_is_of_no_use(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    world, other = answered(
        monkeypatch, *({"in order of arrival": (0.0,), "a short conversation": (BOUND_S, 100)}.get(why, ()))
    )
    if why == "nobody else runs":
        world.cancel("r1")
    planned(world)
    assert world.admitted[-1] == other
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
