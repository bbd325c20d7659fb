"""The Mistral architecture: as Llama, with a window in every layer where the config states one. Mistral 7B
v0.1 has one, later models and Nemo have none. Owns its names and its windows. GGUF files of these models say
llama, and state no window."""

from __future__ import annotations

from penstock.models.architecture import Architecture


class Mistral(Architecture):
    name = "mistral"
    config_name = "MistralForCausalLM"
    in_gguf = False
    window_rule = "usual"
