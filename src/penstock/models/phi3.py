"""The Phi-3 architecture, which Phi-3.5, Phi-4 and Phi-4-mini have too: as Llama, with q, k and v in one
matrix, gate and up in another, and heads that may turn in part. Owns its names, its tensors and its
windows."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from penstock.models.architecture import Architecture, WeightSpec, stack, stated_windows
from penstock.models.model import ModelConfig
from penstock.models.rotary import RopeFactors

_TRAINED = 4096  # tokens: `original_max_position_embeddings` of a config that does not say it


class Phi3(Architecture):
    name = "phi3"
    config_name = "Phi3ForCausalLM"
    rotates_partly = True

    def layer(self, config: ModelConfig) -> tuple[WeightSpec, ...]:
        hidden, ffn = config.hidden, config.ffn
        return (
            stack("attn_norm", ("input_layernorm.weight", hidden)),
            stack("qkv", ("self_attn.qkv_proj.weight", config.qkv_width, hidden)),
            stack("out", ("self_attn.o_proj.weight", hidden, config.num_heads * config.head_dim)),
            stack("ffn_norm", ("post_attention_layernorm.weight", hidden)),
            stack("gate_up", ("mlp.gate_up_proj.weight", 2 * ffn, hidden)),
            stack("down", ("mlp.down_proj.weight", hidden, ffn)),
        )

    def parse_config(self, raw: Mapping[str, Any], where: str) -> ModelConfig:
        trained = raw.get("original_max_position_embeddings") or _TRAINED
        return super().parse_config({**raw, "original_max_position_embeddings": trained}, where)

    def windows(self, raw: Mapping[str, Any], num_layers: int, where: str) -> tuple[int, ...]:
        return stated_windows(raw, num_layers, 0, where)

    def config_of_gguf(
        self, metadata: Mapping[str, Any], tensors: Container[str], factors: RopeFactors, where: str
    ) -> dict[str, Any]:
        config = super().config_of_gguf(metadata, tensors, factors, where)
        return {
            **config,
            "original_max_position_embeddings": metadata.get(
                f"{self.name}.rope.scaling.original_context_length"
            ),
        }
