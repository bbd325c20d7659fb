"""The Llama architecture: Llama 2 to 3.3, SmolLM2 and many others. Owns its names, its tensors and its
built-in dimensions."""

from __future__ import annotations

from penstock.models.architecture import Architecture
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
    attention_biases = ("qkv_bias", "out_bias")
    mlp_biases = ("mlp_bias",)
    interleaved_in_gguf = (".q_proj.weight", ".k_proj.weight", ".q_proj.bias", ".k_proj.bias")
