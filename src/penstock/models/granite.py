"""The Granite 3 architecture: as Llama, with four multipliers. Owns its names, its layers and where the
multipliers apply."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from penstock.models.architecture import Architecture
from penstock.models.decoder import Decoder, DecoderLayer
from penstock.models.fields import Fields, Json
from penstock.models.llama import Llama
from penstock.models.lora import LoraRuns
from penstock.models.model import LayerOps, ModelConfig, Multipliers, Weight
from penstock.models.rotary import RopeFactors

# By name in config.json: the same in GGUF metadata.
_IN_GGUF = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "attention_multiplier": "attention.scale",
}


@dataclass(frozen=True, kw_only=True)
class ScaledLayer(DecoderLayer):
    """What attention and MLP return is scaled before it is added to the residual stream."""

    factor: float

    @classmethod
    def make(cls, index: int, config: ModelConfig, weights: Mapping[str, Weight], ops: LayerOps) -> Self:
        assert config.multipliers is not None
        return super().make(index, config, {**weights, "factor": config.multipliers.residual}, ops)

    def finish(self, attended: Tensor, residual: Tensor, lora: LoraRuns | None) -> tuple[Tensor, Tensor]:
        x = self._linear_shares("out", attended, lora) * self.factor
        x, residual = self.ops.add_rms_norm(x, residual, self.ffn_norm, self.eps)
        return self.mlp(x, lora) * self.factor, residual


class GraniteDecoder(Decoder):
    """A decoder whose embeddings are multiplied and whose logits are divided."""

    def embed(self, tokens: Tensor) -> Tensor:
        assert self.config.multipliers is not None
        return super().embed(tokens) * self.config.multipliers.embedding

    def head(self, hidden: Tensor, residual: Tensor) -> Tensor:
        assert self.config.multipliers is not None
        return super().head(hidden, residual) / self.config.multipliers.logits


class Granite(Architecture):
    name = "granite"
    config_name = "GraniteForCausalLM"
    attention_biases = ("qkv_bias", "out_bias")
    mlp_biases = ("mlp_bias",)
    takes_heads = False
    interleaved_in_gguf = Llama.interleaved_in_gguf

    def model(
        self, config: ModelConfig, weights: Mapping[str, Weight], ops: LayerOps, digest: bytes
    ) -> Decoder:
        return GraniteDecoder(config, weights, ops, digest, [ScaledLayer] * config.num_layers)

    def layer_kind(self, config: ModelConfig, index: int) -> type[DecoderLayer]:
        return ScaledLayer

    def parse_config(self, raw: Json, where: str) -> ModelConfig:
        fields = Fields(raw, where)
        embedding, residual, logits, scores = (fields.positive(name, 1.0) for name in _IN_GGUF)
        plain = {name: value for name, value in raw.items() if name not in _IN_GGUF}
        config = super().parse_config(plain, where)
        return dataclasses.replace(
            config, score_scale=scores, multipliers=Multipliers(embedding, residual, logits)
        )

    def config_of_gguf(
        self, metadata: Json, tensors: Container[str], factors: RopeFactors, where: str
    ) -> Json:
        config = super().config_of_gguf(metadata, tensors, factors, where)
        return {**config, **{name: metadata.get(f"{self.name}.{key}") for name, key in _IN_GGUF.items()}}
