"""Sequences larger than what they may have on the device: the first blocks are paged out to host memory, and
every token attends to all of them all the same. Everything runs under the sanitizer, with its checks of bytes
where the test says so."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import pytest

from penstock.contract import FinishReason, KvSource, StepPlan, Waits
from penstock.engine import build as build_module
from penstock.engine import sizing
from penstock.engine import turns as turns_module
from penstock.engine.engine import Engine
from penstock.engine.execution.running_step import RunningStep
from penstock.errors import ConfigError, InvalidRequest, TransferFailed
from penstock.kv.tiers import saves
from tests.support.driving import assert_same, generate, run_all, settle_all, submit, tiny_config

Make = Callable[..., Engine]
Prompts = Callable[..., list[int]]

LONG = 1024


def deep_engine(make_engine: Make, resident_tokens: int, **settings: Any) -> Engine:
    sizes = {"blocks": 64, "host_blocks": 256, "max_model_len": 2048, "resident_tokens": resident_tokens}
    return make_engine(**{**sizes, **settings})


def full_engine(make_engine: Make, **settings: Any) -> Engine:
    return make_engine(blocks=256, host_blocks=256, max_model_len=2048, **settings)


def test_a_sequence_larger_than_its_room_gives_what_the_full_cache_gives(
    make_engine: Make, prompts: Prompts
) -> None:
    prompt = prompts(LONG)
    full = generate(full_engine(make_engine), prompt, max_tokens=40, logprobs=3)
    engine = deep_engine(make_engine, LONG // 8)
    assert_same(generate(engine, prompt, max_tokens=40, logprobs=3), full)
    assert engine.cache.stats().slots["device"].active == 0


def test_only_its_last_blocks_are_on_the_device(make_engine: Make, prompts: Prompts) -> None:
    engine = deep_engine(make_engine, 256)
    deep = submit(engine, prompts(LONG), max_tokens=20)
    most = 0
    while engine.has_work():
        if not engine.step():
            engine.wait_work(0.01)
        most = max(most, engine.cache.stats().slots["device"].active)
        engine.check()
    assert deep.finish is FinishReason.LENGTH
    assert 256 // 16 - 4 <= most <= 256 // 16, "it used the room it was given, and no more"


def test_others_have_as_much_time_as_steps_that_read_host_memory(
    make_engine: Make, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes a second, and ten where it reads host memory."""
    engine, now_s, reads = deep_engine(make_engine, 256), 0.0, []
    monkeypatch.setattr(
        turns_module, "time", types.SimpleNamespace(monotonic=lambda: now_s, sleep=time.sleep)
    )
    launch, read = engine.turns.launch, engine.turns.read

    def launched(plan: StepPlan, waits: Waits) -> RunningStep:
        nonlocal now_s
        now_s += 1.0
        reads.append(any(chunk.num_paged for chunk in plan.chunks))
        return launch(plan, waits)

    def is_read(step: RunningStep) -> None:
        nonlocal now_s
        now_s += 9.0 * (step.number == engine.turns._host_step[0])
        read(step)

    monkeypatch.setattr(engine.turns, "launch", launched)
    monkeypatch.setattr(engine.turns, "read", is_read)
    submit(engine, prompts(30, 2), max_tokens=100)
    deep = submit(engine, prompts(400), max_tokens=4)
    while deep.finish is None:
        if not engine.step():
            engine.wait_work(0.01)
    between = [
        len(list(others)) for is_host, others in itertools.groupby(reads[reads.index(True) :]) if not is_host
    ]
    assert len(between) > 2 and min(between[:-1]) >= 10, between
    run_all(engine)


def test_the_next_turn_finds_all_of_it_in_host_memory(make_engine: Make, prompts: Prompts) -> None:
    prompt = prompts(LONG)
    full = full_engine(make_engine)
    engine = deep_engine(make_engine, 256)
    for turn in range(3):
        ours, theirs = (generate(one, prompt, max_tokens=40, logprobs=1) for one in (engine, full))
        assert_same(ours, theirs)
        assert ours.source is not None
        if turn:
            assert ours.source.host >= 0.97 * (len(prompt) - 100), ours.source
        prompt = [*prompt, *ours.tokens, *prompts(60, seed=turn)]
        settle_all(engine)


@pytest.mark.parametrize("turns", [1, 6, 30])
def test_cancelled_in_the_middle_it_leaves_nothing_behind(
    turns: int, make_engine: Make, prompts: Prompts
) -> None:
    engine = deep_engine(make_engine, 256)
    deep = submit(engine, prompts(LONG), max_tokens=100)
    for _ in range(turns):
        if not engine.step():
            engine.wait_work(0.01)
    engine.cancel(deep.request_id)
    run_all(engine)
    assert deep.finish is FinishReason.CANCELLED
    settle_all(engine)
    engine.check()
    slots = engine.cache.stats().slots
    assert slots["device"].active == slots["device"].pinned == slots["host"].pinned == 0


def test_under_retraction_it_gives_the_same(make_engine: Make, prompts: Prompts) -> None:
    """Memory is promised twice over, so that somebody has to leave."""
    asked = [(prompts(700, 1), 60), *((prompts(120, seed), 150) for seed in range(2, 8))]
    full = full_engine(make_engine)
    alone = [generate(full, prompt, max_tokens=num, logprobs=1) for prompt, num in asked]
    engine = deep_engine(make_engine, 256, overcommit=4.0, blocks=40)
    together = [submit(engine, prompt, max_tokens=num, logprobs=1) for prompt, num in asked]
    run_all(engine)
    for ours, theirs in zip(together, alone, strict=True):
        assert_same(ours, theirs)


def test_after_a_restart_it_goes_on_from_disk(make_engine: Make, prompts: Prompts, tmp_path: Any) -> None:
    """Holds invariant 28: what was read for it counts for the disk."""
    prompt = prompts(LONG)
    disk = {"ssd_dir": str(tmp_path), "ssd_gib": 0.05}
    first = deep_engine(make_engine, 256, **disk)
    answer = generate(first, prompt, max_tokens=40)
    settle_all(first)
    first.close(timeout_s=20.0)
    engine = deep_engine(make_engine, 384, **disk)
    engine.cache.cold_tiers["ssd"].calls.store.wait_scanned(20.0)  # type: ignore[attr-defined]
    prompt = [*prompt, *answer.tokens, *prompts(60, seed=7)]
    ours = generate(engine, prompt, max_tokens=20, logprobs=1)
    assert_same(ours, generate(full_engine(make_engine), prompt, max_tokens=20, logprobs=1))
    assert ours.source is not None and ours.source.computed <= 60 + 16, ours.source
    assert ours.source == KvSource(ssd=len(prompt) - ours.source.computed, computed=ours.source.computed), (
        "not the tier it was read into"
    )


def test_what_cannot_work_is_refused_with_its_numbers(make_engine: Make, prompts: Prompts) -> None:
    with pytest.raises(ConfigError, match=r"--kv-resident-tokens must be at least 128 \(8 blocks\), got 100"):
        tiny_config(resident_tokens=100)
    with pytest.raises(
        ConfigError,
        match=r"--max-model-len 2048 does not fit into 64 KV blocks .*host memory takes 224 tokens of it",
    ):
        make_engine(blocks=64, host_blocks=16, max_model_len=2048)
    with pytest.raises(
        ConfigError, match=r"does not fit into 64 KV blocks .*let it be paged out with --kv-offload"
    ):
        make_engine(blocks=64, max_model_len=2048)
    with pytest.raises(
        ConfigError,
        match=r"--max-model-len 1024 exceeds --kv-resident-tokens 256, .*host memory takes 224 tokens of it",
    ):
        make_engine(blocks=64, host_blocks=16, max_model_len=1024, resident_tokens=256)
    for settings in [{"host_blocks": 0}, {"host_blocks": 64, "prefix_cache": False}]:
        with pytest.raises(
            ConfigError,
            match=r"--kv-resident-tokens 256: "
            r"paging needs --kv-offload and a prefix cache",
        ):
            make_engine(blocks=64, resident_tokens=256, **settings)
    engine = deep_engine(make_engine, 256)
    windowed = dataclasses.replace(engine.parts.executor.target.model.config, windows=(64, 0))
    for settings, says in [
        ({"resident_tokens": 256}, "--kv-resident-tokens 256: a model"),
        ({"max_model_len": 2048}, "raise --device-kv-gib: a model"),
    ]:
        with pytest.raises(ConfigError, match=f"{says} with sliding windows is not paged out"):
            sizing.longest_sequence(tiny_config(host_blocks=256, **settings), windowed, 64, 256)
    with pytest.raises(InvalidRequest):
        submit(engine, prompts(2048), max_tokens=100)


@pytest.mark.parametrize(("host_blocks", "most"), [(16, 256), (40, 560)])
def test_the_longest_sequence_that_is_accepted_runs(
    make_engine: Make, prompts: Prompts, host_blocks: int, most: int
) -> None:
    """It fits on the device, and may not be there as a whole: then host memory has to take it, or it would
    wait for ever, and all others behind it. Where nobody says how long sequences are, they are as long as has
    room."""
    engine = make_engine(blocks=64, host_blocks=host_blocks, resident_tokens=256)
    assert engine.max_model_len == most
    assert generate(engine, prompts(most - 2), max_tokens=2).finish is FinishReason.LENGTH


def test_a_long_sequence_is_read_in_several_pieces(
    make_engine: Make, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "_CPU_PIECE_TOKENS", 128)
    prompt = prompts(LONG)
    ours = generate(deep_engine(make_engine, 256), prompt, max_tokens=20, logprobs=1)
    assert_same(ours, generate(full_engine(make_engine), prompt, max_tokens=20, logprobs=1))


def test_a_copy_to_host_memory_that_fails_is_made_again(make_engine: Make, prompts: Prompts) -> None:
    engine = deep_engine(make_engine, 256)
    copier, failures = engine.cache.saves.mover.copier, []

    def copy(*args: Any) -> None:
        if len(failures) < 5:
            failures.append(args)
            raise TransferFailed("a copy that is lost")
        copier.copy(*args)

    engine.cache.saves.mover.copier = types.SimpleNamespace(copy=copy)  # type: ignore[assignment]
    prompt = prompts(LONG)
    ours = generate(engine, prompt, max_tokens=20, logprobs=1)
    assert len(failures) == 5
    assert_same(ours, generate(full_engine(make_engine), prompt, max_tokens=20, logprobs=1))


def test_a_piece_that_cannot_be_fetched_ends_its_request_and_no_other(
    make_engine: Make, prompts: Prompts
) -> None:
    engine = deep_engine(make_engine, 256)
    attention = engine.parts.executor.target.attention
    fetch, failures = attention.fetch, []

    def fail(*args: Any) -> None:
        failures.append(args)
        raise RuntimeError("host memory is gone")

    other = submit(engine, prompts(40), max_tokens=60)
    for _ in range(6):
        engine.step()
    attention.fetch = fail  # type: ignore[method-assign]
    deep = submit(engine, prompts(LONG), max_tokens=20)
    while deep.finish is None:
        if not engine.step():
            engine.wait_work(0.01)
    attention.fetch = fetch  # type: ignore[method-assign]
    run_all(engine)
    assert deep.finish is FinishReason.ERROR and "host memory is gone" in (deep.error or "") and failures
    assert other.finish is not None, "it was in the step that failed, or went on: either way it has ended"
    assert generate(engine, prompts(LONG, 3), max_tokens=5).finish is FinishReason.LENGTH


def test_blocks_stay_on_the_device_until_all_that_is_saved_with_them_has_landed(
    make_engine: Make, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save lands block by block, and protects its slots to its end."""
    monkeypatch.setattr(saves, "_PART_BLOCKS", 1)
    engine = deep_engine(make_engine, 128)
    copier, may_go_on, stopped = engine.cache.saves.mover.copier, threading.Event(), threading.Event()
    num_copies = itertools.count(1)

    def copy(*args: Any) -> None:
        if next(num_copies) == 2:
            stopped.set()
            may_go_on.wait(30.0)
        copier.copy(*args)

    engine.cache.saves.mover.copier = types.SimpleNamespace(copy=copy)  # type: ignore[assignment]
    prompt = prompts(512)
    deep = submit(engine, prompt, max_tokens=5, logprobs=1)
    idle = 0
    while idle < 5:  # it has computed what there is room for, and waits
        idle = 0 if engine.step() else idle + 1
        engine.wait_work(0.01)
    assert stopped.wait(30.0), "a loaded machine may take longer for a copy than five idle turns"
    engine.step()
    assert engine.cache.stats().slots["host"].idle >= 1, "the first block of the save has landed"
    may_go_on.set()
    run_all(engine)
    assert_same(deep, generate(full_engine(make_engine), prompt, max_tokens=5, logprobs=1))
