"""Two real processes give the tokens of one, whatever is asked for and wherever KV is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.config import SpeculationConfig
from penstock.contract import Grammar
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.errors import InvalidRequest, ModelError
from penstock.models.model import ModelConfig, OtherRope, Recurrence, Routing
from penstock.models.split import SplitOps
from penstock.ranks.start import Alone
from penstock.speculation.vocab import DraftVocab
from penstock.testing.tiny_models import (
    TINY_GEMMA3,
    TINY_QWEN3,
    TINY_QWEN3_5,
    tiny_tensors,
    write_tiny_model,
)
from tests.cpu.engine.test_mtp_engine import write_random_head
from tests.support.adapters import write_random_adapter
from tests.support.driving import Collected, assert_same, generate, run_all, settle_all, submit, wait_scanned
from tests.support.forced import forced
from tests.support.ranks import build_ranks, open_led_alone, ranks_config
from tests.support.shipped import shipped_tensors

SIZES = {"blocks": 32, "host_blocks": 200, "max_batch": 6, "max_model_len": 256, "overcommit": 4.0}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "random": {"temperature": 0.9, "seed": 3},
    "filtered": {"temperature": 0.8, "seed": 4, "top_p": 0.9, "top_k": 30, "min_p": 0.02},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    "biased": {"temperature": 0.7, "seed": 5, "logit_bias": ((7, 4.0), (9, -100.0))},
    "logprobs": {"logprobs": 3},
    "prompt logprobs": {"prompt_logprobs": 2, "logprobs": 0},
    "at least": {"min_tokens": 6, "ignore_eos": False},
    "a grammar": {
        "grammar": Grammar("choice", json.dumps(["yes indeed", "no"])),
        "ignore_eos": False,
        "max_tokens": 24,
    },
}


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(1, 500, num_tokens).tolist()
    return tokens


HYBRID = replace(
    TINY_QWEN3_5,
    architecture="qwen3_next",
    num_layers=2,
    routing=Routing(4, 2, 32, normalised=True, shared_ffn=48),
    recurrence=Recurrence((0,), 2, 4, 16, 16, window=4, interleaved=True),
)
# Windows and a state for each row: models that the scheduler treats in another way.
WINDOWS = replace(TINY_GEMMA3, num_layers=3, windows=(40, 0, 40), other_rope=OtherRope((0, 2), 1000.0))
PAIRS: dict[str, tuple[ModelConfig | None, dict[str, Any]]] = {
    "qwen3": (None, {"speculate": "ngram"}),
    "hybrid": (HYBRID, {"model": "tiny-qwen3.5", "speculate": "mtp", "state_every": 32}),
    "gemma3": (WINDOWS, {"model": "tiny-llama", "host_blocks": 300, "blocks": 24}),
}


@pytest.fixture(scope="module", params=PAIRS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Engine]]:
    """One rank, and two."""
    dims, settings = PAIRS[request.param]
    directory = None
    lora = write_random_adapter(tmp_path_factory.mktemp("adapter"), dims or TINY_QWEN3, seed=9)
    if dims is not None:
        tensors = tiny_tensors(dims) | ({} if dims.recurrence is None else shipped_tensors(dims))
        directory = write_tiny_model(tmp_path_factory.mktemp("model"), dims, tensors=tensors)
    engines = [build_ranks(size, **SIZES | settings, directory=directory, lora=lora) for size in (1, 2)]
    for engine in engines:
        if engine.parts.speculation is not None:
            forced(engine)
    yield engines[0], engines[1]
    for engine in engines:
        engine.close(timeout_s=20.0)


def both(pair: tuple[Engine, Engine], ask: Callable[[Engine], Collected]) -> tuple[Collected, Collected]:
    right, found = (ask(engine) for engine in pair)
    assert_same(found, right)
    return right, found


@pytest.mark.parametrize("name", SAMPLINGS)
def test_two_ranks_sample_the_tokens_of_one(pair: tuple[Engine, Engine], name: str) -> None:
    right, found = both(
        pair, lambda engine: generate(engine, prompt(40, seed=len(name)), salt=name, **SAMPLINGS[name])
    )
    assert right.tokens
    ours, theirs = found.prompt_logprobs or (), right.prompt_logprobs or ()
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.token == other.token and abs(one.logprob - other.logprob) <= 1e-4


def test_a_crowd_gets_the_tokens_of_one_rank(pair: tuple[Engine, Engine]) -> None:
    """More requests than rows, prompts in chunks beside decodes, prefixes shared, some cancelled."""
    rng = np.random.default_rng(11)
    asked = [
        (
            prompt(int(rng.integers(5, 150)), seed=i % 5),
            {"max_tokens": int(rng.integers(1, 30)), "temperature": float(i % 2), "seed": i},
        )
        for i in range(14)
    ]
    answers = []
    for engine in pair:
        requests = [submit(engine, tokens, salt="crowd", **sampling) for tokens, sampling in asked]
        for _ in range(12):
            engine.step()
        engine.cancel(requests[3].request_id)
        run_all(engine)
        engine.check()
        answers.append(requests)
    for index, (right, found) in enumerate(zip(*answers, strict=True)):
        if index == 3:  # it may have been cancelled earlier or later
            common = min(len(right.tokens), len(found.tokens))
            assert found.tokens[:common] == right.tokens[:common]
        else:
            assert_same(found, right)


def test_a_prefix_returns_from_the_host_memory_of_every_rank(pair: tuple[Engine, Engine]) -> None:
    long = prompt(120, seed=77)
    first, _ = both(pair, lambda engine: generate(engine, long, salt="returns"))
    for engine in pair:
        settle_all(engine)
        engine.cache.reset(("device",))
        for seed in range(6):  # other KV takes the slots meanwhile
            generate(engine, prompt(100, seed=100 + seed), salt="returns")
        settle_all(engine)
        engine.cache.reset(("device",))
    again, found = both(pair, lambda engine: generate(engine, long, salt="returns"))
    assert again.tokens == first.tokens
    assert found.source is not None and found.source.host >= 112


@pytest.mark.parametrize("pair", ["qwen3", "hybrid"], indirect=True)
def test_requests_that_do_not_fit_together_are_retracted_and_resume(pair: tuple[Engine, Engine]) -> None:
    answers = []
    for engine in pair:
        before = engine.stats().retractions
        asked = [
            submit(engine, prompt(100, seed=200 + i), salt="tight", max_tokens=50, temperature=0.5, seed=i)
            for i in range(5)
        ]
        run_all(engine)
        settle_all(engine)
        answers.append(asked)
        assert engine.stats().retractions > before
    for right, found in zip(*answers, strict=True):
        assert_same(found, right)


@pytest.mark.parametrize("pair", ["qwen3", "hybrid"], indirect=True)
def test_adapters_are_divided_as_the_model_is(pair: tuple[Engine, Engine], tmp_path: Path) -> None:
    """Loaded, replaced and unloaded while requests run, in steps with other adapters and with none."""
    dims = pair[0].parts.executor.target.model.config
    for seed in range(3):
        write_random_adapter(tmp_path / str(seed), dims, seed, rank=2 + seed)
    answers = []
    for engine in pair:
        store = engine.adapters
        loaded = [store.load(f"adapter-{seed}", tmp_path / str(seed)).adapter for seed in range(2)]
        first = store.find("tuned")
        assert first is not None
        asked = [
            submit(engine, prompt(40), adapter=adapter, salt="lora", max_tokens=12, temperature=0.6, seed=1)
            for adapter in (*loaded, None, loaded[0], first.adapter)
        ]
        for _ in range(4):
            engine.step()
        store.load("adapter-0", tmp_path / "2")
        assert store.unload("adapter-1")
        run_all(engine)
        replaced = store.load("again", tmp_path / "2").adapter
        asked.append(generate(engine, prompt(40), adapter=replaced, salt="lora", max_tokens=12))
        answers.append(asked)
    for right, found in zip(*answers, strict=True):
        assert_same(found, right)
    assert len({tuple(one.tokens) for one in answers[0]}) == 5


@pytest.mark.parametrize("pair", ["qwen3"], indirect=True)
def test_an_adapter_that_a_rank_cannot_read_is_refused(
    pair: tuple[Engine, Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the engine goes on."""
    engine, dims = pair[1], pair[0].parts.executor.target.model.config
    write_random_adapter(tmp_path / "here", dims, 0)
    monkeypatch.setattr("penstock.ranks.start.os.path.abspath", lambda path: f"{path}/not there")
    with pytest.raises(ModelError, match="is no directory"):
        engine.adapters.load("one", tmp_path / "here")
    monkeypatch.undo()
    loaded = engine.adapters.load("one", tmp_path / "here").adapter
    assert generate(engine, prompt(20), adapter=loaded).tokens


def drafts_of(engine: Engine) -> NDArray[np.int64]:
    """Verified and kept so far."""
    counts = engine.parts.scheduler.counts
    return np.array([sum(counts.drafted_by_place), sum(counts.accepted_by_place)])


@pytest.mark.parametrize("pair", ["qwen3", "hybrid"], indirect=True)
def test_drafts_are_those_of_one_rank(pair: tuple[Engine, Engine]) -> None:
    repeated, before = prompt(12) * 4, [drafts_of(engine) for engine in pair]
    both(pair, lambda engine: generate(engine, repeated, max_tokens=40, salt="repeats"))
    right, found = (drafts_of(engine) - first for engine, first in zip(pair, before, strict=True))
    assert right.tolist() == found.tolist() and right[0] > 0


@pytest.mark.parametrize(("kind", "sampling"), [("draft", "rejection"), ("mtp", "coupled")])
def test_models_and_heads_draft_on_all_ranks(kind: str, sampling: Any, tmp_path: Path) -> None:
    """In crowds, and after their KV has returned from host memory."""
    answers, counts = [], []
    proposer = "draft:tiny-llama" if kind == "draft" else f"mtp:{written_head(tmp_path)}"
    for size in (1, 2):
        config = ranks_config(size, **SIZES)
        engine = build(replace(config, speculation=SpeculationConfig(proposer, 3, sampling)))
        forced(engine)
        for _ in range(2):
            asked = [
                submit(engine, prompt(40 + i, seed=i), max_tokens=14, temperature=i % 2 * 0.7, seed=i)
                for i in range(5)
            ]
            run_all(engine)
            settle_all(engine)
            engine.cache.reset(("device",))
            answers.append(asked)
        counts.append(drafts_of(engine).tolist())
        engine.close(timeout_s=20.0)
    for asked in answers[1:]:
        for right, found in zip(answers[0], asked, strict=True):
            assert_same(found, right)
    assert counts[0] == counts[1] and counts[0][0] > 40


def written_head(directory: Path) -> Path:
    """For tiny-qwen3, of a part of its vocabulary."""
    engine = build_ranks(1)
    vocab = DraftVocab(torch.arange(3, 500, 3), TINY_QWEN3.vocab, "ids")
    head = write_random_head(directory / "head", engine.parts.executor.target.model, vocab=vocab)
    engine.close(timeout_s=20.0)
    return head


@pytest.mark.parametrize("model", ["tiny-qwen3", "tiny-qwen3.5"])
def test_contexts_larger_than_the_device_are_streamed_on_all_ranks(model: str) -> None:
    plain = build_ranks(1, model, max_model_len=512)
    pair = build_ranks(2, model, blocks=32, host_blocks=128, max_model_len=512, resident_tokens=128)
    asked = prompt(400, seed=9), prompt(300, seed=10)
    answers = []
    for engine in (plain, pair):
        requests = [submit(engine, tokens, max_tokens=12, temperature=0.6, seed=1) for tokens in asked]
        run_all(engine)
        answers.append(requests)
    assert pair.stats().host_steps
    with pytest.raises(InvalidRequest, match="the model"):
        submit(pair, asked[0], residency="scored")
    for engine in (plain, pair):
        engine.close(timeout_s=20.0)
    for right, found in zip(*answers, strict=True):
        assert_same(found, right)


def test_a_disk_serves_any_number_of_ranks(tmp_path: Path) -> None:
    """Each engine finds what those before it wrote, states too, and writes a prompt of its own. With four
    ranks each of the two KV heads is on two of them, and two have none of the heads with a state."""
    sizes, answers = (1, 2, 4, 1), dict[int, Collected]()
    directory, disk = write_tiny_model(tmp_path / "model", HYBRID), str(tmp_path / "disk")
    for index, size in enumerate(sizes):
        given = {"host_blocks": 64, "ssd_dir": disk, "ssd_gib": 0.1}
        engine = build_ranks(size, "tiny-qwen3.5", directory=directory, **given)
        wait_scanned(engine)
        for seed in range(index):
            again = generate(engine, prompt(120, seed=seed))
            assert_same(again, answers[seed])
            assert again.source is not None and again.source.ssd >= 112
        answers[index] = generate(engine, prompt(120, seed=index))
        persisting = engine.cache.persist()
        while persisting is not None and not persisting.settled:
            if not engine.step():
                engine.wait_work(0.01)
        engine.close(timeout_s=20.0)


def test_all_of_it_with_one_rank_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the GPU's tests have it: collectives of one."""
    plain = build_ranks(1)
    monkeypatch.setattr("penstock.engine.build.open_ranks", open_led_alone("gloo"))
    led = build_ranks(1, host_blocks=64)
    right, found = (generate(engine, prompt(50), temperature=0.8, seed=2) for engine in (plain, led))
    settle_all(led)
    led.cache.reset(("device",))
    again = generate(led, prompt(50), temperature=0.8, seed=2)
    for engine in (plain, led):
        engine.close(timeout_s=20.0)
    assert_same(found, right)
    assert_same(again, right)


def test_one_rank_has_no_pass_and_no_process_of_ranks() -> None:
    engine = build_ranks(1)
    kinds = [type(one).__name__ for one in engine.parts.executor.passes]
    assert "LedSteps" not in kinds and not isinstance(engine.parts.executor.target.model.ops, SplitOps)
    assert isinstance(engine.parts.ranks, Alone)
    engine.close(timeout_s=20.0)
