"""Adapters in a running engine: whatever shares a step with them, each request gets the tokens of its own
content, before and after a reload; KV of one content is never taken for another's."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config, EngineConfig, KvConfig, LoraConfig, ModelSource, OffloadConfig
from penstock.contract import Adapter, FinishReason, KvSource, SamplingParams, Submission, TokenEvent
from penstock.engine.engine import Engine
from penstock.errors import EngineClosed
from penstock.models.model import ModelConfig
from penstock.models.qwen3_5 import TINY_QWEN3_5
from penstock.testing.sanitized import build_sanitized, check_silent
from penstock.testing.tiny_models import (
    TINY_LLAMA,
    TINY_QWEN3,
    TINY_QWEN3_MOE,
    tiny_tensors,
    write_tiny_model,
)
from tests.support.adapters import adapter_tensors, merged, write_adapter, write_random_adapter
from tests.support.driving import generate, run_all, settle_all, submit

MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]
Load = Callable[..., Adapter]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Writes a random adapter and loads it under a name; the seed is its content."""

    def load(engine: Engine, name: str, seed: int, config: ModelConfig = TINY_QWEN3) -> Adapter:
        return engine.adapters.load(name, write_random_adapter(tmp_path / name, config, seed)).adapter

    return load


@pytest.fixture
def expected(make_engine: MakeEngine, load: Load) -> Callable[..., list[int]]:
    """What an engine that has seen nothing else says to `prompt` under content `seed`; None: the base
    model."""

    def tokens(prompt: list[int], seed: int | None, **settings: Any) -> list[int]:
        engine = make_engine(prefix_cache=False)
        adapter = None if seed is None else load(engine, f"fresh-{seed}", seed)
        return generate(engine, prompt, adapter=adapter, **settings).tokens

    return tokens


def weights_kept(engine: Engine) -> set[str]:
    return set(engine.adapters._weights)


def check_nothing_held(engine: Engine) -> None:
    assert engine.adapters._num_holds.total() == 0
    assert weights_kept(engine) == {loaded.adapter.digest for loaded in engine.adapters.all()}


# ----------------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("tiny-qwen3", TINY_QWEN3),
        ("tiny-llama", TINY_LLAMA),
        ("tiny-qwen3-moe", TINY_QWEN3_MOE),
        ("tiny-qwen3.5", TINY_QWEN3_5),
    ],
)
def test_base_and_adapters_in_one_batch_get_the_tokens_they_get_alone(
    make_engine: MakeEngine,
    prompts: Prompts,
    load: Load,
    model: str,
    config: ModelConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone, together = make_engine(model, prefix_cache=False), make_engine(model)
    work = [(n, which) for n in (1, 16, 30, 70, 130) for which in ("base", "one", "two")]
    for engine in (alone, together):
        load(engine, "one", 1, config)
        load(engine, "two", 2, config)

    def adapter(engine: Engine, which: str) -> Adapter | None:
        found = engine.adapters.find(which)
        return None if found is None else found.adapter

    right = [generate(alone, prompts(n, seed=n), adapter=adapter(alone, which)).tokens for n, which in work]
    mixtures, launch = set(), together.parts.executor.launch

    def watched(plan: Any, waits: Any) -> Any:
        mixtures.add(frozenset(chunk.adapter for chunk in plan.chunks))
        return launch(plan, waits)

    monkeypatch.setattr(together.parts.executor, "launch", watched)
    found = [submit(together, prompts(n, seed=n), adapter=adapter(together, which)) for n, which in work]
    run_all(together)
    assert [c.tokens for c in found] == right
    assert max(map(len, mixtures)) == 3, "no step had all three"
    assert len({tuple(tokens) for tokens in right}) == len(right), (
        "an adapter that changes nothing proves nothing"
    )
    check_nothing_held(together)


def test_each_content_begins_with_states_of_its_own(
    make_engine: MakeEngine, prompts: Prompts, load: Load
) -> None:
    engine = make_engine("tiny-qwen3.5", host_blocks=128, states_gib=0.001)
    contents = [None, *(load(engine, name, seed, TINY_QWEN3_5) for seed, name in enumerate(("one", "two")))]
    prompt, found = prompts(100), {}
    for turn in range(2):
        for content in contents:
            answer = generate(engine, prompt, adapter=content, max_tokens=20)
            settle_all(engine)
            assert answer.source == KvSource(device=96 * turn, computed=100 - 96 * turn)
            assert found.setdefault(content, answer.tokens) == answer.tokens
    assert len({tuple(tokens) for tokens in found.values()}) == 3


@pytest.fixture
def make_from_files() -> Iterator[Callable[..., Engine]]:
    """Engines over model directories, under the sanitizer."""
    made = []

    def make(directory: Path, **lora: Any) -> Engine:
        kv, steps = KvConfig(device_blocks=64), EngineConfig(max_batch=4, prefill_chunk=16)
        source = ModelSource(str(directory), device="cpu", dtype="float32")
        made.append(
            build_sanitized(Config(source, kv, steps, OffloadConfig(enabled=False), lora=LoraConfig(**lora)))
        )
        return made[-1][0]

    yield make
    for engine, sanitizer in made:
        engine.close(timeout_s=20.0)
        check_silent(sanitizer)


@pytest.mark.parametrize("config", [TINY_LLAMA, TINY_QWEN3], ids=["llama", "qwen3"])
def test_an_adapter_says_what_merged_weights_say(
    tmp_path: Path,
    make_from_files: Callable[..., Engine],
    prompts: Prompts,
    config: ModelConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    base, tensors = tiny_tensors(config), adapter_tensors(config, seed=5)
    directory = write_adapter(tmp_path / "adapter", tensors, lora_alpha=8)
    engine = make_from_files(
        write_tiny_model(tmp_path / "base", config, tensors=base), adapters=(("tuned", str(directory)),)
    )
    dense = make_from_files(write_tiny_model(tmp_path / "merged", config, tensors=merged(base, tensors, 2.0)))
    (tuned,) = engine.adapters.all()
    for n, settings in ((50, {}), (40, {"prompt_logprobs": 2, "logprobs": 2})):
        found = generate(engine, prompts(n), adapter=tuned.adapter, max_tokens=20, **settings)
        right = generate(dense, prompts(n), max_tokens=20, **settings)
        assert found.tokens == right.tokens != generate(engine, prompts(n), max_tokens=20).tokens
    scores = [[entry.logprob for entry in (*c.prompt_logprobs[1:], *c.logprobs)] for c in (found, right)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_a_retracted_request_resumes_on_its_own_content(
    make_engine: MakeEngine, prompts: Prompts, load: Load, expected: Any
) -> None:
    """Promises exceed memory, requests are pushed out, and the adapters are reloaded meanwhile."""
    engine = make_engine(blocks=14, overcommit=4.0)
    adapters = [load(engine, "one", 1), None, load(engine, "two", 2), load(engine, "one-again", 1)]
    found = [
        submit(engine, prompts(30, seed=i), adapter=adapter, max_tokens=60)
        for i, adapter in enumerate(adapters)
    ]
    for _ in range(25):
        engine.step()
    load(engine, "one", 7)
    engine.adapters.unload("two")
    run_all(engine)
    assert engine.stats().retractions > 0
    assert [c.tokens for c in found] == [
        expected(prompts(30, seed=i), seed, max_tokens=60) for i, seed in enumerate((1, None, 2, 1))
    ]
    check_nothing_held(engine)


# --------------------------------------------------------------------------------------------- identity of KV


def check_reload(engine: Engine, prompt: list[int], load: Load, expected: Any) -> None:
    """Reloaded under the same name with other content, then with the first again."""
    first = generate(engine, prompt, adapter=load(engine, "tuned", 1))
    again = generate(engine, prompt, adapter=engine.adapters.find("tuned").adapter)  # type: ignore[union-attr]
    second = generate(engine, prompt, adapter=load(engine, "tuned", 2))
    back = generate(engine, prompt, adapter=load(engine, "tuned", 1))
    assert again.source is not None and again.source.device == 32, (
        "what was computed under one content is found under it"
    )
    assert second.source is not None and second.source.device == 0
    assert first.tokens == again.tokens == back.tokens == expected(prompt, 1)
    assert second.tokens == expected(prompt, 2) != first.tokens
    assert back.source is not None and back.source.device == 32, (
        "the same content is the same adapter, whenever it was loaded"
    )


# Holds invariant 13: the version of an adapter is part of a key.
def test_an_adapter_reloaded_under_the_same_name_never_hits_stale_kv(
    make_engine: MakeEngine, prompts: Prompts, load: Load, expected: Any
) -> None:
    check_reload(make_engine(), prompts(40), load, expected)


# Holds invariant 13: no two scopes read the same.
def test_salts_adapters_and_their_names_never_collide(
    make_engine: MakeEngine, prompts: Prompts, load: Load
) -> None:
    engine = make_engine(blocks=512)
    prompt = prompts(40)
    x, tenant = load(engine, "x", 1), load(engine, "tenant", 2)
    salts = ("", "x", "tenant", "lora", x.digest, f"lora{x.digest}", tenant.digest)
    scopes = [(salt, adapter) for salt in salts for adapter in (None, x, tenant)]
    for cached in (0, 32):
        for salt, adapter in scopes:
            source = generate(engine, prompt, salt=salt, adapter=adapter).source
            assert source is not None and source.device == cached, (salt, adapter)


# --------------------------------------------------------------------------------------------------- lifetime


@pytest.mark.parametrize("change", ["reload", "unload"])
def test_a_request_finishes_on_the_content_it_began_with(
    make_engine: MakeEngine, prompts: Prompts, load: Load, expected: Any, change: str
) -> None:
    engine = make_engine()
    old = load(engine, "tuned", 1)
    running = submit(engine, prompts(40), adapter=old, max_tokens=30)
    for _ in range(8):
        engine.step()
    assert 0 < len(running.tokens) < 30
    if change == "reload":
        new = load(engine, "tuned", 2)
        assert generate(engine, prompts(20), adapter=new).tokens == expected(prompts(20), 2)
    else:
        assert engine.adapters.unload("tuned")
    assert engine.adapters.find("tuned") is None or engine.adapters.find("tuned").adapter != old  # type: ignore[union-attr]
    run_all(engine)
    assert running.tokens == expected(prompts(40), 1, max_tokens=30)
    assert old.digest not in weights_kept(engine)
    check_nothing_held(engine)


def test_weights_go_when_the_last_step_that_reads_them_has_been_read(
    make_engine: MakeEngine, prompts: Prompts, load: Load
) -> None:
    engine = make_engine()
    adapter = load(engine, "tuned", 1)
    alive = weakref.ref(engine.adapters.weights_of(adapter).layers[0]["qkv"].a)
    running = submit(engine, prompts(40), adapter=adapter, max_tokens=30)
    engine.step()
    engine.cancel(running.request_id)
    engine.adapters.unload("tuned")
    engine._inbox.run_all()
    assert running.finish is FinishReason.CANCELLED and weights_kept(engine) == set()
    step = engine.turns.running
    assert step is not None and step.outputs.lora is not None and alive() is not None, (
        "the step that still runs keeps them"
    )
    del step
    generate(engine, prompts(20))  # of the step read last, a lane may keep the op that it ran last
    gc.collect()
    assert alive() is None


def test_every_way_in_which_a_request_ends_lets_go_of_its_adapter(
    make_engine: MakeEngine, prompts: Prompts, load: Load
) -> None:
    engine = make_engine(max_batch=1)
    adapter = load(engine, "tuned", 1)
    finished, cancelled, waiting = (submit(engine, prompts(20, seed), adapter=adapter) for seed in range(3))
    params = SamplingParams(max_tokens=1)
    events: list[TokenEvent] = []
    engine.submit(Submission([1], params, id=finished.request_id, adapter=adapter), events.append)
    engine.step()
    assert engine.adapters._num_holds[adapter.digest] == 3, "the one whose id was in use has let go"
    assert events[0].finish is FinishReason.ERROR
    engine.cancel(cancelled.request_id)
    engine.cancel(waiting.request_id)
    run_all(engine)
    check_nothing_held(engine)
    open_at_the_end = submit(engine, prompts(20), adapter=adapter)
    engine.step()
    engine.refuse("closing")
    with pytest.raises(EngineClosed):
        submit(engine, prompts(20), adapter=adapter)
    engine.close(timeout_s=20.0)
    assert open_at_the_end.finish is FinishReason.CANCELLED
    check_nothing_held(engine)
