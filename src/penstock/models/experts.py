"""Layers whose MLP is a choice of experts, for the architectures that have them. Owns their tensors and their
numbers in configs; the products are `LayerOps.routed`."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from penstock.models.architecture import Architecture, TensorSpec, WeightSpec, linear, stack
from penstock.models.decoder import DecoderLayer
from penstock.models.fields import Fields, Json
from penstock.models.lora import LoraRuns
from penstock.models.model import Experts, LayerOps, ModelConfig, Routing, Weight
from penstock.models.rotary import RopeFactors

_MAX_EXPERTS = 4096
_COUNTS = ("num_experts", "num_local_experts")  # names of the same number


@dataclass(frozen=True, kw_only=True)
class RoutedLayer(DecoderLayer):
    """A layer whose MLP is the sum of a token's experts and, if there is one, an expert that every token runs
    through. Adapters change only its attention."""

    experts: Experts | None  # None: this layer has one MLP
    gate_up: Weight = None  # of the shared expert
    down: Weight = None
    shared_gate: Weight = None  # [1, hidden]: the sigmoid of its product weighs the shared expert

    @classmethod
    def make(cls, index: int, config: ModelConfig, weights: Mapping[str, Weight], ops: LayerOps) -> Self:
        if "router" not in weights:
            return super().make(index, config, {**weights, "experts": None}, ops)
        assert config.routing is not None
        own, device = dict(weights), weights["ffn_norm"].device
        bias = own.pop("router_bias", None)
        slots = torch.arange(config.routing.num_experts, dtype=torch.int32, device=device)
        router, gate_up, down = (own.pop(name) for name in ("router", "experts_gate_up", "experts_down"))
        experts = Experts(router, gate_up, down, slots, config.routing, index, bias)
        return super().make(index, config, {**own, "experts": experts}, ops)

    def mlp(self, x: Tensor, lora: LoraRuns | None) -> Tensor:
        if self.experts is None:
            return super().mlp(x, lora)
        shared = None
        if self.gate_up is not None:
            shared = self.ops.linear(self.ops.gated(x, self.gate_up), self.down)
            if self.shared_gate is not None:
                shared = shared * self.ops.sigmoid(self.ops.linear(x, self.shared_gate))
        return self.ops.routed(x, self.experts, shared)


class RoutedArchitecture(Architecture):
    """What architectures with experts share. Names are those of Qwen."""

    routes = True
    count = "num_experts"  # as config.json has it
    router = "mlp.gate"
    expert = "mlp.experts"  # of which each is a number
    gate, up, down = "gate_proj", "up_proj", "down_proj"
    shared: str | None = None  # the module of the shared expert
    gates_shared = True  # whether the shared expert is weighed
    normalises: bool | None = None  # None: config.json says it
    normalises_in_gguf = False  # where the file does not say it

    def layer_kind(self, config: ModelConfig, index: int) -> type[DecoderLayer]:
        return RoutedLayer if _is_routed(config, index) else DecoderLayer

    def mlp(self, config: ModelConfig, index: int) -> Iterator[WeightSpec]:
        if config.routing is None or not _is_routed(config, index):
            yield from super().mlp(config, index)
            return
        hidden, routing = config.hidden, config.routing
        ffn, num = routing.ffn, routing.num_experts
        yield stack("router", (f"{self.router}.weight", num, hidden))
        yield self._stacked("experts_gate_up", num, (self.gate, ffn, hidden), (self.up, ffn, hidden))
        yield self._stacked("experts_down", num, (self.down, hidden, ffn))
        if routing.shared_ffn and self.shared:
            rows = ((f"{self.shared}.{name}", routing.shared_ffn) for name in ("gate_proj", "up_proj"))
            yield from linear("gate_up", hidden, False, *rows)
            yield from linear("down", routing.shared_ffn, False, (f"{self.shared}.down_proj", hidden))
            if self.gates_shared:
                yield stack("shared_gate", (f"{self.shared}_gate.weight", 1, hidden))

    def _stacked(self, name: str, num: int, *modules: tuple[str, int, int]) -> WeightSpec:
        """A slot for each expert, with its `modules` stacked along rows."""
        parts = (
            TensorSpec(f"{self.expert}.{expert}.{module}.weight", (rows, width))
            for expert in range(num)
            for module, rows, width in modules
        )
        return WeightSpec(name, tuple(parts), num)

    def parse_config(self, raw: Json, where: str) -> ModelConfig:
        config = super().parse_config({key: raw[key] for key in raw if key not in _COUNTS}, where)
        return dataclasses.replace(config, routing=self.routing(Fields(raw, where), config))

    def routing(self, fields: Fields, config: ModelConfig) -> Routing | None:
        counts = {name: fields.count(name, most=_MAX_EXPERTS) for name in _COUNTS if fields.is_set(name)}
        fields.need(len(set(counts.values())) <= 1, f"{' and '.join(_COUNTS)} differ: {counts}")
        num = next(iter(counts.values())) if counts else fields.count(self.count)
        top_k = fields.count("num_experts_per_tok")
        fields.need(top_k <= num, f"num_experts_per_tok is {top_k}, and there are {num} experts")
        normalised, ffn = self.normalises, fields.count("moe_intermediate_size", config.ffn)
        return Routing(
            num_experts=num,
            top_k=top_k,
            ffn=ffn,
            normalised=fields.flag("norm_topk_prob", False) if normalised is None else normalised,
            shared_ffn=self.shared_width(fields, ffn) if self.shared else 0,
            dense_layers=_dense_layers(fields, config.num_layers),
        )

    def shared_width(self, fields: Fields, ffn: int) -> int:
        """Inside the shared expert; `ffn` is that of the others."""
        return fields.count("shared_expert_intermediate_size")

    def config_of_gguf(
        self, metadata: Json, tensors: Container[str], factors: RopeFactors, where: str
    ) -> Json:
        def entry(key: str, default: Any = None) -> Any:
            return metadata.get(f"{self.gguf_name or self.name}.{key}", default)

        config = super().config_of_gguf(metadata, tensors, factors, where)
        expert_ffn = entry("expert_feed_forward_length")
        return {
            **config,
            self.count: entry("expert_count"),
            "num_experts_per_tok": entry("expert_used_count"),
            "moe_intermediate_size": expert_ffn,
            "intermediate_size": config["intermediate_size"] or expert_ffn,
            "shared_expert_intermediate_size": entry("expert_shared_feed_forward_length"),
            "norm_topk_prob": entry("expert_weights_norm", self.normalises_in_gguf),
        }


def _is_routed(config: ModelConfig, index: int) -> bool:
    return config.routing is not None and index not in config.routing.dense_layers


def _dense_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """By `mlp_only_layers` and `decoder_sparse_step`: of every so many layers only the last has experts."""
    listed = fields.raw.get("mlp_only_layers") or []
    good = isinstance(listed, list) and all(isinstance(i, int) and 0 <= i < num_layers for i in listed)
    fields.need(good, f"mlp_only_layers must be layers below {num_layers}, got {listed!r}")
    step = fields.count("decoder_sparse_step", 1)
    dense = tuple(i for i in range(num_layers) if i in listed or (i + 1) % step)
    fields.need(len(dense) < num_layers, "no layer has experts (mlp_only_layers, decoder_sparse_step)")
    return dense
