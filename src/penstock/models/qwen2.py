"""The dense Qwen2 architecture, which Qwen2.5 has too: as Llama, with a bias for q, k and v, and windows in
later layers where the config turns them on. Owns its names, its biases and its windows."""

from __future__ import annotations

from typing import Any

from penstock.models.architecture import Architecture, switched_windows
from penstock.models.fields import Fields


class Qwen2(Architecture):
    name = "qwen2"
    config_name = "Qwen2ForCausalLM"

    def biases(self, fields: Fields) -> dict[str, Any]:
        return {**super().biases(fields), "qkv_bias": True}

    def windows(self, fields: Fields, num_layers: int) -> tuple[int, ...]:
        return switched_windows(fields, num_layers)
