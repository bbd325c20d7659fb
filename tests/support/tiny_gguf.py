"""Tiny random models as GGUF files, written from the format. Owns no weights: they are those of
`penstock.testing.tiny_models`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from penstock.models.model import ModelConfig
from penstock.models.registry import architecture_of
from penstock.testing.tiny_models import CHAT_TEMPLATE, SPECIAL, TINY_LLAMA, tiny_tensors, tiny_tokenizer


def write_tiny_gguf(
    path: Path,
    config: ModelConfig = TINY_LLAMA,
    *,
    seed: int = 0,
    metadata: Mapping[str, Any] | None = None,
    encoding_of: Callable[[str], str] = lambda name: "F32",
) -> Path:
    """The same model as `write_tiny_model` as a GGUF file; `metadata` replaces or adds string entries.
    `encoding_of`: ggml's encoding of a matrix by its name in safetensors files."""
    architecture = architecture_of(config)
    writer = gguf.GGUFWriter(path, architecture.gguf_name or architecture.name)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.default_len)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(config.ffn)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    _add_gguf_optional(writer, config)
    _add_gguf_tokenizer(writer, {"tokenizer.ggml.pre": "smollm", **(metadata or {})})
    for name, factors in _gguf_factors(config).items():
        writer.add_tensor(name, np.array(factors, np.float32))
    names = gguf.get_tensor_name_map(
        next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == writer.arch),
        config.num_layers,
    ).mapping
    for name, tensor in _with_experts_together(tiny_tensors(config, seed)).items():
        module, _, which = name.rpartition(".")
        is_plain = tensor.dim() == 1 or "gate_inp" in names[module][1]
        kind = gguf.GGMLQuantizationType["F32" if is_plain else encoding_of(name)]
        writer.add_tensor(
            f"{names[module][1]}.{which}",
            gguf.quantize(_gguf_rows(name, tensor, config), kind),
            raw_dtype=kind,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _with_experts_together(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As llama.cpp's converter writes them: one tensor for all experts of a layer, and the shared expert's
    gate as a vector."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        together = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        if together != name:
            tensor = torch.cat((found.get(together, tensor.new_empty(0, *tensor.shape)), tensor.unsqueeze(0)))
        found[together] = tensor.flatten() if "shared_expert_gate" in name else tensor
    return found


def _add_gguf_optional(writer: Any, config: ModelConfig) -> None:
    """As llama.cpp's converter writes them."""
    scaling, routing = config.rope_scaling, config.routing
    if routing is not None:
        writer.add_expert_count(routing.num_experts)
        writer.add_expert_used_count(routing.top_k)
        if config.architecture != "mixtral":
            writer.add_expert_feed_forward_length(routing.ffn)
        if routing.shared_ffn:
            writer.add_expert_shared_feed_forward_length(routing.shared_ffn)
    if (scales := config.multipliers) is not None:
        writer.add_embedding_scale(scales.embedding)
        writer.add_residual_scale(scales.residual)
        writer.add_logit_scale(scales.logits)
        writer.add_attention_scale(config.scale)
    if config.other_rope is not None and config.other_rope.theta:
        writer.add_float32(f"{writer.arch}.rope.freq_base_swa", config.other_rope.theta)
    if config.rotary_dim:
        writer.add_rope_dimension_count(config.rotary_dim)
    if config.windows:
        writer.add_sliding_window(max(config.windows))
    if scaling is None or scaling.kind == "llama3":
        return
    if scaling.kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling.kind))
        writer.add_rope_scaling_factor(scaling.factor)
    if scaling.kind == "longrope":
        writer.add_rope_scaling_attn_factors(scaling.attention_factor)
    if scaling.trained_len:
        writer.add_rope_scaling_orig_ctx_len(scaling.trained_len)


def _gguf_factors(config: ModelConfig) -> dict[str, Sequence[float]]:
    """The tensors that llama.cpp's converter writes for llama3 and longrope: the divisors of each pair's
    frequency."""
    scaling = config.rope_scaling
    if scaling is None or scaling.kind not in ("llama3", "longrope"):
        return {}
    if scaling.kind == "longrope":
        return {
            "rope_factors_long.weight": scaling.long_factors,
            "rope_factors_short.weight": scaling.short_factors,
        }
    factors = []
    for pair in range(config.head_dim // 2):
        waves = scaling.trained_len / (2 * math.pi * config.rope_theta ** (2 * pair / config.head_dim))
        smooth = (waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        smooth = min(1.0, max(0.0, smooth))
        factors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return {"rope_freqs.weight": factors}


def _add_gguf_tokenizer(writer: Any, texts: Mapping[str, Any]) -> None:
    model = json.loads(tiny_tokenizer().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    for key, text in texts.items():
        writer.add_string(key, text)


def _gguf_rows(name: str, tensor: Tensor, config: ModelConfig) -> np.ndarray[Any, Any]:
    """Llama's q and k rows are stored in GGUF with the two halves of each head interleaved. Written from the
    format, not from our description."""
    rows = tensor.numpy()
    if config.architecture == "gemma3_text" and name.endswith("norm.weight"):
        return rows + 1
    if config.architecture in ("llama", "mixtral", "smollm3", "granite") and (
        ".q_proj." in name or ".k_proj." in name
    ):
        heads = rows.reshape(-1, 2, config.head_dim // 2, rows.shape[-1] if rows.ndim > 1 else 1)
        rows = np.ascontiguousarray(heads.swapaxes(1, 2).reshape(rows.shape))
    return rows
