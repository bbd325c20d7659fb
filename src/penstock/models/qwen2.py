"""The dense Qwen2 architecture, which Qwen2.5 has too: as Llama, with a bias for q, k and v, and windows in
later layers where the config turns them on. Owns its names, its biases and its windows."""

from __future__ import annotations

from penstock.models.architecture import Architecture


class Qwen2(Architecture):
    name = "qwen2"
    config_name = "Qwen2ForCausalLM"
    fixed_biases = ("qkv_bias",)
    window_rule = "switched"
