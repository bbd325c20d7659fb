"""Model dimensions from a config.json, and those of the built-in names. Owns what is refused; reads no weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from penstock.errors import ModelError
from penstock.models.model import ModelConfig

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
# A damaged number must not become a loop over a billion layers or a table of terabytes.
_MAX_LAYERS = 4096
MAX_POSITION = 1 << 22

SMOLLM2_135M = ModelConfig(
    architecture="llama",
    num_layers=30,
    hidden=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    ffn=1536,
    vocab=49152,
    max_position=8192,
    rope_theta=1e5,
    norm_eps=1e-5,
    tied_embeddings=True,
)
QWEN3_4B = ModelConfig(
    architecture="qwen3",
    num_layers=36,
    hidden=2560,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn=9728,
    vocab=151936,
    max_position=40960,
    rope_theta=1e6,
    norm_eps=1e-6,
    tied_embeddings=True,
)
QWEN3_0_6B = ModelConfig(
    architecture="qwen3",
    num_layers=28,
    hidden=1024,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    ffn=3072,
    vocab=151936,
    max_position=40960,
    rope_theta=1e6,
    norm_eps=1e-6,
    tied_embeddings=True,
)
TINY_QWEN3 = ModelConfig(
    architecture="qwen3",
    num_layers=3,
    hidden=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    ffn=256,
    vocab=512,
    max_position=2048,
    rope_theta=1e6,
    norm_eps=1e-6,
    tied_embeddings=True,
)
TINY_LLAMA = ModelConfig(
    architecture="llama",
    num_layers=2,
    hidden=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn=128,
    vocab=512,
    max_position=2048,
    rope_theta=1e4,
    norm_eps=1e-5,
    tied_embeddings=False,
)
BUILT_IN = {
    "smollm2-135m": SMOLLM2_135M,
    "qwen3-4b": QWEN3_4B,
    "qwen3-0.6b": QWEN3_0_6B,
    "tiny-qwen3": TINY_QWEN3,
    "tiny-llama": TINY_LLAMA,
}


def parse_config(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """The dimensions in a parsed config.json; `where` names it in errors. Whatever would change the mathematics is refused."""
    architecture = _architecture(raw, where)
    _refuse_unsupported(raw, where)
    _refuse_windows(raw, architecture, where)
    fields = _Fields(raw, where)
    heads = fields.count("num_attention_heads")
    hidden = fields.count("hidden_size")
    config = ModelConfig(
        architecture=architecture,
        num_layers=fields.count("num_hidden_layers", most=_MAX_LAYERS),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=fields.count("num_key_value_heads", heads),
        head_dim=fields.count("head_dim", hidden // heads if architecture == "llama" else None),
        ffn=fields.count("intermediate_size"),
        vocab=fields.count("vocab_size"),
        max_position=fields.count("max_position_embeddings", most=MAX_POSITION),
        rope_theta=_rope_theta(raw, where),
        norm_eps=fields.positive("rms_norm_eps"),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        eos_ids=token_ids(raw.get("eos_token_id"), f"eos_token_id in {where}"),
    )
    if config.num_heads % config.num_kv_heads:
        raise ModelError(f"{where}: {config.num_heads} query heads are not a multiple of {config.num_kv_heads} KV heads")
    if config.head_dim % 2:
        raise ModelError(f"{where}: head_dim {config.head_dim} is odd, so its halves cannot be rotated")
    return config


def token_ids(value: Any, what: str) -> tuple[int, ...]:
    """One id, a list of ids or nothing, as config files spell it."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise ModelError(f"{what} must be a token id or a list of them, got {value!r}")
    return tuple(dict.fromkeys(ids))


class _Fields:
    """Typed access to a config's entries; a wrong one is named in a ModelError."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self._raw, self._where = raw, where

    def count(self, name: str, default: int | None = None, most: int = 1 << 24) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{self._where}: {name} must be a positive whole number, got {value!r}")
        if value > most:
            raise ModelError(f"{self._where}: {name} is {value}; more than {most} cannot be right")
        return value

    def positive(self, name: str) -> float:
        return positive(self._get(name, None), name, self._where)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self._where}: {name} must be true or false, got {value!r}")
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self._raw.get(name)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self._where} has no {name}")
        return value


def positive(value: Any, name: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ModelError(f"{where}: {name} must be a positive number, got {value!r}")
    return float(value)


def _architecture(raw: Mapping[str, Any], where: str) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names:
        raise ModelError(f"{where} does not name its architecture; supported are {', '.join(ARCHITECTURES)}")
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    raise ModelError(f"{where}: architecture {', '.join(map(str, names))} is not supported; supported are {', '.join(ARCHITECTURES)}")


def _refuse_unsupported(raw: Mapping[str, Any], where: str) -> None:
    for name in ("attention_bias", "mlp_bias"):
        if raw.get(name):
            raise ModelError(f"{where}: {name} is true, but projections with a bias are not supported")
    if raw.get("quantization_config") is not None:
        raise ModelError(f"{where}: quantized weights (quantization_config) are not supported; use the original weights or a GGUF file")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(f"{where}: hidden_act {raw['hidden_act']!r} is not supported, only silu")


def _refuse_windows(raw: Mapping[str, Any], architecture: str, where: str) -> None:
    """Qwen3 configs state a window that is off unless `use_sliding_window` turns it on; in a Llama config a window means one."""
    used = raw.get("use_sliding_window", architecture != "qwen3" and raw.get("sliding_window") is not None)
    layer_types = raw.get("layer_types") or []
    if used or not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise ModelError(f"{where}: sliding-window attention is not supported")


def _rope_theta(raw: Mapping[str, Any], where: str) -> float:
    rope = {**_section(raw, "rope_scaling", where), **_section(raw, "rope_parameters", where)}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in (None, "default"):
        raise ModelError(f"{where}: rope scaling of type {kind!r} is not supported, only plain rotary positions")
    if raw.get("partial_rotary_factor", rope.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise ModelError(f"{where}: partial_rotary_factor is not supported, whole heads are rotated")
    return positive(rope.get("rope_theta", raw.get("rope_theta", 10000.0)), "rope_theta", where)


def _section(raw: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    section = raw.get(name)
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise ModelError(f"{where}: {name} must be an object, got {section!r}")
    return section
