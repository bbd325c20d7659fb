"""Every setting reaches the part that it is for: none is read and then forgotten, and none reaches the part
of another."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config import EVICTIONS, GIB, Config, OffloadConfig, SanitizeConfig
from penstock.engine import build as building
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.engine.execution.passes import PoisonPass
from penstock.errors import ConfigError
from penstock.kv import build as storage
from penstock.kv.blocks.eviction import make_order
from penstock.kv.blocks.key import Scope
from penstock.models.qwen3 import TINY_QWEN3
from tests.support.driving import block_bytes, generate, tiny_config

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
    ((directory, num_bytes, _, name, *_),) = asked
    assert (directory, num_bytes, name) == (str(tmp_path / "kv"), GIB // 4, eviction)


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
    sanitizer = engine.parts.sanitizer
    assert (sanitizer is not None) == (mode != "off")
    if sanitizer is not None:
        assert sanitizer._findings._strict == (mode == "strict")
        assert json.loads(file.read_text()) == []
    movers = engine.cache.loads.mover, engine.cache.saves.mover
    assert any(isinstance(one, PoisonPass) for one in engine.parts.executor.passes) == check_bytes
    assert all((mover.checks is not None) == check_bytes for mover in movers)


MakeEngine = Callable[..., Engine]


def test_the_settings_of_colder_tiers_reach_them(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[Any, ...]] = []

    def recorded(name: str) -> None:
        opens = getattr(storage, name)
        monkeypatch.setattr(
            storage, name, lambda place, *args: opened.append((place, *args)) or opens(place, *args)
        )

    recorded("open_ssd")
    recorded("open_remote")
    engine = make_engine(
        host_blocks=16,
        eviction="cost",
        lease_s=77.0,
        load_deadline_s=11.0,
        ssd_dir=str(tmp_path / "kv"),
        ssd_gib=0.5,
        remote="valkey://127.0.0.1:1",
        remote_timeout_s=3.0,
    )
    cache = engine.cache
    assert (cache.saves._host._lease_s, cache.saves.limits.load_deadline_s) == (77.0, 11.0)
    (place, num_bytes, _, eviction, *_), (url, _, timeout_s) = opened
    assert (place, num_bytes, eviction) == (str(tmp_path / "kv"), GIB // 2, "cost")
    assert (url, timeout_s) == ("valkey://127.0.0.1:1", 3.0)


@pytest.mark.parametrize(("dtype", "block_tokens"), [("float32", 16), ("bfloat16", 8)])
def test_keys_cover_the_weights_and_the_kind_of_block_that_an_engine_has(
    dtype: str, block_tokens: int
) -> None:
    """Holds invariant 13: a scope says everything that makes the bytes of two blocks differ, and each part of
    it is the engine's own."""
    config = tiny_config(block_tokens=block_tokens)
    engine = building.build(
        dataclasses.replace(config, source=dataclasses.replace(config.source, dtype=dtype))
    )  # type: ignore[arg-type]
    model, layout = engine.parts.executor.target.model, engine.parts.arena.layout
    positions = f"rope half-rotation theta={TINY_QWEN3.rope_theta!r}"
    assert engine.cache.scope == Scope(model.digest, dtype, layout.fingerprint(), block_tokens, positions)
    assert layout.dtype == dtype and dtype.encode() in layout.fingerprint() and len(model.digest) >= 16
    prefix = engine.cache.prefix_of(list(range(1, 40)))
    assert prefix is not None and {len(key) for key in prefix.keys} == {16}, "128 bits"
    engine.close(timeout_s=20.0)


def test_an_engine_that_cannot_be_built_leaves_nothing_behind(tmp_path: Path) -> None:
    """Whoever asks for less afterwards finds the directory free, and no thread of the first."""
    sizes = {"blocks": 20, "host_blocks": 20, "ssd_dir": str(tmp_path)}
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="--max-model-len 2000 does not fit"):
        building.build(tiny_config(max_model_len=2000, positions=4096, **sizes))
    assert not set(threading.enumerate()) - before
    building.build(tiny_config(**sizes)).close()


BLOCK_BYTES = block_bytes("tiny-qwen3", 16)

# ------------------------------------------------------------------------------------------------ host memory


def num_host_blocks(
    monkeypatch: pytest.MonkeyPatch, free: int, num_slots: int = 1000, host_gib: float | None = None
) -> int:
    monkeypatch.setattr(storage, "free_bytes", lambda device: free if device.type == "cpu" else 0)
    config = replace(tiny_config(), offload=OffloadConfig(host_gib=host_gib))
    layout = type("L", (), {"block_bytes": BLOCK_BYTES})()
    return storage.num_host_blocks(config, type("A", (), {"layout": layout, "num_slots": num_slots})())  # type: ignore[arg-type]


def test_host_memory_holds_as_many_blocks_as_the_setting_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_bytes, num_blocks in ((BLOCK_BYTES, 1), (5 * BLOCK_BYTES - 1, 4), (5 * BLOCK_BYTES, 5)):
        assert num_host_blocks(monkeypatch, 0, num_slots=1, host_gib=num_bytes / GIB) == num_blocks, (
            "whatever else there is"
        )
    with pytest.raises(ConfigError, match="holds no KV block"):
        num_host_blocks(monkeypatch, GIB, host_gib=(BLOCK_BYTES - 1) / GIB)


def test_where_no_size_is_given_host_memory_is_a_quarter_of_what_is_free_and_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert num_host_blocks(monkeypatch, 40 * BLOCK_BYTES) == 10
    assert num_host_blocks(monkeypatch, 40 * BLOCK_BYTES, num_slots=0) == 1, "one at least"
    assert num_host_blocks(monkeypatch, 0) == 1
    assert num_host_blocks(monkeypatch, 10_000 * BLOCK_BYTES, num_slots=3) == 48, (
        "sixteen times the device's at most"
    )
    assert num_host_blocks(monkeypatch, 1000 * GIB, num_slots=10**9) == 4 * GIB // BLOCK_BYTES


# ------------------------------------------------------------------------------------------------------ parts


def test_a_sanitizer_hears_every_lane_and_every_pool(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(host_blocks=8, ssd_dir=str(tmp_path / "kv"), ssd_gib=0.25)
    sanitizer, cache = engine.parts.sanitizer, engine.cache
    assert sanitizer is not None
    cold = engine.cache.cold_tiers["ssd"]._lanes
    lanes: list[Any] = [engine.parts.lanes[0], *cold.readers, *cold.writers]
    for mover in (cache.loads.mover, cache.saves.mover):
        lanes += [mover.lane, mover._launcher]
    assert [lane.name for lane in lanes if lane._observer is not sanitizer] == []
    assert engine.cache._pool._observer is sanitizer and cache.saves._host.pool._observer is sanitizer


def test_computing_and_copying_track_no_gradients(make_engine: MakeEngine) -> None:
    engine = make_engine(host_blocks=8)
    cache = engine.cache
    found: list[bool] = []
    for lane in (
        engine.parts.lanes[0],
        cache.loads.mover.lane,
        cache.loads.mover._launcher,
        cache.saves.mover.lane,
    ):
        lane.submit(lambda: found.append(torch.is_inference_mode_enabled()), label="look").wait_done(30.0)  # type: ignore[union-attr]
    assert found == [True] * 4
