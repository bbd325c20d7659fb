"""One rank's part of a model: which rows and columns of each tensor it has, and the layer pieces that put the
parts together again. Owns neither weights nor the channel between ranks.

    query, key and value    rows, by KV heads           out     columns: the ranks' results are summed
    gate and up             rows, by width              down    columns: summed
    experts                 by width, like gate, up and down; every rank has the whole router
    layers with a state     by key heads, each with its value heads and its channels of the convolution
    embedding               rows: looked up where they are, and summed
    logits                  rows: joined

A size that the number of ranks does not divide is rounded up: the last ranks have zeros in place of what is
missing, which add nothing. If there are fewer KV heads than ranks, and they divide the ranks, several ranks
have the same KV head, each with a part of its query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.errors import ModelError
from penstock.models.layers import OpsAround
from penstock.models.model import Experts, LayerOps, ModelConfig, Recurrence, Split, Weight

_WHOLE = ("router", "router_bias", "shared_gate", "fc")  # and norms, but those over all heads together


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


def need_even_heads(config: ModelConfig, split: Split, of: str) -> None:
    """Raises ModelError if a rank has empty heads. Needed where these are normalised together with others, or
    where keys of zeros are masked, as those of drafts are."""
    if RankHeads.of(config, split).query.room * split.size != config.num_heads:
        raise ModelError(
            f"--tensor-parallel {split.size} must divide the heads of {of}: {config.num_heads}, and "
            f"{config.num_kv_heads} of KV"
        )


def part_of(config: ModelConfig, split: Split) -> ModelConfig:
    """The dimensions that one rank computes with; the same on every rank."""
    if split.size == 1:
        return config
    heads, routing, dims = RankHeads.of(config, split), config.routing, config.recurrence
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
        recurrence=None if dims is None else divided(dims, split),
    )


def divided(dims: Recurrence, split: Split) -> Recurrence:
    """The dimensions of one rank's part of the states."""
    num_keys, shared = share(dims.num_key_heads, split).room, dims.num_value_heads // dims.num_key_heads
    return replace(dims, num_key_heads=num_keys, num_value_heads=num_keys * shared)


class RecurrentSections(NamedTuple):
    """What one rank has of a layer with a state."""

    channels: tuple[Section, ...]  # of the convolution: q, k and v
    heads: Section  # value heads


def recurrent_sections(dims: Recurrence, split: Split) -> RecurrentSections:
    keys = share(dims.num_key_heads, split)
    k, v = (keys.times(width // dims.num_key_heads) for width in (dims.key_width, dims.out_width))
    heads = keys.times(dims.num_value_heads // dims.num_key_heads)
    return RecurrentSections((k, k.after(dims.key_width), v.after(2 * dims.key_width)), heads)


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

    def of(self, whole: Tensor) -> Tensor:
        """What the rank has of a matrix."""
        own = whole.new_zeros(self.shape(tuple(whole.shape)))
        self.put(own, slice(0, len(whole)), whole)
        return own

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
    full: str, index: int, shapes: tuple[tuple[int, ...], ...], where: tuple[ModelConfig, Split]
) -> Cut:
    """Of part `index` of the model's tensor `full`, whose parts have these `shapes` in files. `where`: the
    whole model's dimensions, and the rank."""
    (config, split), name, shape = where, full.rpartition(".")[2], shapes[index]
    rows, is_alone = shape[0], len(shapes) == 1
    every, heads = Section(0, rows, rows), RankHeads.of(config, split)
    if name in ("q_norm", "k_norm") and rows != config.head_dim:
        need_even_heads(config, split, f"models of architecture {config.architecture}")
        return Cut(((heads.query if name == "q_norm" else heads.kv).times(config.head_dim),))
    if name in _WHOLE or name.endswith("norm"):
        return Cut((every,))
    if name in ("embed", "head"):
        return Cut((share(rows, split),))
    if name in ("gate_up", "gate_up_bias"):
        width = rows // 2 if is_alone else rows
        own = share(width, split)
        return Cut((own, own.after(width)) if is_alone else (own,))
    if name == "experts_gate_up":
        return Cut((share(rows, split),))
    if name in ("down", "experts_down"):
        return Cut((every,), share(shape[1], split))
    if name in ("out_bias", "down_bias"):  # added once: the results are summed
        return Cut((every if split.rank == 0 else Section(0, 0, rows),))
    dims = config.recurrence
    if dims is not None and int(full.split(".")[1]) in dims.layers:
        return _recurrent_cut((name, index), shape, dims, split)
    if name in ("qkv", "qkv_bias"):
        if not is_alone:
            own, num = ((heads.query, config.num_heads), *2 * [(heads.kv, config.num_kv_heads)])[index]
            return Cut((own.times(rows // num),))
        query, kv = heads.query.times(config.head_dim), heads.kv.times(config.head_dim)
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return Cut((query, kv.after(q_rows), kv.after(q_rows + kv_rows)))
    if name == "out":
        return Cut((every,), heads.query.times(config.head_dim))
    raise ModelError(f"--tensor-parallel: {name} of {config.architecture} is not divided among ranks")


def _recurrent_cut(part: tuple[str, int], shape: tuple[int, ...], dims: Recurrence, split: Split) -> Cut:
    """The same for a layer with a state. `part`: its tensor, and which of that one's parts."""
    own = recurrent_sections(dims, split)
    if part[0] == "out":
        return Cut((Section(0, shape[0], shape[0]),), own.heads.times(dims.value_dim))
    if part == ("conv", 0) or (part == ("qkv", 0) and not dims.interleaved):
        return Cut(own.channels)
    # key head by key head
    return Cut((share(dims.num_key_heads, split).times(shape[0] // dims.num_key_heads),))


Pieces = Callable[[int], Iterable[tuple[slice, Tensor]]]  # of a part: ranges of its rows, and their values


class Together(Protocol):
    """The channel between ranks, as ops of the compute lane use it. Every rank makes the same calls in the
    same order."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum of the tensors of all ranks; may be written over `x`."""

    def joined(self, x: Tensor) -> Tensor:
        """[S, n] of each rank -> [S, size * n]."""


class SplitOps(OpsAround):
    """`LayerOps` over one rank's part of the weights. What `ops` computes from columns is a part of a sum,
    and is summed here."""

    def __init__(self, ops: LayerOps, split: Split, together: Together) -> None:
        super().__init__(ops)
        self.split, self.together = split, together
        self.embed, self.logits = self._embed, self._logits
        self.linear_shares, self.whole = self._linear_shares, self._whole
        self.norm_heads, self.summed = self._norm_heads, self._summed

    def routed(self, x: Tensor, experts: Experts, shared: Tensor | None = None) -> Any:
        return self._whole(self.ops.routed(x, experts, shared))

    def _embed(self, tokens: Tensor, table: Weight) -> Tensor:
        own = tokens - self.split.rank * len(table)
        is_here = (own >= 0) & (own < len(table))
        rows = F.embedding(own.clamp(0, len(table) - 1), table)
        return self.together.sum(torch.where(is_here[:, None], rows, 0))

    def _logits(self, x: Tensor, weight: Weight, vocab: int) -> Tensor:
        return self.together.joined(self.ops.linear(x, weight))[:, :vocab]

    def _linear_shares(self, x: Tensor, weight: Weight) -> Tensor:
        return self.together.sum(self.ops.linear(x, weight))

    def _whole(self, x: Tensor) -> Tensor:
        return self.together.sum(x.sum(dim=0) if x.dim() == 3 else x)

    def _norm_heads(self, parts: Sequence[Tensor], weights: Sequence[Tensor], eps: float) -> list[Tensor]:
        """As many values of each part are on every rank."""
        squares = torch.stack([part.float().square().mean(dim=-1) for part in parts], dim=-1)
        scales = (self.together.sum(squares) / self.split.size + eps).rsqrt().unbind(dim=-1)
        return [
            (part.float() * scale[:, None]).to(part.dtype) * weight
            for part, scale, weight in zip(parts, scales, weights, strict=True)
        ]

    def _summed(self, terms: Tensor, chosen: Any, experts: Experts, shared: Tensor | None) -> Tensor:
        return self._whole(self.ops.summed(terms, chosen, experts, shared))
