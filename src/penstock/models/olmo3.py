"""The OLMo 3 architecture: as OLMo 2, with windows in most layers, whose positions are never stretched. Owns
its names and its windows."""

from __future__ import annotations

import dataclasses

from penstock.models.fields import Fields, Json
from penstock.models.model import ModelConfig, OtherRope
from penstock.models.olmo2 import Olmo2
from penstock.models.rotary import LOCAL, rope_by_kind

_THETA = 500_000.0
_EVERY = 4  # the last of so many layers sees all tokens, where a config does not say it


class Olmo3(Olmo2):
    name = "olmo3"
    config_name = "Olmo3ForCausalLM"
    window_rule = "stated"

    def parse_config(self, raw: Json, where: str) -> ModelConfig:
        fields = Fields({"sliding_window": 4096, **raw}, where)
        theta = fields.positive("rope_theta", _THETA)
        whole, local_theta = rope_by_kind(fields, theta, theta)
        num_layers = fields.count("num_hidden_layers", most=4096)
        usual = [("full_attention" if (i + 1) % _EVERY == 0 else LOCAL) for i in range(num_layers)]
        kinds = fields.raw.get("layer_types") or usual
        rope = {"rope_theta": None, "rope_scaling": None, "rope_parameters": whole, "layer_types": kinds}
        config = super().parse_config({**fields.raw, **rope}, where)
        local = tuple(layer for layer, kind in enumerate(kinds) if kind == LOCAL)
        if not local or (config.rope_scaling is None and local_theta == config.rope_theta):
            return config
        return dataclasses.replace(config, other_rope=OtherRope(local, local_theta))
