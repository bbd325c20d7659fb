"""The elementwise pieces of a decoder layer in plain PyTorch, and rotary positions. Owns no weights and no
KV."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.models.forms import Matrix
from penstock.models.model import Experts, LayerOps, ModelConfig, Split
from penstock.models.rotary import plain_frequencies

_GRAIN_VALUES = 32768  # torch gives fewer to one thread


class TokenExperts(NamedTuple):
    """Of each token its experts and their weights, the largest first: both [T, top_k]."""

    ids: Tensor
    weights: Tensor


def routed_by(ops: LayerOps, x: Tensor, experts: Experts, shared: Tensor | None) -> Tensor:
    """`LayerOps.routed` in its four steps."""
    chosen = ops.choose(x, experts)
    terms = ops.terms(x, experts, shared is not None)
    ops.add_terms(x, experts, chosen, terms)
    return ops.summed(terms, chosen, experts, shared)


class TorchLayerOps:
    """LayerOps for any device. Norms are computed in float32 and rounded once, before the weight is
    applied."""

    split = Split()

    def embed(self, tokens: Tensor, table: Tensor | Matrix) -> Tensor:
        return table.rows(tokens) if isinstance(table, Matrix) else F.embedding(tokens, table)

    def logits(self, x: Tensor, weight: Tensor | Matrix, vocab: int) -> Tensor:
        return weight.logits(x) if isinstance(weight, Matrix) else self.linear(x, weight)

    def linear(self, x: Tensor, weight: Tensor | Matrix, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, Matrix):
            product = weight.product(x).float()
            return product if bias is None else product.add_(bias)
        # For a few rows MKL takes up to twice as long with the weight transposed in the call as with the
        # operands exchanged.
        if len(x) >= 4 and x.dtype == torch.float32 and x.device.type == "cpu" and weight.is_contiguous():
            product = (
                torch.mm(weight, x.t()) if bias is None else torch.addmm(bias.unsqueeze(1), weight, x.t())
            )
            return product.t()
        return F.linear(x, weight, bias)

    def linear_shares(self, x: Tensor, weight: Tensor | Matrix) -> Tensor:
        return weight.product(x) if isinstance(weight, Matrix) else self.linear(x, weight)

    def whole(self, x: Tensor) -> Tensor:
        return x

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype == torch.float32:
            if x.is_cpu and x.numel() == x.shape[-1]:
                return _norm_one_row(x, weight, eps)
            return F.rms_norm(x, (x.shape[-1],), weight, eps)
        return (F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype) * weight).to(x.dtype)

    def norm_heads(self, parts: Sequence[Tensor], weights: Sequence[Tensor], eps: float) -> list[Tensor]:
        return [self.rms_norm(part, weight, eps) for part, weight in zip(parts, weights, strict=True)]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual = residual + x
        return self.rms_norm(residual, weight, eps), residual

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        half = gate_up.shape[-1] // 2
        gate, up = gate_up.split_with_sizes((half, half), dim=-1)  # `chunk` takes half as long again
        return F.silu(gate).mul_(up)

    def gated(self, x: Tensor, weight: Tensor | Matrix) -> Tensor:
        return self.silu_mul(self.linear_shares(x, weight))

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        half = gate_up.shape[-1] // 2
        gate, up = gate_up.split_with_sizes((half, half), dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    def gelu_gated(self, x: Tensor, weight: Tensor | Matrix) -> Tensor:
        return self.gelu_mul(self.linear_shares(x, weight))

    def sigmoid(self, x: Tensor) -> Tensor:
        return x.sigmoid()

    def delta_gates(self, rows: Tensor, rate: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        beta, decay = rows.float().chunk(2, dim=1)
        return rate * F.softplus(decay + dt_bias), beta.sigmoid()

    def gated_norm(self, found: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed = F.rms_norm(found, weight.shape, weight, eps)
        gated = normed * F.silu(gate.float().unflatten(1, (-1, len(weight))))
        return gated.flatten(1).to(gate.dtype)

    def routed(self, x: Tensor, experts: Experts, shared: Tensor | None = None) -> Tensor:
        return routed_by(self, x, experts, shared)

    def terms(self, x: Tensor, experts: Experts, has_shared: bool) -> Tensor:
        """[T, top_k, hidden]"""
        return x.new_empty(len(x), experts.routing.top_k, x.shape[1])

    def add_terms(self, x: Tensor, experts: Experts, chosen: TokenExperts, terms: Tensor) -> None:
        """One product for each expert that is hit, of all its tokens."""
        num_experts, top_k = experts.routing.num_experts, experts.routing.top_k
        pairs = chosen.ids.flatten().argsort(stable=True)  # of a token and an expert
        counts = chosen.ids.flatten().bincount(minlength=num_experts).tolist()
        found = terms.view(-1, x.shape[1])
        for slot, own in zip(experts.slots.tolist(), pairs.split(counts), strict=True):
            if len(own) and slot >= 0:
                inner = self.gated(x[own // top_k], experts.gate_up[slot])
                found[own] = self.linear(inner, experts.down[slot])

    def summed(self, terms: Tensor, chosen: TokenExperts, experts: Experts, shared: Tensor | None) -> Tensor:
        terms = terms * chosen.weights.to(terms.dtype).unsqueeze(2)
        total = terms[:, 0]
        for rank in range(1, experts.routing.top_k):
            total = total + terms[:, rank]
        return total if shared is None else total + shared

    def choose(self, x: Tensor, experts: Experts) -> TokenExperts:
        router = experts.router
        if not isinstance(router, Matrix):
            router = router.float()
        weights, ids = experts.routing.choose(self.linear(x.float(), router), experts.bias)
        return TokenExperts(ids, weights)


class SteadyLayerOps(TorchLayerOps):
    """On a CPU: the result of a row is the same bits, whatever rows are computed beside it. Matrices are in
    steady forms."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """A few rows at a time, by one thread: where several share the work, the ends of their shares are
        computed in another way."""
        num_rows = max(1, _GRAIN_VALUES // gate_up.shape[-1])
        if len(gate_up) <= num_rows:
            return super().silu_mul(gate_up)
        return torch.cat([super(SteadyLayerOps, self).silu_mul(rows) for rows in gate_up.split(num_rows)])

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """As `silu_mul`; wide rows in parts, too."""
        gate, up = gate_up.chunk(2, dim=-1)
        parts = (x.split(_GRAIN_VALUES // 2, dim=-1) for x in (gate, up))
        pairs = [torch.cat(pair, dim=-1) for pair in zip(*parts, strict=True)]
        num_rows = max(1, _GRAIN_VALUES // pairs[0].shape[-1])
        made = (
            torch.cat([super(SteadyLayerOps, self).gelu_mul(rows) for rows in pair.split(num_rows)])
            for pair in pairs
        )
        return torch.cat(list(made), dim=-1)

    def sigmoid(self, x: Tensor) -> Tensor:
        """As a choice between x and 0: softmax is computed row by row. `Tensor.sigmoid` computes the last
        values of a tensor in another way than those before them."""
        return F.pad(x.unsqueeze(-1), (0, 1)).softmax(dim=-1)[..., 0]


class OpsAround:
    """The pieces of a layer as another `LayerOps` has them, for one that does some of them in another way."""

    def __init__(self, ops: LayerOps) -> None:
        self.linear, self.linear_shares, self.gated = ops.linear, ops.linear_shares, ops.gated
        self.rms_norm, self.add_rms_norm, self.norm_heads = ops.rms_norm, ops.add_rms_norm, ops.norm_heads
        self.silu_mul, self.sigmoid = ops.silu_mul, ops.sigmoid
        self.gelu_mul, self.gelu_gated = ops.gelu_mul, ops.gelu_gated
        self.delta_gates, self.gated_norm = ops.delta_gates, ops.gated_norm
        self.split, self.embed, self.logits, self.whole = ops.split, ops.embed, ops.logits, ops.whole
        self.terms, self.add_terms, self.summed = ops.terms, ops.add_terms, ops.summed
        self.ops = ops

    def choose(self, x: Tensor, experts: Experts) -> Any:
        return self.ops.choose(x, experts)

    def routed(self, x: Tensor, experts: Experts, shared: Tensor | None = None) -> Any:
        return routed_by(self, x, experts, shared)


_ZERO = torch.zeros(())


def _norm_one_row(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`F.rms_norm` of a single row on the CPU, where that is six calls whose overhead is all their time: here
    it is two."""
    length = torch.linalg.vector_norm(x).item()
    mean_square = length * length / x.shape[-1] + eps
    return torch.addcmul(_ZERO, x, weight, value=mean_square**-0.5 if mean_square else math.inf)


def rope_table(config: ModelConfig) -> Tensor:
    """float32 [max_position, head_dim] on the CPU: cos of the half-rotation angles, then their sin. The table
    of the layers that turn otherwise stands below it.

    The angles are float32 products, as in training: float64 angles would differ by 5e-4 at position 8000 from
    those that the weights were fitted to. Pairs that do not turn have a cos of 1 and a sin of 0; `row_order`
    puts them last.
    """
    dim, scaling, other = config.rotary_dim or config.head_dim, config.rope_scaling, config.other_rope
    frequencies = (
        plain_frequencies(config.rope_theta, dim)
        if scaling is None
        else scaling.frequencies(config.rope_theta, dim)
    )
    first = _turns(config, frequencies, 1.0 if scaling is None else scaling.attention_factor)
    if other is None:
        return first
    still = torch.zeros(dim // 2)
    plain = plain_frequencies(other.theta, dim) if other.theta else still
    return torch.cat((first, _turns(config, plain, 1.0)))


def _turns(config: ModelConfig, frequencies: Tensor, factor: float) -> Tensor:
    """One table. `factor` multiplies cos and sin."""
    angles = torch.arange(config.max_position, dtype=torch.float32)[:, None] * frequencies
    still = config.head_dim // 2 - len(frequencies)
    cos = F.pad(angles.cos() * factor, (0, still), value=1.0)
    return torch.cat((cos, F.pad(angles.sin() * factor, (0, still))), dim=-1)


def row_order(config: ModelConfig) -> Tensor | None:
    """The rows of q, k and v in the order in which a model has them; None: as files have them."""
    head = head_order(config)
    if head is None:
        return None
    rows = torch.arange(config.qkv_width).view(-1, config.head_dim)
    rotated = config.num_heads + config.num_kv_heads
    return torch.cat((rows[:rotated, head], rows[rotated:])).flatten()


def head_order(config: ModelConfig) -> Tensor | None:
    """The values of a head of q or k, in the same way.

    Where a part of each head turns, files have its first half, its second half, and behind them what stands
    still. The kernels turn value i with value i + head_dim / 2, so half of what stands still goes behind the
    first half. Scores are sums over a head's values: the same order in q and k changes none.
    """
    turning, half = config.rotary_dim // 2, config.head_dim // 2
    if not turning:
        return None
    first, second, still = torch.arange(config.head_dim).split(
        (turning, turning, config.head_dim - 2 * turning)
    )
    return torch.cat((first, still[: half - turning], second, still[half - turning :]))
