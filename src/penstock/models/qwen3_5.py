"""The text part of the dense Qwen3.5 architecture: three layers with a state to one that attends. Owns its
names and its built-in dimensions."""

from __future__ import annotations

import dataclasses

from penstock.models.delta_net import HybridArchitecture
from penstock.models.fields import Fields
from penstock.models.model import ModelConfig, Recurrence, Routing

QWEN3_5_4B = ModelConfig(
    architecture="qwen3_5",
    num_layers=32,
    hidden=2560,
    num_heads=16,
    num_kv_heads=4,
    head_dim=256,
    ffn=9216,
    vocab=248320,
    max_position=262144,
    rope_theta=1e7,
    norm_eps=1e-6,
    tied_embeddings=True,
    rotary_dim=64,
    recurrence=Recurrence(tuple(layer for layer in range(32) if layer % 4 != 3), 16, 32, 128, 128, window=4),
)
TINY_QWEN3_5 = dataclasses.replace(
    QWEN3_5_4B,
    num_layers=4,
    hidden=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    ffn=128,
    vocab=512,
    max_position=2048,
    rotary_dim=8,
    recurrence=Recurrence((0, 1, 2), 2, 4, 16, 16, window=4),
)


class Qwen35(HybridArchitecture):
    name = "qwen3_5"
    config_name = "Qwen3_5ForConditionalGeneration"
    other_config_names = ("Qwen3_5ForCausalLM",)

    def routing(self, fields: Fields, config: ModelConfig) -> Routing | None:
        stated = [name for name in ("num_experts", "num_local_experts") if fields.is_set(name)]
        fields.need(not stated, f"{', '.join(stated)} in {self.config_name} is not supported")
        return None
