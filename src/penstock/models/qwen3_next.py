"""The Qwen3-Next architecture, such as Qwen3-Next-80B-A3B: three layers with a state to one that attends, and
experts. Owns its names and how its files order the rows of projections."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.models.delta_net import HybridArchitecture
from penstock.models.model import Recurrence


class Qwen3Next(HybridArchitecture):
    name = "qwen3_next"
    config_name = "Qwen3NextForCausalLM"
    interleaved = True

    def projections(self, dims: Recurrence) -> Mapping[str, Mapping[str, int]]:
        width = dims.qkv_width + dims.out_width
        return {"qkv": {"in_proj_qkvz": width}, "gates": {"in_proj_ba": 2 * dims.num_value_heads}}
