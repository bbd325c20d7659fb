"""How large the parts of an engine are made, from what its configuration says and from what there is; and who
listens to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config import GIB, KvConfig, OffloadConfig
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.errors import ConfigError
from penstock.kv import build as storage
from penstock.testing.stores import MemoryStore
from tests.support.driving import block_bytes, tiny_config

MakeEngine = Callable[..., Engine]
BLOCK_BYTES = block_bytes("tiny-qwen3", 16)

# --------------------------------------------------------------------------------------------------- the line


def test_a_request_is_overtaken_for_as_long_as_the_setting_says_and_never_where_all_wait_in_line(
    make_engine: MakeEngine,
) -> None:
    for settings, bound_s in (
        ({"max_overtaken_s": 7.0}, 7.0),
        ({}, 60.0),
        ({"scheduling": "fifo", "max_overtaken_s": 7.0}, 0.0),
    ):
        scheduler = make_engine(**settings)._parts.scheduler
        assert (scheduler.deep.budget.max_overtaken_s, scheduler.admission.line._bound_s) == (
            bound_s,
            bound_s,
        )


# ---------------------------------------------------------------------------------------------- device memory


def num_device_blocks(**kv: Any) -> int:
    engine = build(replace(tiny_config(), kv=KvConfig(**kv)))
    try:
        return engine.cache.num_blocks
    finally:
        engine.close(timeout_s=20.0)


@pytest.mark.parametrize(
    ("num_bytes", "num_blocks"), [(2 * BLOCK_BYTES, 2), (3 * BLOCK_BYTES - 1, 2), (3 * BLOCK_BYTES, 3)]
)
def test_device_memory_holds_as_many_blocks_as_fit_into_it(num_bytes: int, num_blocks: int) -> None:
    assert num_device_blocks(device_gib=num_bytes / GIB) == num_blocks


def test_blocks_are_of_so_many_tokens_as_the_setting_says() -> None:
    engine = build(replace(tiny_config(), kv=KvConfig(block_tokens=32, device_gib=10 * BLOCK_BYTES / GIB)))
    assert (engine.cache.block_tokens, engine.cache.num_blocks, engine._parts.arena.layout.block_tokens) == (
        32,
        5,
        32,
    )
    assert engine._parts.executor.limits.block_tokens == 32 and engine._parts.executor.limits.max_table == 5
    engine.close(timeout_s=20.0)


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


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_what_the_device_keeps_is_not_saved_again_where_it_keeps_anything(
    make_engine: MakeEngine, prefix_cache: bool
) -> None:
    cache = make_engine(host_blocks=8, prefix_cache=prefix_cache).cache
    assert cache.saves.limits.postpones == prefix_cache
    assert (
        cache.saves.limits.overlap_tokens == storage._CPU_OVERLAP_TOKENS
        and cache.saves._host.memory is not None
    )


def test_tiers_behind_host_memory_have_their_lanes_and_a_quarter_of_it_in_their_queue(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "open_remote", lambda *args: MemoryStore("remote", local=False))
    engine = make_engine(
        host_blocks=8, ssd_dir=str(tmp_path / "kv"), ssd_gib=0.25, remote="valkey://somewhere"
    )
    tiers = engine.cache.cold_tiers
    assert list(tiers) == ["ssd", "remote"], "the hotter one first"
    for name, tier in tiers.items():
        lanes = tier._lanes
        assert [lane.name for lane in lanes.readers] == [
            f"{name}-read-{number}" for number in range(storage.COLD_READERS)
        ]
        assert [lane.name for lane in lanes.writers] == [
            f"{name}-write-{number}" for number in range(storage.COLD_WRITERS)
        ]
        assert (lanes.asker is None) == (name == "ssd"), "a disk answers from memory"
        assert tier._limits.queue_bytes == 8 * BLOCK_BYTES // 4
    monkeypatch.setattr(storage, "_WRITE_QUEUE_BYTES", 3)
    tiny = make_engine(host_blocks=8, remote="valkey://somewhere").cache.cold_tiers["remote"]
    assert tiny._limits.queue_bytes == 3


def test_a_sanitizer_hears_every_lane_and_every_pool(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(host_blocks=8, ssd_dir=str(tmp_path / "kv"), ssd_gib=0.25)
    sanitizer, cache = engine._parts.sanitizer, engine.cache
    assert sanitizer is not None
    cold = engine.cache.cold_tiers["ssd"]._lanes
    lanes: list[Any] = [engine._parts.lanes[0], *cold.readers, *cold.writers]
    for mover in (cache.loads.mover, cache.saves.mover):
        lanes += [mover.lane, mover._launcher]
    assert [lane.name for lane in lanes if lane._observer is not sanitizer] == []
    assert engine.cache._pool._observer is sanitizer and cache.saves._host.pool._observer is sanitizer


def test_computing_and_copying_track_no_gradients(make_engine: MakeEngine) -> None:
    engine = make_engine(host_blocks=8)
    cache = engine.cache
    found: list[bool] = []
    for lane in (
        engine._parts.lanes[0],
        cache.loads.mover.lane,
        cache.loads.mover._launcher,
        cache.saves.mover.lane,
    ):
        lane.submit(lambda: found.append(torch.is_inference_mode_enabled()), label="look").wait_done(30.0)  # type: ignore[union-attr]
    assert found == [True] * 4
