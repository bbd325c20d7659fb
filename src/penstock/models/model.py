"""Dimensions of a model, and the protocols that its forward pass calls. Owns no weights and no KV."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.models.rotary import RopeScaling

LEAST_SUM = 1e-20  # added to a sum of weights before they are divided by it


class Split(NamedTuple):
    """The part of a model that one of several ranks has."""

    rank: int = 0
    size: int = 1


Weight = Any  # what `LayerOps.linear` of a device multiplies with: a Tensor, or on the CPU a `forms.Matrix`


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of a model's sparse layers: a token runs through `top_k` of them."""

    num_experts: int
    top_k: int
    ffn: int  # width inside an expert
    normalised: bool  # the weights of a token's experts are divided by their sum
    shared_ffn: int = 0  # width inside the expert that every token runs through; 0: there is none
    dense_layers: tuple[int, ...] = ()  # have one MLP instead

    def choose(self, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """From the router's logits [T, num_experts], float32: each token's weights and experts, both [T,
        top_k], the likeliest first. Another rule is a subclass, and a row in `triton_experts.RULES`."""
        weights, ids = logits.softmax(dim=-1).topk(self.top_k, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True) if self.normalised else weights, ids


@dataclass(frozen=True, slots=True)
class GroupedRouting(Routing):
    """Each expert has a sigmoid. A bias, which weighs nothing, is added to choose; experts come only from the
    groups with the best two."""

    num_groups: int = 1  # of adjacent experts
    top_groups: int = 1
    scale: float = 1.0  # of all weights

    def choose(self, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        # As a choice between each and 0, computed row by row: the bits of `Tensor.sigmoid` depend on the
        # rows beside it.
        shares = F.pad(logits.unsqueeze(-1), (0, 1)).softmax(dim=-1)[..., 0]
        wanted = shares if bias is None else shares + bias
        groups = wanted.unflatten(1, (self.num_groups, -1))
        best = groups.topk(2, dim=-1).values.sum(dim=-1).topk(self.top_groups, dim=-1).indices
        is_in = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, True)
        wanted = groups.masked_fill(~is_in.unsqueeze(2), float("-inf")).flatten(1)
        ids = wanted.topk(self.top_k, dim=-1).indices
        weights = shares.gather(1, ids)
        if self.normalised:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + LEAST_SUM)
        return weights * self.scale, ids


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The layers that keep a state of fixed size instead of KV: a gated delta rule behind a convolution over
    time. Several value heads share a key head."""

    layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int
    key_dim: int  # of one head
    value_dim: int
    window: int  # tokens that the convolution sees
    interleaved: bool = False  # files have the rows of all projections key head by key head

    @property
    def key_width(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def qkv_width(self) -> int:
        return 2 * self.key_width + self.out_width

    @property
    def out_width(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def num_bytes(self) -> int:
        """The float32 state of one request in all layers."""
        return len(self.layers) * 4 * ((self.window - 1) * self.qkv_width + self.key_dim * self.out_width)

    def fingerprint(self) -> bytes:
        """Equal exactly if states are interchangeable byte by byte. Readable."""
        return (
            f"delta-rule/1 layers={len(self.layers)} heads={self.num_key_heads}/{self.num_value_heads} "
            f"dims={self.key_dim}/{self.value_dim} window={self.window} dtype=float32"
        ).encode()


@dataclass(frozen=True, slots=True)
class OtherRope:
    """The layers whose heads turn by another table than the rest: plain positions, or none."""

    layers: tuple[int, ...]
    theta: float  # 0: their heads do not turn


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Numbers by which a model scales what flows through it."""

    embedding: float
    residual: float  # of what attention and MLP return
    logits: float  # they are divided by it


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
    context: int = 0  # tokens of a sequence by default; 0: max_position
    rope_scaling: RopeScaling | None = None  # None: plain rotary positions
    rotary_dim: int = 0  # values of a head that turn with its position; 0: all
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    normed_heads: bool = False  # q and k are normalised per head, where only the config says it
    # by layer: tokens that a token sees, itself included; 0: all before it. (): all layers see all
    windows: tuple[int, ...] = ()
    routing: Routing | None = None  # None: every layer has one MLP
    recurrence: Recurrence | None = None  # None: every layer attends
    other_rope: OtherRope | None = None  # None: all layers turn alike
    multipliers: Multipliers | None = None
    score_scale: float = 0.0  # of a query's product with a key; 0: head_dim ** -0.5

    def settled(self, max_model_len: int | None) -> ModelConfig:
        """For sequences of at most `max_model_len` tokens. None: the model's default."""
        if self.rope_scaling is None:
            return self
        return dataclasses.replace(
            self, rope_scaling=self.rope_scaling.settled(max_model_len or self.default_len)
        )

    @property
    def default_len(self) -> int:
        """Tokens of a sequence by default."""
        return self.context or self.max_position

    @property
    def num_kv_layers(self) -> int:
        """Those that attend."""
        return self.num_layers - (0 if self.recurrence is None else len(self.recurrence.layers))

    @property
    def state_bytes(self) -> int:
        """Of one request."""
        return 0 if self.recurrence is None else self.recurrence.num_bytes

    @property
    def scale(self) -> float:
        return self.score_scale or float(self.head_dim) ** -0.5

    @property
    def ropes(self) -> tuple[int, ...]:
        """By layer: its rotary table, a number among those that `rope_table` stacks."""
        other = () if self.other_rope is None else self.other_rope.layers
        return tuple(int(layer in other) for layer in range(self.num_layers))

    @property
    def rope_shape(self) -> tuple[int, int]:
        """Of all rotary tables, stacked."""
        return self.max_position * (1 if self.other_rope is None else 2), self.head_dim

    @property
    def positions(self) -> str:
        """How positions get into keys: KV under another scheme never matches."""
        plain = f"rope half-rotation theta={self.rope_theta!r}"
        partial = f" of {self.rotary_dim} values" if self.rotary_dim else ""
        partial += f" other={self.other_rope}" if self.other_rope else ""
        return (
            f"{plain}{partial}"
            if self.rope_scaling is None
            else (f"{plain}{partial} scaling={self.rope_scaling}")
        )

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def mlp_values(self) -> int:
        """Values per token inside the widest MLP: gate, up and their product; of experts also what each
        returns."""
        if (routing := self.routing) is None:
            return 3 * self.ffn
        routed = (routing.top_k + 1) * self.hidden + routing.top_k * routing.ffn
        return max(3 * self.ffn * bool(routing.dense_layers), routed + 3 * routing.shared_ffn)


class Experts(NamedTuple):
    """The weights of one layer's experts. Expert e is in slot `slots[e]` of both stacks, which on a CPU may
    be lists of matrices. Below 0: it is in none."""

    router: Weight  # [num_experts, hidden]
    gate_up: Any  # [slots, 2 * ffn, hidden]: gate rows, then up rows
    down: Any  # [slots, hidden, ffn]
    slots: Tensor  # int32 [num_experts]
    routing: Routing
    layer: int = 0
    bias: Tensor | None = None  # float32 [num_experts], of rules that have one


class RoutedTokens(Protocol):
    """Of each token of a step its experts, and what else a device keeps of the choice."""

    @property
    def ids(self) -> Tensor:
        """[T, top_k], the likeliest first"""


class PagedKv(Protocol):
    """The KV cache as one step sees it: bound to the step's tokens, positions and tables by the executor."""

    def rotate_and_write(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split `qkv` [T, qkv_width]; normalise q and k per head where weights are given, rotate both by
        position, write k and v of every token to its slot. Returns q [T, num_heads, head_dim], k and v [T,
        num_kv_heads, head_dim]."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of each request's tokens over its own cached KV, within the layer's window.
        Returns [T, num_heads * head_dim]. `k` and `v` are this step's own, as returned by `rotate_and_write`;
        a backend may read them from there instead of the cache."""


class RecurrentStates(Protocol):
    """The states of recurrent layers as one step sees them: bound to the step's tokens and rows by the
    executor."""

    def advance(self, layer: int, qkv: Tensor, conv: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Run each request's tokens through its state, which is changed in place. `qkv` [T, qkv_width] are
        inputs of the convolution `conv` [qkv_width, 1, window]; `decay` (its logarithm) and `beta` are [T,
        num_value_heads]. Returns float32 [T, num_value_heads, value_dim]."""


class LayerOps(Protocol):
    """The pieces of a layer that are not attention, one implementation per device."""

    @property
    def split(self) -> Split:
        """The part of the model that the weights are."""

    def embed(self, tokens: Tensor, table: Weight) -> Tensor:
        """int32 [T] -> [T, hidden]"""

    def logits(self, x: Tensor, weight: Weight, vocab: int) -> Tensor:
        """[S, hidden] -> [S, vocab]"""

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """[T, in] by [out, in], plus an optional bias [out] -> [T, out]. The loader chooses the memory layout
        of `weight` for the device."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def norm_heads(self, parts: Sequence[Tensor], weights: Sequence[Tensor], eps: float) -> list[Tensor]:
        """`rms_norm` of each part, which is the rows of all heads."""

    def linear_shares(self, x: Tensor, weight: Weight) -> Tensor:
        """As `linear` for `add_rms_norm` alone: [T, out], perhaps in a narrower type, or [shares, T, out]
        whose sum that is."""

    def whole(self, x: Tensor) -> Tensor:
        """What `linear` made of a matrix whose results `linear_shares` gives."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Returns (norm(x + residual), x + residual). `x` may be in shares."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 * ffn] -> [T, ffn]: silu of the first half times the second."""

    def gated(self, x: Tensor, weight: Weight) -> Tensor:
        """`silu_mul(linear(x, weight))`: [T, in] by [2 * ffn, in] -> [T, ffn]."""

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """As `silu_mul`, with GELU in its approximation by tanh."""

    def gelu_gated(self, x: Tensor, weight: Weight) -> Tensor:
        """`gelu_mul(linear(x, weight))`."""

    def sigmoid(self, x: Tensor) -> Tensor: ...

    def delta_gates(self, rows: Tensor, rate: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        """[T, 2 * heads], for beta and then for the decay -> float32 [T, heads] of the decay's logarithm, and
        of beta."""

    def gated_norm(self, found: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """float32 [T, heads, values], normalised by head, times silu of `gate` [T, heads * values], in whose
        type it is returned."""

    def routed(self, x: Tensor, experts: Experts, shared: Tensor | None = None) -> Any:
        """The weighted sum of what each token's experts return, and `shared` [T, hidden]: [T, hidden] or in
        shares. Sums follow the order of a token's experts, never that of the batch. It is `choose`, `terms`,
        `add_terms` and `summed`."""

    def choose(self, x: Tensor, experts: Experts) -> Any:
        """Which experts each token runs through: `RoutedTokens`."""

    def terms(self, x: Tensor, experts: Experts, has_shared: bool) -> Tensor:
        """Room for what the experts of each token return."""

    def add_terms(self, x: Tensor, experts: Experts, chosen: Any, terms: Tensor) -> None:
        """Fill in what the experts that are in a slot return. Several calls may fill in all of them."""

    def summed(self, terms: Tensor, chosen: Any, experts: Experts, shared: Tensor | None) -> Tensor:
        """What `routed` returns, once all terms are filled in."""
