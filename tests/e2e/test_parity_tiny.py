"""Tiny random models against `transformers` through safetensors directories, both ways: theirs loaded by us,
ours loaded by them."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config import ModelSource
from penstock.models.decoder import Decoder
from penstock.models.layers import TorchLayerOps, rope_table
from penstock.models.loader import load_model
from penstock.models.model import ModelConfig
from penstock.models.progress import silent
from penstock.testing.tiny_models import TINY_LLAMA, TINY_QWEN3, tiny_tokenizer, write_tiny_model
from tests.support.contiguous_kv import ContiguousKv, forward

TOLERANCE = 1e-4
IDS = torch.randint(0, 512, (80,), generator=torch.Generator().manual_seed(3)).tolist()
TRANSFORMERS = importlib.import_module("transformers")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.mktemp("cache")))


def load(directory: Path) -> Decoder:
    return load_model(
        ModelSource(str(directory)), torch.device("cpu"), torch.float32, TorchLayerOps(), silent
    ).model


def their_model(architecture: str, tied: bool) -> Any:
    """Random weights made and initialised by `transformers`; norms are moved off one, so that leaving one out
    shows."""
    name = {"llama": "Llama", "qwen3": "Qwen3"}[architecture]
    config = getattr(TRANSFORMERS, f"{name}Config")(
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=512,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = getattr(TRANSFORMERS, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.mul_(4)
    return model.eval()


@torch.inference_mode()
def their_logits(reference: Any) -> torch.Tensor:
    return reference(torch.tensor([IDS])).logits[0]


def our_logits(model: Decoder, prefill: int = len(IDS)) -> torch.Tensor:
    kv = ContiguousKv(model.config, model.rope)
    return torch.cat([forward(model, kv, IDS[:prefill]), *(forward(model, kv, [id]) for id in IDS[prefill:])])


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize(
    ("architecture", "tied", "shard"),
    [("qwen3", True, "1GB"), ("qwen3", False, "300KB"), ("llama", False, "1GB"), ("llama", True, "300KB")],
    ids=["tied qwen3", "sharded untied qwen3", "untied llama", "sharded tied llama"],
)
def test_what_transformers_saves_computes_the_same_here(
    tmp_path: Path, architecture: str, tied: bool, shard: str
) -> None:
    reference = their_model(architecture, tied)
    reference.save_pretrained(tmp_path, max_shard_size=shard)
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "300KB")
    model = load(tmp_path)
    assert model.config.architecture == architecture and model.config.eos_ids == (2,)
    expected = their_logits(reference)
    assert expected.std() > 0.5
    assert error(our_logits(model), expected) < TOLERANCE
    assert error(our_logits(model, prefill=60), expected) < TOLERANCE


@pytest.mark.parametrize("config", [TINY_LLAMA, TINY_QWEN3], ids=["llama", "qwen3"])
@pytest.mark.parametrize("shards", [1, 3])
def test_what_the_tiny_models_write_computes_the_same_in_transformers(
    tmp_path: Path, config: ModelConfig, shards: int
) -> None:
    directory = write_tiny_model(tmp_path / "model", config, shards=shards)
    reference = TRANSFORMERS.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    assert error(our_logits(load(directory)), their_logits(reference)) < TOLERANCE


# ----------------------------------------------------------------------------- faults that turn the above red


def without_q_norm(model: Any) -> None:
    model.layers = [layer._replace(q_norm=torch.ones_like(layer.q_norm)) for layer in model.layers]


def without_k_norm(model: Any) -> None:
    model.layers = [layer._replace(k_norm=torch.ones_like(layer.k_norm)) for layer in model.layers]


def swapped_head_norms(model: Any) -> None:
    model.layers = [layer._replace(q_norm=layer.k_norm, k_norm=layer.q_norm) for layer in model.layers]


def wrong_theta(model: Any) -> None:
    model.rope = rope_table(dataclasses.replace(model.config, rope_theta=1e4))


def swapped_gate_and_up(model: Any) -> None:
    model.layers = [layer._replace(gate_up=torch.cat(layer.gate_up.chunk(2)[::-1])) for layer in model.layers]


def swapped_key_and_value(model: Any) -> None:
    q_rows, kv_rows = (
        model.config.num_heads * model.config.head_dim,
        model.config.num_kv_heads * model.config.head_dim,
    )
    for i, layer in enumerate(model.layers):
        q, k, v = layer.qkv.split((q_rows, kv_rows, kv_rows))
        model.layers[i] = layer._replace(qkv=torch.cat((q, v, k)))


@pytest.mark.parametrize(
    "fault",
    [
        without_q_norm,
        without_k_norm,
        swapped_head_norms,
        wrong_theta,
        swapped_gate_and_up,
        swapped_key_and_value,
    ],
)
def test_parity_turns_red_with(fault: Any, tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", TINY_QWEN3)
    reference = TRANSFORMERS.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model = load(directory)
    fault(model)
    assert error(our_logits(model), their_logits(reference)) > 10 * TOLERANCE
