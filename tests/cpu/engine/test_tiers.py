"""The engine with a host tier: wherever KV comes back from, and whatever goes wrong on the way, the tokens
are those of a request alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.contract import CacheHint, FinishReason, KvSource, SamplingParams, StepPlan, Submission, Waits
from penstock.engine.engine import Engine
from penstock.kv.blocks.slots import SlotState
from tests.cpu.engine.test_engine import check_at_rest
from tests.support.driving import Collected, generate, run_all, settle_all, submit
from tests.support.gates import gates

MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]


def forget(engine: Engine, tier: str = "device") -> None:
    settle_all(engine)
    engine.cache.reset((tier,))


def overlap_from(engine: Engine, num_tokens: int) -> None:
    """Steps over at least so many tokens start on the first layers of their loads; shorter ones wait for all
    of it."""
    cache = engine.cache
    cache.loads.limits = dataclasses.replace(cache.saves.limits, overlap_tokens=num_tokens)


def states(engine: Engine) -> dict[str, int]:
    return {state: num for state, num in engine.stats().requests.items() if num}


def turn(engine: Engine, times: int = 1) -> None:
    for _ in range(times):
        if not engine.step():
            engine.wait_work(0.01)


def until(engine: Engine, condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        turn(engine)
    raise AssertionError("it never came to that")


def busy(engine: Engine, prompts: Prompts) -> Collected:
    """Another request that decodes all along, so that no step is launched over a load before it has
    landed."""
    other = submit(engine, prompts(20, seed=1), max_tokens=150)
    until(engine, lambda: len(other.tokens) > 2)
    return other


@pytest.mark.parametrize("length", [15, 16, 100])
def test_a_prefix_comes_back_from_host_memory_with_the_same_tokens(
    make_engine: MakeEngine, prompts: Prompts, length: int
) -> None:
    engine = make_engine(host_blocks=64)
    cold = generate(engine, prompts(length))
    forget(engine)
    warm = generate(engine, prompts(length))
    assert warm.tokens == cold.tokens
    from_host = min(length // 16 * 16, length - 1)
    assert warm.source == KvSource(host=from_host, computed=length - from_host)
    assert engine.stats().cache["promoted"] == length // 16
    settle_all(engine)
    check_at_rest(engine)


def test_restored_bytes_are_the_bytes_that_were_saved(make_engine: MakeEngine, prompts: Prompts) -> None:
    engine = make_engine(host_blocks=64)
    prompt = prompts(96)
    generate(engine, prompt, max_tokens=1)
    prefix = engine.cache.prefix_of(prompt)
    assert prefix is not None
    arena, pool = engine.parts.arena.tensor, engine.cache._pool
    before = arena[pool.find(prefix.keys)].clone()
    settle_all(engine)
    forget(engine)
    arena[: engine.cache.num_blocks].fill_(float("nan"))  # the device's copy is destroyed
    generate(engine, prompts(30, seed=5))  # other slots come first now
    generate(engine, prompt, max_tokens=1)
    slots = pool.find(prefix.keys)
    assert len(slots) == 6 and torch.equal(arena[slots], before)


def test_with_the_device_cache_off_every_prefix_comes_from_the_host(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = make_engine(host_blocks=64, prefix_cache=False)
    _, save = gates(engine)
    save.hold()
    first = generate(engine, prompts(50))
    assert engine.stats().kv_blocks["device"]["pinned"] == 3, (
        "a save that has not ended keeps the blocks of a request that has"
    )
    again = generate(engine, prompts(50))
    assert again.source == KvSource(computed=50), (
        "what is still being saved on the device is not reused there"
    )
    save.let()
    settle_all(engine)
    third = generate(engine, prompts(50))
    assert third.source == KvSource(host=48, computed=2)
    assert first.tokens == again.tokens == third.tokens
    settle_all(engine)
    assert engine.stats().kv_blocks["device"]["idle"] == 0


# Holds invariant 15: three requests for the same blocks share one promotion.
def test_identical_promotions_in_flight_are_shared(make_engine: MakeEngine, prompts: Prompts) -> None:
    engine = make_engine(host_blocks=64)
    expected = generate(engine, prompts(80)).tokens
    forget(engine)
    load, _ = gates(engine)
    load.hold()
    busy(engine, prompts)
    found = [submit(engine, prompts(80)) for _ in range(3)]
    turn(engine, 5)
    load.let()
    run_all(engine)
    assert [one.tokens for one in found] == [expected] * 3
    assert engine.stats().cache["promoted"] == 5
    assert [one.source for one in found] == [KvSource(host=79, computed=1)] + [
        KvSource(device=79, computed=1)
    ] * 2


def retracting(make_engine: MakeEngine, **settings: Any) -> Engine:
    return make_engine(**{"blocks": 24, "host_blocks": 128, "overcommit": 4.0, "max_batch": 8, **settings})


def crowd(engine: Engine, prompts: Prompts, **sampling: Any) -> list[Collected]:
    found = [submit(engine, prompts(60 + i, seed=10 + i), **{"max_tokens": 80, **sampling}) for i in range(6)]
    run_all(engine)
    return found


@pytest.mark.parametrize("settings", [{"prefix_cache": False}, {"capture": False, "prefill_chunk": 16}])
def test_a_retracted_request_resumes_from_host_memory_with_no_token_computed_again(
    make_engine: MakeEngine, prompts: Prompts, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = retracting(make_engine, **settings)
    planned: list[int] = []
    launch = engine.parts.executor.launch

    def launched(plan: StepPlan, waits: Waits) -> Any:
        planned.append(plan.num_tokens)
        return launch(plan, waits)

    monkeypatch.setattr(engine.parts.executor, "launch", launched)
    found = crowd(engine, prompts)
    alone = make_engine(prefix_cache=False)
    assert [one.tokens for one in found] == [
        generate(alone, prompts(60 + i, seed=10 + i), max_tokens=80).tokens for i in range(6)
    ]
    stats = engine.stats()
    assert stats.retractions > 0 and sum(stats.resume.counts) == stats.retractions
    assert sum(planned) == sum(60 + i + 80 - 1 for i in range(6)), "every token was computed once"
    settle_all(engine)
    check_at_rest(engine)


def test_a_retracted_request_can_be_cancelled_while_it_is_being_saved(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = retracting(make_engine)
    _, save = gates(engine)
    found = [submit(engine, prompts(60 + i, seed=10 + i), max_tokens=80) for i in range(6)]
    until(engine, lambda: engine.stats().requests["running"] > 2)
    save.hold()
    until(engine, lambda: engine.stats().requests["retracted"] > 0)
    for one in found:
        engine.cancel(one.request_id)
    turn(engine, 2)
    assert all(one.finish is FinishReason.CANCELLED for one in found)
    save.let()
    settle_all(engine)
    check_at_rest(engine)


def test_a_retracted_request_whose_save_hangs_computes_instead_of_waiting(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = retracting(make_engine, blocks=40, load_deadline_s=0.2)
    _, save = gates(engine)
    found = [submit(engine, prompts(60 + i, seed=10 + i), max_tokens=80) for i in range(6)]
    # their prompts are saved
    until(engine, lambda: all(one.tokens for one in found) and not engine.cache.num_in_flight)
    save.hold()
    run_all(engine)
    alone = make_engine(prefix_cache=False)
    assert [one.tokens for one in found] == [
        generate(alone, prompts(60 + i, seed=10 + i), max_tokens=80).tokens for i in range(6)
    ]
    stats = engine.stats()
    assert stats.retractions > 0 and stats.traffic is not None and stats.traffic.skipped["late"] > 0
    save.let()
    settle_all(engine)
    check_at_rest(engine)


# Holds invariant 22: a failed copy costs a computation, and the tokens are the same.
@pytest.mark.parametrize("copies_before", [0, 1])
def test_a_promotion_that_fails_is_computed_instead(
    make_engine: MakeEngine, prompts: Prompts, copies_before: int
) -> None:
    engine = make_engine(host_blocks=64)
    expected = generate(engine, prompts(80), max_tokens=6).tokens
    forget(engine)
    load, _ = gates(engine)
    load.hold()
    busy(engine, prompts)
    returning = submit(engine, prompts(80), max_tokens=6)
    until(engine, lambda: engine.stats().requests["loading"] == 1)
    load.let(copies_before)
    load.fail_next = 1
    load.let()
    run_all(engine)
    assert returning.tokens == expected and returning.source == KvSource(computed=80)
    traffic = engine.stats().traffic
    assert traffic is not None and traffic.failures == {("host", "copy"): 1}
    settle_all(engine)
    check_at_rest(engine)


def test_a_load_that_takes_too_long_is_given_up_and_its_slots_stay_with_it(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = make_engine(host_blocks=64, load_deadline_s=0.02)
    expected = generate(engine, prompts(80), max_tokens=6).tokens
    forget(engine)
    load, _ = gates(engine)
    load.hold()
    busy(engine, prompts)
    returning = submit(engine, prompts(80), max_tokens=6)
    until(engine, lambda: returning.finish is not None)
    second = generate(engine, prompts(80), max_tokens=6)
    assert second.tokens == expected, "nobody else waits for the one that is stuck"
    assert returning.tokens == expected and returning.source == KvSource(computed=80)
    stuck = engine.cache.loads.mover.flying[0]
    assert stuck is not None
    states_now = [engine.cache._pool.book.state[slot] for slot in stuck.dest_slots.tolist()]
    assert states_now == [SlotState.PINNED] * 5, "a deadline ends a wait, never an ownership"
    load.let()
    run_all(engine)
    settle_all(engine)
    check_at_rest(engine)


# Holds invariant 24: saves are skipped, requests go on.
def test_a_full_host_pool_takes_no_more_and_disturbs_nobody(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    alone = make_engine()
    expected = [generate(alone, prompts(64, seed=i)).tokens for i in range(3)]
    # the device keeps what was computed meanwhile, alone; where it is not used again it has to be skipped
    for reuses in (True, False):
        engine = make_engine(host_blocks=4, prefix_cache=reuses)
        _, save = gates(engine)
        save.hold()  # four slots are taken and none can be evicted
        found = [generate(engine, prompts(64, seed=i)) for i in range(3)]
        save.let()
        settle_all(engine)
        assert [one.tokens for one in found] == expected
        traffic = engine.stats().traffic
        assert traffic is not None and (traffic.postponed, traffic.skipped["full"]) == (
            (8, 0) if reuses else (0, 8)
        )
        assert [generate(engine, prompts(64, seed=i)).tokens for i in range(3)] == expected


def test_close_with_everything_in_flight_leaves_nothing(make_engine: MakeEngine, prompts: Prompts) -> None:
    engine = make_engine(host_blocks=64, blocks=24)
    generate(engine, prompts(80), max_tokens=1)
    forget(engine)
    for seed in range(6):
        submit(engine, prompts(80, seed=seed), max_tokens=30)
    turn(engine, 4)
    assert states(engine), "requests are open"
    engine.close(20.0)  # raises where a slot is still held
    assert states(engine) == {} and not engine.is_transferring()


# --------------------------------------------------------------------------------------------------- sessions


def say(engine: Engine, prompt: list[int], session: str, num_tokens: int = 8, **hint: Any) -> Collected:
    heard = Collected()
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    engine.submit(Submission(prompt, params, session=session, hint=CacheHint(**hint)), heard.events.append)
    run_all(engine)
    return heard


def test_a_session_ends_with_the_blocks_that_its_requests_have_filled(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    """What is retained is just what a next request that goes on from there finds."""
    engine = make_engine(host_blocks=64)
    first = say(engine, prompts(40), "agent", 25, retain_s=60.0)
    assert engine.stats().sessions.retained_blocks == 4  # 40 tokens and 24 that were fed back
    again = say(engine, [*prompts(40), *first.tokens, 5], "agent")
    assert again.source == KvSource(device=64, computed=2)


def test_a_released_session_leaves_both_tiers_empty_in_whatever_state_its_saves_are(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = make_engine(host_blocks=64)
    _, save = gates(engine)
    save.hold()
    say(engine, prompts(70), "agent", release=True)
    turn(engine, 5)
    assert engine.stats().sessions.released_blocks == 0
    save.let()
    settle_all(engine)
    turn(engine, 2)
    assert engine.stats().sessions.released_blocks == 8
    assert {tier: blocks["idle"] for tier, blocks in engine.stats().kv_blocks.items()} == {
        "device": 0,
        "host": 0,
    }
