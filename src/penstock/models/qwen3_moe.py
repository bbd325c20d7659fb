"""The Qwen3 architecture with experts, such as Qwen3-30B-A3B: attention as Qwen3, and in most layers a choice
of experts. Owns its names and its built-in dimensions."""

from __future__ import annotations

import dataclasses

from penstock.models.experts import RoutedArchitecture
from penstock.models.model import ModelConfig, Routing

QWEN3_30B_A3B = ModelConfig(
    architecture="qwen3_moe",
    num_layers=48,
    hidden=2048,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    ffn=6144,
    vocab=151936,
    max_position=40960,
    rope_theta=1e6,
    norm_eps=1e-6,
    tied_embeddings=False,
    routing=Routing(num_experts=128, top_k=8, ffn=768, normalised=True),
)
TINY_QWEN3_MOE = dataclasses.replace(
    QWEN3_30B_A3B,
    num_layers=3,
    hidden=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    ffn=128,
    vocab=512,
    max_position=2048,
    routing=Routing(num_experts=8, top_k=2, ffn=32, normalised=True),
)


class Qwen3Moe(RoutedArchitecture):
    name = "qwen3_moe"
    gguf_name = "qwen3moe"
    config_name = "Qwen3MoeForCausalLM"
    attention_biases = ("qkv_bias", "out_bias")
    norms_heads = True
    normalises_in_gguf = True
