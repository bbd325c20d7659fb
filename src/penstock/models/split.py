"""One rank's part of a model: which rows and columns of each tensor it has, and the layer pieces that put the
parts together again. Owns neither weights nor the channel between ranks.

    query, key and value    rows, by KV heads           out     columns: the ranks' results are summed
    gate and up             rows, by width              down    columns: summed
    experts                 by width, like gate, up and down; every rank has the whole router
    embedding               rows: looked up where they are, and summed
    logits                  rows: joined

A size that the number of ranks does not divide is rounded up: the last ranks have zeros in place of what is
missing, which add nothing. If there are fewer KV heads than ranks, and they divide the ranks, several ranks
have the same KV head, each with a part of its query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.errors import ModelError
from penstock.models.model import Experts, LayerOps, ModelConfig, Split, Weight

# Architectures with the layers that this file knows. In others a norm may follow a product, or a state.
DIVIDED = ("llama", "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
_WHOLE = ("attn_norm", "ffn_norm", "norm", "q_norm", "k_norm", "router", "shared_gate")


class Section(NamedTuple):
    """A part of a dimension: `num` entries from `first` on, in room for `room`."""

    first: int
    num: int
    room: int

    def times(self, size: int) -> Section:
        return Section(self.first * size, self.num * size, self.room * size)

    def after(self, start: int) -> Section:
        return self._replace(first=self.first + start)


def share(total: int, split: Split) -> Section:
    """This rank's part of a dimension."""
    room = -(-total // split.size)
    first = min(split.rank * room, total)
    return Section(first, min(room, total - first), room)


class RankHeads(NamedTuple):
    """The heads of one rank."""

    query: Section
    kv: Section

    @classmethod
    def of(cls, config: ModelConfig, split: Split) -> RankHeads:
        num, num_kv, size = config.num_heads, config.num_kv_heads, split.size
        if num_kv < size and size % num_kv == 0 and num % size == 0:
            return cls(share(num, split), Section(split.rank * num_kv // size, 1, 1))
        kv = share(num_kv, split)
        return cls(kv.times(num // num_kv), kv)


def part_of(config: ModelConfig, split: Split) -> ModelConfig:
    """The dimensions that one rank computes with; the same on every rank."""
    if split.size == 1:
        return config
    if config.architecture not in DIVIDED:
        raise ModelError(
            f"--tensor-parallel: models of architecture {config.architecture} run on one rank only"
        )
    heads, routing = RankHeads.of(config, split), config.routing
    if routing is not None:
        routing = replace(
            routing, ffn=share(routing.ffn, split).room, shared_ffn=share(routing.shared_ffn, split).room
        )
    return replace(
        config,
        num_heads=heads.query.room,
        num_kv_heads=heads.kv.room,
        ffn=share(config.ffn, split).room,
        routing=routing,
    )


class Cut(NamedTuple):
    """What a rank has of one tensor of a file."""

    rows: tuple[Section, ...]  # in their order in the file
    columns: Section | None = None  # None: all

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        rows = sum(span.room for span in self.rows)
        return (rows, *whole[1:]) if self.columns is None else (rows, self.columns.room)

    @property
    def has_gaps(self) -> bool:
        """True if a part of its room stays empty."""
        spans = (*self.rows, *(() if self.columns is None else (self.columns,)))
        return any(span.num < span.room for span in spans)

    def put(self, room: Tensor, rows: slice, values: Tensor) -> None:
        """Of some `rows` of the whole tensor, copy those that belong into `room`. A vector is a matrix of one
        column."""
        columns, start = self.columns or Section(0, values.shape[1], values.shape[1]), 0
        for span in self.rows:
            first, end = max(rows.start, span.first), min(rows.stop, span.first + span.num)
            if first < end:
                own = values[first - rows.start : end - rows.start, columns.first :][:, : columns.num]
                at = start + first - span.first
                room[at : at + end - first, : columns.num].copy_(own)
            start += span.room


def cut_of(
    name: str, index: int, shapes: tuple[tuple[int, ...], ...], where: tuple[ModelConfig, Split]
) -> Cut:
    """Of part `index` of the model's tensor `name`, whose parts have these `shapes` in files. `where`: the
    whole model's dimensions, and the rank."""
    (config, split), name, shape = where, name.rpartition(".")[2], shapes[index]
    rows, is_alone = shape[0], len(shapes) == 1
    heads = RankHeads.of(config, split)
    if name in _WHOLE:
        return Cut((Section(0, rows, rows),))
    if name in ("embed", "head"):
        return Cut((share(rows, split),))
    if name in ("qkv", "qkv_bias"):
        query, kv = heads.query.times(config.head_dim), heads.kv.times(config.head_dim)
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        fused = (query, kv.after(q_rows), kv.after(q_rows + kv_rows))
        return Cut(fused if is_alone else ((query, kv, kv)[index],))
    if name in ("gate_up", "gate_up_bias"):
        width = rows // 2 if is_alone else rows
        own = share(width, split)
        return Cut((own, own.after(width)) if is_alone else (own,))
    if name == "experts_gate_up":
        return Cut((share(rows, split),))
    every = Section(0, rows, rows)
    if name == "out":
        return Cut((every,), heads.query.times(config.head_dim))
    if name in ("down", "experts_down"):
        return Cut((every,), share(shape[1], split))
    if name in ("out_bias", "down_bias"):  # added once: the results are summed
        return Cut((every if split.rank == 0 else Section(0, 0, rows),))
    raise ModelError(f"--tensor-parallel: {name} of {config.architecture} is not divided among ranks")


Pieces = Callable[[int], Iterable[tuple[slice, Tensor]]]  # of a part: ranges of its rows, and their values


class Together(Protocol):
    """The channel between ranks, as ops of the compute lane use it. Every rank makes the same calls in the
    same order."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum of the tensors of all ranks; may be written over `x`."""

    def joined(self, x: Tensor) -> Tensor:
        """[S, n] of each rank -> [S, size * n]."""


@dataclass(frozen=True, slots=True)
class SplitOps:
    """`LayerOps` over one rank's part of the weights. What `ops` computes from columns is a part of a sum,
    and is summed here."""

    ops: LayerOps
    split: Split
    together: Together

    def embed(self, tokens: Tensor, table: Weight) -> Tensor:
        own = tokens - self.split.rank * len(table)
        is_here = (own >= 0) & (own < len(table))
        rows = F.embedding(own.clamp(0, len(table) - 1), table)
        return self.together.sum(torch.where(is_here[:, None], rows, 0))

    def logits(self, x: Tensor, weight: Weight, vocab: int) -> Tensor:
        return self.together.joined(self.ops.linear(x, weight))[:, :vocab]

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        return self.ops.linear(x, weight, bias)

    def linear_shares(self, x: Tensor, weight: Weight) -> Tensor:
        return self.together.sum(self.ops.linear(x, weight))

    def whole(self, x: Tensor) -> Tensor:
        return self.together.sum(x.sum(dim=0) if x.dim() == 3 else x)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.ops.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self.ops.add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self.ops.silu_mul(gate_up)

    def gated(self, x: Tensor, weight: Weight) -> Tensor:
        return self.ops.gated(x, weight)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self.ops.gelu_mul(gate_up)

    def gelu_gated(self, x: Tensor, weight: Weight) -> Tensor:
        return self.ops.gelu_gated(x, weight)

    def delta_gates(self, rows: Tensor, rate: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        return self.ops.delta_gates(rows, rate, dt_bias)

    def gated_norm(self, found: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.ops.gated_norm(found, gate, weight, eps)

    def sigmoid(self, x: Tensor) -> Tensor:
        return self.ops.sigmoid(x)

    def routed(self, x: Tensor, experts: Experts, shared: Tensor | None = None) -> Any:
        return self.whole(self.ops.routed(x, experts, shared))

    def choose(self, x: Tensor, experts: Experts) -> Any:
        return self.ops.choose(x, experts)

    def terms(self, x: Tensor, experts: Experts, has_shared: bool) -> Tensor:
        return self.ops.terms(x, experts, has_shared)

    def add_terms(self, x: Tensor, experts: Experts, chosen: Any, terms: Tensor) -> None:
        self.ops.add_terms(x, experts, chosen, terms)

    def summed(self, terms: Tensor, chosen: Any, experts: Experts, shared: Tensor | None) -> Tensor:
        return self.whole(self.ops.summed(terms, chosen, experts, shared))
