"""States of recurrent layers that are kept at block boundaries: a prefix comes back from the device or from
host memory as far as both its blocks and a state are there, and the tokens are those of a state that runs
through the whole sequence.

The reference computes one sequence, token by token."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock.config import Config, OffloadConfig
from penstock.contract import FinishReason, KvSource, StateMove, StepPlan
from penstock.engine import build
from penstock.engine.engine import Engine
from penstock.engine.execution.passes import StatePass, StepOps
from penstock.engine.scheduling.boundaries import AtBoundaries
from penstock.engine.scheduling.placement import Placement
from penstock.errors import ConfigError
from penstock.kv import build as kv_build
from penstock.kv.memory import StateLayout
from penstock.kv.rules import WholePrefix, WithStates
from penstock.kv.states import KeptStates
from penstock.lanes.cpu import CpuLane
from penstock.sanitizer.report import Kind
from penstock.testing.sanitized import build_sanitized
from tests.cpu.engine.test_engine import check_at_rest
from tests.support import contiguous_kv
from tests.support.crowds import crowds
from tests.support.driving import Collected, generate, run_all, settle_all, submit, tiny_config
from tests.support.gates import gates

MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]
MODEL, BLOCK = "tiny-qwen3.5", 16
ROOM = {"blocks": 128, "host_blocks": 256}


@pytest.fixture
def make(make_engine: MakeEngine) -> MakeEngine:
    """Engines with host memory for states and for KV."""
    return functools.partial(make_engine, MODEL, **ROOM)


def expected(engine: Engine, prompt: Sequence[int], num_tokens: int) -> list[int]:
    return contiguous_kv.generate(engine.parts.executor.target.model, prompt, num_tokens)


def states_of(engine: Engine) -> KeptStates:
    assert engine.cache.states is not None
    return engine.cache.states


def assert_right(engine: Engine, prompt: Sequence[int], found: Collected, num_tokens: int) -> None:
    assert found.error is None
    assert found.tokens == expected(engine, prompt, num_tokens)


def assert_wrong(engine: Engine, prompt: Sequence[int], num_tokens: int = 12) -> None:
    """The fault shows in the second answer."""
    generate(engine, prompt, max_tokens=1)
    assert generate(engine, prompt, max_tokens=num_tokens).tokens != expected(engine, prompt, num_tokens)


def all_at_rest(engine: Engine) -> None:
    settle_all(engine)
    check_at_rest(engine)
    counts = states_of(engine).pool.counts
    assert counts.free + counts.idle == states_of(engine).pool.num_slots
    assert not states_of(engine).expected


# ---------------------------------------------------------------------------------------- a prefix comes back


@pytest.mark.parametrize("length", [1, 16, 17, 33, 100, 128, 129])
@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_prompt_that_comes_back_begins_at_its_last_boundary(
    make: MakeEngine, prompts: Prompts, length: int, tier: str
) -> None:
    """A state behind the last token would have it twice, so that boundary is not used."""
    engine, prompt, boundary = make(prefill_chunk=70), prompts(length), (length - 1) // BLOCK * BLOCK
    assert generate(engine, prompt).source == KvSource(computed=length)
    settle_all(engine)
    if tier == "host":
        engine.cache.reset(("device",))
    found = generate(engine, prompt, max_tokens=20)
    assert found.source == KvSource(computed=length - boundary, **{tier: boundary})
    assert_right(engine, prompt, found, 20)
    all_at_rest(engine)


def test_a_prompt_that_ends_where_a_state_is_kept_begins_before_it(
    make: MakeEngine, prompts: Prompts
) -> None:
    """That state has its last token already, which is computed again."""
    engine, prompt = make(state_every=16), prompts(96)
    generate(engine, [*prompt, *prompts(30, seed=1)])
    found = generate(engine, prompt, max_tokens=20)
    assert found.source == KvSource(device=80, computed=16)
    assert_right(engine, prompt, found, 20)
    all_at_rest(engine)


def test_a_conversation_computes_its_newest_answer_and_question_alone(
    make: MakeEngine, prompts: Prompts
) -> None:
    engine, prompt, boundary = make(), prompts(90), 0
    for turn in range(5):
        found = generate(engine, prompt, max_tokens=21)
        assert found.source == KvSource(device=boundary, computed=len(prompt) - boundary)
        assert_right(engine, prompt, found, 21)
        boundary = (len(prompt) - 1) // BLOCK * BLOCK
        prompt = [*prompt, *found.tokens, *prompts(17, seed=turn + 1)]
    all_at_rest(engine)


def test_with_states_at_intervals_a_shared_beginning_and_an_answer_come_back(
    make: MakeEngine, prompts: Prompts
) -> None:
    engine, shared = make(state_every=32), prompts(100)
    first = generate(engine, [*shared, *prompts(50, seed=1)], max_tokens=60)
    other = [*shared, *prompts(40, seed=2)]
    found = generate(engine, other)
    assert found.source == KvSource(device=96, computed=44)
    assert_right(engine, other, found, 8)
    longer = [*shared, *prompts(50, seed=1), *first.tokens, *prompts(9, seed=3)]
    found = generate(engine, longer, max_tokens=20)
    assert found.source == KvSource(device=192, computed=len(longer) - 192), "in the middle of the answer"
    assert_right(engine, longer, found, 20)


@pytest.mark.parametrize("lacks", ["states", "blocks"])
def test_a_prefix_is_as_long_as_both_its_blocks_and_a_state_reach(
    make: MakeEngine, prompts: Prompts, lacks: str
) -> None:
    """Holds invariant 15a: a boundary without a state, and a state without its blocks, are of no use."""
    engine, prompt = make(state_every=32), prompts(150)
    generate(engine, prompt)
    settle_all(engine)
    prefix = engine.cache.prefix_of(prompt)
    assert prefix is not None
    if lacks == "states":
        pool = states_of(engine).pool
        pool.forget(pool.find_each([prefix.keys[8], prefix.keys[7]]))  # at 144 and 128 tokens
    else:
        for pool in (engine.cache._pool, engine.cache.host.pool):
            pool.forget(slot for slot in pool.find_each(prefix.keys[7:8]) if slot >= 0)
    found = generate(engine, prompt, max_tokens=20)
    assert found.source == KvSource(device=96, computed=54)
    assert_right(engine, prompt, found, 20)
    all_at_rest(engine)


def test_where_two_prompts_have_parted_a_third_one_begins(make: MakeEngine, prompts: Prompts) -> None:
    """Three users share a long beginning that ends inside a chunk."""
    engine, shared = make(max_model_len=1000), prompts(333)
    asked = [[*shared, *prompts(60, seed=user)] for user in range(1, 4)]
    found = [generate(engine, prompt, max_tokens=6) for prompt in asked]
    for prompt, one in zip(asked, found, strict=True):
        assert_right(engine, prompt, one, 6)
    assert [one.source for one in found] == [
        KvSource(computed=393),
        KvSource(computed=393),
        KvSource(device=320, computed=73),
    ]
    all_at_rest(engine)


@pytest.mark.parametrize("chunk", [48, 64])
def test_prompts_that_come_together_share_their_beginning(
    make: MakeEngine, prompts: Prompts, chunk: int
) -> None:
    """A running request keeps a state where a waiting one parts from it, if it is not that far yet."""
    engine, shared = make(prefill_chunk=chunk, max_model_len=1000), prompts(333)
    asked = [[*shared, *prompts(60, seed=user)] for user in range(1, 5)]
    found = [submit(engine, prompt, max_tokens=6) for prompt in asked]
    run_all(engine)
    for prompt, one in zip(asked, found, strict=True):
        assert_right(engine, prompt, one, 6)
    shares = [one.source.computed for one in found if one.source is not None]
    assert shares == [393, 73, 73, 73]
    all_at_rest(engine)


def test_an_answer_that_goes_on_is_no_place_where_prompts_part(make: MakeEngine, prompts: Prompts) -> None:
    engine, prompt = make(max_model_len=2000), prompts(90)
    for turn in range(3):
        found = generate(engine, prompt, max_tokens=300)
        assert states_of(engine).pool.num_keys == turn + 1
        prompt = [*prompt, *found.tokens, *prompts(17, seed=turn + 1)]
    all_at_rest(engine)


def test_of_a_long_prompt_the_state_is_from_before_the_tokens_of_a_chat_template(
    make: MakeEngine, prompts: Prompts
) -> None:
    """Its last ones are others when the conversation goes on."""
    engine, prompt = make(max_model_len=2000), prompts(1100)
    generate(engine, prompt)
    longer = [*prompt[:-30], *prompts(100, seed=1)]
    found = generate(engine, longer, max_tokens=6)
    assert found.source == KvSource(device=1024, computed=146)
    assert_right(engine, longer, found, 6)


def test_requests_with_the_same_prompt_wait_for_the_state_of_the_first(
    make: MakeEngine, prompts: Prompts
) -> None:
    engine, prompt = make(prefill_chunk=40), prompts(150)
    found = [submit(engine, prompt, max_tokens=6 + i) for i in range(4)]
    run_all(engine)
    sources = [one.source for one in found]
    assert sources == [KvSource(computed=150), *[KvSource(device=144, computed=6)] * 3]
    for i, one in enumerate(found):
        assert_right(engine, prompt, one, 6 + i)
    all_at_rest(engine)


def test_a_request_that_waits_for_a_state_goes_on_when_the_other_one_is_cancelled(
    make: MakeEngine, prompts: Prompts
) -> None:
    engine, prompt = make(prefill_chunk=16), prompts(150)
    first = submit(engine, prompt)
    found = submit(engine, prompt, max_tokens=6)
    for _ in range(3):
        engine.step()
    assert not found.events
    engine.cancel(first.request_id)
    run_all(engine)
    assert_right(engine, prompt, found, 6)
    all_at_rest(engine)


def test_a_prompt_under_another_salt_finds_neither_blocks_nor_states(
    make: MakeEngine, prompts: Prompts
) -> None:
    engine, prompt = make(), prompts(100)
    generate(engine, prompt, salt="one")
    assert generate(engine, prompt, salt="two").source == KvSource(computed=100)
    assert generate(engine, prompt, salt="one").source == KvSource(device=96, computed=4)


def test_a_reset_of_host_memory_forgets_states(make: MakeEngine, prompts: Prompts) -> None:
    engine, prompt = make(), prompts(100)
    generate(engine, prompt)
    settle_all(engine)
    engine.cache.reset(("host",))
    assert states_of(engine).pool.num_keys == 0
    assert generate(engine, prompt).source == KvSource(computed=100)


def test_a_request_with_prompt_logprobs_neither_uses_nor_keeps_a_state(
    make: MakeEngine, prompts: Prompts
) -> None:
    engine, prompt = make(), prompts(100)
    assert generate(engine, prompt, prompt_logprobs=0).source == KvSource(computed=100)
    assert states_of(engine).pool.num_keys == 0


# ------------------------------------------------------------------------------ pressure, failure and cancels


def test_where_no_slot_is_left_a_state_is_skipped_and_counted(make: MakeEngine, prompts: Prompts) -> None:
    """Holds invariant 24: requests go on without it."""
    engine = make(states_gib=2.5 * 16896 / 2**30, prefill_chunk=500)  # all of them in one step
    assert states_of(engine).pool.num_slots == 2
    asked = [prompts(40, seed=seed) for seed in range(5)]
    found = [submit(engine, prompt, max_tokens=6) for prompt in asked]
    run_all(engine)
    for prompt, one in zip(asked, found, strict=True):
        assert_right(engine, prompt, one, 6)
    traffic = engine.stats().traffic
    assert traffic is not None and traffic.skipped["states"] == 3
    assert engine.stats().kv_blocks["states"]["idle"] == 2
    for seed in range(10, 14):  # the oldest make room
        generate(engine, prompts(40, seed=seed))
    assert generate(engine, prompts(40, seed=13)).source == KvSource(device=32, computed=8)
    all_at_rest(engine)


def test_a_retracted_request_resumes_at_the_last_state_that_was_kept(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = make_engine(
        MODEL, blocks=24, host_blocks=200, overcommit=4.0, max_batch=6, state_every=16, prefill_chunk=40
    )
    asked = [prompts(40 + 7 * seed, seed=seed) for seed in range(6)]
    found = [submit(engine, prompt, max_tokens=60) for prompt in asked]
    run_all(engine)
    assert engine.stats().retractions > 0
    for prompt, one in zip(asked, found, strict=True):
        assert_right(engine, prompt, one, 60)
    all_at_rest(engine)


def fail_a_load(engine: Engine, prompts: Prompts, beside: bool) -> Collected:
    """A prompt of 150 tokens whose blocks do not arrive. `beside` another request it waits for the end of its
    load; alone it may be in a step before."""
    generate(engine, prompts(150))
    settle_all(engine)
    engine.cache.reset(("device",))
    if beside:
        other = submit(engine, prompts(20, seed=4), max_tokens=60)
        while not other.tokens:
            engine.step()
    load, _ = gates(engine)
    load.fail_next = 1
    return generate(engine, prompts(150), max_tokens=20)


@pytest.mark.parametrize("beside", [True, False])
def test_a_load_that_fails_is_computed_from_the_beginning(
    make: MakeEngine, prompts: Prompts, beside: bool
) -> None:
    """What landed of its blocks ends at a boundary without a state."""
    engine = make()
    assert_right(engine, prompts(150), fail_a_load(engine, prompts, beside), 20)
    all_at_rest(engine)


@pytest.mark.parametrize("turns", range(1, 9, 2))
def test_a_request_that_is_cancelled_leaves_no_state_that_it_has_not_computed(
    make: MakeEngine, prompts: Prompts, turns: int
) -> None:
    engine, prompt = make(prefill_chunk=32, max_batch=2), prompts(100)
    gone = submit(engine, prompt, max_tokens=20)
    for _ in range(turns):
        engine.step()
    engine.cancel(gone.request_id)
    other = submit(engine, prompts(60, seed=1), max_tokens=5)  # may take its slot at once
    run_all(engine)
    assert gone.finish is FinishReason.CANCELLED
    assert_right(engine, prompts(60, seed=1), other, 5)
    assert_right(engine, prompt, generate(engine, prompt, max_tokens=20), 20)
    all_at_rest(engine)


def test_the_state_of_a_step_that_failed_is_not_found(
    make: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompt = make(), prompts(100)
    layer, calls = engine.parts.executor.target.forward._head, iter(range(100))

    def fails_once(flow: Any) -> None:
        if next(calls) == 0:
            raise RuntimeError("the head was told to fail")
        layer(flow)

    monkeypatch.setattr(engine.parts.executor.target.forward, "_head", fails_once)
    assert generate(engine, prompt).finish is FinishReason.ERROR
    assert states_of(engine).pool.num_keys == 0
    assert_right(engine, prompt, generate(engine, prompt), 8)
    all_at_rest(engine)


@pytest.mark.parametrize("seed", crowds(1))
def test_a_random_crowd_over_both_tiers_gets_the_tokens_of_each_request_alone(
    make_engine: MakeEngine, prompts: Prompts, seed: int
) -> None:
    r = random.Random(seed)
    engine = make_engine(
        MODEL,
        blocks=r.choice([24, 48]),
        host_blocks=r.choice([30, 120]),
        states_gib=r.choice([3, 12, 60]) * 16896 / 2**30,
        state_every=r.choice([0, 16, 48]),
        max_batch=4,
        overcommit=r.choice([1.0, 3.0]),
        prefill_chunk=r.choice([16, 40, 100]),
        capture=r.random() < 0.7,
        max_model_len=300,
    )
    known = [prompts(r.randint(10, 120), seed=i) for i in range(3)]
    asked: list[tuple[list[int], Collected, int]] = []
    for _ in range(16):
        stem = r.choice(known)
        prompt = [*stem[: r.randint(1, len(stem))], *prompts(r.randint(0, 30), seed=r.randint(0, 9))][:220]
        num = r.randint(1, 60)
        asked.append((prompt, submit(engine, prompt, max_tokens=num), num))
        known.append([*prompt, *asked[-1][1].tokens])
        for _ in range(r.randint(0, 30)):
            engine.step()
        if r.random() < 0.3:
            engine.cancel(r.choice(asked)[1].request_id)
        if r.random() < 0.3:
            engine.cache.reset((r.choice(["device", "host"]),))
    run_all(engine)
    for prompt, one, num in asked:
        assert one.error is None
        assert one.tokens == expected(engine, prompt, num)[: len(one.tokens)]
    all_at_rest(engine)


# ------------------------------------------------------------------------------------------------- the faults


def test_a_kept_state_that_is_not_copied_to_the_row_is_noticed(
    make: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StatePass, "begin", lambda own, plan, ops: None)
    assert_wrong(make(max_batch=1), prompts(100))


def test_a_prefix_without_a_state_is_noticed(
    make: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks alone count, and the request begins with whatever is in its row."""
    monkeypatch.setattr(WithStates, "_cut", lambda own, found, keys: found)
    monkeypatch.setattr(KeptStates, "pin", lambda own, owner, key: own.pool.pin([0], owner))
    engine = make(max_batch=1)
    shared = prompts(100)
    generate(engine, [*shared, *prompts(60, seed=1)])
    prompt = [*shared, *prompts(20, seed=2)]
    assert generate(engine, prompt, max_tokens=12).tokens != expected(engine, prompt, 12)


def test_a_state_with_the_last_token_already_in_it_is_noticed(
    make: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AtBoundaries, "usable_keys", Placement.usable_keys)
    engine, prompt = make(max_batch=1), prompts(96)
    generate(engine, [*prompt, *prompts(1, seed=1)])
    assert generate(engine, prompt, max_tokens=12).tokens != expected(engine, prompt, 12)


def test_a_state_that_is_kept_before_its_chunk_has_run_is_noticed(
    make: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = StatePass.begin

    def too_early(own: StatePass, plan: StepPlan, ops: StepOps) -> None:
        begin(own, plan, ops)
        ends = [(one.row, one.state.ends) for one in plan.chunks if one.state is not None]
        own._copy(ops, "keep states", (own._rows, own._kept), ends)

    monkeypatch.setattr(StatePass, "begin", too_early)
    monkeypatch.setattr(StatePass, "submit", lambda own, step: None)
    assert_wrong(make(max_batch=1), prompts(100))


def test_a_chunk_that_runs_past_the_boundary_is_noticed(
    make: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state has some tokens more than the key says."""
    place = AtBoundaries.place

    def past(own: AtBoundaries, running: Any, start: int, end: int, *more: Any) -> Any:
        kept = own._kept[running.life]
        if passed := [boundary for boundary in kept.ends if start < boundary < end]:
            written = own._reserve(running, kept, passed[0])
            placed = place(own, running, start, end, *more)
            return placed._replace(state=StateMove(None, written))
        return place(own, running, start, end, *more)

    monkeypatch.setattr(AtBoundaries, "until_boundary", Placement.until_boundary)
    monkeypatch.setattr(AtBoundaries, "place", past)
    assert_wrong(make(max_batch=1), prompts(100))


def test_what_landed_of_a_load_is_no_place_to_continue_from(
    make: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AtBoundaries, "divides", True)
    engine = make()
    found = fail_a_load(engine, prompts, beside=True)
    assert found.tokens != expected(engine, prompts(150), 20)


# Holds invariant 23a: kept states are touched on the lane that computes, and only while they are held.
@pytest.mark.parametrize("fault", ["another lane", "no pin"])
def test_the_sanitizer_sees_states_that_are_copied_out_of_order_or_unheld(
    prompts: Prompts, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    engine, sanitizer = build_sanitized(tiny_config(MODEL, **ROOM))
    aside = CpuLane("aside", sanitizer.observers.lanes[0])
    if fault == "another lane":
        copy = StatePass._copy

        def copy_aside(own: StatePass, ops: StepOps, label: str, *more: Any) -> None:
            copy(own, dataclasses.replace(ops, lane=aside, last=None), label, *more)

        monkeypatch.setattr(StatePass, "_copy", copy_aside)
    else:

        class Unheld:
            def __init__(self, slots: list[int]) -> None:
                self.slots = slots

            def end(self, fence: object = None) -> None:
                pass

        monkeypatch.setattr(KeptStates, "pin", lambda own, owner, key: Unheld(own.pool.find((key,)).tolist()))
    generate(engine, prompts(100))
    generate(engine, prompts(100))
    kind = Kind.RACE if fault == "another lane" else Kind.LIFETIME
    assert sanitizer.num_by_kind[kind] > 0
    assert any("states" in str(report) for report in sanitizer.reports)
    aside.close(20.0)
    engine.close(timeout_s=20.0)


# -------------------------------------------------------------------------------------------- what is refused


def test_options_of_states_are_refused_where_they_have_no_effect(make_engine: MakeEngine) -> None:
    dense = tiny_config("tiny-qwen3", **ROOM)
    for change in ({"state_every": 64}, {"states_gib": 1.0}):
        with pytest.raises(ConfigError, match="this model has no recurrent layers"):
            build.build(dataclasses.replace(dense, offload=dataclasses.replace(dense.offload, **change)))
    with pytest.raises(ConfigError, match="--state-every must be a multiple of --block-tokens 16, got 40"):
        make_engine(MODEL, **ROOM, state_every=40)
    with pytest.raises(ConfigError, match="--kv-offload-states-gib 1e-09 holds no state"):
        make_engine(MODEL, **ROOM, states_gib=1e-9)
    with pytest.raises(ConfigError, match="--state-every needs --kv-offload"):
        OffloadConfig(enabled=False, state_every=64)


def test_a_whole_prefix_rule_uses_blocks_alone() -> None:
    assert WholePrefix(BLOCK).states is None


@pytest.mark.parametrize(
    ("num_cached", "free_gib", "num"),
    [(844_672, 256, 103), (0, 256, 32), (844_672, 16, 32), (844_672, 8, 16)],
)
def test_by_default_there_is_a_state_for_each_8192_tokens_of_kv_where_memory_is_free(
    num_cached: int, free_gib: int, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_build, "free_bytes", lambda device: free_gib << 30)
    assert kv_build.num_states(Config(), StateLayout(30, 64 << 20, b"a state"), num_cached) == num
