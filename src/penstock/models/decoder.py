"""The forward pass that the architectures share: pre-norm layers, rotary attention with grouped KV heads,
gated SiLU. Owns its weights, not its KV."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from penstock.models.forms import Matrix
from penstock.models.layers import rope_table, row_order
from penstock.models.lora import LoraRuns
from penstock.models.model import LayerOps, ModelConfig, PagedKv, Weight


class DecoderLayer(NamedTuple):
    """Weights of one layer, under the names of `Architecture.layer`; matrices are [out, in]. None: the
    architecture does not have it."""

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


class Decoder:
    """A forward pass in the pieces that become ops on the compute lane: embed, each layer, head. `weights`
    has the names and shapes of `Architecture.layout`; KV computed by weights of another `digest` never
    matches."""

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Weight], ops: LayerOps, digest: bytes
    ) -> None:
        self.config = config
        self.digest = digest
        self.ops = ops
        self.embedding: Weight = weights["embed"]
        self.norm: Tensor = weights["norm"]
        self.dtype, self.device = self.norm.dtype, self.norm.device
        # float32 [max_position, head_dim]: cos of the half-rotation angles, then their sin
        self.rope = rope_table(config).to(self.device)
        layers: list[dict[str, Weight]] = [{} for _ in range(config.num_layers)]
        for name, tensor in weights.items():
            if name.startswith("layers."):
                _, index, field = name.split(".")
                layers[int(index)][field] = tensor
        order = row_order(config)
        if order is not None:
            for tensor in (layer[name] for layer in layers for name in ("qkv", "qkv_bias") if name in layer):
                if isinstance(tensor, Matrix):
                    tensor.reorder(order)
                else:
                    tensor.copy_(tensor[order.to(self.device)])
        self.layers = [DecoderLayer(**layer) for layer in layers]  # a weight that no field takes is an error
        self.output = self.embedding if config.tied_embeddings else weights["head"]

    def embed(self, tokens: Tensor) -> Tensor:
        """int32 [T] -> [T, hidden]"""
        return (
            self.embedding.rows(tokens)
            if isinstance(self.embedding, Matrix)
            else F.embedding(tokens, self.embedding)
        )

    def layer(
        self, index: int, hidden: Tensor, residual: Tensor | None, kv: PagedKv, lora: LoraRuns | None = None
    ) -> tuple[Tensor, Tensor]:
        """One decoder layer. The residual stream is carried beside `hidden` so that the add and the next norm
        are one pass; `residual` is None before layer 0, and `lora` where no token of the step has an adapter.
        Returns the next (hidden, residual), the former perhaps in shares (`LayerOps.linear_shares`)."""
        q, k, v, residual = self.project(index, hidden, residual, kv, lora)
        return self.finish(index, kv.attend(index, q, k, v), residual, lora)

    def project(
        self, index: int, hidden: Tensor, residual: Tensor | None, kv: PagedKv, lora: LoraRuns | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A layer up to its attention, for steps that attend in several passes: q, k and v as
        `PagedKv.rotate_and_write` returns them, and the residual stream."""
        w, eps = self.layers[index], self.config.norm_eps
        if residual is None:
            x, residual = self.ops.rms_norm(hidden, w.attn_norm, eps), hidden
        else:
            x, residual = self.ops.add_rms_norm(hidden, residual, w.attn_norm, eps)
        return *kv.rotate_and_write(index, self._linear(index, "qkv", x, lora), w.q_norm, w.k_norm), residual

    def finish(
        self, index: int, attended: Tensor, residual: Tensor, lora: LoraRuns | None = None
    ) -> tuple[Tensor, Tensor]:
        """The rest of the layer. `layer` is both, with `PagedKv.attend` between them."""
        w, eps = self.layers[index], self.config.norm_eps
        x = self._linear_shares(index, "out", attended, lora)
        x, residual = self.ops.add_rms_norm(x, residual, w.ffn_norm, eps)
        return self._linear_shares(index, "down", self._gated(index, x, lora), lora), residual

    def head(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """Final norm and output projection of the rows given: [S, hidden] (`hidden` perhaps in shares) ->
        logits [S, vocab] in the model's dtype."""
        x, _ = self.ops.add_rms_norm(hidden, residual, self.norm, self.config.norm_eps)
        return self.output.logits(x) if isinstance(self.output, Matrix) else self.ops.linear(x, self.output)

    def _linear(self, index: int, name: str, x: Tensor, lora: LoraRuns | None) -> Tensor:
        layer = self.layers[index]
        y = self.ops.linear(x, getattr(layer, name), getattr(layer, f"{name}_bias"))
        if lora is not None:
            lora.add(index, name, x, y)
        return y

    def _linear_shares(self, index: int, name: str, x: Tensor, lora: LoraRuns | None) -> Tensor:
        layer = self.layers[index]
        if lora is None and getattr(layer, f"{name}_bias") is None:
            return self.ops.linear_shares(x, getattr(layer, name))
        return self._linear(index, name, x, lora)

    def _gated(self, index: int, x: Tensor, lora: LoraRuns | None) -> Tensor:
        layer = self.layers[index]
        if lora is None and layer.gate_up_bias is None:
            return self.ops.gated(x, layer.gate_up)
        return self.ops.silu_mul(self._linear(index, "gate_up", x, lora))
