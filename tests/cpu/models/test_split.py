"""A model in parts computes what the whole one does, whatever its sizes and however many ranks there are."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.config import ModelSource
from penstock.errors import ModelError
from penstock.models.adapters import read_adapter
from penstock.models.delta_rule import DeltaInputs, LayerStates, Prompts, ReadableDelta
from penstock.models.layers import TorchLayerOps
from penstock.models.loader import LoadedModel, load_model
from penstock.models.lora import LoraRun, LoraRuns
from penstock.models.model import ModelConfig, Recurrence, Routing, Split
from penstock.models.progress import silent
from penstock.models.split import SplitOps
from penstock.testing.tiny_models import (
    TINY_GEMMA3,
    TINY_GLM4_MOE,
    TINY_GRANITE,
    TINY_LLAMA,
    TINY_MIXTRAL,
    TINY_OLMO2,
    TINY_QWEN2_MOE,
    TINY_QWEN3,
    TINY_QWEN3_5,
    TINY_QWEN3_MOE,
    TINY_SMOLLM3,
    write_tiny_model,
)
from tests.support.adapters import ALL_MODULES, adapter_tensors, write_adapter

CPU, WHOLE = torch.device("cpu"), Split()
UNEVEN = replace(
    TINY_LLAMA,
    num_heads=9,
    num_kv_heads=3,
    hidden=9 * TINY_LLAMA.head_dim,
    ffn=101,
    vocab=TINY_LLAMA.vocab + 1,
)
BIASED = replace(TINY_LLAMA, out_bias=True, qkv_bias=True, mlp_bias=True, tied_embeddings=False)
FUSED = replace(TINY_LLAMA, architecture="phi3")
MODELS = {
    "llama": TINY_LLAMA,
    "qwen3": TINY_QWEN3,
    "experts": TINY_QWEN3_MOE,
    "shared expert": TINY_QWEN2_MOE,
    "mixtral": TINY_MIXTRAL,
    "sizes that do not divide": UNEVEN,
    "biases": BIASED,
    "fused matrices": FUSED,
    "gemma3": TINY_GEMMA3,
    "glm4-moe": TINY_GLM4_MOE,
    "granite": replace(TINY_GRANITE, qkv_bias=True, out_bias=True, mlp_bias=True),
    "smollm3": TINY_SMOLLM3,
    "olmo2": TINY_OLMO2,
    "olmo2 with biases": replace(TINY_OLMO2, num_kv_heads=4, qkv_bias=True, out_bias=True),
    "olmo3": replace(TINY_OLMO2, architecture="olmo3"),
    "hybrid": TINY_QWEN3_5,
    "hybrid with experts": replace(
        TINY_QWEN3_5,
        architecture="qwen3_5_moe",
        routing=Routing(4, 2, 32, normalised=True, shared_ffn=48),
    ),
    "hybrid of interleaved rows": replace(
        TINY_QWEN3_5,
        architecture="qwen3_next",
        recurrence=Recurrence((0, 1, 2), 3, 6, 16, 8, window=4, interleaved=True),
        routing=Routing(4, 2, 32, normalised=True, shared_ffn=48),
    ),
}
FUSED_MODULES = ("qkv_proj", "gate_up_proj", "in_proj_qkvz", "in_proj_ba")
MODULES = (*ALL_MODULES, *FUSED_MODULES, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
ALL_HEADS = {"olmo2", "olmo2 with biases", "olmo3"}  # normalised together


class Ranks:
    """Ranks as threads: a `Together` for each."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=30.0)
        self._values: list[Tensor | None] = [None] * size

    def exchanged(self, rank: int, x: Tensor) -> list[Tensor]:
        self._values[rank] = x.clone()
        self._barrier.wait()
        values = [value for value in self._values if value is not None]
        self._barrier.wait()
        return values


class OneRank:
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self._rank = ranks, rank

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack(self._ranks.exchanged(self._rank, x)).sum(dim=0)

    def joined(self, x: Tensor) -> Tensor:
        return torch.cat(self._ranks.exchanged(self._rank, x), dim=-1)


class Attends:
    """Causal attention over the tokens given, without positions, and layers with states over the same."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def advance(self, layer: int, qkv: Tensor, conv: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        dims, num = self._config.recurrence, len(qkv)
        assert dims is not None
        matrices = torch.zeros(1, dims.num_value_heads, dims.key_dim, dims.value_dim)
        states = LayerStates(torch.zeros(1, dims.window - 1, dims.qkv_width), matrices)
        prompts = Prompts(torch.zeros(1, dtype=torch.int32), torch.tensor([0, num]), 0, num, [num])
        return ReadableDelta(dims).prompts(states, prompts, DeltaInputs(qkv, conv, decay, beta))

    def rotate_and_write(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> tuple[Tensor, ...]:
        dims = self._config
        heads = qkv.view(len(qkv), -1, dims.head_dim)
        return heads.split([dims.num_heads, dims.num_kv_heads, dims.num_kv_heads], dim=1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = self._config.num_heads // self._config.num_kv_heads
        k, v = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
        out = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True)
        return out.transpose(0, 1).flatten(1)


def loaded(source: ModelSource, ranks: Ranks | None, split: Split) -> LoadedModel:
    ops = TorchLayerOps()
    chosen = ops if ranks is None else SplitOps(ops, split, OneRank(ranks, split.rank))
    return load_model(source, CPU, torch.float32, chosen, silent)


def logits(
    source: ModelSource, adapter: Path | None = None, ranks: Ranks | None = None, split: Split = WHOLE
) -> Tensor:
    """With `adapter`, the last tokens run with it."""
    with torch.inference_mode():
        found, lora = loaded(source, ranks, split), None
        model = found.model
        if adapter is not None:
            lora = LoraRuns([LoraRun(4, 9, read_adapter(adapter, model, found.dims).weights)])
        hidden, residual = model.embed(torch.arange(9, dtype=torch.int32) * 7), None
        for layer in range(model.config.num_layers):
            hidden, residual = model.layer(layer, hidden, residual, Attends(model.config), lora)
        assert residual is not None
        return model.head(hidden, residual)


def in_parts(source: ModelSource, size: int, adapter: Path | None = None) -> list[Tensor]:
    ranks = Ranks(size)
    with ThreadPoolExecutor(size) as pool:
        parts = [pool.submit(logits, source, adapter, ranks, Split(rank, size)) for rank in range(size)]
        return [part.result() for part in parts]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_parts_together_compute_the_logits_of_the_whole(name: str, size: int, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, MODELS[name])
    source = ModelSource(model=str(tmp_path), weights="float32")
    if name in ALL_HEADS and MODELS[name].num_heads % size:
        with pytest.raises(ModelError, match=f"--tensor-parallel {size} must divide the heads"):
            loaded(source, Ranks(size), Split(0, size))
        return
    tensors = adapter_tensors(MODELS[name], 1, modules=MODULES)
    adapter = write_adapter(tmp_path / "adapter", tensors)
    whole = logits(source, adapter)
    for part in in_parts(source, size, adapter):
        torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-4)


def test_random_weights_are_the_same_model_on_any_number_of_ranks() -> None:
    source = ModelSource(model="tiny-qwen3-moe", load_format="dummy", weights="float32")
    whole = logits(source)
    for part in in_parts(source, 2):
        torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-4)


def test_the_digest_of_a_part_is_that_of_the_whole(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, TINY_QWEN3)
    source, ranks = ModelSource(model=str(tmp_path), weights="float32"), Ranks(2)
    digests = {loaded(source, ranks, Split(rank, 2)).model.digest for rank in range(2)}
    assert digests == {loaded(source, None, WHOLE).model.digest}


def test_a_part_has_half_of_the_heads_and_of_the_width() -> None:
    source = ModelSource(model="tiny-qwen3", load_format="dummy", weights="float32")
    part = loaded(source, Ranks(2), Split(1, 2)).model.config
    whole = loaded(source, None, WHOLE).model.config
    sizes = (part.num_heads, part.num_kv_heads, part.ffn)
    assert sizes == (whole.num_heads // 2, whole.num_kv_heads // 2, whole.ffn // 2)
    assert part.vocab == whole.vocab


def test_forms_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="--weights int8"):
        loaded(ModelSource(weights="int8"), Ranks(2), Split(0, 2))
