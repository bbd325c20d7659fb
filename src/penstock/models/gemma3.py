"""The text part of the Gemma 3 architecture: norms before and behind attention and MLP, a GELU gate, scaled
embeddings, windows in most layers, which turn by a table of their own. Owns its names, its layers and how its
configs and files spell them."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from penstock.errors import ModelError
from penstock.models.architecture import Architecture, FileTensor, WeightSpec, stack
from penstock.models.decoder import Decoder, DecoderLayer
from penstock.models.fields import Fields, Json
from penstock.models.lora import LoraRuns
from penstock.models.model import LayerOps, ModelConfig, OtherRope, Weight
from penstock.models.rotary import GLOBAL, LOCAL, RopeFactors, rope_by_kind

S = TypeVar("S", bound=FileTensor)

_PATTERN = 6  # of so many layers the last one sees all tokens
_LOCAL_THETA = 10_000.0
_GELU = ("gelu_pytorch_tanh", "gelu_new")
_LARGEST_LAYERS = 62  # of the only size whose scores have a scale of their own; its GGUF files do not say it
# What a config means where it does not say it: configs of models that take images leave most of it out.
_USUAL: Json = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "hidden_activation": _GELU[0],
    "eos_token_id": 1,
}
_OWN = ("hidden_act", "hidden_activation", "query_pre_attn_scalar", "rope_theta", "rope_scaling")
_TEXT_PARTS = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_NOT_READ = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


@dataclass(frozen=True, kw_only=True)
class SandwichLayer(DecoderLayer):
    """What attention and MLP return is normalised before it is added to the residual stream."""

    attn_post_norm: Tensor
    ffn_post_norm: Tensor

    def finish(self, attended: Tensor, residual: Tensor, lora: LoraRuns | None) -> tuple[Tensor, Tensor]:
        x = self.ops.whole(self._linear("out", attended, lora))
        x = self.ops.rms_norm(x, self.attn_post_norm, self.eps)
        x, residual = self.ops.add_rms_norm(x, residual, self.ffn_norm, self.eps)
        return self.ops.rms_norm(self.mlp(x, lora), self.ffn_post_norm, self.eps), residual

    def mlp(self, x: Tensor, lora: LoraRuns | None) -> Tensor:
        if lora is None:
            gated = self.ops.gelu_gated(x, self.gate_up)
        else:
            gated = self.ops.gelu_mul(self._linear("gate_up", x, lora))
        return self.ops.whole(self._linear("down", gated, lora))


class ScaledDecoder(Decoder):
    """A decoder whose embeddings are scaled by hidden ** 0.5, rounded to the type of the model."""

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Weight], ops: LayerOps, digest: bytes
    ) -> None:
        super().__init__(config, weights, ops, digest, [SandwichLayer] * config.num_layers)
        self.factor = float(torch.tensor(config.hidden**0.5, dtype=self.dtype))

    def embed(self, tokens: Tensor) -> Tensor:
        return super().embed(tokens) * self.factor


class Gemma3(Architecture):
    name = "gemma3_text"
    config_name = "Gemma3ForCausalLM"
    other_config_names = ("Gemma3ForConditionalGeneration",)
    gguf_name = "gemma3"
    attention_biases = ("qkv_bias", "out_bias")
    norms_heads = True
    window_rule = "stated"
    takes_heads = False
    one_more_in_gguf = ("norm.weight",)

    def layer_kind(self, config: ModelConfig, index: int) -> type[DecoderLayer]:
        return SandwichLayer

    def layer(self, config: ModelConfig, index: int = 0) -> tuple[WeightSpec, ...]:
        return (
            stack("attn_norm", ("input_layernorm.weight", config.hidden)),
            *self.attention(config),
            stack("attn_post_norm", ("post_attention_layernorm.weight", config.hidden)),
            stack("ffn_norm", ("pre_feedforward_layernorm.weight", config.hidden)),
            *self.mlp(config, index),
            stack("ffn_post_norm", ("post_feedforward_layernorm.weight", config.hidden)),
        )

    def layout(self, config: ModelConfig) -> Iterator[WeightSpec]:
        for weight in super().layout(config):
            yield weight._replace(exact=weight.name.endswith("norm"))

    def dummy_value(self, name: str) -> float:
        return 0.0

    def model(
        self, config: ModelConfig, weights: Mapping[str, Weight], ops: LayerOps, digest: bytes
    ) -> Decoder:
        """Files have the weights of norms as their difference from one."""
        for name, tensor in weights.items():
            if name.endswith("norm"):
                tensor.add_(1.0)
        return ScaledDecoder(config, weights, ops, digest)

    def text_name(self, name: str) -> str:
        start = next((start for start in _TEXT_PARTS if name.startswith(start)), "")
        return _TEXT_PARTS.get(start, "") + name.removeprefix(start)

    def laid_out(self, stored: Mapping[str, S]) -> Mapping[str, S]:
        """The text part has the names of a model of text alone."""
        found: dict[str, S] = {}
        for full, tensor in stored.items():
            if full.startswith(_NOT_READ):
                continue
            name = self.text_name(full)
            if name in found:
                raise ModelError(f"the weights have {name} twice, the second time as {full}")
            found[name] = tensor
        return found

    def unread(self, names: Iterable[str]) -> Iterator[str]:
        if num := sum(name.startswith(_NOT_READ) for name in names):
            yield f"{num} tensors of the vision part"

    def parse_config(self, raw: Json, where: str) -> ModelConfig:
        text = Fields(raw, where).section("text_config")
        stated = {name: value for name, value in {**raw, **text}.items() if value is not None}
        fields = Fields({**_USUAL, **stated}, where)
        _refuse_others(fields)
        num_layers = fields.count("num_hidden_layers", most=4096)
        kinds = stated.get("layer_types") or _layer_types(fields, num_layers)
        local_theta = fields.positive("rope_local_base_freq", _LOCAL_THETA)
        whole, theta = rope_by_kind(fields, fields.positive("rope_theta", 1e6), local_theta)
        rope = {"rope_parameters": whole, "layer_types": kinds}
        plain = {name: value for name, value in fields.raw.items() if name not in _OWN}
        config = super().parse_config({**plain, **rope}, where)
        local = tuple(layer for layer, kind in enumerate(kinds) if kind == LOCAL)
        return dataclasses.replace(
            config,
            # the number that configs state is that of the stretched context
            max_position=fields.count("max_position_embeddings"),
            context=0,
            other_rope=OtherRope(local, theta) if local else None,
            score_scale=fields.positive("query_pre_attn_scalar") ** -0.5,
        )

    def config_of_gguf(
        self, metadata: Json, tensors: Container[str], factors: RopeFactors, where: str
    ) -> Json:
        def entry(key: str, default: Any = None) -> Any:
            return metadata.get(f"{self.gguf_name}.{key}", default)

        config = super().config_of_gguf(metadata, tensors, factors, where)
        if not config["sliding_window"]:
            raise ModelError(f"{where} has no gemma3.attention.sliding_window")
        hidden, heads, layers = (
            config[name] for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
        )
        is_largest = layers == _LARGEST_LAYERS
        softcaps = {name: entry(name) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
        return {
            **config,
            **softcaps,
            "query_pre_attn_scalar": hidden // heads if is_largest else config["head_dim"],
            "rope_local_base_freq": entry("rope.freq_base_swa", _LOCAL_THETA),
            "sliding_window_pattern": entry("attention.sliding_window_pattern", _PATTERN),
            "hidden_activation": _GELU[0],
        }


def _refuse_others(fields: Fields) -> None:
    act = fields.raw.get("hidden_activation")
    fields.need(act in _GELU, f"hidden_activation {act!r} is not supported, only {_GELU[0]}")
    both = fields.flag("use_bidirectional_attention", False)
    fields.need(not both, "use_bidirectional_attention is true, which is not supported")


def _layer_types(fields: Fields, num_layers: int) -> list[str]:
    every = fields.count("sliding_window_pattern", fields.raw.get("_sliding_window_pattern") or _PATTERN)
    return [GLOBAL if (layer + 1) % every == 0 else LOCAL for layer in range(num_layers)]
