"""An architecture is one class and one entry of the registry: one with other names and fused projections
computes what it does in `transformers`, from safetensors and from GGUF files."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from penstock.config import ModelSource
from penstock.models import registry
from penstock.models.adapters import blank_weights, read_adapter
from penstock.models.architecture import Architecture
from penstock.models.decoder import Decoder, DecoderLayer
from penstock.models.lora import LoraRuns, LoraWeight
from penstock.models.model import ModelConfig
from penstock.testing.tiny_models import TINY_LLAMA, tiny_tensors, write_tiny_model
from tests.support.adapters import adapter_tensors, write_adapter
from tests.support.contiguous_kv import logits_of
from tests.support.loading import load_on_cpu
from tests.support.tiny_gguf import write_tiny_gguf

TRANSFORMERS = importlib.import_module("transformers")
IDS = torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(5)).tolist()


class Doubled(DecoderLayer):
    """A kind of layer of its own: twice what an MLP says."""

    def mlp(self, x: torch.Tensor, lora: LoraRuns | None) -> torch.Tensor:
        return 2.0 * super().mlp(x, lora)


class FusedToy(Architecture):
    """Llama with the projections of Phi-3's files, which have q, k and v in one matrix, and gate and up."""

    name = "phi3"
    config_name = "Phi3ForCausalLM"
    fused = True
    doubled: ClassVar[frozenset[int]] = frozenset()

    def layer_kind(self, config: ModelConfig, index: int) -> type[DecoderLayer]:
        return Doubled if index in self.doubled else DecoderLayer


@pytest.fixture(autouse=True)
def added(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path_factory.mktemp("cache")))
    others = tuple(
        architecture for architecture in registry.ARCHITECTURES if architecture.name != FusedToy.name
    )
    monkeypatch.setattr(registry, "ARCHITECTURES", (*others, FusedToy()))


def load(path: Path, load_format: str = "auto") -> Decoder:
    return load_on_cpu(ModelSource(str(path), load_format)).model


def our_logits(model: Decoder) -> torch.Tensor:
    return logits_of(model, IDS)


def test_it_computes_the_same_as_in_transformers_from_safetensors_and_from_gguf(tmp_path: Path) -> None:
    config = dataclasses.replace(TINY_LLAMA, architecture="phi3")
    directory = write_tiny_model(tmp_path / "toy", config, shards=2)
    loaded, converted = load(directory), load(write_tiny_gguf(tmp_path / "toy.gguf", config))
    assert loaded.config.architecture == converted.config.architecture == "phi3"
    reference = TRANSFORMERS.Phi3ForCausalLM.from_pretrained(
        directory, dtype=torch.float32, pad_token_id=0
    ).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([IDS])).logits[0]
    for model in (loaded, converted):
        assert float((our_logits(model) - expected).abs().max() / expected.abs().max()) < 1e-4


def test_a_layer_of_another_kind_is_a_class_and_a_line_of_the_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(TINY_LLAMA, architecture="phi3")
    tensors = tiny_tensors(config)
    down = "model.layers.1.mlp.down_proj.weight"
    directory = write_tiny_model(tmp_path / "toy", config, tensors=tensors)
    doubled = write_tiny_model(tmp_path / "doubled", config, tensors={**tensors, down: 2.0 * tensors[down]})
    expected, plain = our_logits(load(doubled)), our_logits(load(directory))
    monkeypatch.setattr(FusedToy, "doubled", frozenset({1}))
    torch.testing.assert_close(our_logits(load(directory)), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(expected, plain, atol=1e-2)


def test_random_weights_and_adapters_follow_from_its_tensors(tmp_path: Path) -> None:
    config = dataclasses.replace(TINY_LLAMA, architecture="phi3")
    directory = write_tiny_model(tmp_path / "toy", config)
    assert our_logits(load(directory, "dummy")).std() > 0.1
    tensors = adapter_tensors(config, seed=1, modules=("qkv_proj", "o_proj", "gate_up_proj", "down_proj"))
    adapter = read_adapter(write_adapter(tmp_path / "adapter", tensors), load(directory)).weights
    blank = blank_weights(config, torch.float32, torch.device("cpu"), rank=4)
    assert [shapes(layer) for layer in adapter.layers] == [shapes(layer) for layer in blank.layers]
    assert shapes(adapter.layers[0])["qkv"] == [(4, 64), (config.qkv_width, 4)]


def shapes(layer: Mapping[str, LoraWeight]) -> dict[str, list[tuple[int, ...]]]:
    return {
        name: [tuple(weight.a.shape), *(tuple(part.b.shape) for part in weight.parts)]
        for name, weight in layer.items()
    }
