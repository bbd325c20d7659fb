"""The text part of the Qwen3.5 architecture with experts, such as Qwen3.5-35B-A3B. Owns its names and its
built-in dimensions."""

from __future__ import annotations

import dataclasses

from penstock.models.delta_net import HybridArchitecture
from penstock.models.model import Recurrence, Routing
from penstock.models.qwen3_5 import QWEN3_5_4B

QWEN3_5_35B_A3B = dataclasses.replace(
    QWEN3_5_4B,
    architecture="qwen3_5_moe",
    num_layers=40,
    hidden=2048,
    num_kv_heads=2,
    ffn=512,
    tied_embeddings=False,
    routing=Routing(num_experts=256, top_k=8, ffn=512, normalised=True, shared_ffn=512),
    recurrence=Recurrence(tuple(layer for layer in range(40) if layer % 4 != 3), 16, 32, 128, 128, window=4),
)


class Qwen35Moe(HybridArchitecture):
    name = "qwen3_5_moe"
    config_name = "Qwen3_5MoeForConditionalGeneration"
    other_config_names = ("Qwen3_5MoeForCausalLM",)
    normalises = True
