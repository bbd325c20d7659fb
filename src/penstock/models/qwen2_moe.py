"""The Qwen2 architecture with experts, such as Qwen1.5-MoE-A2.7B and Qwen2-57B-A14B: attention as Qwen2, and
in most layers a choice of experts beside one that every token runs through. Owns its names and biases."""

from __future__ import annotations

from penstock.models.experts import RoutedArchitecture
from penstock.models.fields import Fields, Json


class Qwen2Moe(RoutedArchitecture):
    name = "qwen2_moe"
    gguf_name = "qwen2moe"
    config_name = "Qwen2MoeForCausalLM"
    shared = "mlp.shared_expert"

    def biases(self, fields: Fields) -> Json:
        return {**super().biases(fields), "qkv_bias": fields.flag("qkv_bias", True)}
