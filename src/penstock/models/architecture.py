"""What an architecture is to the rest: which tensors it has and how files call them, what its config may say, how it runs. Owns what
architectures have in common, refusals included; a file of its own has what is different in one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

from penstock.errors import ModelError
from penstock.models.decoder import Decoder
from penstock.models.model import ModelConfig

# A damaged number must not become a loop over a billion layers or a table of terabytes.
_MAX_LAYERS = 4096
MAX_POSITION = 1 << 22

EMBED, NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"  # the modules outside layers, as safetensors files call them


class TensorSpec(NamedTuple):
    """One tensor as safetensors files of an architecture have it."""

    name: str
    shape: tuple[int, ...]


class WeightSpec(NamedTuple):
    """One tensor as the model takes it: its parts stacked along rows."""

    name: str
    parts: tuple[TensorSpec, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @property
    def numel(self) -> int:
        return sum(math.prod(part.shape) for part in self.parts)


def stack(name: str, *parts: tuple[str, *tuple[int, ...]]) -> WeightSpec:
    """The model's `name`, and of each part its name in safetensors files and its shape."""
    return WeightSpec(name, tuple(TensorSpec(part[0], part[1:]) for part in parts))


class Architecture(ABC):
    """One architecture. A subclass states the first two names and `layer`, and overrides what else is different."""

    name: ClassVar[str]  # `ModelConfig.architecture`, `model_type` in config.json, `general.architecture` in GGUF files
    config_name: ClassVar[str]  # in `architectures` of config.json
    presets: ClassVar[Mapping[str, ModelConfig]] = {}  # dimensions that users can ask for by name
    model: ClassVar[type[Decoder]] = Decoder
    interleaved_in_gguf: ClassVar[tuple[str, ...]] = ()  # endings of names: in GGUF files the halves of their heads are interleaved

    @abstractmethod
    def layer(self, config: ModelConfig) -> tuple[WeightSpec, ...]:
        """The tensors of one layer, in the order in which a forward pass meets them. The model's names are fields of `DecoderLayer`, those
        of files are without "model.layers.N.". Order and names are part of the digest."""

    def layout(self, config: ModelConfig) -> Iterator[WeightSpec]:
        """Every tensor of the model, in the order in which a forward pass meets them."""
        yield stack("embed", (f"{EMBED}.weight", config.vocab, config.hidden))
        layer = self.layer(config)
        for i in range(config.num_layers):
            for weight in layer:
                parts = (TensorSpec(f"model.layers.{i}.{part.name}", part.shape) for part in weight.parts)
                yield WeightSpec(f"layers.{i}.{weight.name}", tuple(parts))
        yield stack("norm", (f"{NORM}.weight", config.hidden))
        if not config.tied_embeddings:
            yield stack("head", (f"{HEAD}.weight", config.vocab, config.hidden))

    def is_redundant(self, tensor: str, config: ModelConfig) -> bool:
        """Old checkpoints store the rotary frequencies, and some repeat a tied output matrix; both follow from what is read."""
        return tensor.endswith(".rotary_emb.inv_freq") or (tensor == f"{HEAD}.weight" and config.tied_embeddings)

    def parse_config(self, raw: Mapping[str, Any], where: str) -> ModelConfig:
        """The dimensions in a parsed config.json; `where` names it in errors. Whatever would change the mathematics is refused."""
        _refuse_unsupported(raw, where)
        if self.has_window(raw):
            raise ModelError(f"{where}: sliding-window attention is not supported")
        fields = _Fields(raw, where)
        heads = fields.count("num_attention_heads")
        hidden = fields.count("hidden_size")
        config = ModelConfig(
            architecture=self.name,
            num_layers=fields.count("num_hidden_layers", most=_MAX_LAYERS),
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=fields.count("num_key_value_heads", heads),
            head_dim=fields.count("head_dim", self.default_head_dim(hidden, heads)),
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

    def default_head_dim(self, hidden: int, heads: int) -> int | None:
        """Where config.json does not say it. None: it must."""
        return hidden // heads

    def has_window(self, raw: Mapping[str, Any]) -> bool:
        """Whether a config.json asks for attention that does not reach all tokens before."""
        layer_types = raw.get("layer_types") or []
        if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
            return True
        return bool(raw.get("use_sliding_window", raw.get("sliding_window") is not None))

    def config_of_gguf(self, metadata: Mapping[str, Any], tensors: Container[str], where: str) -> dict[str, Any]:
        """The config.json that the metadata and the names of `tensors` of a GGUF file amount to."""

        def entry(key: str, default: Any = None) -> Any:
            return metadata.get(f"{self.name}.{key}", default)

        if entry("expert_count", 0) or entry("attention.sliding_window", 0):
            raise ModelError(f"{where}: experts and sliding windows are not supported")
        heads, hidden = entry("attention.head_count"), entry("embedding_length")
        derived = hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None
        head_dim = entry("attention.key_length") or derived
        if entry("attention.value_length", head_dim) != head_dim or entry("rope.dimension_count", head_dim) != head_dim:
            raise ModelError(f"{where}: keys, values and rotated dimensions of unequal width are not supported")
        scaling = entry("rope.scaling.type", "none")
        if "rope_freqs.weight" in tensors or entry("rope.scale_linear", 1.0) != 1.0:
            scaling = "frequency factors"
        vocabulary = metadata.get("tokenizer.ggml.tokens")
        return {
            "architectures": [self.config_name],
            "model_type": self.name,  # not ours to read: it lets others load the converted directory
            "num_hidden_layers": entry("block_count"),
            "hidden_size": hidden,
            "intermediate_size": entry("feed_forward_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": entry("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "vocab_size": entry("vocab_size", len(vocabulary) if isinstance(vocabulary, list) else None),
            "max_position_embeddings": entry("context_length"),
            "rope_theta": entry("rope.freq_base", 10000.0),
            "rope_scaling": None if scaling == "none" else {"rope_type": scaling},
            "rms_norm_eps": entry("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "output.weight" not in tensors,
        }


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


def _refuse_unsupported(raw: Mapping[str, Any], where: str) -> None:
    for name in ("attention_bias", "mlp_bias"):
        if raw.get(name):
            raise ModelError(f"{where}: {name} is true, but projections with a bias are not supported")
    if raw.get("quantization_config") is not None:
        raise ModelError(f"{where}: quantized weights (quantization_config) are not supported; use the original weights or a GGUF file")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(f"{where}: hidden_act {raw['hidden_act']!r} is not supported, only silu")


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
