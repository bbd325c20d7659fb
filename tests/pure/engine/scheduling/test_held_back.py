"""For whom the room of a conversation is kept that was just answered, and from whom: by how it ended, and by
where the KV of the next one is."""

from __future__ import annotations

import pytest

from penstock.contract import FinishReason
from penstock.engine.scheduling import conversations
from tests.pure.engine.scheduling.scheduler_cases import A, B, C, planned, tiers_of
from tests.pure.engine.scheduling.scheduler_tiers import Cold
from tests.pure.engine.scheduling.scheduler_world import World

BOUND_S = 20.0


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


def test_one_that_ended_by_itself_is_expected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world, talk = two_that_run(monkeypatch)
    other = world.submit(B, 1)
    answer(world, talk)
    assert world.outcome(talk)[1] is FinishReason.LENGTH and is_held_back(world, other)
    world.close()


def test_nobody_goes_on_with_a_prompt_without_a_full_block_however_long_its_answer_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, _ = two_that_run(monkeypatch)
    short = world.submit([3, 3, 3], 9, ignore_eos=True)
    answer(world, short)
    assert short not in {one.life.request.id for one in world.scheduler.admission.conversations._kept}
    world.submit(B, 1)
    world.finish()
    world.close()


def test_one_that_was_cancelled_is_not_expected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world, talk = two_that_run(monkeypatch)
    other = world.submit(B, 1)
    world.cancel(talk)
    assert not is_held_back(world, other)
    world.close()


@pytest.mark.parametrize(("dear_tokens", "held"), [(11, True), (12, True), (13, False)])
def test_a_conversation_counts_from_so_many_tokens_on_with_its_answer(
    monkeypatch: pytest.MonkeyPatch, dear_tokens: int, held: bool
) -> None:
    world, talk = two_that_run(monkeypatch, dear_tokens=dear_tokens)
    other = world.submit(B, 1)
    answer(world, talk)
    assert is_held_back(world, other) == held
    world.close()


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


def test_without_a_conversation_nobody_is_ever_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    world, talk = two_that_run(monkeypatch, dear_tokens=1000)
    for number in range(3):
        other = world.submit([number + 1] * 9, 1)
        answer(world, talk)
        assert not is_held_back(world, other)
        talk = other
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


def test_what_was_just_answered_is_forgotten_after_what_nobody_wants_and_before_what_older_requests_want(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, talk = two_that_run(monkeypatch, C[:8])
    newest_s = max(asked.request.arrival_s for asked in world.asked.values())
    answer(world, talk)
    (want,) = world.cache.pool.idle.wants
    assert want.rank == newest_s
    coldest = world.cache.pool.keys(world.cache.pool.coldest(2))
    assert coldest == list(reversed(world.cache.prefix_of(C[:8]).keys)), "nobody wants those"
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
