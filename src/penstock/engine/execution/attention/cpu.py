"""Attention for the CPU: paged KV is gathered into a workspace and handed to PyTorch's fused kernel, and what one token reads of a long
context is summed where it lies. Owns that workspace and one step's indices and masks; the KV itself is the arena's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.execution.attention.geometry import Geometry
from penstock.engine.execution.batch import StepInputs
from penstock.errors import InvariantBroken
from penstock.models.model import ModelConfig

# Measured with SmolLM2-135M (9 query heads, 3 KV heads of 64, fp32) on two cores.
SHORT_TOKENS = 16  # chunks of at most so many tokens are batched across requests, under a mask; longer ones run one by one without
GROUP_BYTES = 4 << 20  # KV gathered at a time for short chunks: what stays in a core's cache until it is read again
PAD_TOKENS = 128  # a call costs about as much as so many more keys, so lengths this close share one
PAD_SHARE = 0.2  # and so do lengths within this share of the longest
LONE_TOKENS = 512  # a single token that attends to at least so many is computed alone: no padding, and its values are not copied
LONE_GROUP = 4  # unless more query heads than this share a KV head, since each of them reads the values again
KEY_BYTES = 768 << 10  # keys gathered at a time for such a token: what a core's own cache keeps until they are multiplied
INT32_ROWS = 1 << 31  # an arena of at most so many rows has indices of half the width, which saves a third of the time that values take


class _Span(NamedTuple):
    """One chunk as host numbers."""

    q_begin: int
    q_len: int
    kv_len: int
    table: Tensor  # int64 slots, exactly those that hold kv_len tokens


class _Short(NamedTuple):
    """Short chunks of equal q_len and similar kv_len, attended in one call."""

    rows: Tensor | slice  # [C * q_len] tokens of the step; a slice where they are adjacent
    gather: Tensor  # [2 * C * padded kv_len] rows of the arena at layer 0: all keys, then all values
    mask: Tensor | None  # [C, 1, group * q_len, padded kv_len], added to the scores; None: everything is visible
    num_chunks: int
    q_len: int


class _Lone(NamedTuple):
    """A single token with a long context."""

    row: int
    kv_len: int
    keys: tuple[Tensor, ...]  # blocks of the arena at layer 0, in parts that fit into a cache
    values: Tensor  # [num_heads * kv_len] heads of the arena at layer 0: those that each query head sums up
    starts: Tensor  # [num_heads] where each query head's begin


class _Long(NamedTuple):
    """One longer chunk: its own tokens causally, and the prefix before them in full."""

    begin: int
    end: int
    prefix_len: int
    gather: Tensor  # [2 * blocks of the prefix] blocks of the arena at layer 0: keys, then values


@dataclass(slots=True)
class _Step:
    """What depends on the step alone and serves all its layers."""

    inputs: StepInputs
    cos: Tensor  # [T, 1, head_dim], each twice: for the first and the second half
    sin: Tensor  # [T, 1, head_dim / 2]
    write_rows: Tensor  # [T] rows of the arena at layer 0
    lone: list[_Lone]
    short: list[_Short]
    long: list[_Long]


class CpuAttention:
    """`Attention` in float32 or bfloat16 on the CPU."""

    def __init__(self, arena: Tensor, config: ModelConfig, rope: Tensor) -> None:
        sizes = Geometry.of(arena, config, rope)
        if not arena.is_contiguous():
            raise InvariantBroken("the CPU backend reads the arena as one flat array of tokens; it must be contiguous")
        self._sizes = sizes
        self._rope = rope.float()
        self._dtype = arena.dtype
        # The arena as rows of one head, of one token, and of one block's keys or values; layers are reached by starting later.
        self._heads = arena.view(-1, sizes.head_dim)
        self._rows = arena.view(-1, sizes.num_kv_heads * sizes.head_dim)
        self._blocks = arena.view(-1, sizes.block_tokens * sizes.num_kv_heads * sizes.head_dim)
        self._workspace = arena.new_empty(0)
        self._step: _Step | None = None

    def rotate_and_write(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, inputs: StepInputs
    ) -> tuple[Tensor, Tensor, Tensor]:
        sizes, step = self._sizes, self._prepared(layer, inputs)
        heads = qkv.view(qkv.shape[0], -1, sizes.head_dim)
        num_rotated = sizes.num_heads + sizes.num_kv_heads
        rotated = _rotate(self._normalise(heads[:, :num_rotated], q_norm, k_norm), step.cos, step.sin).to(qkv.dtype)
        k, v = rotated[:, sizes.num_heads :], heads[:, num_rotated:]
        first = 2 * layer * sizes.block_tokens
        self._rows[first:].index_copy_(0, step.write_rows, k.flatten(1))
        self._rows[first + sizes.block_tokens :].index_copy_(0, step.write_rows, v.flatten(1))
        return rotated[:, : sizes.num_heads], k, v

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, inputs: StepInputs) -> Tensor:
        step = self._step
        if step is None or step.inputs is not inputs:
            raise InvariantBroken("attend before this step's KV was written")
        if len(q) == len(step.lone) == 1:  # the most frequent one; calls that hardly do anything are a good part of its time
            return self._attend_lone(layer, q[0], step.lone[0]).view(1, -1)
        out = q.new_zeros(q.shape)
        for lone in step.lone:
            out[lone.row] = self._attend_lone(layer, q[lone.row], lone)
        for short in step.short:
            out[short.rows] = self._attend_short(layer, q[short.rows], short)
        for chunk in step.long:
            own = slice(chunk.begin, chunk.end)
            out[own] = self._attend_long(layer, q[own], k[own], v[own], chunk)
        return out.flatten(1)

    # ------------------------------------------------------------------------------------------------- once per step

    def _prepared(self, layer: int, inputs: StepInputs) -> _Step:
        """A replay refills the tensors of `inputs` in place, so layer 0 always starts a new step."""
        if layer == 0 or self._step is None or self._step.inputs is not inputs:
            sizes = self._sizes
            cos, sin = self._rope[inputs.positions.long()].unsqueeze(1).chunk(2, dim=-1)
            cos = torch.cat([cos, cos], dim=-1)
            at = inputs.write_at.long()
            write_rows = at // sizes.block_tokens * self._rows_per_slot + at % sizes.block_tokens
            spans = list(self._spans(inputs))
            lone = [self._lone(s) for s in spans if self._is_lone(s)]
            short = [self._short(group) for group in self._grouped([s for s in spans if s.q_len <= SHORT_TOKENS and not self._is_lone(s)])]
            long = [self._long(s) for s in spans if s.q_len > SHORT_TOKENS]
            self._step = _Step(inputs, cos, sin, write_rows, lone, short, long)
            self._grow_workspace(lone, short, long)
        return self._step

    @property
    def _rows_per_slot(self) -> int:
        return self._sizes.num_layers * 2 * self._sizes.block_tokens

    def _spans(self, inputs: StepInputs) -> Iterator[_Span]:
        q_starts, kv_lens, table_starts = inputs.q_starts.tolist(), inputs.kv_lens.tolist(), inputs.table_starts.tolist()
        tables = inputs.tables.long()
        for chunk, kv_len in enumerate(kv_lens):
            q_len = q_starts[chunk + 1] - q_starts[chunk]
            if q_len == 0 or kv_len == 0:
                continue
            table = tables[table_starts[chunk] :][: self._sizes.num_blocks(kv_len)]
            if table.numel() < self._sizes.num_blocks(kv_len) or kv_len < q_len:
                raise InvariantBroken(f"chunk {chunk}: {q_len} of {kv_len} tokens over a table of {table.numel()} blocks")
            yield _Span(q_starts[chunk], q_len, kv_len, table)

    def _is_lone(self, span: _Span) -> bool:
        """bfloat16 would round the scores before they are compared; the fused kernel keeps them in float32."""
        return span.q_len == 1 and span.kv_len >= LONE_TOKENS and self._sizes.group <= LONE_GROUP and self._dtype == torch.float32

    def _grouped(self, spans: list[_Span]) -> Iterator[list[_Span]]:
        """Chunks that share a call: equal q_len, lengths close enough that padding is cheaper than another call."""
        token_bytes = 2 * self._rows.shape[1] * self._rows.element_size()
        group: list[_Span] = []
        for span in sorted(spans, key=lambda s: (s.q_len, -s.kv_len)):
            if group:
                longest = group[0].kv_len
                close = longest - span.kv_len <= max(PAD_TOKENS, PAD_SHARE * longest)
                fits = (len(group) + 1) * longest * token_bytes <= GROUP_BYTES
                if not (close and fits and group[0].q_len == span.q_len):
                    yield group
                    group = []
            group.append(span)
        if group:
            yield group

    def _key_rows(self, span: _Span) -> Tensor:
        """[kv_len] rows of the arena at layer 0 that hold the keys; the values follow a block's tokens later."""
        within = torch.arange(self._sizes.block_tokens)
        return (span.table[:, None] * self._rows_per_slot + within).flatten()[: span.kv_len]

    def _lone(self, span: _Span) -> _Lone:
        sizes = self._sizes
        of_kv_head = (self._key_rows(span) + sizes.block_tokens) * sizes.num_kv_heads + torch.arange(sizes.num_kv_heads)[:, None]
        width = torch.int32 if len(self._heads) <= INT32_ROWS else torch.int64
        values = of_kv_head.to(width).repeat_interleave(sizes.group, dim=0)
        keys = span.table * (2 * sizes.num_layers)
        part_blocks = max(1, KEY_BYTES // (self._blocks.shape[1] * self._blocks.element_size()))
        starts = torch.arange(0, values.numel(), span.kv_len, dtype=width)
        return _Lone(span.q_begin, span.kv_len, keys.split(part_blocks), values.flatten(), starts)

    def _short(self, group: list[_Span]) -> _Short:
        sizes = self._sizes
        longest, q_len = group[0].kv_len, group[0].q_len
        gather = torch.empty(2, len(group), longest, dtype=torch.int64)
        for keys, span in zip(gather[0], group, strict=True):
            rows = self._key_rows(span)
            keys[: span.kv_len] = rows
            keys[span.kv_len :] = rows[0]  # masked below, but it must be finite: what lies behind the end may be anything
        gather[1] = gather[0] + sizes.block_tokens
        mask = None
        if q_len > 1 or group[-1].kv_len != longest:
            last_visible = torch.tensor([s.kv_len for s in group])[:, None] - q_len + torch.arange(q_len)
            hidden = torch.arange(longest) > last_visible[:, None, :, None].expand(-1, sizes.group, -1, -1)
            mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf"))
            mask = mask.view(len(group), 1, sizes.group * q_len, longest)
        return _Short(_rows_of(group), gather.flatten(), mask, len(group), q_len)

    def _long(self, span: _Span) -> _Long:
        prefix_len = span.kv_len - span.q_len
        keys = span.table[: self._sizes.num_blocks(prefix_len)] * (2 * self._sizes.num_layers)
        return _Long(span.q_begin, span.q_begin + span.q_len, prefix_len, torch.cat([keys, keys + 1]))

    def _grow_workspace(self, lone: list[_Lone], short: list[_Short], long: list[_Long]) -> None:
        num_blocks = [s.keys[0].numel() for s in lone] + [c.gather.numel() for c in long]
        sizes = [s.gather.numel() * self._rows.shape[1] for s in short] + [num * self._blocks.shape[1] for num in num_blocks]
        needed = max(sizes, default=0)
        if needed > self._workspace.numel():
            self._workspace = self._rows.new_empty(needed)

    # ------------------------------------------------------------------------------------------------ once per layer

    def _normalise(self, heads: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> Tensor:
        heads = heads.float()
        if q_norm is None or k_norm is None:
            return heads
        split = self._sizes.num_heads
        weight = torch.cat([q_norm.expand(split, -1), k_norm.expand(self._sizes.num_kv_heads, -1)]).float()
        return F.rms_norm(heads, (self._sizes.head_dim,), eps=self._sizes.norm_eps) * weight

    def _attend_lone(self, layer: int, q: Tensor, lone: _Lone) -> Tensor:
        """[heads, head_dim]. The values are the rows of a table of which each query head sums up some, by weight: nothing is copied."""
        sizes = self._sizes
        queries = q.view(sizes.num_kv_heads, sizes.group, sizes.head_dim) * sizes.scale
        parts = (self._gathered(self._blocks[2 * layer :], part).view(-1, sizes.num_kv_heads, sizes.head_dim) for part in lone.keys)
        scores = torch.cat([torch.bmm(queries, keys.permute(1, 2, 0)) for keys in parts], dim=-1)
        # Behind kv_len the last block may hold anything, so its scores are cut off and not weighed with 0.
        weights = scores[..., : lone.kv_len].softmax(dim=-1).flatten()
        values = self._heads[2 * layer * sizes.block_tokens * sizes.num_kv_heads :]
        return F.embedding_bag(lone.values, values, lone.starts, mode="sum", per_sample_weights=weights)

    def _attend_short(self, layer: int, q: Tensor, short: _Short) -> Tensor:
        """[C * q_len, heads, head_dim]. The query heads of a KV head become rows of one small matrix, so that no key is copied per head."""
        sizes, (chunks, q_len) = self._sizes, (short.num_chunks, short.q_len)
        kv = self._gathered(self._rows[2 * layer * sizes.block_tokens :], short.gather)
        keys, values = kv.view(2, chunks, -1, sizes.num_kv_heads, sizes.head_dim).transpose(2, 3)
        grouped = q.view(chunks, q_len, sizes.num_kv_heads, sizes.group, sizes.head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=short.mask, scale=sizes.scale)
        return out.unflatten(2, (sizes.group, q_len)).permute(0, 3, 1, 2, 4).reshape(q.shape)

    def _attend_long(self, layer: int, q: Tensor, k: Tensor, v: Tensor, chunk: _Long) -> Tensor:
        """[q_len, heads, head_dim]. A prefix is attended apart and joined by log-sum-exp, so that no mask is ever built."""
        sizes = self._sizes
        queries, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        if chunk.prefix_len == 0:
            own = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True, scale=sizes.scale)
            return own.squeeze(0).transpose(0, 1)
        kv = self._gathered(self._blocks[2 * layer :], chunk.gather)
        past = kv.view(2, 1, -1, sizes.num_kv_heads, sizes.head_dim)[:, :, : chunk.prefix_len].transpose(2, 3)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        own, own_lse = flash(queries, self._per_head(keys), self._per_head(values), is_causal=True, scale=sizes.scale)
        grouped = queries.reshape(1, sizes.num_kv_heads, -1, sizes.head_dim)
        before, before_lse = flash(grouped, past[0], past[1], scale=sizes.scale)
        weight = torch.sigmoid(before_lse.reshape(own_lse.shape) - own_lse).unsqueeze(-1)
        joined = torch.lerp(own.float(), before.reshape(own.shape).float(), weight)
        return joined.squeeze(0).transpose(0, 1)

    def _per_head(self, kv: Tensor) -> Tensor:
        return kv.repeat_interleave(self._sizes.group, dim=1)

    def _gathered(self, source: Tensor, index: Tensor) -> Tensor:
        out = self._workspace[: index.numel() * source.shape[1]].view(index.numel(), source.shape[1])
        return torch.index_select(source, 0, index, out=out)


def _rows_of(group: list[_Span]) -> Tensor | slice:
    """The tokens of chunks of equal length; copying them is spared where they follow each other already."""
    begins, q_len = [span.q_begin for span in group], group[0].q_len
    if begins == list(range(begins[0], begins[0] + len(group) * q_len, q_len)):
        return slice(begins[0], begins[0] + len(group) * q_len)
    return (torch.tensor(begins)[:, None] + torch.arange(q_len)).flatten()


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-rotation of float32 [T, heads, head_dim], into a new tensor without temporaries."""
    half = heads.shape[-1] // 2
    out = heads * cos
    out[..., :half].addcmul_(heads[..., half:], sin, value=-1.0)
    out[..., half:].addcmul_(heads[..., :half], sin)
    return out
