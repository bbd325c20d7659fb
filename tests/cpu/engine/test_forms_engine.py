"""An engine whose weights are in 4 or 8 bits: prefixes come back as they were computed, and only to the form
that computed them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.config import Config, LoraConfig, SpeculationConfig, WeightsName
from penstock.contract import KvSource
from penstock.engine.engine import Engine
from penstock.models.registry import BUILT_IN
from penstock.testing.sanitized import build_sanitized, check_silent
from tests.support.adapters import adapter_tensors, write_adapter
from tests.support.driving import generate, settle_all, tiny_config
from tests.support.forced import forced
from tests.support.tiny_gguf import write_tiny_gguf

PROMPT = list(range(3, 100))  # six full blocks, and one token that is always computed


def config_of(weights: WeightsName, folder: Path, **offload: Any) -> Config:
    """A GGUF file whose layers are in 4 bits, in any form: the same weights for all."""
    config, file = tiny_config("tiny-llama", host_blocks=64), folder / "tiny.gguf"
    if not file.exists():
        write_tiny_gguf(file, encoding_of=lambda name: "Q4_1" if ".layers." in name else "Q8_0")
    source = dataclasses.replace(config.source, model=str(file), load_format="auto", weights=weights)
    return dataclasses.replace(config, source=source, offload=dataclasses.replace(config.offload, **offload))


def answer(engine: Engine) -> tuple[KvSource | None, list[int]]:
    found = generate(engine, PROMPT, max_tokens=24)
    settle_all(engine)
    return found.source, list(found.tokens)


def prompt_logprobs(config: Config, adapter: Path, adapted: bool) -> np.ndarray:
    lora = LoraConfig((("tuned", str(adapter)),))
    engine, sanitizer = build_sanitized(dataclasses.replace(config, lora=lora))
    (loaded,) = engine.adapters.all()
    found = generate(
        engine, PROMPT, max_tokens=1, prompt_logprobs=0, adapter=loaded.adapter if adapted else None
    )
    engine.close(timeout_s=20.0)
    check_silent(sanitizer)
    assert found.prompt_logprobs is not None
    return np.array([one.logprob for one in found.prompt_logprobs if one is not None])


@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4"])
def test_an_adapter_does_the_same_on_top_of_every_form(tmp_path: Path, weights: WeightsName) -> None:
    exact, rounded = config_of("float32", tmp_path), config_of(weights, tmp_path)
    adapter = write_adapter(tmp_path / "adapter", adapter_tensors(BUILT_IN["tiny-llama"], seed=3))
    plain, tuned = (prompt_logprobs(exact, adapter, adapted) for adapted in (False, True))
    found = prompt_logprobs(rounded, adapter, adapted=True)
    assert np.abs(found - tuned).mean() < 0.1 * np.abs(plain - tuned).mean()


@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4"])
def test_drafts_change_an_answer_only_where_rounding_may(tmp_path: Path, weights: WeightsName) -> None:
    """Products of one row and of several are rounded apart in these forms: beside drafts as beside other
    requests."""
    config = config_of(weights, tmp_path)
    drafting = dataclasses.replace(config, speculation=SpeculationConfig("ngram"))
    (plain, _), (engine, sanitizer) = build_sanitized(config), build_sanitized(drafting)
    forced(engine)
    for seed in range(6):
        prompt = (np.random.default_rng(seed).integers(3, 250, 8).tolist() * 4)[:29]
        right, found = (generate(one, prompt, max_tokens=40, logprobs=2) for one in (plain, engine))
        assert found.error is None and len(found.tokens) == 40
        assert all(entry.rank == 1 for entry in found.logprobs), "it is the model's own choice"
        at = next(
            (
                at
                for at, pair in enumerate(zip(found.tokens, right.tokens, strict=True))
                if pair[0] != pair[1]
            ),
            None,
        )
        if at is not None:
            first, second = (logprob for _, logprob in right.logprobs[at].top)
            assert first - second < 0.05, "not a near tie"
    assert engine.stats().drafted[0] > 20 and engine.stats().accepted[0] > 0
    for one in (plain, engine):
        one.close(timeout_s=20.0)
    check_silent(sanitizer)


def test_blocks_on_disk_serve_the_form_that_computed_them_and_no_other(tmp_path: Path) -> None:
    def restarted(weights: WeightsName) -> int:
        offload = {"ssd_dir": str(tmp_path / "ssd"), "ssd_gib": 0.05, "load_always": True}
        engine, sanitizer = build_sanitized(config_of(weights, tmp_path, **offload))
        engine.cache.cold_tiers["ssd"].calls.store.wait_scanned(20.0)
        source, _ = answer(engine)
        persisting = engine.cache.persist()
        assert persisting is not None
        while not persisting.settled:
            engine.step()
        settle_all(engine)
        engine.close(timeout_s=20.0)
        check_silent(sanitizer)
        assert source is not None
        return source.ssd

    assert restarted("int8") == 0
    assert restarted("int8") == 96
    assert restarted("float32") == 0 and restarted("bfloat16") == 0
    assert restarted("int4") == 0
    assert restarted("int4") == 96
