"""When a long conversation begins, and for whom the room of one is kept that was just answered."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from penstock.engine.scheduling import conversations
from penstock.engine.scheduling.conversations import Conversations
from tests.pure.engine.scheduling.scheduler_cases import A, B, C, planned, tiers_of
from tests.pure.engine.scheduling.scheduler_tiers import Cold
from tests.pure.engine.scheduling.scheduler_world import World

BOUND_S = 20.0


@pytest.fixture(autouse=True)
def _twelve_tokens_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "LONG_TOKENS", 12)


def under_way(
    *known: list[int], bound_s: float = BOUND_S, measured: bool = True, **talk: Any
) -> tuple[World, str]:
    """A conversation of 7 blocks runs on a device of 16, of which three quarters are 12. `known` are cached
    there."""
    world = World(num_slots=16, max_batch=4, prefill_chunk=64, cold=Cold(24), max_overtaken_s=bound_s)
    times = world.scheduler.admission._times = tiers_of(world).loads.costs.prefill
    if measured:
        times.add(100, 0.0, 100.0)
    for prompt in known:
        world.submit(prompt, 1, ignore_eos=True)
        world.finish()
    world.scheduler.admission.conversations.forget()
    world.scheduler.admission.conversations._going_on = 1.0
    runs = world.submit(A, **{"max_tokens": 12, "ignore_eos": True, **talk})
    planned(world)
    assert world.state_of(runs) == "running"
    return world, runs


def begun(world: World, *request_ids: str) -> list[str]:
    """Which of them run after the next plan."""
    world.plan()
    return [one for one in request_ids if one not in world.in_line()]


@pytest.mark.parametrize(("max_tokens", "begins"), [(5, True), (6, False)], ids=["12 blocks", "13 blocks"])
def test_a_long_conversation_begins_where_all_take_three_quarters_of_the_device(
    max_tokens: int, begins: bool
) -> None:
    world, _ = under_way()
    first, second = world.submit(B, max_tokens, ignore_eos=True), world.submit(C, 12)
    assert begun(world, first, second) == ([first] if begins else [])
    world.finish()
    assert world.log.admitted[1:] == [first, second], "and their turn comes"
    world.close()


@pytest.mark.parametrize(
    ("prompt", "begins"),
    [
        ([*C[:12], 1], True),
        ([*C[:4], *B[:12]], True),
        ([*C[:4], *B[:13]], False),
        ([2] * 11, True),
        ([2] * 12, False),
    ],
    ids=[
        "nearly all is known",
        "a quarter is known",
        "less than a quarter is known",
        "a short one",
        "a long one",
    ],
)
def test_whoever_goes_on_and_whoever_is_short_goes_ahead_of_it(prompt: list[int], begins: bool) -> None:
    world, _ = under_way(C[:12])
    waits, other = world.submit(B, 12), world.submit(prompt, 10)
    assert begun(world, waits, other) == ([other] if begins else [])
    world.finish()
    assert len(world.log.admitted) == 4
    world.close()


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize(("late_s", "begins"), [(0.0, False), (19.9, False), (20.0, True)])
def test_it_waits_until_somebody_comes_whom_it_may_not_be_overtaken_by(
    late_s: float, begins: bool, measured: bool
) -> None:
    """Before anything was measured as well: agents that begin together do so when an engine has just been
    started."""
    world, _ = under_way(C[:12], measured=measured)
    waits = world.submit(B, 12)
    world.submit([*B[:15], 1], 12)
    assert begun(world, waits) == []
    world.now_s += late_s
    newest = world.submit([*C[:12], 1], 1)
    assert begun(world, waits, newest) == ([waits] if begins else [newest]), "there is no room for both"
    world.close()


# -------------------------------------------------------------------------------------------------- any order


def crowd(seed: int) -> Counter[str]:
    """Conversations that begin and go on at any time, long and short, on a device for a few of them. The
    world checks at every admission that nobody was overtaken by one that came later than the bound, or by a
    lower priority."""
    r = random.Random(seed)
    bound_s, cold = r.choice([2.0, 20.0]), Cold(r.choice([9, 24]))
    sizes = {"num_slots": r.randint(6, 16), "max_batch": r.choice([2, 4]), "prefill_chunk": r.choice([4, 64])}
    world = World(**sizes, cold=cold, max_overtaken_s=bound_s)
    tiers_of(world).loads.costs.prefill.add(100, 0.0, r.choice([0.1, 10.0, 100.0]))
    talks: list[list[int]] = []
    for _ in range(r.randint(6, 16)):
        if not talks or r.random() < 0.5:
            talks.append([r.randint(1, 6) for _ in range(r.choice([3, 8, 12, 14]))])
        talk = r.choice(talks)
        talk += [r.randint(1, 6) for _ in range(r.randint(0, 3))]
        world.submit(talk[:18], r.randint(1, 6), r.choice([0, 0, 0, 1]), ignore_eos=True)
        world.now_s += r.choice([0.0, 0.0, 0.5, 10.0])
        for _ in range(r.choice([0, 1, 3])):
            world.plan()
            world.check()
            if world.in_flight:
                world.commit()
    world.finish()
    assert not world.scheduler.has_work()
    world.close()
    return world.seen


def test_whoever_begins_later_is_overtaken_within_the_bound_and_comes_to_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_late = 0
    need_room = Conversations.need_room

    def counted(self: Conversations, *args: Any) -> bool:
        nonlocal num_late
        late = need_room(self, *args)
        num_late += late
        return late

    monkeypatch.setattr(Conversations, "need_room", counted)
    seen = sum((crowd(seed) for seed in range(24)), Counter[str]())
    assert num_late > 20 and seen["overtakes"] > 10


def two_that_run(
    monkeypatch: pytest.MonkeyPatch, *known: list[int], dear_tokens: int = 8, bound_s: float = BOUND_S
) -> tuple[World, str]:
    """All rows are taken, one of them by a conversation that counts as dear; `known` are cached on the
    device."""
    world = World(num_slots=32, max_batch=2, prefill_chunk=64, cold=Cold(24), max_overtaken_s=bound_s)
    tiers_of(world).loads.costs.prefill.add(100, 0.0, 100.0)
    for prompt in known:
        world.submit(prompt, 1, ignore_eos=True)
        world.finish()
    monkeypatch.setattr(conversations, "LONG_TOKENS", dear_tokens)
    talk = world.submit(A[:8], 4, ignore_eos=True)
    world.submit([2, 2, 2], 40, ignore_eos=True)
    planned(world)
    return world, talk


def answer(world: World, talk: str) -> None:
    while world.outcome(talk)[1] is None:
        planned(world)
        world.commit()


def is_held_back(world: World, request_id: str) -> bool:
    planned(world)
    return request_id in world.in_line()


@pytest.mark.parametrize(
    ("prompt", "tier", "held"),
    [
        ([*C[:8], *B[:8]], "device", False),
        ([*C[:8], *B[:9]], "device", True),
        ([*C[:8], *B[:8]], "host", True),
        ([*C[:8], 1], "host", True),
        (B, "device", True),
    ],
    ids=["half of it", "less than half", "half in host memory", "nearly all in host memory", "nothing"],
)
def test_whoever_has_at_least_half_of_its_kv_on_the_device_is_not_held_back(
    monkeypatch: pytest.MonkeyPatch, prompt: list[int], tier: str, held: bool
) -> None:
    world, talk = two_that_run(monkeypatch, C[:8])
    if tier == "host":
        assert world.cache.pool.evict(world.cache.num_blocks) >= 2
    other = world.submit(prompt, 1)
    answer(world, talk)
    assert is_held_back(world, other) == held
    world.close()


def test_a_step_that_computes_a_prompt_ends_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes as long as several of the steps that the grace is counted in."""
    world, talk = two_that_run(monkeypatch, C[:8])
    other = world.submit(B, 1)
    answer(world, talk)
    here = world.submit([*C[:8], 1, 2, 3], 1, priority=-1)
    assert world.scheduler.admission.conversations._grace > 1 and not is_held_back(world, here)
    assert other in world.in_line() and world.scheduler.admission.conversations._grace == 0
    world.close()


def kept(world: World) -> int:
    """Blocks of the device that are wanted though nobody is in line."""
    assert not world.in_line()
    return sum(want.num_blocks for want in world.cache.pool.idle.wants)


def test_what_was_just_answered_is_wanted_until_its_next_request_had_time_to_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conversations, "KEPT_PLANS", 3)
    world, talk = two_that_run(monkeypatch)
    answer(world, talk)
    assert kept(world) == 2, "its prompt's blocks"
    wanted = []
    for _ in range(4):
        planned(world)
        world.commit()
        wanted.append(kept(world))
    assert wanted == [2, 2, 0, 0]
    world.close()


@pytest.mark.parametrize("why", ["cancelled", "in order of arrival", "short", "nobody is left"])
def test_what_nobody_goes_on_with_is_not_kept(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    world, talk = two_that_run(
        monkeypatch,
        dear_tokens=13 if why == "short" else 8,
        bound_s=0.0 if why == "in order of arrival" else BOUND_S,
    )
    if why == "cancelled":
        world.cancel(talk)
    elif why == "nobody is left":
        answer(world, talk)
        world.cancel("r1")
    else:
        answer(world, talk)
    assert kept(world) == 0
    world.finish()
    world.close()
