"""The Mixtral architecture: as Mistral, and in every layer a choice of experts. Owns its names. GGUF files of
these models say llama, and state experts."""

from __future__ import annotations

from penstock.models.experts import RoutedArchitecture
from penstock.models.llama import Llama


class Mixtral(RoutedArchitecture):
    name = "mixtral"
    gguf_name = "llama"
    config_name = "MixtralForCausalLM"
    window_rule = "stated"
    interleaved_in_gguf = Llama.interleaved_in_gguf
    count = "num_local_experts"
    router = "block_sparse_moe.gate"
    expert = "block_sparse_moe.experts"
    gate, up, down = "w1", "w3", "w2"
    normalises = True
