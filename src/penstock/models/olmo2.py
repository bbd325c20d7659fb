"""The OLMo 2 architecture: as Llama, with norms behind attention and MLP instead of before them, and with q
and k normalised over all heads together. Owns its names and its layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.models.architecture import Architecture, WeightSpec, stack
from penstock.models.decoder import DecoderLayer
from penstock.models.lora import LoraRuns
from penstock.models.model import ModelConfig, PagedKv


@dataclass(frozen=True, kw_only=True)
class PostNormLayer(DecoderLayer):
    """`attn_norm` and `ffn_norm` are applied to what attention and MLP return. `q_norm` and `k_norm` have the
    width of all heads."""

    def project(
        self, hidden: Tensor, residual: Tensor | None, kv: PagedKv, lora: LoraRuns | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        residual = hidden if residual is None else residual + hidden
        assert self.q_norm is not None and self.k_norm is not None
        qkv, widths = self._linear("qkv", residual, lora), (len(self.q_norm), len(self.k_norm))
        q, k, v = qkv.split_with_sizes((*widths, qkv.shape[1] - sum(widths)), dim=1)
        q, k = self.ops.norm_heads((q, k), (self.q_norm, self.k_norm), self.eps)
        return *kv.rotate_and_write(self.index, torch.cat((q, k, v), dim=1), None, None), residual

    def finish(self, attended: Tensor, residual: Tensor, lora: LoraRuns | None) -> tuple[Tensor, Tensor]:
        x = self.ops.whole(self._linear("out", attended, lora))
        residual = residual + self.ops.rms_norm(x, self.attn_norm, self.eps)
        return self.ops.rms_norm(self.mlp(residual, lora), self.ffn_norm, self.eps), residual

    def mlp(self, x: Tensor, lora: LoraRuns | None) -> Tensor:
        if lora is None:
            gated = self.ops.gated(x, self.gate_up)
        else:
            gated = self.ops.silu_mul(self._linear("gate_up", x, lora))
        return self.ops.whole(self._linear("down", gated, lora))


class Olmo2(Architecture):
    name = "olmo2"
    config_name = "Olmo2ForCausalLM"
    in_gguf = False
    attention_biases = ("qkv_bias", "out_bias")
    takes_heads = False

    def layer_kind(self, config: ModelConfig, index: int) -> type[DecoderLayer]:
        return PostNormLayer

    def layer(self, config: ModelConfig, index: int = 0) -> tuple[WeightSpec, ...]:
        return (
            *self.attention(config),
            stack("attn_norm", ("post_attention_layernorm.weight", config.hidden)),
            *self.mlp(config, index),
            stack("ffn_norm", ("post_feedforward_layernorm.weight", config.hidden)),
        )

    def attention(self, config: ModelConfig) -> Iterator[WeightSpec]:
        yield from super().attention(config)
        for name, heads in (("q_norm", config.num_heads), ("k_norm", config.num_kv_heads)):
            yield stack(name, (f"self_attn.{name}.weight", heads * config.head_dim))
