"""What the configuration says reaches the part that it is for: each setting has a number of its own, so that
no two can be mixed up."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.config import GIB, OffloadConfig
from penstock.engine import build as building
from penstock.engine.engine import Engine
from penstock.errors import ConfigError
from penstock.kv import build as storage
from penstock.kv.blocks.key import Scope
from penstock.kv.cache import KvCache
from penstock.models.qwen3 import TINY_QWEN3
from tests.support.driving import tiny_config

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
    (place, num_bytes, _, eviction), (url, _, timeout_s) = opened
    assert (place, num_bytes, eviction) == (str(tmp_path / "kv"), GIB // 2, "cost")
    assert (url, timeout_s) == ("valkey://127.0.0.1:1", 3.0)


def test_by_default_a_lease_outlasts_a_load_and_a_load_an_exchange_with_a_store() -> None:
    """A lease is a backstop: one that ends before its load could end would take the prefix away under it."""
    defaults = OffloadConfig()
    assert defaults.lease_s > defaults.load_deadline_s > defaults.remote_timeout_s


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
    model, layout = engine._parts.executor._forward.model, engine._parts.arena.layout
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


def test_an_error_is_told_even_where_closing_fails_too(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    closed: list[KvCache] = []

    def close(cache: KvCache, timeout_s: float | None = None) -> None:
        closed.append(cache)
        raise OSError("it is stuck")

    config = tiny_config(max_model_len=2000, positions=4096, blocks=20, host_blocks=20)
    with monkeypatch.context() as patch:
        patch.setattr(KvCache, "close", close)
        with pytest.raises(ConfigError, match="--max-model-len 2000 does not fit"):
            building.build(config)
    assert "could not be closed" in caplog.text and "it is stuck" in caplog.text
    closed[0].close()
