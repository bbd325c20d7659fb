"""Hybrid models: most layers keep a state of fixed size (gated delta rule), every few layers attend, and both
gate what they return. Owns these layers and what the architectures with them share; the arithmetic of the
state is in `delta_rule.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self, TypeVar

import torch
from torch import Tensor

from penstock.errors import ModelError
from penstock.models.architecture import FileTensor, WeightSpec, linear, stack
from penstock.models.decoder import Decoder, DecoderLayer
from penstock.models.experts import RoutedArchitecture, RoutedLayer
from penstock.models.fields import Fields, Json, Shape
from penstock.models.layers import head_order
from penstock.models.lora import LoraRuns
from penstock.models.model import LayerOps, ModelConfig, PagedKv, Recurrence, RecurrentStates, Weight

S = TypeVar("S", bound=FileTensor)

_KINDS = ("linear_attention", "full_attention")
# Norms, and numbers of each head or channel: held in float32, and rounded by no form.
_EXACT = ("norm", ".conv", ".decay_log", ".dt_bias")
_NOT_READ = {"model.visual.": "the vision part", "mtp.": "the head for drafts, which --speculate mtp uses"}
_ROTARY_SHARE = 0.25  # of a head's values turn, where a config does not say it
# Text has the same position in all sections, so these change nothing for it.
_IMAGE_POSITIONS = ("mrope_section", "mrope_interleaved")


@dataclass(frozen=True, kw_only=True)
class GatedLayer(RoutedLayer):
    """Attention with a gate for each value that it returns. `qkv` has the gate's rows last."""

    @classmethod
    def row_orders(cls, config: ModelConfig) -> Mapping[str, Tensor]:
        """Files have each head's gate behind its query."""
        order = head_order(config)
        head = torch.arange(config.head_dim) if order is None else order
        num_keys = config.num_kv_heads
        q, gate = torch.arange(2 * config.num_heads * len(head)).view(-1, 2, len(head)).unbind(dim=1)
        kv = torch.arange(2 * num_keys * len(head)).view(-1, len(head)) + 2 * q.numel()
        rows = torch.cat((q[:, head], kv[:num_keys, head], kv[num_keys:], gate)).flatten()
        return {"qkv": rows, "q_norm": head, "k_norm": head}

    def project(
        self, hidden: Tensor, residual: Tensor | None, kv: PagedKv, lora: LoraRuns | None
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
        qkv, gate, residual = self._gated(hidden, residual, lora)
        return *kv.rotate_and_write(self.index, qkv, self.q_norm, self.k_norm), (residual, gate)

    def finish(
        self, attended: Tensor, rest: tuple[Tensor, Tensor], lora: LoraRuns | None
    ) -> tuple[Tensor, Tensor]:
        residual, gate = rest
        return super().finish(attended * gate.sigmoid(), residual, lora)

    def _gated(
        self, hidden: Tensor, residual: Tensor | None, lora: LoraRuns | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, residual = self._normed(hidden, residual)
        rows = self._linear("qkv", x, lora)
        num_gated = self.out.shape[1]
        qkv, gate = rows.split_with_sizes((rows.shape[1] - num_gated, num_gated), dim=1)
        return qkv.contiguous(), gate, residual


@dataclass(frozen=True, kw_only=True)
class DeltaLayer(RoutedLayer):
    """A layer with a state. `qkv` has the rows of q, k and v, then those of the gate of what it returns."""

    dims: Recurrence
    gates: Weight  # a row for beta of each value head, then a row for its decay
    conv: Tensor  # [width of q, k and v, 1, window]
    rate: Tensor  # [value heads], negative: how fast each decays
    dt_bias: Tensor  # [value heads]
    state_norm: Tensor  # [value_dim]

    @classmethod
    def make(cls, index: int, config: ModelConfig, weights: Mapping[str, Weight], ops: LayerOps) -> Self:
        own = dict(weights)
        rate = -own.pop("decay_log").exp()
        return super().make(index, config, {**own, "rate": rate, "dims": config.recurrence}, ops)

    @classmethod
    def row_orders(cls, config: ModelConfig) -> Mapping[str, Tensor]:
        """Where files are interleaved, a key head's rows are followed by those of its value heads."""
        dims = config.recurrence
        assert dims is not None
        if not dims.interleaved:
            return {}
        shared = dims.num_value_heads // dims.num_key_heads
        sizes = {
            "qkv": (dims.key_dim, dims.key_dim, shared * dims.value_dim, shared * dims.value_dim),
            "gates": (shared, shared),
        }
        rows = {name: torch.arange(dims.num_key_heads * sum(parts)) for name, parts in sizes.items()}
        apart = {name: rows[name].view(-1, sum(parts)).split(parts, dim=1) for name, parts in sizes.items()}
        return {name: torch.cat([part.flatten() for part in parts]) for name, parts in apart.items()}

    def forward(
        self, hidden: Tensor, residual: Tensor | None, kv: RecurrentStates, lora: LoraRuns | None
    ) -> tuple[Tensor, Tensor]:
        x, residual = self._normed(hidden, residual)
        rows, dims = self._linear("qkv", x, lora), self.dims
        qkv, z = rows.split_with_sizes((dims.qkv_width, dims.out_width), dim=1)
        gates = self.ops.linear(x, self.gates)
        if lora is not None:
            lora.add(self.index, "gates", x, gates)
        decay, beta = self.ops.delta_gates(gates, self.rate, self.dt_bias)
        found = kv.advance(self.index, qkv, self.conv, decay, beta)
        return self.finish(self.ops.gated_norm(found, z, self.state_norm, self.eps), residual, lora)


class HybridArchitecture(RoutedArchitecture):
    """What architectures with both kinds of layers share: names, refusals, norms whose weights are stored as
    their difference from one."""

    in_gguf = False
    shared = "mlp.shared_expert"
    norms_heads = True
    derives_head_dim = False
    rotates_partly = True
    interleaved = False  # `Recurrence.interleaved`
    ships_heads = True

    def layer_kind(self, config: ModelConfig, index: int) -> type[DecoderLayer]:
        return DeltaLayer if _is_recurrent(config, index) else GatedLayer

    def layer(self, config: ModelConfig, index: int = 0) -> tuple[WeightSpec, ...]:
        mixer = self.delta_net(config) if _is_recurrent(config, index) else self.attention(config)
        return (
            stack("attn_norm", ("input_layernorm.weight", config.hidden)),
            *mixer,
            stack("ffn_norm", ("post_attention_layernorm.weight", config.hidden)),
            *self.mlp(config, index),
        )

    def attention(self, config: ModelConfig) -> Iterator[WeightSpec]:
        q_rows, kv_rows = (num * config.head_dim for num in (config.num_heads, config.num_kv_heads))
        modules = (("q", 2 * q_rows), ("k", kv_rows), ("v", kv_rows))
        rows = ((f"self_attn.{name}_proj", num) for name, num in modules)
        yield from linear("qkv", config.hidden, False, *rows)
        for name in ("q_norm", "k_norm"):
            yield stack(name, (f"self_attn.{name}.weight", config.head_dim))
        yield from linear("out", q_rows, False, ("self_attn.o_proj", config.hidden))

    def delta_net(self, config: ModelConfig) -> Iterator[WeightSpec]:
        dims = config.recurrence
        assert dims is not None
        num = dims.num_value_heads
        for name, modules in self.projections(dims).items():
            parts = ((f"linear_attn.{module}", rows) for module, rows in modules.items())
            yield from linear(name, config.hidden, False, *parts)
        yield stack("conv", ("linear_attn.conv1d.weight", dims.qkv_width, 1, dims.window))
        yield stack("decay_log", ("linear_attn.A_log", num))
        yield stack("dt_bias", ("linear_attn.dt_bias", num))
        yield stack("state_norm", ("linear_attn.norm.weight", dims.value_dim))
        yield from linear("out", dims.out_width, False, ("linear_attn.out_proj", config.hidden))

    def projections(self, dims: Recurrence) -> Mapping[str, Mapping[str, int]]:
        """By tensor of the model: the modules that are stacked in it, and their rows."""
        num = dims.num_value_heads
        return {
            "qkv": {"in_proj_qkv": dims.qkv_width, "in_proj_z": dims.out_width},
            "gates": {"in_proj_b": num, "in_proj_a": num},
        }

    def layout(self, config: ModelConfig) -> Iterator[WeightSpec]:
        for weight in super().layout(config):
            yield weight._replace(exact=weight.name.endswith(_EXACT))

    def dummy_value(self, name: str) -> float:
        """Half of a state is left after some thirty tokens."""
        if name.endswith(".decay_log"):
            return -3.4
        return 1.0 if name.endswith(".state_norm") else 0.0

    def model(
        self, config: ModelConfig, weights: Mapping[str, Weight], ops: LayerOps, digest: bytes
    ) -> Decoder:
        for name, tensor in weights.items():
            if name.endswith("norm") and not name.endswith(".state_norm"):
                tensor.add_(1.0)
        return super().model(config, weights, ops, digest)

    def text_name(self, name: str) -> str:
        return name.replace("model.language_model.", "model.", 1)

    def laid_out(self, stored: Mapping[str, S]) -> Mapping[str, S]:
        """The text part has the names of a model of text alone, and experts in one tensor are taken apart."""
        found: dict[str, S] = {}
        for full, tensor in stored.items():
            name = self.text_name(full)
            if name.startswith(tuple(_NOT_READ)):
                continue
            parts = _expert_tensors(name, tensor)
            if twice := [part for part in parts if part in found]:
                raise ModelError(f"the weights have {twice[0]} twice, the second time in {full}")
            found |= parts
        return found

    def unread(self, names: Iterable[str]) -> Iterator[str]:
        for start, what in _NOT_READ.items():
            if num := sum(name.startswith(start) for name in names):
                yield f"{num} tensors of {what} ({start}*)"

    def parse_config(self, raw: Json, where: str) -> ModelConfig:
        text = Fields(raw, where).section("text_config")
        flat = {**raw, **{name: value for name, value in text.items() if value is not None}}
        fields = Fields(flat, where)
        gated = fields.flag("attn_output_gate", True)
        fields.need(gated, "attn_output_gate is false, which is not supported")
        rope = fields.section("rope_parameters") or fields.section("rope_scaling")
        share = rope.get("partial_rotary_factor") or flat.get("partial_rotary_factor") or _ROTARY_SHARE
        plain = {name: rope[name] for name in rope if name not in _IMAGE_POSITIONS}
        flat |= {"rope_scaling": None, "rope_parameters": {**plain, "partial_rotary_factor": share}}
        # what transformers takes where a config does not say it
        usual = {"norm_topk_prob": True, "intermediate_size": flat.get("moe_intermediate_size")}
        flat = {**usual, **{name: value for name, value in flat.items() if value is not None}}
        config = super().parse_config(flat, where)
        return dataclasses.replace(config, recurrence=self.recurrence(Fields(flat, where), config.num_layers))

    def recurrence(self, fields: Fields, num_layers: int) -> Recurrence | None:
        """None: every layer attends."""
        every = fields.count("full_attention_interval", 4)
        usual = [_KINDS[(layer + 1) % every == 0] for layer in range(num_layers)]
        kinds = fields.raw.get("layer_types") or usual
        good = isinstance(kinds, list) and len(kinds) == num_layers and set(kinds) <= set(_KINDS)
        must = f"layer_types must be {' or '.join(_KINDS)} for each of {num_layers} layers"
        fields.need(good, f"{must}, got {kinds!r}")
        layers = tuple(layer for layer, kind in enumerate(kinds) if kind == _KINDS[0])
        fields.need(len(layers) < num_layers, "no layer attends (layer_types), which is not supported")
        key_heads, value_heads = (fields.count(f"linear_num_{kind}_heads") for kind in ("key", "value"))
        uneven = f"{value_heads} value heads are not a multiple of {key_heads} key heads"
        fields.need(value_heads % key_heads == 0, uneven)
        window = fields.count("linear_conv_kernel_dim", most=64)
        fields.need(window > 1, "linear_conv_kernel_dim is 1, which is not supported")
        key_dim, value_dim = (fields.count(f"linear_{kind}_head_dim") for kind in ("key", "value"))
        found = Recurrence(layers, key_heads, value_heads, key_dim, value_dim, window, self.interleaved)
        return found if layers else None

    def windows(self, fields: Fields, num_layers: int) -> Shape:
        return ()


def _is_recurrent(config: ModelConfig, index: int) -> bool:
    return config.recurrence is not None and index in config.recurrence.layers


def _expert_tensors(name: str, tensor: S) -> dict[str, S]:
    """All experts in one tensor [experts, rows, width], by the names that they have one by one."""
    start, _, module = name.rpartition(".")
    if not start.endswith(".mlp.experts") or len(tensor.shape) != 3:
        return {name: tensor}
    names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(module, ())
    num, rows = tensor.shape[:2]
    if not names or not rows or rows % len(names):
        return {name: tensor}
    size = rows // len(names)
    return {
        f"{start}.{expert}.{own}.weight": tensor.matrix(expert * rows + place * size, size)
        for expert in range(num)
        for place, own in enumerate(names)
    }
