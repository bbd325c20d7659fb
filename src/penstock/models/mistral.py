"""The Mistral architecture: as Llama, with a window in every layer where the config states one. Mistral 7B
v0.1 has one, later models and Nemo have none. Owns its names and its windows. GGUF files of these models say
llama, and state no window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.models.architecture import Architecture, stated_windows

_WINDOW = 4096  # where a config does not say; null in it means none


class Mistral(Architecture):
    name = "mistral"
    config_name = "MistralForCausalLM"
    in_gguf = False

    def windows(self, raw: Mapping[str, Any], num_layers: int, where: str) -> tuple[int, ...]:
        return stated_windows({"sliding_window": _WINDOW, **raw}, num_layers, 0, where)
