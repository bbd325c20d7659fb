"""Tiny random models on disk, as directories and as GGUF files, made without any other library's model code.
For tests only."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor

from penstock.models.llama import TINY_LLAMA
from penstock.models.model import ModelConfig
from penstock.models.qwen3 import TINY_QWEN3
from penstock.models.registry import architecture_of, layout
from penstock.models.rotary import RopeScaling
from penstock.models.weights import INDEX

__all__ = [
    "CHAT_TEMPLATE",
    "TINY_LLAMA",
    "TINY_QWEN3",
    "tiny_tensors",
    "tiny_tokenizer",
    "write_tiny_gguf",
    "write_tiny_model",
]

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% "
    "endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_NUMBERS = {  # of each rotary scheme that config.json states
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "truncate"),
    "longrope": ("attention_factor", "short_factors", "long_factors"),
}
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CORPUS = """
A penstock is a gate that lets the right amount of water from a reservoir to a turbine. When the gate opens too early, the water
arrives before the blades are ready; when it opens too late, the turbine runs dry. Between the two lies an order that somebody has to
keep, and the one who keeps it must know what has happened and not merely what was asked for. Every block of state has one owner at a
time, every copy has a source and a destination, and nobody reads what has not been written yet. for index in range(len(blocks)):
    if block.sealed and not block.pinned: return block.key
The quick brown fox jumps over the lazy dog, and then the dog, who was not lazy at all but only patient, gets up and walks away.
"""  # noqa: E501


def tiny_tensors(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors under the names of safetensors files. Norms differ from one, so that a missing norm
    shows."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for part in (part for weight in layout(config) for part in weight.parts):
        noise = torch.randn(part.shape, generator=generator)
        is_norm = len(part.shape) == 1 and not part.name.endswith(".bias")
        tensors[part.name] = (
            1 + 0.3 * noise
            if is_norm
            else 0.3 * noise
            if len(part.shape) == 1
            else noise * part.shape[-1] ** -0.5
        )
    return tensors


def tiny_tokenizer(vocab: int = 512) -> tokenizers.Tokenizer:
    """A byte-level BPE with special tokens at ids 0 to 2, trained on a paragraph until it has `vocab`
    tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        show_progress=False,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    return tokenizer


def write_tiny_model(
    directory: Path,
    config: ModelConfig = TINY_LLAMA,
    *,
    seed: int = 0,
    shards: int = 1,
    tensors: Mapping[str, Tensor] | None = None,
    tokenizer: tokenizers.Tokenizer | None = None,
) -> Path:
    """A model directory: config.json, tokenizer files and safetensors, in `shards` files, with an index if
    there are several."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = tiny_tensors(config, seed) if tensors is None else tensors
    _write_json(directory / "config.json", config_json(config))
    (tokenizer or tiny_tokenizer()).save(str(directory / "tokenizer.json"))
    settings = {
        "bos_token": _SPECIAL[0],
        "eos_token": {"content": _SPECIAL[2]},
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(directory / "tokenizer_config.json", settings)
    _write_json(directory / "generation_config.json", {"eos_token_id": [2, 0]})
    if shards == 1:
        save_file(dict(tensors), directory / "model.safetensors")
        return directory
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensor for i, (name, tensor) in enumerate(tensors.items()) if i % shards == shard}
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    _write_json(directory / INDEX, {"metadata": {}, "weight_map": weight_map})
    return directory


def config_json(config: ModelConfig) -> dict[str, Any]:
    """`config` as a config.json."""
    return {
        "architectures": [architecture_of(config).config_name],
        "model_type": config.architecture,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.max_position,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": "silu",
        "eos_token_id": 2,
        **_optional_fields(config),
    }


def _optional_fields(config: ModelConfig) -> dict[str, Any]:
    """Fields that many configs lack."""
    fields: dict[str, Any] = {}
    if config.rope_scaling is not None:
        fields["rope_scaling"] = _rope_scaling(config.rope_scaling)
        fields["max_position_embeddings"] = config.default_len
        fields["original_max_position_embeddings"] = config.rope_scaling.trained_len or None
    if config.rotary_dim:
        fields["partial_rotary_factor"] = config.rotary_dim / config.head_dim
    if config.out_bias:
        fields["attention_bias"] = True
    if config.mlp_bias:
        fields["mlp_bias"] = True
    if config.windows:
        kinds = ["sliding_attention" if window else "full_attention" for window in config.windows]
        fields |= {"sliding_window": max(config.windows), "use_sliding_window": True, "layer_types": kinds}
    elif config.architecture == "mistral":
        fields["sliding_window"] = None
    return fields


def _rope_scaling(scaling: RopeScaling) -> dict[str, Any]:
    numbers = {
        name: value for name in _NUMBERS[scaling.kind] if (value := getattr(scaling, name)) is not None
    }
    renamed = {"short_factors": "short_factor", "long_factors": "long_factor"}
    return {
        "rope_type": scaling.kind,
        **{renamed.get(k, k): list(v) if isinstance(v, tuple) else v for k, v in numbers.items()},
    }


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
    import gguf

    writer = gguf.GGUFWriter(path, config.architecture)
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
        next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == config.architecture),
        config.num_layers,
    ).mapping
    for name, tensor in tiny_tensors(config, seed).items():
        module, _, which = name.rpartition(".")
        kind = gguf.GGMLQuantizationType[encoding_of(name) if tensor.dim() == 2 else "F32"]
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


def _add_gguf_optional(writer: Any, config: ModelConfig) -> None:
    """As llama.cpp's converter writes them."""
    import gguf

    scaling = config.rope_scaling
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
    writer.add_token_types([3 if token in _SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    for key, text in texts.items():
        writer.add_string(key, text)


def _gguf_rows(name: str, tensor: Tensor, config: ModelConfig) -> np.ndarray[Any, Any]:
    """Llama's q and k rows are stored in GGUF with the two halves of each head interleaved. Written from the
    format, not from our description."""
    rows = tensor.numpy()
    if config.architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
        heads = rows.reshape(-1, 2, config.head_dim // 2, rows.shape[-1] if rows.ndim > 1 else 1)
        rows = np.ascontiguousarray(heads.swapaxes(1, 2).reshape(rows.shape))
    return rows


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
