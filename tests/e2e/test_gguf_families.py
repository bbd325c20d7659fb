"""GGUF files of every architecture and every rotary scheme that the format can say: the same logits as from
safetensors, and as `transformers` computes from the same file."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import ModelError
from penstock.models.decoder import Decoder
from penstock.models.model import ModelConfig, OtherRope
from penstock.models.rotary import RopeScaling
from penstock.testing.tiny_models import (
    TINY_GEMMA3,
    TINY_GRANITE,
    TINY_LLAMA,
    TINY_MIXTRAL,
    TINY_QWEN2_MOE,
    TINY_QWEN3,
    TINY_QWEN3_MOE,
    TINY_SMOLLM3,
    write_tiny_model,
)
from tests.support.contiguous_kv import logits_of
from tests.support.loading import load_on_cpu
from tests.support.tiny_gguf import write_tiny_gguf

IDS = torch.randint(3, 512, (150,), generator=torch.Generator().manual_seed(5)).tolist()
TRANSFORMERS = importlib.import_module("transformers")
LLAMA3 = RopeScaling("llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = RopeScaling("yarn", 4.0, 64, 0.1 * 1.3862943611198906 + 1.0, 32.0, 1.0)
LONGROPE = RopeScaling(
    "longrope",
    1.0,
    64,
    1.2,
    short_factors=tuple(0.9 + 0.05 * i for i in range(8)),
    long_factors=(1.0, 2.0, 3.5, 4.0) * 2,
)
PHI3 = dataclasses.replace(TINY_LLAMA, architecture="phi3")

CONFIGS = {
    "llama3": dataclasses.replace(TINY_LLAMA, rope_scaling=LLAMA3),
    "llama with biases": dataclasses.replace(TINY_LLAMA, qkv_bias=True, out_bias=True, mlp_bias=True),
    "linear": dataclasses.replace(
        TINY_LLAMA, rope_scaling=RopeScaling("linear", 4.0), max_position=8192, context=2048
    ),
    "qwen2": dataclasses.replace(TINY_LLAMA, architecture="qwen2", qkv_bias=True, tied_embeddings=True),
    "yarn": dataclasses.replace(TINY_QWEN3, rope_scaling=YARN),
    "phi3": dataclasses.replace(PHI3, windows=(40, 40)),
    "longrope": dataclasses.replace(PHI3, rope_scaling=LONGROPE),
    "a part of each head": dataclasses.replace(PHI3, rotary_dim=12),
    "gemma3": TINY_GEMMA3,
    "gemma3, stretched": dataclasses.replace(TINY_GEMMA3, rope_scaling=RopeScaling("linear", 8.0)),
    "smollm3": TINY_SMOLLM3,
    "granite": TINY_GRANITE,
    "mixtral": TINY_MIXTRAL,
    "qwen2-moe": dataclasses.replace(
        TINY_QWEN2_MOE, routing=dataclasses.replace(TINY_QWEN2_MOE.routing, dense_layers=())
    ),
    "qwen3-moe": TINY_QWEN3_MOE,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.mktemp("cache")))


def load(path: Path, max_model_len: int | None = None) -> Decoder:
    return load_on_cpu(path, max_model_len=max_model_len).model


def our_logits(model: Decoder) -> torch.Tensor:
    return logits_of(model, IDS)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_computes_what_the_directory_computes(name: str, tmp_path: Path) -> None:
    config: ModelConfig = CONFIGS[name]
    directory, file = (
        write_tiny_model(tmp_path / "model", config),
        write_tiny_gguf(tmp_path / "model.gguf", config),
    )
    expected, found = our_logits(load(directory)), our_logits(load(file))
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


@torch.inference_mode()
def their_logits(folder: Path, **how: Any) -> torch.Tensor:
    load = TRANSFORMERS.AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=torch.float32, pad_token_id=0, **how)
    logits: torch.Tensor = model(torch.tensor([IDS])).logits[0]
    return logits


def test_a_directory_of_ours_computes_the_same_in_transformers(tmp_path: Path) -> None:
    """So that the test above compares with what is right."""
    plain = {"tiny llama": TINY_LLAMA, "tiny qwen3": TINY_QWEN3}
    for name in (
        *plain,
        "llama3",
        "qwen2",
        "phi3",
        "mixtral",
        "qwen2-moe",
        "qwen3-moe",
        "gemma3",
        "smollm3",
        "granite",
    ):
        directory = write_tiny_model(tmp_path / name, {**plain, **CONFIGS}[name])
        found = our_logits(load(directory))
        torch.testing.assert_close(found, their_logits(directory), rtol=1e-4, atol=1e-4)


def test_transformers_reads_the_same_model_from_the_file(tmp_path: Path) -> None:
    """Their reader knows names and the order of rows by itself."""
    gemma = dataclasses.replace(
        TINY_GEMMA3,
        head_dim=256,
        num_heads=2,
        num_kv_heads=1,
        other_rope=OtherRope((0, 1, 2, 3, 4, 6), 10_000.0),
        score_scale=256**-0.5,
    )
    for config in (TINY_LLAMA, CONFIGS["qwen2"], PHI3, gemma):
        file = write_tiny_gguf(tmp_path / f"{config.architecture}.gguf", config)
        expected = their_logits(tmp_path, gguf_file=file.name)
        torch.testing.assert_close(our_logits(load(file)), expected, rtol=1e-4, atol=1e-4)


def test_factors_for_all_lengths_are_those_of_any_length(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "model.gguf", CONFIGS["llama3"])
    assert load(file, 32).config.positions == load(file, 2048).config.positions


@pytest.mark.parametrize(
    ("key", "message"),
    [("llama.attention.sliding_window", "sliding_window"), ("llama.expert_count", "num_local_experts")],
)
def test_what_a_file_of_this_architecture_cannot_have_is_refused_by_name(
    key: str, message: str, tmp_path: Path
) -> None:
    file = write_tiny_gguf(tmp_path / "model.gguf", metadata={key: "8"})
    with pytest.raises(ModelError, match=message):
        load(file)
