"""The dense Qwen3 architecture: as Llama, with q and k normalised per head before they are rotated. Owns its
names, its tensors and its built-in dimensions."""

from __future__ import annotations

import dataclasses

from penstock.models.architecture import Architecture
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
    QWEN3_4B,
    num_layers=3,
    hidden=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    ffn=256,
    vocab=512,
    max_position=2048,
)


class Qwen3(Architecture):
    name = "qwen3"
    config_name = "Qwen3ForCausalLM"
    attention_biases = ("qkv_bias", "out_bias")
    norms_heads = True
    derives_head_dim = False
    window_rule = "switched"
