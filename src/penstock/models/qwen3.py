"""The dense Qwen3 architecture: as Llama, with q and k normalised per head before they are rotated. Owns its names, its tensors and its
built-in dimensions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from penstock.models.architecture import Architecture, WeightSpec, stack
from penstock.models.model import ModelConfig

QWEN3_4B = ModelConfig(
    architecture="qwen3",
    num_layers=36,
    hidden=2560,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn=9728,
    vocab=151936,
    max_position=40960,
    rope_theta=1e6,
    norm_eps=1e-6,
    tied_embeddings=True,
)
QWEN3_0_6B = dataclasses.replace(QWEN3_4B, num_layers=28, hidden=1024, num_heads=16, ffn=3072)
TINY_QWEN3 = dataclasses.replace(
    QWEN3_4B, num_layers=3, hidden=128, num_heads=4, num_kv_heads=2, head_dim=32, ffn=256, vocab=512, max_position=2048
)


class Qwen3(Architecture):
    name = "qwen3"
    config_name = "Qwen3ForCausalLM"
    presets: ClassVar[Mapping[str, ModelConfig]] = {"qwen3-4b": QWEN3_4B, "qwen3-0.6b": QWEN3_0_6B, "tiny-qwen3": TINY_QWEN3}

    def layer(self, config: ModelConfig) -> tuple[WeightSpec, ...]:
        hidden, ffn, dim = config.hidden, config.ffn, config.head_dim
        q_rows, kv_rows = config.num_heads * dim, config.num_kv_heads * dim
        return (
            stack("attn_norm", ("input_layernorm.weight", hidden)),
            stack(
                "qkv",
                ("self_attn.q_proj.weight", q_rows, hidden),
                ("self_attn.k_proj.weight", kv_rows, hidden),
                ("self_attn.v_proj.weight", kv_rows, hidden),
            ),
            stack("q_norm", ("self_attn.q_norm.weight", dim)),
            stack("k_norm", ("self_attn.k_norm.weight", dim)),
            stack("out", ("self_attn.o_proj.weight", hidden, q_rows)),
            stack("ffn_norm", ("post_attention_layernorm.weight", hidden)),
            stack("gate_up", ("mlp.gate_proj.weight", ffn, hidden), ("mlp.up_proj.weight", ffn, hidden)),
            stack("down", ("mlp.down_proj.weight", hidden, ffn)),
        )

    def default_head_dim(self, hidden: int, heads: int) -> int | None:
        return None

    def has_window(self, raw: Mapping[str, Any]) -> bool:
        """Configs state a window that is off unless `use_sliding_window` turns it on."""
        return super().has_window({"use_sliding_window": False, **raw})
