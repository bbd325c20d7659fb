"""The engine with a host tier: wherever KV comes back from, and whatever goes wrong on the way, the tokens
are those of a request alone."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.contract import CacheHint, FinishReason, KvSource, SamplingParams, StepPlan, Waits
from penstock.engine.engine import Engine
from penstock.engine.execution.arriving import Arriving
from penstock.engine.execution.batch import Packer
from penstock.errors import DeadlineExceeded
from penstock.kv.blocks.slots import SlotState
from penstock.kv.transfer import Transfer
from penstock.sanitizer.report import Kind
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


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 100])
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


@pytest.mark.parametrize("settings", [{}, {"prefix_cache": False}, {"capture": False}, {"prefill_chunk": 16}])
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


def test_a_retracted_request_whose_tail_could_not_be_saved_computes_it_again(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = retracting(make_engine, host_blocks=6)
    found = crowd(engine, prompts)
    alone = make_engine(prefix_cache=False)
    assert [one.tokens for one in found] == [
        generate(alone, prompts(60 + i, seed=10 + i), max_tokens=80).tokens for i in range(6)
    ]
    stats = engine.stats()
    assert stats.retractions > 0 and stats.traffic is not None and stats.traffic.skipped["full"] > 0
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


def test_a_flush_covers_what_is_submitted_and_not_launched(make_engine: MakeEngine, prompts: Prompts) -> None:
    engine = make_engine(host_blocks=64)
    _, save = gates(engine)
    save.hold()
    generate(engine, prompts(64), max_tokens=1)
    with pytest.raises(DeadlineExceeded):
        engine.cache.drain(0.05)
    assert engine.stats().kv_blocks["host"]["idle"] == 0
    save.let()
    engine.cache.drain(20.0)
    assert engine.stats().kv_blocks["host"]["idle"] == 4


@pytest.mark.parametrize("overlap_tokens", [0, 1 << 30], ids=["layer by layer", "behind all of it"])
def test_a_step_that_does_not_wait_for_its_load_is_reported(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch, overlap_tokens: int
) -> None:
    """The fault behind the tests above: with the waits gone, the sanitizer says which edge is missing."""
    engine = make_engine(host_blocks=64)
    overlap_from(engine, overlap_tokens)
    sanitizer = engine.parts.sanitizer
    assert sanitizer is not None
    generate(engine, prompts(90), max_tokens=1)
    forget(engine)
    monkeypatch.setattr(Arriving, "wait_on", lambda self, lane, end: False)
    # it is seen to be over only later
    monkeypatch.setattr(Transfer, "over", lambda self: self.arrivals is not None and engine.stats().steps > 3)
    generate(engine, prompts(90), max_tokens=4)
    said = [report.sentence for report in sanitizer.reports]
    assert any("promote of" in sentence and "on lane load" in sentence for sentence in said), said
    sanitizer.reports.clear()


def test_a_hit_in_a_tier_that_is_slower_than_computing_is_computed(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = make_engine(host_blocks=64, load_always=False)
    expected = generate(engine, prompts(80)).tokens
    cache = engine.cache
    assert cache.loads.costs.prefill.seconds(64, 32) is not None, "steps are measured as they go"
    forget(engine)
    cache.loads.costs.link.add(1, 1.0)  # one byte a second
    slow = generate(engine, prompts(80))
    assert slow.source == KvSource(computed=80) and slow.tokens == expected
    forget(engine)
    cache.loads.costs.link.bytes_per_s = 1e12
    assert generate(engine, prompts(80)).source == KvSource(host=79, computed=1)


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


def test_bytes_that_change_while_they_are_in_host_memory_are_reported(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = make_engine(host_blocks=64)
    sanitizer, cache = engine.parts.sanitizer, engine.cache
    assert sanitizer is not None
    generate(engine, prompts(80), max_tokens=1)
    forget(engine)
    prefix = engine.cache.prefix_of(prompts(80))
    assert prefix is not None
    (slot,) = cache.host.pool.find_each(prefix.keys[2:3])
    host = cache.saves.mover.copier._ends.tensors[1].data_ptr()  # type: ignore[attr-defined]
    ctypes.memset(host + slot * cache.saves.layout.block_bytes + 100, 7, 1)
    generate(engine, prompts(80), max_tokens=1)
    settle_all(engine)
    assert [report.kind for report in sanitizer.reports] == [Kind.LIFETIME]
    assert "bytes changed between demote and promote" in sanitizer.reports[0].sentence
    sanitizer.reports.clear()


def test_a_read_of_what_was_never_written_is_seen_in_checked_mode(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: a step that claims one token more than its KV has. Nobody declared anything wrong, but the
    bytes tell."""
    engine = make_engine(blocks=64, capture=False)
    expected = generate(engine, prompts(30), logprobs=1)
    by_token = Packer._by_token

    def misplaced(self: Packer, chunks: Any, rows: Any, table_starts: Any, tables: Any) -> Any:
        ids, places, written = by_token(self, chunks, rows, table_starts, tables)
        # the newest token's KV goes nowhere
        written[: rows.num_decodes] = self._padding_slot * self.block_tokens
        return ids, places, written

    monkeypatch.setattr(Packer, "_by_token", misplaced)
    found = generate(engine, prompts(30, seed=1), logprobs=1)
    assert not any(math.isnan(entry.logprob) for entry in expected.logprobs)
    assert any(math.isnan(entry.logprob) for entry in found.logprobs)


# --------------------------------------------------------------------------------------------------- sessions


def say(engine: Engine, prompt: list[int], session: str, num_tokens: int = 8, **hint: Any) -> Collected:
    heard = Collected()
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    engine.submit(prompt, params, heard.events.append, session=session, hint=CacheHint(**hint))
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


def test_a_listener_that_raises_does_not_keep_its_session_from_being_known(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = make_engine()

    def raises(event: object) -> None:
        raise ValueError("mine")

    engine.submit(prompts(40), SamplingParams(max_tokens=1), raises, session="agent")
    run_all(engine)
    assert engine.stats().sessions.known == 1


def test_a_prefetch_that_nobody_waits_for_is_not_begun(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(host_blocks=64)
    begun: list[object] = []
    monkeypatch.setattr(engine.cache, "prefetch", lambda prefix, owner: begun.append(prefix.keys))
    given_up, wanted = engine.prefetch(prompts(40)), engine.prefetch(prompts(40, seed=1), cache_salt="x")
    assert given_up.cancel()
    turn(engine)
    assert wanted.result(timeout=0) == (0, False)
    assert begun == [engine.cache.prefix_of(prompts(40, seed=1), "x").keys]


def test_where_nothing_is_reused_there_is_nothing_to_retain_or_prefetch(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = make_engine(prefix_cache=False)
    say(engine, prompts(40), "agent", retain_s=60.0)
    by_prompt, by_session = engine.prefetch(prompts(40)), engine.prefetch(session="agent")
    turn(engine)
    assert (by_prompt.result(timeout=0), by_session.result(timeout=0)) == ((0, False), None)


def test_with_one_step_in_flight_the_session_of_a_cancelled_request_is_known(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = make_engine()
    heard = Collected()
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    request_id = engine.submit(
        prompts(40), params, heard.events.append, session="agent", hint=CacheHint(retain_s=60.0)
    )
    while len(heard.tokens) < 10:
        turn(engine)
    engine.cancel(request_id)
    run_all(engine)
    figures = engine.stats().sessions
    assert (figures.known, figures.retained_blocks) == (1, (40 + len(heard.tokens) - 1) // 16)
