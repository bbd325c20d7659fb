"""KV that was turned by one table of positions is never read under another: every number of a rotary scheme
is in the keys' scope, and a scheme that follows from a length has one table in a run.

Holds invariant 13: another position scheme has other keys."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config import Config
from penstock.contract import KvSource
from penstock.engine.engine import Engine
from penstock.kv import build as build_module
from penstock.kv.blocks.key import Scope
from penstock.models.layers import rope_table
from penstock.models.llama import TINY_LLAMA
from penstock.models.model import ModelConfig
from penstock.models.registry import parse_config
from penstock.models.rotary import RopeScaling
from penstock.models.weights import weights_digest
from penstock.testing.stores import MemoryStore
from penstock.testing.tiny_models import config_json, write_tiny_model
from tests.cpu.engine.test_replaced_weights import answer, serving, started  # noqa: F401

Prompts = Callable[..., list[int]]
SHORT, LONG = [1.0 + 0.1 * i for i in range(8)], [2.0 + 0.5 * i for i in range(8)]
SCHEMES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": 1.1,
        "truncate": True,
    },
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 64,
        "attention_factor": 1.2,
        "short_factor": SHORT,
        "long_factor": LONG,
    },
}
NUMBERS = [
    (scheme, name)
    for scheme, numbers in SCHEMES.items()
    for name in numbers
    if name not in ("rope_type", "short_factor")
]


def config_of(rope: dict[str, Any], **fields: Any) -> ModelConfig:
    return parse_config({**config_json(TINY_LLAMA), "rope_scaling": rope, **fields}, "config.json")


def scope_of(config: ModelConfig) -> bytes:
    """As if all else were equal, the digest of the weights included."""
    return Scope(b"weights", "float32", b"layout", 16, config.positions).digest()


def other(value: Any) -> Any:
    """Almost the same."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return [*value[:-1], value[-1] * (1 + 1e-6)]
    return value * 2 if isinstance(value, int) else value * (1 + 1e-6)


@pytest.mark.parametrize(("scheme", "name"), NUMBERS, ids=lambda part: str(part))
def test_one_number_that_differs_is_another_scope(scheme: str, name: str) -> None:
    rope = SCHEMES[scheme]
    same, changed = (config_of(one).settled(4096) for one in (rope, {**rope, name: other(rope[name])}))
    assert scope_of(same) == scope_of(config_of(dict(rope)).settled(4096))
    assert scope_of(same) != scope_of(changed)


def test_every_scheme_is_a_scope_of_its_own_and_plain_positions_keep_theirs() -> None:
    settled = [config_of(rope).settled(4096) for rope in SCHEMES.values()]
    partial = dataclasses.replace(TINY_LLAMA, rotary_dim=8)
    scopes = {scope_of(config) for config in (*settled, TINY_LLAMA, partial)}
    assert len(scopes) == len(SCHEMES) + 2
    assert TINY_LLAMA.positions == ("rope half-rotation theta=10000.0"), (
        "files and stores that people have stay valid"
    )


def test_the_table_of_a_scheme_follows_from_what_the_scope_says() -> None:
    """Two configs of one scope have one table, whatever length they were settled for."""
    for rope in SCHEMES.values():
        tables: dict[bytes, torch.Tensor] = {}
        for length in (32, 64, 65, 2048, 2049, 5000):
            config = config_of(rope).settled(length)
            table = rope_table(config)
            assert torch.equal(tables.setdefault(scope_of(config), table), table)
        assert len(tables) == {"dynamic": 3, "longrope": 2}.get(rope["rope_type"], 1)


# --------------------------------------------------------------------------------------------- with an engine


def with_rope(folder: Path, rope: dict[str, Any]) -> Path:
    model = write_tiny_model(folder / "model")
    (model / "config.json").write_text(
        json.dumps({**config_json(TINY_LLAMA), "rope_scaling": rope, "max_position_embeddings": 512})
    )
    return model


def limited(config: Config, max_model_len: int | None) -> Config:
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, max_model_len=max_model_len))


@pytest.mark.parametrize(
    ("scheme", "lengths"),
    [("longrope", (64, 128, None)), ("dynamic", (None, 600, 601)), ("linear", (64, 600, None))],
)
def test_cached_kv_of_one_table_is_not_read_under_another(
    scheme: str,
    lengths: tuple[int | None, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prompts: Prompts,
    started: Callable[[Config], Engine],  # noqa: F811
) -> None:
    """Restarts with another --max-model-len, over one store. Of longrope the first is short, the others are
    long; dynamic positions are plain, then one of two kinds; linear ones follow from no length."""
    shared = MemoryStore("remote", local=False)
    monkeypatch.setattr(build_module, "open_remote", lambda url, space, timeout_s: shared)
    config = serving(with_rope(tmp_path, SCHEMES[scheme]), remote="memory://")
    prompt = prompts(50)
    found = [answer(started(limited(config, length)), prompt) for length in lengths]
    computed, read = KvSource(computed=50), KvSource(remote=48, computed=2)
    expected = {
        "longrope": [computed, computed, read],
        "dynamic": [computed] * 3,
        "linear": [computed, read, read],
    }
    assert [one.source for one in found] == expected[scheme]
    again = answer(started(limited(config, lengths[0])), prompt)
    assert again.source == read and again.tokens == found[0].tokens, "the same table finds its KV"


def test_scaling_is_part_of_the_identity_of_weights_and_the_default_context_is_not() -> None:
    plain = weights_digest(TINY_LLAMA, torch.float32, [])
    assert weights_digest(dataclasses.replace(TINY_LLAMA, context=512), torch.float32, []) == plain
    for changed in (
        {"rope_scaling": RopeScaling("linear", 2.0)},
        {"windows": (8, 0)},
        {"rotary_dim": 8},
        {"qkv_bias": True},
    ):
        assert weights_digest(dataclasses.replace(TINY_LLAMA, **changed), torch.float32, []) != plain
