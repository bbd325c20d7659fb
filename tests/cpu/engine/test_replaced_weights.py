"""Weights replaced behind the engine's back, with the size and the modification time of those before: KV that
the old ones computed is on disk and in a shared store, and none of it is served.

Holds invariant 13: other weights, another adapter or another config have other keys."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config
from penstock.contract import KvSource
from penstock.engine.engine import Engine
from penstock.kv import build as build_module
from penstock.testing.sanitized import build_sanitized, check_silent
from penstock.testing.stores import MemoryStore
from penstock.testing.tiny_models import TINY_LLAMA, config_json, write_tiny_model
from tests.cpu.engine.test_cold_tiers import flush, store_of
from tests.support.adapters import adapter_tensors, write_adapter
from tests.support.driving import Collected, generate, tiny_config
from tests.support.tiny_gguf import write_tiny_gguf

Prompts = Callable[..., list[int]]
STAMP = 1_000_000_000  # seconds: the one modification time of a reproducible image


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def started() -> Iterator[Callable[[Config], Engine]]:
    """Engines under the sanitizer; each is closed before the next one starts, as a restart does."""
    running: list[tuple[Engine, Any]] = []

    def stop() -> None:
        while running:
            engine, sanitizer = running.pop()
            engine.close(20.0)
            check_silent(sanitizer)

    def start(config: Config) -> Engine:
        stop()
        running.append(build_sanitized(config))
        engine = running[0][0]
        if config.offload.ssd_dir is not None:
            store_of(engine, "ssd").wait_scanned(20.0)
        return engine

    yield start
    stop()


def stamped(path: Path) -> Path:
    """All files at and below `path` get one modification time, as in an image that is made twice from the
    same sources."""
    for file in [path, *path.rglob("*")]:
        os.utime(file, (STAMP, STAMP))
    return path


def sizes(path: Path) -> dict[str, tuple[int, int]]:
    """Everything that size and modification time say about the files there."""
    return {
        str(file): (file.stat().st_size, file.stat().st_mtime_ns)
        for file in [path, *path.rglob("*")]
        if file.is_file()
    }


def serving(model: Path, **offload: Any) -> Config:
    config = tiny_config("tiny-llama", host_blocks=64, **offload)
    return dataclasses.replace(
        config, source=dataclasses.replace(config.source, model=str(model), load_format="auto")
    )


def answer(engine: Engine, prompt: list[int], adapter: Any = None) -> Collected:
    found = generate(engine, prompt, adapter=adapter)
    flush(engine)
    return found


def write_gguf(folder: Path, seed: int) -> Path:
    folder.mkdir(exist_ok=True)
    return write_tiny_gguf(folder / "model.gguf", seed=seed)


KINDS: dict[str, Callable[[Path, int], Path]] = {
    "one file": lambda folder, seed: write_tiny_model(folder / "model", seed=seed),
    "shards": lambda folder, seed: write_tiny_model(folder / "model", seed=seed, shards=3),
    "gguf": write_gguf,
}


@pytest.mark.parametrize(
    ("write", "tier"),
    [(KINDS["one file"], "ssd"), (KINDS["shards"], "remote"), (KINDS["gguf"], "ssd")],
    ids=KINDS,
)
def test_replaced_weights_of_equal_size_and_time_compute_everything(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prompts: Prompts,
    started: Callable[[Config], Engine],
    write: Any,
    tier: str,
) -> None:
    shared = MemoryStore("remote", local=False)
    monkeypatch.setattr(build_module, "open_remote", lambda url, space, timeout_s: shared)
    offload = {"ssd_dir": str(tmp_path / "kv"), "ssd_gib": 0.05} if tier == "ssd" else {"remote": "memory://"}
    prompt = prompts(400)
    model = stamped(write(tmp_path, 1))
    before, old = sizes(model), answer(started(serving(model, **offload)), prompt)
    warm = answer(started(serving(model, **offload)), prompt)
    assert warm.source == KvSource(computed=1, **{tier: 399}) and warm.tokens == old.tokens, (
        "the same weights find their KV"
    )
    stamped(write(tmp_path, 2))
    assert sizes(model) == before, "the files can be told apart by their bytes only"
    found = answer(started(serving(model, **offload)), prompt)
    assert found.source == KvSource(computed=400)
    fresh = answer(
        started(serving(write(tmp_path / "fresh", 2), ssd_dir=str(tmp_path / "empty"), ssd_gib=0.05)), prompt
    )
    assert found.tokens == fresh.tokens != old.tokens


def test_an_adapter_replaced_by_one_of_equal_size_and_time_computes_everything(
    tmp_path: Path, prompts: Prompts, started: Callable[[Config], Engine]
) -> None:
    model, prompt = write_tiny_model(tmp_path / "model"), prompts(100)
    config = serving(model, ssd_dir=str(tmp_path / "kv"), ssd_gib=0.05)
    directory = tmp_path / "tuned"

    def tuned(engine: Engine, seed: int, **fields: Any) -> Any:
        stamped(write_adapter(directory, adapter_tensors(TINY_LLAMA, seed), **fields))
        return engine.adapters.load("tuned", directory).adapter

    engine = started(config)
    old = answer(engine, prompt, tuned(engine, 1))
    before = sizes(directory)
    engine = started(config)
    assert answer(engine, prompt, tuned(engine, 1)).source == KvSource(ssd=96, computed=4), (
        "the same content finds its KV"
    )
    found = answer(engine, prompt, tuned(engine, 2))
    assert sizes(directory) == before
    scaled = answer(engine, prompt, tuned(engine, 1, lora_alpha=2))
    assert sizes(directory) == before, "another alpha of as many digits"
    assert found.source == scaled.source == KvSource(computed=100)
    fresh = started(serving(model, ssd_dir=str(tmp_path / "empty"), ssd_gib=0.05))
    expected = [
        answer(fresh, prompt, tuned(fresh, 2)).tokens,
        answer(fresh, prompt, tuned(fresh, 1, lora_alpha=2)).tokens,
    ]
    assert [found.tokens, scaled.tokens] == expected and old.tokens not in expected


OTHER_CONFIGS: dict[str, dict[str, Any]] = {
    "rotary base": {"rope_theta": 20000.0},
    "rotary scaling": {"rope_scaling": {"rope_type": "linear", "factor": 1.5}},
    "norm epsilon": {"rms_norm_eps": 1e-2},
    "heads of another width": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
}


@pytest.mark.parametrize("change", OTHER_CONFIGS.values(), ids=OTHER_CONFIGS)
def test_another_config_beside_the_same_weights_computes_everything(
    tmp_path: Path, prompts: Prompts, started: Callable[[Config], Engine], change: dict[str, Any]
) -> None:
    model, prompt = stamped(write_tiny_model(tmp_path / "model")), prompts(100)
    config = serving(model, ssd_dir=str(tmp_path / "kv"), ssd_gib=0.05)
    old = answer(started(config), prompt)
    (model / "config.json").write_text(json.dumps({**config_json(TINY_LLAMA), "eos_token_id": 7}))
    same = answer(started(config), prompt)
    assert same.source == KvSource(ssd=96, computed=4) and same.tokens == old.tokens, (
        "when to stop changes no KV"
    )
    (model / "config.json").write_text(json.dumps({**config_json(TINY_LLAMA), **change}))
    stamped(model)
    found = answer(started(config), prompt)
    assert found.source == KvSource(computed=100) and found.tokens != old.tokens
