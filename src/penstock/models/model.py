"""What a model is to the engine: its dimensions and its forward pass in pieces. Owns no weights and no KV."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.models.rotary import RopeScaling

Weight = Any  # what `LayerOps.linear` of a device multiplies with: a Tensor, or on the CPU a `forms.Matrix`


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Dimensions of a decoder-only transformer."""

    architecture: str  # `Architecture.name`
    num_layers: int
    hidden: int
    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_position: int  # tokens
    rope_theta: float
    norm_eps: float
    tied_embeddings: bool
    eos_ids: tuple[int, ...] = ()
    context: int = 0  # tokens of a sequence where nobody asks for more; 0: max_position
    rope_scaling: RopeScaling | None = None  # None: plain rotary positions
    rotary_dim: int = 0  # values of a head that turn with its position; 0: all
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    windows: tuple[int, ...] = ()  # by layer: tokens that a token sees, itself included; 0: all before it. (): all layers see all

    def settled(self, max_model_len: int | None) -> ModelConfig:
        """For a run of sequences with at most so many tokens. None: as many as the model has by default."""
        if self.rope_scaling is None:
            return self
        return dataclasses.replace(self, rope_scaling=self.rope_scaling.settled(max_model_len or self.default_len))

    @property
    def default_len(self) -> int:
        """Tokens of a sequence where nobody asks for more."""
        return self.context or self.max_position

    @property
    def scale(self) -> float:
        return float(self.head_dim) ** -0.5

    @property
    def positions(self) -> str:
        """How positions get into keys: KV under another scheme never matches."""
        plain = f"rope half-rotation theta={self.rope_theta!r}"
        partial = f" of {self.rotary_dim} values" if self.rotary_dim else ""
        return f"{plain}{partial}" if self.rope_scaling is None else f"{plain}{partial} scaling={self.rope_scaling}"

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


class PagedKv(Protocol):
    """The KV cache as one step sees it: bound to the step's tokens, positions and tables by the executor."""

    def rotate_and_write(self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Split `qkv` [T, qkv_width]; normalise q and k per head where weights are given, rotate both by position, write k and v
        of every token to its slot. Returns q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim]."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of each request's tokens over its own cached KV, as far as the layer's window reaches. Returns
        [T, num_heads * head_dim].
        `k` and `v` are this step's own, as returned by `rotate_and_write`; a backend may read them from there instead of the cache."""


class Updates(Protocol):
    """What adapters add to a model's projections in one step."""

    def add(self, layer: int, name: str, x: Tensor, y: Tensor) -> None:
        """Change `y` in place: the output of layer `layer`'s projection `name` (as in `Architecture.layer`) for the input `x`."""


class LayerOps(Protocol):
    """The pieces of a layer that are not attention, one implementation per device."""

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """[T, in] by [out, in], plus [out] where there is a bias -> [T, out]. How `weight` lies in memory is the loader's choice for the
        device."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def linear_shares(self, x: Tensor, weight: Weight) -> Tensor:
        """As `linear` for `add_rms_norm` alone: [T, out], perhaps in a narrower type, or float32 [shares, T, out] whose sum that is."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Returns (norm(x + residual), x + residual). `x` may be in shares."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 * ffn] -> [T, ffn]: silu of the first half times the second."""

    def gated(self, x: Tensor, weight: Weight) -> Tensor:
        """`silu_mul(linear(x, weight))`: [T, in] by [2 * ffn, in] -> [T, ffn]."""


class Model(Protocol):
    """A forward pass in the pieces that become ops on the compute lane: embed, each layer, head."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    digest: bytes  # of the weights: KV computed by other weights never matches
    rope: Tensor  # float32 [max_position, head_dim]: cos of the half-rotation angles, then their sin

    def embed(self, tokens: Tensor) -> Tensor:
        """int32 [T] -> [T, hidden]"""

    def layer(self, index: int, hidden: Tensor, residual: Tensor | None, kv: PagedKv, lora: Updates | None = None) -> tuple[Tensor, Tensor]:
        """One decoder layer. The residual stream is carried beside `hidden` so that the add and the next norm are one pass;
        `residual` is None before layer 0, and `lora` where no token of the step has an adapter. Returns the next (hidden, residual), the
        former perhaps in shares (`LayerOps.linear_shares`)."""

    def project(
        self, index: int, hidden: Tensor, residual: Tensor | None, kv: PagedKv, lora: Updates | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A layer up to its attention, for steps that attend in several passes: q, k and v as `PagedKv.rotate_and_write` returns them,
        and the residual stream."""

    def finish(self, index: int, attended: Tensor, residual: Tensor, lora: Updates | None = None) -> tuple[Tensor, Tensor]:
        """The rest of the layer. `layer` is both, with `PagedKv.attend` between them."""

    def head(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """Final norm and output projection of the rows given: [S, hidden] (`hidden` perhaps in shares) -> logits [S, vocab] in the
        model's dtype."""
