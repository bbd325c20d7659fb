"""The forward pass: embedding, layers, output head. Owns the weights, not the KV. A layer is an object; the
architecture says which class computes which layer."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from penstock.models.forms import Matrix
from penstock.models.layers import head_order, rope_table, row_order
from penstock.models.lora import LoraRuns
from penstock.models.model import LayerOps, ModelConfig, PagedKv, Weight


@dataclass(frozen=True, kw_only=True)
class DecoderLayer:
    """One layer: rotary attention with grouped KV heads, then a gated SiLU, each behind a norm. Another kind
    is a subclass that overrides `mlp` or `forward`. Weights have the names of `Architecture.layer`; matrices
    are [out, in]. None: the architecture does not have it."""

    index: int
    eps: float
    ops: LayerOps
    attn_norm: Tensor
    qkv: Weight  # q rows, then k rows, then v rows
    out: Weight
    ffn_norm: Tensor
    gate_up: Weight  # gate rows, then up rows
    down: Weight
    q_norm: Tensor | None = None  # [head_dim], shared by all query heads
    k_norm: Tensor | None = None  # [head_dim], shared by all KV heads
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @classmethod
    def make(cls, index: int, config: ModelConfig, weights: Mapping[str, Weight], ops: LayerOps) -> Self:
        """`weights` are changed in place. One that no field takes is an error."""
        for name, order in cls.row_orders(config).items():
            if isinstance(tensor := weights.get(name), Matrix):
                tensor.reorder(order)
            elif tensor is not None:
                tensor.copy_(tensor[order.to(tensor.device)])
        return cls(index=index, eps=config.norm_eps, ops=ops, **weights)

    @classmethod
    def row_orders(cls, config: ModelConfig) -> Mapping[str, Tensor]:
        """By name: the rows of the tensors that files have in another order."""
        order, head = row_order(config), head_order(config)
        if order is None or head is None:
            return {}
        return {"qkv": order, "qkv_bias": order, "q_norm": head, "k_norm": head}

    def forward(
        self, hidden: Tensor, residual: Tensor | None, kv: Any, lora: LoraRuns | None
    ) -> tuple[Tensor, Tensor]:
        """The next (hidden, residual); see `Decoder.layer`."""
        q, k, v, rest = self.project(hidden, residual, kv, lora)
        return self.finish(kv.attend(self.index, q, k, v), rest, lora)

    def project(
        self, hidden: Tensor, residual: Tensor | None, kv: PagedKv, lora: LoraRuns | None
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """q, k and v, and what `finish` needs besides what they find: the residual stream."""
        x, residual = self._normed(hidden, residual)
        qkv = self._linear("qkv", x, lora)
        return *kv.rotate_and_write(self.index, qkv, self.q_norm, self.k_norm), residual

    def _normed(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The input of the first projection, and the residual stream."""
        if residual is None:
            return self.ops.rms_norm(hidden, self.attn_norm, self.eps), hidden
        return self.ops.add_rms_norm(hidden, residual, self.attn_norm, self.eps)

    def finish(self, attended: Tensor, rest: Any, lora: LoraRuns | None) -> tuple[Tensor, Tensor]:
        x = self._linear_shares("out", attended, lora)
        x, residual = self.ops.add_rms_norm(x, rest, self.ffn_norm, self.eps)
        return self.mlp(x, lora), residual

    def mlp(self, x: Tensor, lora: LoraRuns | None) -> Tensor:
        """[T, hidden] -> the same, perhaps in shares."""
        if lora is None and self.gate_up_bias is None:
            gated = self.ops.gated(x, self.gate_up)
        else:
            gated = self.ops.silu_mul(self._linear("gate_up", x, lora))
        return self._linear_shares("down", gated, lora)

    def _linear(self, name: str, x: Tensor, lora: LoraRuns | None) -> Tensor:
        y = self.ops.linear(x, getattr(self, name), getattr(self, f"{name}_bias"))
        if lora is not None:
            lora.add(self.index, name, x, y)
        return y

    def _linear_shares(self, name: str, x: Tensor, lora: LoraRuns | None) -> Tensor:
        if lora is None and getattr(self, f"{name}_bias") is None:
            return self.ops.linear_shares(x, getattr(self, name))
        return self.ops.whole(self._linear(name, x, lora))


class Decoder:
    """A forward pass in the pieces that become ops on the compute lane: embed, each layer, head. `weights`
    has the names and shapes of `Architecture.layout`; KV computed by weights of another `digest` never
    matches. `kinds`: the class of each layer, `DecoderLayer` if not given."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        ops: LayerOps,
        digest: bytes,
        kinds: Sequence[type[DecoderLayer]] = (),
    ) -> None:
        self.config = config
        self.digest = digest
        self.ops = ops
        self.embedding: Weight = weights["embed"]
        self.norm: Tensor = weights["norm"]
        self.output: Weight = self.embedding if config.tied_embeddings else weights["head"]
        # norms may be in float32 whatever the model is in
        table = self.embedding
        self.dtype = self.norm.dtype if isinstance(table, Matrix) else table.dtype
        self.device = self.norm.device
        # float32, of `ModelConfig.rope_shape`: cos of the half-rotation angles, then their sin
        self.rope = rope_table(config).to(self.device)
        self.layers: list[DecoderLayer] = []
        for index, kind in enumerate(kinds or [DecoderLayer] * config.num_layers):
            prefix = f"layers.{index}."
            own = {name.removeprefix(prefix): weights[name] for name in weights if name.startswith(prefix)}
            self.layers.append(kind.make(index, config, own, ops))

    def with_layers(self, layers: Sequence[DecoderLayer]) -> Decoder:
        """The same model with other layers; weights are shared."""
        made = copy.copy(self)
        made.layers = list(layers)
        return made

    def embed(self, tokens: Tensor) -> Tensor:
        """int32 [T] -> [T, hidden]"""
        return self.ops.embed(tokens, self.embedding)

    def layer(
        self, index: int, hidden: Tensor, residual: Tensor | None, kv: Any, lora: LoraRuns | None = None
    ) -> tuple[Tensor, Tensor]:
        """One layer, over `kv`: a `PagedKv`, or `RecurrentStates` if the layer is recurrent. The residual
        stream is carried beside `hidden` so that the add and the next norm are one pass; `residual` is None
        before layer 0, and `lora` where no token of the step has an adapter. Returns the next (hidden,
        residual), the former perhaps in shares (`LayerOps.linear_shares`)."""
        return self.layers[index].forward(hidden, residual, kv, lora)

    def project(
        self, index: int, hidden: Tensor, residual: Tensor | None, kv: PagedKv, lora: LoraRuns | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """A layer up to its attention, for steps that attend in several passes: q, k and v as
        `PagedKv.rotate_and_write` returns them, and the rest for `finish`."""
        return self.layers[index].project(hidden, residual, kv, lora)

    def finish(
        self, index: int, attended: Tensor, rest: Any, lora: LoraRuns | None = None
    ) -> tuple[Tensor, Tensor]:
        """The rest of the layer. `layer` is both, with `PagedKv.attend` between them."""
        return self.layers[index].finish(attended, rest, lora)

    def head(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """Final norm and output projection of the rows given: [S, hidden] (`hidden` perhaps in shares) ->
        logits [S, vocab] in the model's dtype."""
        x, _ = self.ops.add_rms_norm(hidden, residual, self.norm, self.config.norm_eps)
        return self.ops.logits(x, self.output, self.config.vocab)
