"""Models whose layers all have a window: KV that no later token sees leaves the device, and the tokens are
those of an engine that keeps all of it.

The reference computes over all KV of one sequence, with a mask."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.config import SpeculationConfig
from penstock.contract import KvSource
from penstock.engine.engine import Engine
from penstock.errors import ConfigError
from penstock.models.llama import TINY_LLAMA
from penstock.models.registry import BUILT_IN
from penstock.testing.sanitized import build_sanitized, check_silent
from tests.cpu.engine.test_engine import check_at_rest
from tests.support import contiguous_kv
from tests.support.crowds import crowds
from tests.support.driving import Collected, generate, run_all, settle_all, submit, tiny_config
from tests.support.forced import forced
from tests.support.gates import gates

MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]
MODEL, WINDOW, BLOCK = "tiny-windowed", 40, 8
WINDOW_BLOCKS = WINDOW // BLOCK


@pytest.fixture
def make(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    """Engines of a model with the window in every layer."""
    windowed = dataclasses.replace(TINY_LLAMA, architecture="mistral", windows=(WINDOW, WINDOW))
    monkeypatch.setitem(BUILT_IN, MODEL, windowed)  # type: ignore[arg-type]
    return functools.partial(make_engine, MODEL, block_tokens=BLOCK)


def expected(engine: Engine, prompt: Sequence[int], num_tokens: int) -> list[int]:
    return contiguous_kv.generate(engine.parts.executor.target.model, prompt, num_tokens)


def held(engine: Engine) -> int:
    return engine.stats().kv_blocks["device"]["active"]


def run_watched(engine: Engine) -> int:
    """Until it rests. Returns the most slots that requests had at one time."""
    most = 0
    while engine.has_work():
        if not engine.step():
            engine.wait_work(0.01)
        most = max(most, held(engine))
    return most


@pytest.mark.parametrize("chunk", [3, BLOCK, 29, WINDOW, 64, 256])
def test_a_prompt_of_several_windows_in_any_chunks_gives_the_tokens_of_all_its_kv(
    make: MakeEngine, prompts: Prompts, chunk: int
) -> None:
    engine = make(prefill_chunk=chunk)
    found = generate(engine, prompts(210), max_tokens=100)
    assert found.tokens == expected(engine, prompts(210), 100)
    check_at_rest(engine)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_generation_longer_than_the_device_runs_in_a_window_of_it(
    make: MakeEngine, prompts: Prompts, prefix_cache: bool
) -> None:
    engine = make(blocks=14, prefill_chunk=WINDOW, max_model_len=600, prefix_cache=prefix_cache)
    found = submit(engine, prompts(150), max_tokens=400)
    assert run_watched(engine) <= 2 * WINDOW_BLOCKS + 2
    assert found.tokens == expected(engine, prompts(150), 400)
    assert engine.stats().retractions == 0


def test_an_answer_holds_a_window_and_leaves_the_rest_to_others(make: MakeEngine, prompts: Prompts) -> None:
    engine = make(blocks=30, prefill_chunk=WINDOW, max_model_len=600)
    found = [submit(engine, prompts(120, seed=seed), max_tokens=120) for seed in range(3)]
    while not all(one.tokens for one in found):
        engine.step()
    most = 0
    while engine.has_work():
        engine.step()
        most = max(most, held(engine))
    assert most <= 3 * (WINDOW_BLOCKS + 3), "all three decode at the same time, in a window each"
    assert engine.stats().retractions == 0
    for seed, one in enumerate(found):
        assert one.tokens == expected(engine, prompts(120, seed=seed), 120)


def test_steps_are_made_small_enough_for_the_device(make: MakeEngine, prompts: Prompts) -> None:
    engine = make(blocks=10, prefill_chunk=256, max_model_len=600)
    assert generate(engine, prompts(300), max_tokens=40).tokens == expected(engine, prompts(300), 40)
    with pytest.raises(ConfigError, match="does not fit into 7 KV blocks"):
        make(blocks=7, max_model_len=600)


# ---------------------------------------------------------------------------------------- a prefix comes back


def conversation(engine: Engine, prompts: Prompts) -> tuple[list[int], Collected]:
    """Its first turn, of several windows. Returns the prompt of the second turn as well."""
    first = generate(engine, prompts(200), max_tokens=30)
    return [*prompts(200), *first.tokens, *prompts(20, seed=7)], first


def test_a_second_turn_finds_its_window_on_the_device_though_the_blocks_before_are_gone(
    make: MakeEngine, prompts: Prompts
) -> None:
    engine = make(blocks=40)
    prompt, _ = conversation(engine, prompts)
    while engine.stats().kv_blocks["device"]["idle"] > WINDOW_BLOCKS + 1:
        engine.cache._pool.evict(1)
    found = generate(engine, prompt, max_tokens=60)
    assert found.source == KvSource(device=224, computed=26)
    assert found.tokens == expected(engine, prompt, 60)


def test_a_full_match_computes_its_last_token_over_a_whole_window(make: MakeEngine, prompts: Prompts) -> None:
    engine = make()
    prompt = prompts(20 * BLOCK)
    generate(engine, prompt, max_tokens=1)
    prefix, pool = engine.cache.prefix_of(prompt), engine.cache._pool
    assert prefix is not None
    pool.forget(pool.find_each(prefix.keys[:-WINDOW_BLOCKS]))
    found = generate(engine, prompt, max_tokens=50)
    assert found.source == KvSource(device=20 * BLOCK - 1, computed=1)
    assert found.tokens == expected(engine, prompt, 50)


@pytest.mark.parametrize("num_before", [0, 3])
def test_a_second_turn_loads_no_more_than_its_window_from_host_memory(
    make: MakeEngine, prompts: Prompts, num_before: int
) -> None:
    """`num_before`: leading blocks of the window that the device still has."""
    engine = make(blocks=64, host_blocks=64)
    prompt, _ = conversation(engine, prompts)
    settle_all(engine)
    prefix = engine.cache.prefix_of(prompt)
    assert prefix is not None
    first = 224 // BLOCK - WINDOW_BLOCKS
    pool = engine.cache._pool
    slots = pool.find_each(prefix.keys[first : first + num_before])
    pool.forget(slot for slot in range(64) if slot not in slots)
    found = generate(engine, prompt, max_tokens=60)
    assert found.tokens == expected(engine, prompt, 60)
    assert engine.stats().cache["promoted"] == WINDOW_BLOCKS - num_before
    assert engine.stats().cache["hits"] == num_before, "what left the window is held by no table"
    device = 224 - (WINDOW_BLOCKS - num_before) * BLOCK if num_before else 0
    assert found.source == KvSource(device=device, host=224 - device, computed=26)
    settle_all(engine)
    check_at_rest(engine)


@pytest.mark.parametrize("host_has_some", [False, True])
def test_a_second_turn_loads_no_more_than_its_window_from_a_disk(
    make: MakeEngine, prompts: Prompts, tmp_path: Path, host_has_some: bool
) -> None:
    engine = make(blocks=64, host_blocks=256, ssd_dir=str(tmp_path), ssd_gib=0.1)
    prompt, _ = conversation(engine, prompts)
    engine.cache.drain(30.0)
    engine.cache.reset(("device",))
    host = engine.cache.host.pool
    prefix = engine.cache.prefix_of(prompt)
    assert prefix is not None
    kept = prefix.keys[224 // BLOCK - 2 : 224 // BLOCK] if host_has_some else ()
    host.forget(slot for slot in range(host.num_slots) if slot not in host.find_each(kept))
    found = generate(engine, prompt, max_tokens=60)
    assert found.tokens == expected(engine, prompt, 60)
    assert engine.stats().cache["promoted"] == WINDOW_BLOCKS
    assert found.source is not None and found.source.computed == 26 and found.source.ssd > 0
    settle_all(engine)
    check_at_rest(engine)


@pytest.mark.parametrize("device_has_some", [False, True])
def test_a_prefetch_reads_the_last_window_of_what_the_tiers_have(
    make: MakeEngine, prompts: Prompts, tmp_path: Path, device_has_some: bool
) -> None:
    engine = make(blocks=64, host_blocks=256, ssd_dir=str(tmp_path), ssd_gib=0.1)
    prompt, _ = conversation(engine, prompts)
    engine.cache.drain(30.0)
    prefix = engine.cache.prefix_of([*prompt, *prompts(100, seed=8)])
    assert prefix is not None and len(prefix.keys) * BLOCK > 224, "the rest is nowhere"
    engine.cache.reset(("host",))
    pool = engine.cache._pool
    first = 224 // BLOCK - WINDOW_BLOCKS
    kept = pool.find_each(prefix.keys[first : first + 2]) if device_has_some else ()
    pool.forget(slot for slot in range(64) if slot not in kept)
    fetch = engine.cache.prefetch(prefix, "reader")
    assert fetch is not None and fetch.num_blocks == WINDOW_BLOCKS - len(kept)
    while not fetch.settled:
        engine.cache.settle()
    found = generate(engine, prompt, max_tokens=60)
    assert found.source is not None and found.source.computed == 26 and not found.source.ssd
    assert found.tokens == expected(engine, prompt, 60)


@pytest.mark.parametrize("blocks", [20, 100])
def test_snapshots_may_pin_half_of_host_memory_however_small_the_device(
    make: MakeEngine, blocks: int
) -> None:
    """No sequence is paged out to host memory, so none of it is promised."""
    engine = make(blocks=blocks, host_blocks=100, max_model_len=600)
    assert engine.stats().snapshots.pinned_blocks_max == 50


def test_without_the_blocks_of_the_last_window_nothing_before_it_is_used(
    make: MakeEngine, prompts: Prompts
) -> None:
    """One block is missing in the middle of the window: the prefix up to it is used, and no longer one."""
    engine = make(blocks=64)
    prompt, _ = conversation(engine, prompts)
    prefix = engine.cache.prefix_of(prompt)
    assert prefix is not None
    pool = engine.cache._pool
    pool.forget(pool.find_each(prefix.keys[25:26]))
    found = generate(engine, prompt, max_tokens=60)
    assert found.source == KvSource(device=25 * BLOCK, computed=len(prompt) - 25 * BLOCK)
    assert found.tokens == expected(engine, prompt, 60)


def test_a_load_that_fails_is_computed_from_the_beginning(make: MakeEngine, prompts: Prompts) -> None:
    """What landed of a window is no prefix without the rest."""
    engine = make(blocks=64, host_blocks=64)
    prompt, _ = conversation(engine, prompts)
    settle_all(engine)
    engine.cache.reset(("device",))
    load, _ = gates(engine)
    load.fail_next = 1
    found = generate(engine, prompt, max_tokens=60)
    assert found.tokens == expected(engine, prompt, 60)
    assert found.source == KvSource(computed=250)
    settle_all(engine)
    check_at_rest(engine)


# --------------------------------------------------------------------------------------------- under pressure


def test_a_retracted_request_saves_and_resumes_with_its_window(make: MakeEngine, prompts: Prompts) -> None:
    engine = make(blocks=40, host_blocks=200, overcommit=4.0, max_batch=8, prefill_chunk=WINDOW)
    found = [submit(engine, prompts(100 + 3 * i, seed=i), max_tokens=90) for i in range(6)]
    run_all(engine)
    assert engine.stats().retractions > 0
    for i, one in enumerate(found):
        assert one.tokens == expected(engine, prompts(100 + 3 * i, seed=i), 90)
    settle_all(engine)
    check_at_rest(engine)


def test_a_block_that_leaves_the_window_while_it_is_saved_stays_until_the_save_ends(
    make: MakeEngine, prompts: Prompts
) -> None:
    engine = make(blocks=14, host_blocks=64, prefill_chunk=WINDOW, max_model_len=600)
    _, save = gates(engine)
    save.hold()
    found = submit(engine, prompts(120), max_tokens=100)
    for _ in range(40):
        engine.step()
    counts = engine.stats().kv_blocks["device"]
    assert counts["pinned"] > 0 and len(found.tokens) < 100, "it waits for slots that are being saved"
    save.let()
    run_all(engine)
    assert found.tokens == expected(engine, prompts(120), 100)
    assert engine.stats().retractions == 0, "transfers that end by themselves push no request out"
    settle_all(engine)
    check_at_rest(engine)


def test_requests_that_share_a_prefix_part_without_taking_what_was_promised(
    make: MakeEngine, prompts: Prompts
) -> None:
    """Shared blocks leave the windows one after the other, and each request draws its own."""
    engine = make(blocks=40, prefill_chunk=WINDOW, max_model_len=600)
    stem = prompts(64)
    generate(engine, stem, max_tokens=1)
    asked = [[*stem, *prompts(9, seed=i)] for i in range(6)]
    found = [submit(engine, prompt, max_tokens=100) for prompt in asked]
    run_all(engine)
    assert engine.stats().retractions == 0
    for prompt, one in zip(asked, found, strict=True):
        assert one.tokens == expected(engine, prompt, 100)


@pytest.mark.parametrize("seed", crowds(1))
def test_a_random_crowd_over_all_tiers_gets_the_tokens_of_each_request_alone(
    make: MakeEngine, prompts: Prompts, tmp_path: Path, seed: int
) -> None:
    r = random.Random(seed)
    engine = make(
        blocks=r.choice([24, 40]),
        host_blocks=r.choice([40, 120]),
        ssd_dir=str(tmp_path),
        ssd_gib=0.1,
        max_batch=4,
        overcommit=r.choice([1.0, 3.0]),
        prefill_chunk=r.choice([16, WINDOW, 100]),
        max_model_len=600,
    )
    known = [prompts(r.randint(10, 150), seed=i) for i in range(3)]
    asked: list[tuple[list[int], Collected, dict[str, Any]]] = []
    for _ in range(14):
        stem = r.choice(known)
        prompt = [*stem[: r.randint(1, len(stem))], *prompts(r.randint(0, 30), seed=r.randint(0, 99))]
        sampling = {"max_tokens": r.randint(1, 90)}
        asked.append((prompt, submit(engine, prompt, **sampling), sampling))
        known.append([*prompt, *asked[-1][1].tokens])
        for _ in range(r.randint(0, 40)):
            engine.step()
        if r.random() < 0.3:
            engine.cancel(r.choice(asked)[1].request_id)
        if r.random() < 0.3:
            engine.cache.reset((r.choice(["device", "host"]),))
    run_all(engine)
    for prompt, one, sampling in asked:
        assert one.tokens == expected(engine, prompt, sampling["max_tokens"])[: len(one.tokens)]
    settle_all(engine)
    check_at_rest(engine)


def test_drafts_of_an_ngram_are_verified_over_the_window(make: MakeEngine, prompts: Prompts) -> None:
    engine = make(blocks=20, speculate="ngram", prefill_chunk=WINDOW, max_model_len=600)
    prompt = prompts(30) * 5
    found = generate(engine, prompt, max_tokens=200)
    assert found.tokens == expected(engine, prompt, 200)
    assert sum(event.drafted for event in found.events) > 0
    check_at_rest(engine)


@pytest.mark.parametrize("draft", [MODEL, "tiny-qwen3"], ids=["windowed", "dense"])
def test_a_draft_model_over_the_same_blocks_changes_no_token(
    make: MakeEngine, prompts: Prompts, draft: str
) -> None:
    """A draft model that sees all tokens keeps all blocks."""
    sizes = {"block_tokens": BLOCK, "blocks": 20 if draft == MODEL else 60, "prefill_chunk": WINDOW}
    config = tiny_config(MODEL, max_model_len=400, **sizes)
    config = dataclasses.replace(config, speculation=SpeculationConfig(f"draft:{draft}", 4))
    engine, sanitizer = build_sanitized(config)
    forced(engine)
    assert engine.cache.keeps_all == (draft != MODEL)
    found = generate(engine, prompts(150), max_tokens=200)
    assert found.tokens == expected(engine, prompts(150), 200)
    drafted, kept = (sum(getattr(event, name) for event in found.events) for name in ("drafted", "accepted"))
    assert drafted > 100 and (kept == drafted or draft != MODEL), "it sees what the target sees"
    engine.close(timeout_s=20.0)
    check_silent(sanitizer)


def test_a_model_with_windows_in_some_layers_keeps_all_kv(
    make: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers are in one block, so what one of them needs stays for all."""
    mixed = dataclasses.replace(TINY_LLAMA, architecture="qwen2", qkv_bias=True, windows=(0, WINDOW))
    monkeypatch.setitem(BUILT_IN, MODEL, mixed)  # type: ignore[arg-type]
    engine = make(blocks=64)
    found = submit(engine, prompts(200), max_tokens=100)
    assert run_watched(engine) >= 299 // BLOCK
    assert found.tokens == expected(engine, prompts(200), 100)
    with pytest.raises(ConfigError, match="a model with sliding windows is not paged out"):
        make(blocks=20, host_blocks=64, max_model_len=600)
