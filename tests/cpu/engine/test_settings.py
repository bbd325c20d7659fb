"""Every setting reaches the part that it is for: none is read and then forgotten, and none reaches the part
of another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config import EVICTIONS, GIB, Config, SanitizeConfig
from penstock.engine import build as build_module
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.engine.execution.passes import PoisonPass
from penstock.kv import build as storage
from penstock.kv.blocks.eviction import make_order
from penstock.testing.stores import MemoryStore
from tests.support.driving import generate, tiny_config

Built = Callable[[Config], Engine]


@pytest.fixture
def built() -> Iterator[Built]:
    made: list[Engine] = []

    def make(config: Config) -> Engine:
        made.append(build(config))
        return made[-1]

    yield make
    for engine in made:
        engine.close(timeout_s=20.0)


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_full_tier_forgets_as_the_setting_says_and_so_does_the_device_where_that_costs_little(
    built: Built, eviction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    open_ssd = storage.open_ssd
    monkeypatch.setattr(storage, "open_ssd", lambda *args: asked.append(args) or open_ssd(*args))
    engine = built(tiny_config(host_blocks=8, eviction=eviction, ssd_dir=str(tmp_path / "kv"), ssd_gib=0.25))
    assert type(engine.cache.saves._host.pool.idle.others) is type(make_order(eviction, 8))
    on_device = eviction if eviction in ("returning", "lru") else "lru"
    assert type(engine.cache._pool.idle.others) is type(make_order(on_device, 8))
    ((directory, num_bytes, _, name),) = asked
    assert (directory, num_bytes, name) == (str(tmp_path / "kv"), GIB // 4, eviction)


@pytest.mark.parametrize("admission", ["always", "reuse", "evict"])
def test_what_goes_to_the_disk_is_as_the_setting_says_and_a_store_alone_gets_everything(
    built: Built, admission: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(storage, "open_remote", lambda *args: asked.append(args) or MemoryStore("remote"))
    settings: dict[str, Any] = {"host_blocks": 8, "ssd_admission": admission, "remote_timeout_s": 0.75}
    with_disk = built(tiny_config(ssd_dir=str(tmp_path / "kv"), ssd_gib=0.25, **settings))
    saves = with_disk.cache.saves
    assert saves.limits.admission == admission and list(with_disk.cache.cold_tiers) == ["ssd"]
    alone = built(tiny_config(remote="valkey://somewhere", **settings))
    saves = alone.cache.saves
    assert saves.limits.admission == "always" and list(alone.cache.cold_tiers) == ["remote"]
    ((url, _, timeout_s),) = asked
    assert (url, timeout_s) == ("valkey://somewhere", 0.75)


def test_times_and_choices_of_the_host_tier_are_those_of_the_settings(built: Built) -> None:
    cache = built(tiny_config(host_blocks=8, lease_s=3.5, load_deadline_s=4.5, load_always=True)).cache
    assert cache.saves._host._lease_s == 3.5
    assert (cache.saves.limits.load_deadline_s, cache.saves.limits.load_always) == (4.5, True)
    assert not built(tiny_config(host_blocks=8, load_always=False)).cache.saves.limits.load_always


@pytest.mark.parametrize("overcommit", [1.0, 3.0])
def test_steps_are_put_together_as_the_settings_say(built: Built, overcommit: float) -> None:
    engine = built(tiny_config(max_batch=5, prefill_chunk=24, overcommit=overcommit, max_model_len=100))
    budget = engine._parts.scheduler.deep.budget
    assert (budget.max_batch, budget.prefill_chunk, budget.overcommit, engine.max_model_len) == (
        5,
        24,
        overcommit,
        100,
    )
    small = built(tiny_config(prefill_chunk=512, max_model_len=40))
    assert small._parts.scheduler.deep.budget.prefill_chunk == 40, (
        "no step needs more tokens than the context has"
    )


@pytest.mark.parametrize(
    ("chunk_ms", "cpu_s", "cuda_s"), [(None, 0.0, 0.15), (0.0, 0.0, 0.0), (80.0, 0.08, 0.08)]
)
def test_prompts_may_take_as_long_as_the_setting_says(
    chunk_ms: float | None, cpu_s: float, cuda_s: float
) -> None:
    config = tiny_config(prefill_chunk_ms=chunk_ms)
    cpu, cuda = (build_module._budget(config, torch.device(name), 512) for name in ("cpu", "cuda"))
    assert (cpu.chunk_s, cuda.chunk_s) == (cpu_s, cuda_s)
    assert (cpu.min_chunk, cuda.min_chunk) == (64, 512), (
        "whole blocks of every size but the largest on the CPU"
    )


@pytest.mark.parametrize("host_blocks", [0, 8])
def test_chunks_are_sized_by_the_times_of_steps_that_loading_is_weighed_against(
    built: Built, host_blocks: int
) -> None:
    engine = built(tiny_config(host_blocks=host_blocks, prefill_chunk_ms=80.0))
    rate = engine._parts.scheduler.admission._times
    assert rate is engine.cache.prefill and rate is engine.cache.loads.costs.prefill
    assert rate.tokens(1.0, 0) is None
    generate(engine, list(range(1, 60)))
    assert rate.tokens(1.0, 0) is not None, (
        "steps are measured as they go, with a tier behind the device or without"
    )


@pytest.mark.cpu_shapes
@pytest.mark.parametrize("capture", [True, False])
def test_decodes_are_captured_unless_that_is_turned_off(built: Built, capture: bool) -> None:
    engine = built(tiny_config(capture=capture, max_batch=3))
    assert [shape.num_tokens for shape in engine._parts.executor.target.replays.buckets] == (
        [1, 2, 3] if capture else []
    )


@pytest.mark.parametrize(
    ("mode", "check_bytes"),
    [("off", False), ("report", False), ("strict", False), ("report", True), ("strict", True)],
)
def test_the_sanitizer_listens_as_it_was_asked_to(
    built: Built, mode: str, check_bytes: bool, tmp_path: Path
) -> None:
    file = tmp_path / "findings.json"
    sanitize = SanitizeConfig(mode, None if mode == "off" else str(file), check_bytes)  # type: ignore[arg-type]
    engine = built(replace(tiny_config(host_blocks=8), sanitize=sanitize))
    generate(engine, list(range(1, 40)), max_tokens=2)
    sanitizer = engine._parts.sanitizer
    assert (sanitizer is not None) == (mode != "off")
    if sanitizer is not None:
        assert sanitizer._findings._strict == (mode == "strict")
        assert json.loads(file.read_text()) == []
    movers = engine.cache.loads.mover, engine.cache.saves.mover
    assert any(isinstance(one, PoisonPass) for one in engine._parts.executor.passes) == check_bytes
    assert all((mover.checks is not None) == check_bytes for mover in movers)
