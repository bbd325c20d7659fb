"""The Llama architecture: Llama 2 to 3.3, SmolLM2 and many others. Owns its names, its tensors and its built-in dimensions."""

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
    bias_fields: ClassVar[Mapping[str, tuple[str, ...]]] = {"attention_bias": ("qkv_bias", "out_bias"), "mlp_bias": ("mlp_bias",)}
    interleaved_in_gguf = (".q_proj.weight", ".k_proj.weight", ".q_proj.bias", ".k_proj.bias")

    def layer(self, config: ModelConfig) -> tuple[WeightSpec, ...]:
        return separate_layer(config)


def separate_layer(config: ModelConfig) -> tuple[WeightSpec, ...]:
    """The tensors of a layer in files that have q, k, v, gate and up one by one, with the biases that the config asks for."""
    hidden, ffn, dim = config.hidden, config.ffn, config.head_dim
    q_rows, kv_rows = config.num_heads * dim, config.num_kv_heads * dim
    qkv = (("self_attn.q_proj", q_rows), ("self_attn.k_proj", kv_rows), ("self_attn.v_proj", kv_rows))
    gate_up = (("mlp.gate_proj", ffn), ("mlp.up_proj", ffn))
    return (
        stack("attn_norm", ("input_layernorm.weight", hidden)),
        stack("qkv", *((f"{name}.weight", rows, hidden) for name, rows in qkv)),
        *([stack("qkv_bias", *((f"{name}.bias", rows) for name, rows in qkv))] if config.qkv_bias else ()),
        stack("out", ("self_attn.o_proj.weight", hidden, q_rows)),
        *([stack("out_bias", ("self_attn.o_proj.bias", hidden))] if config.out_bias else ()),
        stack("ffn_norm", ("post_attention_layernorm.weight", hidden)),
        stack("gate_up", *((f"{name}.weight", rows, hidden) for name, rows in gate_up)),
        *([stack("gate_up_bias", *((f"{name}.bias", rows) for name, rows in gate_up))] if config.mlp_bias else ()),
        stack("down", ("mlp.down_proj.weight", hidden, ffn)),
        *([stack("down_bias", ("mlp.down_proj.bias", hidden))] if config.mlp_bias else ()),
    )
