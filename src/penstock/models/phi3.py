"""The Phi-3 architecture, which Phi-3.5, Phi-4 and Phi-4-mini have too: as Llama, with q, k and v in one
matrix, gate and up in another, and heads that may turn in part. Owns its names, its tensors and its
windows."""

from __future__ import annotations

from collections.abc import Container

from penstock.models.architecture import Architecture
from penstock.models.fields import Json
from penstock.models.model import ModelConfig
from penstock.models.rotary import RopeFactors

_TRAINED = 4096  # tokens: `original_max_position_embeddings` of a config that does not say it


class Phi3(Architecture):
    name = "phi3"
    config_name = "Phi3ForCausalLM"
    fused = rotates_partly = True
    window_rule = "stated"

    def parse_config(self, raw: Json, where: str) -> ModelConfig:
        trained = raw.get("original_max_position_embeddings") or _TRAINED
        return super().parse_config({**raw, "original_max_position_embeddings": trained}, where)

    def config_of_gguf(
        self, metadata: Json, tensors: Container[str], factors: RopeFactors, where: str
    ) -> Json:
        trained = metadata.get(f"{self.name}.rope.scaling.original_context_length")
        config = super().config_of_gguf(metadata, tensors, factors, where)
        return {**config, "original_max_position_embeddings": trained}
