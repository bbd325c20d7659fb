"""The SmolLM3 architecture: as Llama, with layers whose heads do not turn. Owns its names and which layers
those are."""

from __future__ import annotations

import dataclasses
from collections.abc import Container

from penstock.models.architecture import Architecture
from penstock.models.fields import Fields, Json
from penstock.models.llama import Llama
from penstock.models.model import ModelConfig, OtherRope
from penstock.models.rotary import RopeFactors

_EVERY = 4  # the last of so many layers does not turn, where a config does not say it


class SmolLM3(Architecture):
    name = "smollm3"
    config_name = "SmolLM3ForCausalLM"
    attention_biases = ("qkv_bias", "out_bias")
    mlp_biases = ("mlp_bias",)
    window_rule = "switched"
    takes_heads = False
    interleaved_in_gguf = Llama.interleaved_in_gguf

    def parse_config(self, raw: Json, where: str) -> ModelConfig:
        fields = Fields({"tie_word_embeddings": True, **raw}, where)
        num_layers, every = fields.count("num_hidden_layers", most=4096), _EVERY
        if raw.get("no_rope_layer_interval") is not None:
            every = fields.count("no_rope_layer_interval")
        turning = raw.get("no_rope_layers")  # in spite of its name: 1 for layers that do turn
        if turning is None:
            turning = [int((layer + 1) % every != 0) for layer in range(num_layers)]
        good = isinstance(turning, list) and len(turning) == num_layers and set(turning) <= {0, 1}
        fields.need(good, f"no_rope_layers must be 0 or 1 for each of {num_layers} layers, got {turning!r}")
        still = tuple(layer for layer, turns in enumerate(turning) if not turns)
        plain = {name: value for name, value in fields.raw.items() if name != "no_rope_layers"}
        if plain.get("layer_types") is None and fields.is_set("sliding_window"):
            kinds = ("sliding_attention", "full_attention")
            plain["layer_types"] = [kinds[int(turns)] for turns in turning]
        config = super().parse_config(plain, where)
        return dataclasses.replace(config, other_rope=OtherRope(still, 0.0) if still else None)

    def config_of_gguf(
        self, metadata: Json, tensors: Container[str], factors: RopeFactors, where: str
    ) -> Json:
        """Files have windows never, and the usual layers that do not turn."""
        return {**super().config_of_gguf(metadata, tensors, factors, where), "no_rope_layer_interval": _EVERY}
