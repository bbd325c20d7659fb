"""The Llama architecture, which SmolLM2 has too. Owns its names, its tensors and its built-in dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from penstock.models.architecture import Architecture, WeightSpec, stack
from penstock.models.model import ModelConfig

SMOLLM2_135M = ModelConfig(
    architecture="llama",
    num_layers=30,
    hidden=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    ffn=1536,
    vocab=49152,
    max_position=8192,
    rope_theta=1e5,
    norm_eps=1e-5,
    tied_embeddings=True,
)
TINY_LLAMA = ModelConfig(
    architecture="llama",
    num_layers=2,
    hidden=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn=128,
    vocab=512,
    max_position=2048,
    rope_theta=1e4,
    norm_eps=1e-5,
    tied_embeddings=False,
)


class Llama(Architecture):
    name = "llama"
    config_name = "LlamaForCausalLM"
    presets: ClassVar[Mapping[str, ModelConfig]] = {"smollm2-135m": SMOLLM2_135M, "tiny-llama": TINY_LLAMA}
    interleaved_in_gguf = (".q_proj.weight", ".k_proj.weight")

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
            stack("out", ("self_attn.o_proj.weight", hidden, q_rows)),
            stack("ffn_norm", ("post_attention_layernorm.weight", hidden)),
            stack("gate_up", ("mlp.gate_proj.weight", ffn, hidden), ("mlp.up_proj.weight", ffn, hidden)),
            stack("down", ("mlp.down_proj.weight", hidden, ffn)),
        )
