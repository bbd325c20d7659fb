"""Models with recurrent layers: whatever shares their steps and whatever happens to others, requests get the
tokens of a state that runs through them alone.

The reference computes one sequence, token by token."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config import EngineConfig
from penstock.contract import Access, FinishReason, KvSource, Mode, StepPlan
from penstock.engine import build, sizing
from penstock.engine.engine import Engine
from penstock.engine.execution.passes import STATES, StatePass, StepOps
from penstock.engine.execution.replays import cuda_buckets
from penstock.engine.execution.states import BoundStates, StateSlots
from penstock.errors import ConfigError
from penstock.lanes.cpu import CpuLane
from penstock.models import delta_rule
from penstock.models.loader import read_config
from penstock.models.registry import BUILT_IN
from penstock.sanitizer.report import Kind
from penstock.testing.sanitized import build_sanitized
from penstock.testing.tiny_models import TINY_QWEN3_5, write_tiny_model
from tests.cpu.engine.test_engine import check_at_rest
from tests.support import contiguous_kv
from tests.support.crowds import crowds
from tests.support.driving import Collected, block_bytes, generate, run_all, submit, tiny_config

MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]
MODEL = "tiny-qwen3.5"
LENGTHS = (1, 2, 5, 30, 63, 64, 65, 130, 200)


def expected(engine: Engine, prompt: Sequence[int], num_tokens: int) -> list[int]:
    return contiguous_kv.generate(engine.parts.executor.target.model, prompt, num_tokens)


def slots_of(engine: Engine) -> StateSlots:
    slots = engine.parts.executor.target.forward.slots
    assert slots is not None
    return slots


def assert_right(engine: Engine, prompt: Sequence[int], found: Collected, num_tokens: int) -> None:
    assert found.error is None
    assert found.tokens == expected(engine, prompt, num_tokens)


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes of steps that a GPU captures."""

    def buckets(config: Any, limits: Any, device: object) -> Any:
        return cuda_buckets(limits.max_rows, limits.prefill_chunk)

    monkeypatch.setattr(sizing, "buckets_for", buckets)


# --------------------------------------------------------------------------------------------- steps and rows


@pytest.mark.parametrize("chunk", [3, 16, 64, 500])
@pytest.mark.parametrize("capture", [True, False])
def test_requests_in_one_batch_get_the_tokens_of_their_own_states(
    make_engine: MakeEngine, prompts: Prompts, chunk: int, capture: bool
) -> None:
    engine = make_engine(MODEL, prefill_chunk=chunk, capture=capture)
    asked = [prompts(length, seed=length) for length in LENGTHS]
    found = [submit(engine, prompt, max_tokens=20) for prompt in asked]
    run_all(engine)
    for prompt, one in zip(asked, found, strict=True):
        assert_right(engine, prompt, one, 20)
    check_at_rest(engine)


def test_a_request_gets_a_clear_state_whoever_had_its_row_before(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = make_engine(MODEL, max_batch=1)
    for length in (200, 1, 7, 90):
        prompt = prompts(length, seed=length)
        assert_right(engine, prompt, generate(engine, prompt, max_tokens=10), 10)


def test_without_clearing_a_request_goes_on_from_the_state_before(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault."""
    monkeypatch.setattr(StateSlots, "clear", lambda slots, rows: None)
    engine = make_engine(MODEL, max_batch=1)
    generate(engine, prompts(200), max_tokens=10)
    prompt = prompts(7, seed=7)
    assert generate(engine, prompt, max_tokens=10).tokens != expected(engine, prompt, 10)


@pytest.mark.parametrize("form", ["one_step", "many_steps"])
def test_a_state_that_does_not_advance_is_noticed(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """The fault, in decodes and in prompts."""
    right = getattr(delta_rule, form)
    monkeypatch.setattr(delta_rule, form, lambda heads, state: (right(heads, state)[0], state))
    engine, prompt = make_engine(MODEL, prefill_chunk=50), prompts(120)
    assert generate(engine, prompt, max_tokens=20).tokens != expected(engine, prompt, 20)


def test_two_requests_in_one_row_are_noticed(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: a row is given to the next request while its owner still runs."""
    advance = BoundStates.advance

    def one_row(bound: Any, *args: Any) -> Any:
        rows = bound._inputs.rows
        own, rows[:] = rows.clone(), torch.zeros_like(rows)
        found = advance(bound, *args)
        rows[:] = own
        return found

    monkeypatch.setattr(BoundStates, "advance", one_row)
    engine = make_engine(MODEL, capture=False)
    asked = [prompts(40, seed=seed) for seed in range(2)]
    found = [submit(engine, prompt, max_tokens=10) for prompt in asked]
    run_all(engine)
    assert [one.tokens for one in found] != [expected(engine, prompt, 10) for prompt in asked]


@pytest.mark.usefixtures("padded")
def test_rows_of_padding_touch_no_state_of_a_request(make_engine: MakeEngine, prompts: Prompts) -> None:
    """Decodes of three, five and six requests, in steps of four and eight rows."""
    engine = make_engine(MODEL, max_batch=16)
    asked = [prompts(length, seed=length) for length in (9, 20, 33, 50, 70, 71)]
    found = [submit(engine, prompt, max_tokens=9 + 3 * i) for i, prompt in enumerate(asked)]
    run_all(engine)
    assert all(shape.is_decode for shape in engine.parts.executor.target.replays.buckets)
    for i, (prompt, one) in enumerate(zip(asked, found, strict=True)):
        assert_right(engine, prompt, one, 9 + 3 * i)
    windows, matrices = slots_of(engine).tensors
    assert not windows[:, len(asked) : -1].any() and not matrices[:, len(asked) : -1].any()
    assert matrices[:, -1].isfinite().all()


@pytest.mark.usefixtures("padded")
def test_padding_in_the_row_of_a_request_is_noticed(make_engine: MakeEngine, prompts: Prompts) -> None:
    """The fault."""
    engine = make_engine(MODEL)
    engine.parts.executor.target.replays.packer.padding_row = 0
    asked = [prompts(length, seed=length) for length in (9, 20, 33)]
    found = [submit(engine, prompt, max_tokens=20) for prompt in asked]
    run_all(engine)
    assert [one.tokens for one in found] != [expected(engine, prompt, 20) for prompt in asked]


# ------------------------------------------------------------------------------------------ order of accesses


def test_every_op_declares_the_states_that_it_reads_and_writes(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(MODEL, capture=False)
    lane, seen = engine.parts.lanes[0], list[tuple[str, list[Access]]]()
    submit_op = lane.submit

    def noted(op: Any, accesses: Sequence[Access] = (), **more: Any) -> Any:
        seen.append((more["label"], [one for one in accesses if one.arena == STATES]))
        return submit_op(op, accesses, **more)

    monkeypatch.setattr(lane, "submit", noted)
    submit(engine, prompts(20), max_tokens=3)
    submit(engine, prompts(30), max_tokens=3)
    run_all(engine)
    found = {label: of_states for label, of_states in seen if of_states}
    assert set(found) == {"clear states", "layer 0", "layer 1", "layer 2"}, "layer 3 attends"
    assert found["clear states"][0].layers == (0, 3)
    for layer in range(3):
        (access,) = found[f"layer {layer}"]
        assert (access.layers, access.mode) == ((layer, layer + 1), Mode.WRITE)
        assert sorted(int(row) for row in access.slots) == [0, 1]


# Holds invariant 23a: nothing writes a state beside the lane that computes.
def test_a_clearing_outside_the_order_of_the_compute_lane_is_a_race(
    prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault; without it the sanitizer says nothing, as all tests here check at their end."""
    engine, sanitizer = build_sanitized(tiny_config(MODEL))
    aside = CpuLane("aside", sanitizer.observers.lanes[0])

    def begin_aside(own: StatePass, plan: StepPlan, ops: StepOps) -> None:
        rows = [chunk.row for chunk in plan.chunks if chunk.start == 0]
        if rows:
            access = Access(STATES, rows, (0, 3), Mode.WRITE)
            aside.submit(lambda: None, [access], label="clear states")

    monkeypatch.setattr(StatePass, "begin", begin_aside)
    generate(engine, prompts(20))
    assert sanitizer.num_by_kind[Kind.RACE] > 0
    assert any(STATES in str(report) for report in sanitizer.reports)
    aside.close(20.0)
    engine.close(timeout_s=20.0)


# -------------------------------------------------------------------------------- retraction, cancel, failure


def test_a_retracted_request_is_computed_again_from_a_clear_state(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = make_engine(MODEL, blocks=14, overcommit=4.0, max_batch=6)
    asked = [prompts(20 + 7 * seed, seed=seed) for seed in range(6)]
    found = [submit(engine, prompt, max_tokens=60) for prompt in asked]
    run_all(engine)
    assert engine.stats().retractions > 0
    for prompt, one in zip(asked, found, strict=True):
        assert_right(engine, prompt, one, 60)
    check_at_rest(engine)


def test_the_row_of_a_cancelled_request_is_clear_for_the_next_one_while_its_last_step_runs(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = make_engine(MODEL, max_batch=1)
    for turns in range(1, 8):
        gone = submit(engine, prompts(150, seed=turns), max_tokens=40)
        for _ in range(turns):
            engine.step()
        engine.cancel(gone.request_id)
        prompt = prompts(5, seed=turns)
        found = submit(
            engine, prompt, max_tokens=6
        )  # its first step is launched behind the last one of `gone`
        run_all(engine)
        assert gone.finish is FinishReason.CANCELLED
        assert_right(engine, prompt, found, 6)
    check_at_rest(engine)


def test_a_step_that_fails_in_the_middle_of_its_layers_spoils_no_later_request(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first layers have advanced, and the others have not. Its requests end, and their rows are used."""
    engine = make_engine(MODEL, max_batch=2)
    running = [submit(engine, prompts(30, seed=seed), max_tokens=40) for seed in range(2)]
    while not all(one.tokens for one in running):
        engine.step()
    advance, calls = BoundStates.advance, iter(range(10_000))

    def fails_once(bound: Any, *args: Any) -> Any:
        if next(calls) == 1:
            raise RuntimeError("the second layer was told to fail")
        return advance(bound, *args)

    monkeypatch.setattr(BoundStates, "advance", fails_once)
    run_all(engine)
    assert all(one.finish is FinishReason.ERROR for one in running)
    asked = [prompts(40, seed=seed) for seed in (3, 4)]
    found = [submit(engine, prompt, max_tokens=12) for prompt in asked]
    run_all(engine)
    for prompt, one in zip(asked, found, strict=True):
        assert_right(engine, prompt, one, 12)


@pytest.mark.parametrize("seed", crowds(2))
def test_a_random_crowd_gets_the_tokens_of_each_request_alone(
    make_engine: MakeEngine, prompts: Prompts, seed: int
) -> None:
    r = random.Random(seed)
    engine = make_engine(
        MODEL,
        blocks=r.choice([20, 40]),
        max_batch=r.choice([2, 5]),
        overcommit=r.choice([1.0, 3.0]),
        prefill_chunk=r.choice([16, 40, 100]),
        capture=r.random() < 0.7,
        max_model_len=300,
    )
    asked: list[tuple[list[int], Collected, int]] = []
    for number in range(16):
        prompt, num = prompts(r.randint(1, 150), seed=r.randrange(4)), r.randint(1, 60)
        scored = {"prompt_logprobs": 0} if r.random() < 0.2 else {}
        asked.append((prompt, submit(engine, prompt, id=f"r{number}", max_tokens=num, **scored), num))
        for _ in range(r.randint(0, 20)):
            engine.step()
        if r.random() < 0.3:
            engine.cancel(r.choice(asked)[1].request_id)
    run_all(engine)
    for prompt, one, num in asked:
        assert one.error is None
        assert one.tokens == expected(engine, prompt, num)[: len(one.tokens)]
        assert len(one.tokens) == num or one.finish is FinishReason.CANCELLED
    check_at_rest(engine)


# ------------------------------------------------------------------------------ no reuse, sizes, and refusals


def test_a_prefix_is_neither_matched_nor_held_nor_credited(
    make_engine: MakeEngine, prompts: Prompts, caplog: pytest.LogCaptureFixture
) -> None:
    """Holds invariant 21: such requests compute all of their prompt."""
    with caplog.at_level(logging.WARNING):
        engine = make_engine(MODEL)
    assert [one.getMessage() for one in caplog.records if "no prefix is reused" in one.getMessage()]
    for _ in range(2):
        found = generate(engine, prompts(100))
        assert found.source == KvSource(computed=100)
        assert_right(engine, prompts(100), found, 8)
    stats = engine.stats()
    assert stats.cache["hits"] == 0 and stats.kv_blocks["device"]["idle"] == 0
    assert list(stats.kv_blocks) == ["device"], "there is no colder tier"


def test_blocks_have_only_the_layers_that_attend(make_engine: MakeEngine) -> None:
    dims = BUILT_IN[MODEL]
    engine = make_engine(MODEL)
    assert dims.num_kv_layers == 1
    assert engine.parts.arena.layout.num_layers == 1
    assert engine.parts.arena.layout.block_bytes == 2 * 2 * 32 * 16 * 4 == block_bytes(MODEL, 16)


def test_a_model_written_for_tests_is_read_as_what_it_is(tmp_path: Path) -> None:
    found = read_config(write_tiny_model(tmp_path, TINY_QWEN3_5))
    assert dataclasses.replace(found, eos_ids=()) == TINY_QWEN3_5


def test_the_states_have_the_size_that_is_counted(make_engine: MakeEngine) -> None:
    dims = BUILT_IN[MODEL].recurrence
    assert dims is not None
    held = sum(tensor.nbytes for tensor in slots_of(make_engine(MODEL, max_batch=5)).tensors)
    assert held == sizing.state_bytes(dims, 5) == 6 * dims.num_bytes


def test_more_states_than_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "free_bytes", lambda device: 100_000)
    with pytest.raises(ConfigError, match="--max-batch 16: the states of so many requests take"):
        build.build(tiny_config(MODEL))


@pytest.mark.parametrize(
    ("flag", "change"),
    [
        ("--deterministic is not supported", {"deterministic": True}),
        ("--kv-events: with recurrent", {"events": True}),
    ],
)
def test_what_was_not_made_for_states_is_refused_by_name(flag: str, change: dict[str, bool]) -> None:
    """Holds invariant 26: an option that has no effect is refused at start."""
    config, part = tiny_config(MODEL), "kv" if "events" in change else "source"
    with pytest.raises(ConfigError, match=flag):
        build.build(
            dataclasses.replace(config, **{part: dataclasses.replace(getattr(config, part), **change)})
        )


def test_a_context_larger_than_the_device_is_refused_in_words_that_help(make_engine: MakeEngine) -> None:
    config = dataclasses.replace(tiny_config(MODEL, blocks=8), engine=EngineConfig(max_model_len=400))
    with pytest.raises(
        ConfigError,
        match="raise --device-kv-gib, or let it be paged out with --kv-offload",
    ):
        build.build(config)
