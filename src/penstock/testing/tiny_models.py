"""Tiny random models on disk, made without any other library's model code. For tests only."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor

from penstock.models.llama import TINY_LLAMA
from penstock.models.model import GroupedRouting, ModelConfig, Multipliers, OtherRope, Routing
from penstock.models.qwen3 import TINY_QWEN3
from penstock.models.qwen3_5 import TINY_QWEN3_5
from penstock.models.qwen3_moe import TINY_QWEN3_MOE
from penstock.models.registry import architecture_of, layout
from penstock.models.rotary import RopeScaling
from penstock.models.weights import INDEX

__all__ = [
    "CHAT_TEMPLATE",
    "TINY_GEMMA3",
    "TINY_GLM4_MOE",
    "TINY_GRANITE",
    "TINY_LLAMA",
    "TINY_MIXTRAL",
    "TINY_OLMO2",
    "TINY_QWEN2_MOE",
    "TINY_QWEN3",
    "TINY_QWEN3_5",
    "TINY_QWEN3_MOE",
    "TINY_SMOLLM3",
    "tiny_tensors",
    "tiny_tokenizer",
    "write_tiny_model",
]

TINY_MIXTRAL = dataclasses.replace(
    TINY_LLAMA, architecture="mixtral", routing=Routing(num_experts=4, top_k=2, ffn=128, normalised=True)
)
TINY_GEMMA3 = dataclasses.replace(
    TINY_LLAMA,
    architecture="gemma3_text",
    num_layers=7,
    tied_embeddings=True,
    windows=(40, 40, 40, 40, 40, 0, 40),
    other_rope=OtherRope((0, 1, 2, 3, 4, 6), 1000.0),
    score_scale=0.25,
)
TINY_GLM4_MOE = dataclasses.replace(
    TINY_LLAMA,
    architecture="glm4_moe",
    num_layers=3,
    qkv_bias=True,
    normed_heads=True,
    rotary_dim=8,
    routing=GroupedRouting(8, 2, 32, True, 64, (0,), num_groups=4, top_groups=2, scale=1.5),
)
TINY_SMOLLM3 = dataclasses.replace(
    TINY_LLAMA, architecture="smollm3", num_layers=5, other_rope=OtherRope((3,), 0.0)
)
TINY_OLMO2 = dataclasses.replace(TINY_LLAMA, architecture="olmo2")
TINY_GRANITE = dataclasses.replace(
    TINY_LLAMA, architecture="granite", score_scale=0.5, multipliers=Multipliers(3.0, 0.5, 2.0)
)
TINY_QWEN2_MOE = dataclasses.replace(
    TINY_LLAMA,
    architecture="qwen2_moe",
    qkv_bias=True,
    num_layers=3,
    routing=Routing(6, top_k=3, ffn=32, normalised=False, shared_ffn=64, dense_layers=(1,)),
)

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
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
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
        special_tokens=list(SPECIAL),
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
        "bos_token": SPECIAL[0],
        "eos_token": {"content": SPECIAL[2]},
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
    if config.routing is not None:
        fields |= _routing_fields(config)
    if (dims := config.recurrence) is not None:
        kinds = ["full_attention", "linear_attention"]
        fields["layer_types"] = [kinds[i in dims.layers] for i in range(config.num_layers)]
        fields |= {"linear_num_key_heads": dims.num_key_heads, "linear_key_head_dim": dims.key_dim}
        fields |= {"linear_num_value_heads": dims.num_value_heads, "linear_value_head_dim": dims.value_dim}
        fields["linear_conv_kernel_dim"] = dims.window
    if config.out_bias:
        fields["attention_bias"] = True
    if config.mlp_bias:
        fields["mlp_bias"] = True
    if config.windows:
        kinds = ["sliding_attention" if window else "full_attention" for window in config.windows]
        fields |= {"sliding_window": max(config.windows), "use_sliding_window": True, "layer_types": kinds}
    elif config.architecture in ("mistral", "mixtral"):
        fields["sliding_window"] = None
    if config.architecture == "smollm3":
        still = () if config.other_rope is None else config.other_rope.layers
        fields["no_rope_layers"] = [int(layer not in still) for layer in range(config.num_layers)]
    if (scales := config.multipliers) is not None:
        fields |= {"embedding_multiplier": scales.embedding, "residual_multiplier": scales.residual}
        fields |= {"logits_scaling": scales.logits, "attention_multiplier": config.scale}
    if config.architecture == "gemma3_text" and config.other_rope is not None:
        fields |= {"hidden_act": None, "hidden_activation": "gelu_pytorch_tanh"}
        fields["rope_local_base_freq"] = config.other_rope.theta
        fields["query_pre_attn_scalar"] = round(config.scale**-2)
    return fields


def _routing_fields(config: ModelConfig) -> dict[str, Any]:
    routing = config.routing
    assert routing is not None
    if isinstance(routing, GroupedRouting):
        return {
            "n_routed_experts": routing.num_experts,
            "num_experts_per_tok": routing.top_k,
            "moe_intermediate_size": routing.ffn,
            "norm_topk_prob": routing.normalised,
            "n_shared_experts": routing.shared_ffn // routing.ffn,
            "first_k_dense_replace": len(routing.dense_layers),
            "n_group": routing.num_groups,
            "topk_group": routing.top_groups,
            "routed_scaling_factor": routing.scale,
            "use_qk_norm": config.normed_heads,
            "attention_bias": config.qkv_bias,
        }
    if config.architecture == "mixtral":
        return {"num_local_experts": routing.num_experts, "num_experts_per_tok": routing.top_k}
    return {
        "num_experts": routing.num_experts,
        "num_experts_per_tok": routing.top_k,
        "moe_intermediate_size": routing.ffn,
        "norm_topk_prob": routing.normalised,
        "shared_expert_intermediate_size": routing.shared_ffn,
        "mlp_only_layers": list(routing.dense_layers),
    }


def _rope_scaling(scaling: RopeScaling) -> dict[str, Any]:
    numbers = {
        name: value for name in _NUMBERS[scaling.kind] if (value := getattr(scaling, name)) is not None
    }
    renamed = {"short_factors": "short_factor", "long_factors": "long_factor"}
    return {
        "rope_type": scaling.kind,
        **{renamed.get(k, k): list(v) if isinstance(v, tuple) else v for k, v in numbers.items()},
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
