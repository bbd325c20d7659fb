"""The interface of an architecture: its tensors and their names in files, the allowed values of its config,
how it runs. Owns what architectures share, including refusals; each has a file with its differences."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

from penstock.errors import ModelError
from penstock.models.decoder import Decoder
from penstock.models.fields import Fields
from penstock.models.model import ModelConfig
from penstock.models.rotary import RopeFactors, parse_rope, rope_scaling_of_gguf

# A damaged number must not become a loop over a billion layers or a table of terabytes.
_MAX_LAYERS = 4096
MAX_POSITION = 1 << 22

# the modules outside layers, as safetensors files call them
EMBED, NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"


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


class Architecture:
    """One architecture. A subclass states the first two names and `layer`, and overrides what else is
    different."""

    # `ModelConfig.architecture`, `model_type` in config.json, `general.architecture` in GGUF files
    name: ClassVar[str]
    config_name: ClassVar[str]  # in `architectures` of config.json
    presets: ClassVar[Mapping[str, ModelConfig]] = {}  # dimensions that users can ask for by name
    model: ClassVar[type[Decoder]] = Decoder
    # fields of config.json to the biases of ModelConfig that they turn on
    bias_fields: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    in_gguf: ClassVar[bool] = True  # whether GGUF files call it by its name
    rotates_partly: ClassVar[bool] = False  # whether its heads may turn in part (`partial_rotary_factor`)
    # endings of names: in GGUF files the halves of their heads are interleaved
    interleaved_in_gguf: ClassVar[tuple[str, ...]] = ()

    def layer(self, config: ModelConfig) -> tuple[WeightSpec, ...]:
        """The tensors of one layer, in the order in which a forward pass meets them. The model's names are
        fields of `DecoderLayer`, those of files are without "model.layers.N.". Order and names are part of
        the digest. Here as Llama has them: q, k, v, gate and up one by one, with the biases that the config
        asks for."""
        hidden, ffn, dim = config.hidden, config.ffn, config.head_dim
        q_rows, kv_rows = config.num_heads * dim, config.num_kv_heads * dim
        qkv = (("self_attn.q_proj", q_rows), ("self_attn.k_proj", kv_rows), ("self_attn.v_proj", kv_rows))
        gate_up = (("mlp.gate_proj", ffn), ("mlp.up_proj", ffn))
        return (
            stack("attn_norm", ("input_layernorm.weight", hidden)),
            stack("qkv", *((f"{name}.weight", rows, hidden) for name, rows in qkv)),
            *(
                [stack("qkv_bias", *((f"{name}.bias", rows) for name, rows in qkv))]
                if config.qkv_bias
                else ()
            ),
            stack("out", ("self_attn.o_proj.weight", hidden, q_rows)),
            *([stack("out_bias", ("self_attn.o_proj.bias", hidden))] if config.out_bias else ()),
            stack("ffn_norm", ("post_attention_layernorm.weight", hidden)),
            stack("gate_up", *((f"{name}.weight", rows, hidden) for name, rows in gate_up)),
            *(
                [stack("gate_up_bias", *((f"{name}.bias", rows) for name, rows in gate_up))]
                if config.mlp_bias
                else ()
            ),
            stack("down", ("mlp.down_proj.weight", hidden, ffn)),
            *([stack("down_bias", ("mlp.down_proj.bias", hidden))] if config.mlp_bias else ()),
        )

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
        """Old files store the rotary frequencies, and some repeat a tied output matrix; both can be
        derived."""
        return tensor.endswith(".rotary_emb.inv_freq") or (
            tensor == f"{HEAD}.weight" and config.tied_embeddings
        )

    def parse_config(self, raw: Mapping[str, Any], where: str) -> ModelConfig:
        """The dimensions in a parsed config.json; `where` names it in errors. Refuses fields that would
        change the mathematics."""
        _refuse_unsupported(raw, where)
        fields = Fields(raw, where)
        heads = fields.count("num_attention_heads")
        kv_heads = fields.count("num_key_value_heads", heads)
        hidden = fields.count("hidden_size")
        head_dim = fields.count("head_dim", self.default_head_dim(hidden, heads))
        fields.need(heads % kv_heads == 0, f"{heads} query heads are not a multiple of {kv_heads} KV heads")
        fields.need(head_dim % 2 == 0, f"head_dim {head_dim} is odd, so its halves cannot be rotated")
        num_layers = fields.count("num_hidden_layers", most=_MAX_LAYERS)
        rope = parse_rope(raw, head_dim, MAX_POSITION, where)
        if rope["rotary_dim"] and not self.rotates_partly:
            raise ModelError(f"{where}: partial_rotary_factor is not supported, whole heads are rotated")
        windows = self.windows(raw, num_layers, where)
        return ModelConfig(
            architecture=self.name,
            num_layers=num_layers,
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=fields.count("intermediate_size"),
            vocab=fields.count("vocab_size"),
            norm_eps=fields.positive("rms_norm_eps"),
            tied_embeddings=fields.flag("tie_word_embeddings", False),
            eos_ids=token_ids(raw.get("eos_token_id"), f"eos_token_id in {where}"),
            windows=windows if any(window and window < rope["max_position"] for window in windows) else (),
            **{**rope, **self.biases(fields)},
        )

    def default_head_dim(self, hidden: int, heads: int) -> int | None:
        """Where config.json does not say it. None: it must."""
        return hidden // heads

    def biases(self, fields: Fields) -> dict[str, bool]:
        """The fields of ModelConfig that say which projections have a bias."""
        for name in {"attention_bias", "mlp_bias"} - self.bias_fields.keys():
            fields.need(
                not fields.flag(name, False),
                f"{name} is true, but {self.config_name} with such a bias is not supported",
            )
        return {
            bias: fields.flag(name, False) for name, biases in self.bias_fields.items() for bias in biases
        }

    def windows(self, raw: Mapping[str, Any], num_layers: int, where: str) -> tuple[int, ...]:
        """`ModelConfig.windows`. Here a window is refused; an architecture with windows says how its config
        states them."""
        layer_types = raw.get("layer_types") or []
        if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
            raise ModelError(
                f"{where}: sliding-window attention (layer_types) is not supported in {self.config_name}"
            )
        if raw.get("use_sliding_window", raw.get("sliding_window") is not None):
            raise ModelError(
                f"{where}: sliding-window attention (sliding_window) is not supported in {self.config_name}"
            )
        return ()

    def config_of_gguf(
        self, metadata: Mapping[str, Any], tensors: Container[str], factors: RopeFactors, where: str
    ) -> dict[str, Any]:
        """The config.json that the metadata and the names of `tensors` of a GGUF file amount to; `factors`
        are its tensors of rotary factors."""

        def entry(key: str, default: Any = None) -> Any:
            return metadata.get(f"{self.name}.{key}", default)

        if entry("expert_count", 0):
            raise ModelError(f"{where}: experts (expert_count) are not supported")
        heads, hidden = entry("attention.head_count"), entry("embedding_length")
        derived = hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None
        head_dim = entry("attention.key_length") or derived
        if entry("attention.value_length", head_dim) != head_dim:
            raise ModelError(f"{where}: keys and values of unequal width are not supported")
        rotated = entry("rope.dimension_count", head_dim)
        partial = rotated != head_dim and isinstance(rotated, int) and isinstance(head_dim, int)
        vocabulary = metadata.get("tokenizer.ggml.tokens")
        window = entry("attention.sliding_window") or None
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
            "rope_scaling": rope_scaling_of_gguf(metadata, self.name, factors, where),
            "partial_rotary_factor": rotated / head_dim if partial else None,
            "rms_norm_eps": entry("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "output.weight" not in tensors,
            "sliding_window": window,
            "use_sliding_window": window is not None,
            "attention_bias": "blk.0.attn_output.bias" in tensors,
            "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        }


def token_ids(value: Any, what: str) -> tuple[int, ...]:
    """One id, a list of ids or nothing, as config files spell it."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise ModelError(f"{what} must be a token id or a list of them, got {value!r}")
    return tuple(dict.fromkeys(ids))


# Fields of other and derived architectures that would change a layer's computation, with the values that
# change nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "logits_scaling": (1, 1.0),
    "logit_scale": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "no_rope_layers": ([],),
    "lm_head_bias": (False,),
    "rope_interleaved": (False,),
    "qk_layernorm": (False,),
    "use_qk_norm": (False,),
    "use_mrope": (False,),
    "alibi": (False,),
}


def _refuse_unsupported(raw: Mapping[str, Any], where: str) -> None:
    if raw.get("quantization_config") is not None:
        raise ModelError(
            f"{where}: quantized weights (quantization_config) are not supported; use the original weights "
            "or a GGUF file"
        )
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(f"{where}: hidden_act {raw['hidden_act']!r} is not supported, only silu")
    for name, neutral in _NEUTRAL.items():
        if raw.get(name) is not None and raw[name] not in neutral:
            raise ModelError(f"{where}: {name} is {raw[name]!r}, which is not supported")


def stated_windows(raw: Mapping[str, Any], num_layers: int, first: int, where: str) -> tuple[int, ...]:
    """`ModelConfig.windows` where `sliding_window` alone says that there are some: in the layers that
    `layer_types` names, or from `first` on."""
    kinds = raw.get("layer_types")
    if kinds is None:
        layers = [layer >= first for layer in range(num_layers)]
    else:
        known = {"full_attention": False, "sliding_attention": True}
        if (
            not isinstance(kinds, list)
            or len(kinds) != num_layers
            or any(kind not in known for kind in kinds)
        ):
            raise ModelError(
                f"{where}: layer_types must be {' or '.join(known)} for each of {num_layers} layers, got "
                f"{kinds!r}"
            )
        layers = [known[kind] for kind in kinds]
    if not any(layers) or raw.get("sliding_window") is None:
        return ()
    window = Fields(raw, where).count("sliding_window")
    return tuple(window if is_windowed else 0 for is_windowed in layers)


def switched_windows(raw: Mapping[str, Any], num_layers: int, where: str) -> tuple[int, ...]:
    """The same where `use_sliding_window` turns windows on, from layer `max_window_layers` on."""
    fields = Fields({"sliding_window": 4096, "max_window_layers": 28, **raw}, where)
    if not fields.flag("use_sliding_window", False):
        return ()
    first = raw.get("max_window_layers", 28)
    fields.need(
        isinstance(first, int) and first >= 0, f"max_window_layers must be a number of layers, got {first!r}"
    )
    return stated_windows({"sliding_window": 4096, **raw}, num_layers, first, where)
