"""The interface of an architecture: its tensors and their names in files, the allowed values of its config,
how it runs. Owns what architectures share, including refusals; each has a file with its differences."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from penstock.errors import ModelError
from penstock.models.decoder import Decoder, DecoderLayer
from penstock.models.fields import Fields, Json, Shape, is_number
from penstock.models.model import LayerOps, ModelConfig, Weight
from penstock.models.rotary import RopeFactors, parse_rope, rope_scaling_of_gguf

# A damaged number must not become a loop over a billion layers or a table of terabytes.
_MAX_LAYERS = 4096
MAX_POSITION = 1 << 22

# the modules outside layers, as safetensors files call them
EMBED, NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"


_InFile = TypeVar("_InFile", bound="FileTensor")


class TensorSpec(NamedTuple):
    """One tensor as safetensors files of an architecture have it."""

    name: str
    shape: Shape


class WeightSpec(NamedTuple):
    """One tensor as the model takes it: its parts stacked along rows, or along the rows of equal slots."""

    name: str
    parts: tuple[TensorSpec, ...]
    num_slots: int = 0  # 0: one tensor without slots
    exact: bool = False  # float32, whatever the model is in

    @property
    def shape(self) -> Shape:
        rows, rest = sum(part.shape[0] for part in self.parts), self.parts[0].shape[1:]
        return (self.num_slots, rows // self.num_slots, *rest) if self.num_slots else (rows, *rest)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def by_slot(self) -> Iterator[tuple[TensorSpec, ...]]:
        """The parts of each slot; all of them where there are none."""
        size = len(self.parts) // max(1, self.num_slots)
        return (self.parts[first : first + size] for first in range(0, len(self.parts), size))


class FileTensor(Protocol):
    """A tensor in a file."""

    @property
    def shape(self) -> Shape: ...

    def matrix(self, first: int, num_rows: int) -> Self:
        """Some rows of it, where all dimensions but the last are rows."""


def stack(name: str, *parts: tuple[str, *Shape]) -> WeightSpec:
    """The model's `name`, and of each part its name in safetensors files and its shape."""
    return WeightSpec(name, tuple(TensorSpec(part[0], part[1:]) for part in parts))


def linear(name: str, width: int, has_bias: bool, *modules: tuple[str, int]) -> list[WeightSpec]:
    """A stack of linear modules over `width` values, by their names in files and their rows; and the stack of
    their biases if they have some."""
    biases = [stack(f"{name}_bias", *((f"{module}.bias", rows) for module, rows in modules))]
    weight = stack(name, *((f"{module}.weight", rows, width) for module, rows in modules))
    return [weight, *(biases if has_bias else ())]


class Architecture:
    """One architecture. A subclass states the first two names and overrides what else is different."""

    name: str  # `ModelConfig.architecture`, `model_type` in config.json
    config_name: str  # in `architectures` of config.json
    other_config_names: tuple[str, ...] = ()  # of the same model
    # the biases of ModelConfig that `attention_bias` and `mlp_bias` of config.json turn on
    attention_biases: tuple[str, ...] = ()
    mlp_biases: tuple[str, ...] = ()
    fixed_biases: tuple[str, ...] = ()  # that every model has
    # How configs state windows. none: they are refused; stated: by `sliding_window`; usual: the same, 4096
    # where a config does not say it; switched: if `use_sliding_window`, from layer `max_window_layers` on.
    window_rule = "none"
    in_gguf = True  # whether GGUF files have it
    gguf_name = ""  # `general.architecture` in GGUF files; "": its name
    routes = False  # whether it has experts
    ships_heads = False  # whether files may have a draft head beside the model (`mtp.*`)
    fused = False  # whether files have q, k and v in one matrix, and gate and up in another
    norms_heads = False  # whether q and k are normalised per head before they are rotated
    derives_head_dim = True  # whether config.json may leave out the width of heads
    takes_heads = True  # whether trained heads (`--speculate mtp`, `eagle`) can draft for it
    rotates_partly = False  # whether its heads may turn in part (`partial_rotary_factor`)
    # endings of names: in GGUF files the halves of their heads are interleaved
    interleaved_in_gguf: tuple[str, ...] = ()
    one_more_in_gguf: tuple[str, ...] = ()  # endings of names: GGUF files have these values plus one

    def layer_kind(self, config: ModelConfig, index: int) -> type[DecoderLayer]:
        """The class that computes layer `index`. Its fields are the names of `layer`."""
        return DecoderLayer

    def layer(self, config: ModelConfig, index: int = 0) -> tuple[WeightSpec, ...]:
        """The tensors of layer `index`, in the order in which a forward pass meets them; names in files are
        without "model.layers.N.". Order and names are part of the digest."""
        return (
            stack("attn_norm", ("input_layernorm.weight", config.hidden)),
            *self.attention(config),
            stack("ffn_norm", ("post_attention_layernorm.weight", config.hidden)),
            *self.mlp(config, index),
        )

    def attention(self, config: ModelConfig) -> Iterator[WeightSpec]:
        dim, kv_rows = config.head_dim, config.num_kv_heads * config.head_dim
        q_rows = config.num_heads * dim
        rows = {"qkv": config.qkv_width} if self.fused else {"q": q_rows, "k": kv_rows, "v": kv_rows}
        modules = ((f"self_attn.{name}_proj", num) for name, num in rows.items())
        yield from linear("qkv", config.hidden, config.qkv_bias, *modules)
        if self.norms_heads or config.normed_heads:
            yield from (stack(name, (f"self_attn.{name}.weight", dim)) for name in ("q_norm", "k_norm"))
        yield from linear("out", q_rows, config.out_bias, ("self_attn.o_proj", config.hidden))

    def mlp(self, config: ModelConfig, index: int) -> Iterator[WeightSpec]:
        ffn = config.ffn
        rows = {"gate_up": 2 * ffn} if self.fused else {"gate": ffn, "up": ffn}
        modules = ((f"mlp.{name}_proj", num) for name, num in rows.items())
        yield from linear("gate_up", config.hidden, config.mlp_bias, *modules)
        yield from linear("down", ffn, config.mlp_bias, ("mlp.down_proj", config.hidden))

    def layout(self, config: ModelConfig) -> Iterator[WeightSpec]:
        """Every tensor of the model, in the order in which a forward pass meets them."""
        yield stack("embed", (f"{EMBED}.weight", config.vocab, config.hidden))
        for i in range(config.num_layers):
            for weight in self.layer(config, i):
                parts = (TensorSpec(f"model.layers.{i}.{part.name}", part.shape) for part in weight.parts)
                yield weight._replace(name=f"layers.{i}.{weight.name}", parts=tuple(parts))
        yield stack("norm", (f"{NORM}.weight", config.hidden))
        if not config.tied_embeddings:
            yield stack("head", (f"{HEAD}.weight", config.vocab, config.hidden))

    def model(
        self, config: ModelConfig, weights: Mapping[str, Weight], ops: LayerOps, digest: bytes
    ) -> Decoder:
        kinds = [self.layer_kind(config, index) for index in range(config.num_layers)]
        return Decoder(config, weights, ops, digest, kinds)

    def laid_out(self, stored: Mapping[str, _InFile]) -> Mapping[str, _InFile]:
        """The tensors of files by the names of `layout`, without those that are not for this model."""
        return stored

    def text_name(self, name: str) -> str:
        """Of a tensor of the text part, in files of a model that also takes images: as a model of text alone
        has it."""
        return name

    def unread(self, names: Iterable[str]) -> Iterator[str]:
        """What `laid_out` leaves out of tensors with these names, in words."""
        return iter(())

    def dummy_value(self, name: str) -> float:
        """The values of a vector of the model with random weights."""
        return 0.0 if name.endswith("_bias") else 1.0

    def is_redundant(self, tensor: str, config: ModelConfig) -> bool:
        """Old files store the rotary frequencies, and some repeat a tied output matrix; both can be
        derived."""
        return tensor.endswith(".rotary_emb.inv_freq") or (
            tensor == f"{HEAD}.weight" and config.tied_embeddings
        )

    def parse_config(self, raw: Json, where: str) -> ModelConfig:
        """The dimensions in a parsed config.json; `where` names it in errors. Refuses fields that would
        change the mathematics."""
        fields = Fields(raw, where)
        _refuse_unsupported(fields)
        heads, hidden = fields.count("num_attention_heads"), fields.count("hidden_size")
        kv_heads = fields.count("num_key_value_heads", heads)
        head_dim = fields.count("head_dim", hidden // heads if self.derives_head_dim else None)
        fields.need(heads % kv_heads == 0, f"{heads} query heads are not a multiple of {kv_heads} KV heads")
        fields.need(head_dim % 2 == 0, f"head_dim {head_dim} is odd, so its halves cannot be rotated")
        num_layers = fields.count("num_hidden_layers", most=_MAX_LAYERS)
        rope = parse_rope(fields, head_dim, MAX_POSITION)
        whole = self.rotates_partly or not rope["rotary_dim"]
        fields.need(whole, "partial_rotary_factor is not supported, whole heads are rotated")
        windows = self.windows(fields, num_layers)
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
            **rope,
            **self.biases(fields),
        )

    def biases(self, fields: Fields) -> Json:
        """The fields of ModelConfig that say which projections have a bias."""
        found: dict[str, Any] = dict.fromkeys(self.fixed_biases, True)
        for name, biases in (("attention_bias", self.attention_biases), ("mlp_bias", self.mlp_biases)):
            is_on = fields.flag(name, False)
            refused = f"{name} is true, but {self.config_name} with such a bias is not supported"
            fields.need(biases or not is_on, refused)
            found |= dict.fromkeys(biases, is_on)
        return found

    def windows(self, fields: Fields, num_layers: int) -> Shape:
        """`ModelConfig.windows`, by `window_rule`."""
        raw, rule = fields.raw, self.window_rule
        known, kinds = ("full_attention", "sliding_attention"), raw.get("layer_types")
        if rule == "none":
            stated = raw.get("use_sliding_window", raw.get("sliding_window") is not None)
            whole = not kinds or (isinstance(kinds, list) and all(kind == known[0] for kind in kinds))
            for name, is_stated in (("layer_types", not whole), ("sliding_window", stated)):
                refused = f"sliding-window attention ({name}) is not supported in {self.config_name}"
                fields.need(not is_stated, refused)
            return ()
        if rule == "switched" and not fields.flag("use_sliding_window", False):
            return ()
        first = raw.get("max_window_layers", 28) if rule == "switched" else 0
        good = isinstance(first, int) and first >= 0
        fields.need(good, f"max_window_layers must be a number of layers, got {first!r}")
        if kinds is None:
            kinds = [known[layer >= first] for layer in range(num_layers)]
        good = isinstance(kinds, list) and len(kinds) == num_layers and all(kind in known for kind in kinds)
        must = f"layer_types must be {' or '.join(known)} for each of {num_layers} layers"
        fields.need(good, f"{must}, got {kinds!r}")
        window = raw.get("sliding_window", None if rule == "stated" else 4096)
        if known[1] not in kinds or window is None:
            return ()
        window = fields.count("sliding_window", window)
        return tuple(window if kind == known[1] else 0 for kind in kinds)

    def config_of_gguf(
        self, metadata: Json, tensors: Container[str], factors: RopeFactors, where: str
    ) -> Json:
        """The config.json that the metadata and the names of `tensors` of a GGUF file amount to; `factors`
        are its tensors of rotary factors."""

        def entry(key: str, default: Any = None) -> Any:
            return metadata.get(f"{name}.{key}", default)

        name = self.gguf_name or self.name
        if entry("expert_count", 0) and not self.routes:
            raise ModelError(f"{where}: experts (expert_count) are not supported")
        heads, hidden = entry("attention.head_count"), entry("embedding_length")
        known = isinstance(hidden, int) and isinstance(heads, int) and heads
        head_dim = entry("attention.key_length") or (hidden // heads if known else None)
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
            "rope_scaling": rope_scaling_of_gguf(metadata, name, factors, where),
            "partial_rotary_factor": rotated / head_dim if partial else None,
            "rms_norm_eps": entry("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "output.weight" not in tensors,
            "sliding_window": window,
            "use_sliding_window": window is not None,
            "attention_bias": "blk.0.attn_output.bias" in tensors,
            "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        }


def token_ids(value: Any, what: str) -> Shape:
    """One id, a list of ids or nothing, as config files spell it."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(is_number(id, int) and id >= 0 for id in ids):
        raise ModelError(f"{what} must be a token id or a list of them, got {value!r}")
    return tuple(dict.fromkeys(ids))


# Fields of other and derived architectures that would change a layer's computation, with the values that
# change nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("logits_scaling", "logit_scale", "embedding_multiplier", "residual_multiplier"), (1,)),
    **dict.fromkeys(
        ("lm_head_bias", "rope_interleaved", "qk_layernorm", "use_qk_norm", "use_mrope"), (False,)
    ),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"), ()),
    **dict.fromkeys(("num_experts", "num_local_experts", "alibi"), (0,)),
    "attention_multiplier": (),
    "no_rope_layers": ([],),
}


def _refuse_unsupported(fields: Fields) -> None:
    raw = fields.raw
    fields.need(
        raw.get("quantization_config") is None,
        "quantized weights (quantization_config) are not supported; use the original weights or a GGUF file",
    )
    act = raw.get("hidden_act", "silu")
    fields.need(act in ("silu", "swish"), f"hidden_act {act!r} is not supported, only silu")
    for name, neutral in _NEUTRAL.items():
        known = raw.get(name) is None or raw[name] in neutral
        fields.need(known, f"{name} is {raw.get(name)!r}, which is not supported")
