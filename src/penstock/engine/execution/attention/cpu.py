"""Attention for the CPU: paged KV is gathered into a workspace and handed to PyTorch's fused kernel, except
that a single token sums its values in place. Owns that workspace and one step's indices and masks; the arena
owns the KV."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.execution.attention import Geometry, Partial
from penstock.engine.execution.batch import StepInputs
from penstock.errors import InvariantBroken
from penstock.models.model import ModelConfig

# All measured with SmolLM2-135M (9 query heads, 3 KV heads of 64, fp32) on two cores.
# Chunks of at most this many tokens are batched across requests with a mask; longer ones run one by one
# without a mask.
SHORT_TOKENS = 16
# KV gathered at a time for short chunks: it stays in a core's cache until it is read
GROUP_BYTES = 4 << 20
PAD_TOKENS = 128  # a call costs about as much as this many keys, so lengths this close share a call
PAD_SHARE = 0.2  # lengths within this share of the longest share a call, too
# a single token that attends to at least this many is computed alone, without padding or copied values; so is
# any token that is alone in its step
LONE_TOKENS = 512
LONE_GROUP = 4  # only if at most this many query heads share a KV head: each of them reads the values again
# keys gathered at a time for such a token: they stay in a core's own cache until multiplied
KEY_BYTES = 768 << 10
# tokens of a longer chunk that attend together in a layer with a window: all keys that one of them sees are
# read
BAND_TOKENS = 128
KEPT_MASKS = 4  # after the first window all full bands have the same mask
# MKL multiplies 4 or more rows several times faster if the row stride of the result is a multiple of this
# many floats
SCORE_ALIGN = 256
# an arena of at most this many rows uses 32-bit indices, which saves a third of the time for values
INT32_ROWS = 1 << 31


class ChunkSpan(NamedTuple):
    """One chunk as host numbers."""

    q_begin: int
    q_len: int
    kv_len: int  # tokens that it attends to, from the first visible one on
    table: Tensor  # int64 slots of these tokens, no others
    skipped: int = 0  # tokens of the first slot that are not visible

    def within(self, window: int, block_tokens: int) -> ChunkSpan:
        """The span without keys outside the window of all its tokens."""
        first = self.kv_len - self.q_len + 1 - window
        if not window or first <= 0:
            return self
        num_blocks, skipped = divmod(first, block_tokens)
        return ChunkSpan(self.q_begin, self.q_len, self.kv_len - first, self.table[num_blocks:], skipped)


class _Layer(NamedTuple):
    """Views of the arena that start at one layer, so that an index of layer 0 finds that layer: keys first,
    values a block later."""

    heads: Tensor  # rows of one head
    rows: Tensor  # rows of one token
    blocks: Tensor  # rows of one block's keys or values


class _Tokens(NamedTuple):
    """How the tokens of a step are rotated, and where they are written."""

    cos: Tensor  # [T, 1, head_dim], each twice: for the first and the second half
    sin: Tensor  # [T, 1, head_dim / 2]
    key_rows: Tensor  # [T] rows of the arena at layer 0
    value_rows: Tensor


class _Short(NamedTuple):
    """Short chunks of equal q_len and similar kv_len, attended in one call. Or a band of a longer chunk, in a
    layer with a window."""

    rows: Tensor | slice  # [C * q_len] tokens of the step; a slice where they are adjacent
    gather: Tensor  # [2 * C * padded kv_len] rows of the arena at layer 0: all keys, then all values
    space: Tensor  # where they are gathered
    # [C, 1, group * q_len, padded kv_len], added to the scores; None: everything is visible
    mask: Tensor | None
    num_chunks: int
    q_len: int


class _Part(NamedTuple):
    """Keys of a single token's context, as many as fit into a core's cache."""

    gather: Tensor  # blocks of the arena at layer 0
    space: Tensor  # where they are gathered
    keys: Tensor  # [kv_heads, head_dim, tokens] of `space`, up to the end of the context
    scores: Tensor  # [kv_heads, group, tokens], view of all scores


class _Lone(NamedTuple):
    """A single token with a long context, or in a step of its own."""

    row: int
    parts: list[_Part]
    scores: Tensor  # [num_heads, kv_len]
    values: Tensor  # [num_heads * kv_len] head rows of the arena at layer 0 that each query head sums
    starts: Tensor  # [num_heads] start of each query head's rows


class _Long(NamedTuple):
    """One longer chunk: its own tokens causally, and the prefix before them in full."""

    begin: int
    end: int
    prefix_len: int
    gather: Tensor  # [2 * blocks of the prefix] blocks of the arena at layer 0: keys, then values
    space: Tensor  # where they are gathered


class _Plan(NamedTuple):
    """How the tokens of a step attend in layers of one window."""

    lone: list[_Lone]
    short: list[_Short]
    long: list[_Long]
    only: _Lone | _Short | None  # set if it covers all tokens in order, so that no outputs are merged


@dataclass(slots=True)
class PreparedStep:
    """What all layers of a step share."""

    inputs: StepInputs
    tokens: Sequence[_Tokens]  # by layer
    plans: Sequence[_Plan]  # by layer


class Preparation:
    """Prepares what all layers of a step share. Owns the workspace to gather into."""

    def __init__(self, arena: Tensor, sizes: Geometry, rope: Tensor) -> None:
        self._arena = arena
        self._sizes = sizes
        self._ropes = rope.float().view(max(sizes.ropes) + 1, -1, sizes.head_dim)
        self._dtype = arena.dtype
        self._token_width = sizes.num_kv_heads * sizes.head_dim
        self._rows_per_slot = arena.stride(0) // self._token_width
        self._blocks_per_slot = self._rows_per_slot // sizes.block_tokens  # of one layer's keys, or values
        self._workspace = arena.new_empty(0)

    def step(self, inputs: StepInputs) -> PreparedStep:
        num_tokens, spans = len(inputs.positions), list(self.spans(inputs))
        longest = max((span.kv_len for span in spans), default=0)
        # A window that covers the longest context changes nothing: such layers share the plan without a
        # window.
        windows = [window if window < longest else 0 for window in self._sizes.windows]
        plans = {window: self._plan(spans, window, num_tokens) for window in dict.fromkeys(windows)}
        return PreparedStep(inputs, self._tokens(inputs), [plans[window] for window in windows])

    def _plan(self, spans: list[ChunkSpan], window: int, num_tokens: int) -> _Plan:
        alone: list[ChunkSpan] = []
        batched: list[ChunkSpan] = []
        long: list[_Long] = []
        bands: list[ChunkSpan] = []
        for span in spans:
            if span.q_len <= SHORT_TOKENS:
                seen = span.within(window, self._sizes.block_tokens)
                (alone if self._is_lone(seen, num_tokens) else batched).append(seen)
            elif window and span.kv_len > window:
                bands += self._bands(span, window)
            else:
                long.append(self.long(span))
        lone = [self._lone(span) for span in alone]
        short = [self._short(group, window) for group in self._grouped(batched)]
        short += [self._short([band], window) for band in bands]
        return _Plan(lone, short, long, _only(num_tokens, lone, short))

    def _tokens(self, inputs: StepInputs) -> list[_Tokens]:
        """By layer."""
        size, positions = self._sizes.block_tokens, inputs.positions.long()
        at = inputs.write_at.long()
        key_rows = at // size * self._rows_per_slot + at % size
        made = []
        for rope in self._ropes:
            cos, sin = rope[positions].unsqueeze(1).chunk(2, dim=-1)
            made.append(_Tokens(torch.cat([cos, cos], dim=-1), sin, key_rows, key_rows + size))
        return [made[number] for number in self._sizes.ropes]

    def spans(self, inputs: StepInputs) -> Iterator[ChunkSpan]:
        q_starts, kv_lens = inputs.q_starts.tolist(), inputs.kv_lens.tolist()
        table_starts = inputs.table_starts.tolist()
        tables = inputs.tables.long()
        first = 0
        for chunk, kv_len in enumerate(kv_lens):
            if (
                chunk + 1 < len(kv_lens)
                and kv_lens[chunk + 1] == kv_len + 1
                and table_starts[chunk + 1] == table_starts[chunk]
            ):
                continue  # rows of one request, a token and its drafts: their keys are gathered once
            q_begin, first = q_starts[first], chunk + 1
            q_len = q_starts[chunk + 1] - q_begin
            if q_len == 0 or kv_len == 0:
                continue
            table = tables[table_starts[chunk] :][: self._sizes.num_blocks(kv_len)]
            if table.numel() < self._sizes.num_blocks(kv_len) or kv_len < q_len:
                raise InvariantBroken(
                    f"chunk {chunk}: {q_len} of {kv_len} tokens over a table of {table.numel()} blocks"
                )
            yield ChunkSpan(q_begin, q_len, kv_len, table)

    def _is_lone(self, span: ChunkSpan, num_tokens: int) -> bool:
        """Only for float32: bfloat16 would round the scores, while the fused kernel keeps them in float32."""
        is_worth_it = span.q_len == 1 and (num_tokens == 1 or span.kv_len >= LONE_TOKENS)
        return is_worth_it and self._sizes.group <= LONE_GROUP and self._dtype == torch.float32

    def _grouped(self, spans: list[ChunkSpan]) -> Iterator[list[ChunkSpan]]:
        """Chunks that share a call: equal q_len, lengths close enough that padding is cheaper than another
        call."""
        token_bytes = 2 * self._token_width * self._dtype.itemsize
        group: list[ChunkSpan] = []
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

    def key_rows(self, span: ChunkSpan) -> Tensor:
        """[kv_len] rows of the arena at layer 0 that hold the keys; the values follow a block's tokens
        later."""
        within = torch.arange(self._sizes.block_tokens)
        return (span.table[:, None] * self._rows_per_slot + within).flatten()[
            span.skipped : span.skipped + span.kv_len
        ]

    def _lone(self, span: ChunkSpan) -> _Lone:
        sizes = self._sizes
        of_kv_head = (self.key_rows(span) + sizes.block_tokens) * sizes.num_kv_heads + torch.arange(
            sizes.num_kv_heads
        )[:, None]
        num_heads = self._arena.shape[0] * self._arena.stride(0) // sizes.head_dim
        width = torch.int32 if num_heads <= INT32_ROWS else torch.int64
        values = of_kv_head.to(width).repeat_interleave(sizes.group, dim=0).flatten()
        starts = torch.arange(0, values.numel(), span.kv_len, dtype=width)
        stride = span.kv_len if sizes.group < 4 else -(-span.kv_len // SCORE_ALIGN) * SCORE_ALIGN
        scores = torch.empty(sizes.num_kv_heads, sizes.group, stride)[..., : span.kv_len]
        return _Lone(span.q_begin, list(self._parts(span, scores)), scores.flatten(0, 1), values, starts)

    def _parts(self, span: ChunkSpan, scores: Tensor) -> Iterator[_Part]:
        """After kv_len the last block may hold anything, even NaN. It is never multiplied, not even by a
        weight of 0."""
        sizes = self._sizes
        block_width = sizes.block_tokens * self._token_width
        part_blocks = max(1, KEY_BYTES // (block_width * self._dtype.itemsize))
        begin, skipped = 0, span.skipped
        for gather in (span.table * self._blocks_per_slot).split(part_blocks):
            space = self._space(len(gather), block_width)
            of_part = scores[..., begin : begin + len(gather) * sizes.block_tokens - skipped]
            tokens = space.view(-1, sizes.num_kv_heads, sizes.head_dim)[skipped : skipped + of_part.shape[-1]]
            yield _Part(gather, space, tokens.permute(1, 2, 0), of_part)
            begin, skipped = begin + of_part.shape[-1], 0

    def _short(self, group: list[ChunkSpan], window: int) -> _Short:
        sizes = self._sizes
        group = sorted(group, key=lambda span: span.q_begin)
        longest, q_len = max(span.kv_len for span in group), group[0].q_len
        gather = torch.empty(2, len(group), longest, dtype=torch.int64)
        for keys, span in zip(gather[0], group, strict=True):
            rows = self.key_rows(span)
            keys[: span.kv_len] = rows
            # masked below, but must be finite: memory after the end may hold anything
            keys[span.kv_len :] = rows[0]
        gather[1] = gather[0] + sizes.block_tokens
        mask = None
        if q_len > 1 or any(span.kv_len != longest for span in group):
            mask = _mask(tuple(span.kv_len for span in group), q_len, window, sizes.group, self._dtype)
        return _Short(
            _rows_of(group),
            gather.flatten(),
            self._space(gather.numel(), self._token_width),
            mask,
            len(group),
            q_len,
        )

    def long(self, span: ChunkSpan) -> _Long:
        prefix_len = span.kv_len - span.q_len
        keys = span.table[: self._sizes.num_blocks(prefix_len)] * self._blocks_per_slot
        space = self._space(2 * len(keys), self._sizes.block_tokens * self._token_width)
        return _Long(span.q_begin, span.q_begin + span.q_len, prefix_len, torch.cat([keys, keys + 1]), space)

    def _bands(self, span: ChunkSpan, window: int) -> Iterator[ChunkSpan]:
        """A few tokens at a time, over all keys that one of them sees."""
        for begin in range(0, span.q_len, BAND_TOKENS):
            num = min(BAND_TOKENS, span.q_len - begin)
            kv_len = span.kv_len - span.q_len + begin + num
            band = ChunkSpan(span.q_begin + begin, num, kv_len, span.table[: self._sizes.num_blocks(kv_len)])
            yield band.within(window, self._sizes.block_tokens)

    def _space(self, num_rows: int, width: int) -> Tensor:
        """Workspace to gather into, shared by all: it is read before the next gather."""
        if num_rows * width > self._workspace.numel():
            self._workspace = self._arena.new_empty(num_rows * width)
        return self._workspace[: num_rows * width].view(num_rows, width)


class CpuAttention:
    """`Attention` in float32 or bfloat16 on the CPU."""

    lse_nats = 1.0

    def __init__(
        self, arena: Tensor, config: ModelConfig, rope: Tensor, blank_from: int | None = None
    ) -> None:
        sizes = Geometry.of(arena, config, rope, blank_from)
        part = arena.shape[3] * arena.shape[4] * arena.shape[5]
        if not arena[0].is_contiguous() or arena.stride(0) % part:
            raise InvariantBroken(
                "the CPU backend reads the arena as one flat array of blocks: a slot must be a whole number "
                "of them"
            )
        self.arena = arena
        self._sizes = sizes
        self._layers = [_from_layer(arena, layer) for layer in range(sizes.num_layers)]
        self._preparation = Preparation(arena, sizes, rope)
        self._step: PreparedStep | None = None

    def warm(self, max_chunk: int, max_tokens: int, progress: Callable[[str, int, int], None]) -> None:
        """Nothing is compiled here."""

    def rotate_and_write(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, inputs: StepInputs
    ) -> tuple[Tensor, Tensor, Tensor]:
        sizes, tokens = self._sizes, self._prepared(layer, inputs).tokens[layer]
        heads = qkv.view(qkv.shape[0], -1, sizes.head_dim)
        # Not `split`: its Python wrapper takes longer than the operation.
        rotated, v = heads.split_with_sizes((sizes.num_heads + sizes.num_kv_heads, sizes.num_kv_heads), dim=1)
        rotated = _rotate(self._normalise(rotated, q_norm, k_norm), tokens.cos, tokens.sin).to(qkv.dtype)
        q, k = rotated.split_with_sizes((sizes.num_heads, sizes.num_kv_heads), dim=1)
        rows = self._layers[layer].rows
        rows.index_copy_(0, tokens.key_rows, k.flatten(1))
        rows.index_copy_(0, tokens.value_rows, v.flatten(1))
        return q, k, v

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, inputs: StepInputs) -> Tensor:
        step = self._step
        if step is None or step.inputs is not inputs:
            raise InvariantBroken("attend before this step's KV was written")
        plan = step.plans[layer]
        if isinstance(plan.only, _Lone):
            return self._attend_lone(layer, q, plan.only).view(1, -1)
        if plan.only is not None:
            return self._attend_short(layer, q, plan.only).flatten(1)
        out = q.new_zeros(q.shape)
        for lone in plan.lone:
            out[lone.row] = self._attend_lone(layer, q[lone.row], lone)
        for short in plan.short:
            out[short.rows] = self._attend_short(layer, q[short.rows], short)
        for chunk in plan.long:
            own = slice(chunk.begin, chunk.end)
            out[own] = self._attend_long(layer, q[own], k[own], v[own], chunk).out.view(q[own].shape)
        return out.flatten(1)

    def attend_resident(self, layer: int, q: Tensor, k: Tensor, v: Tensor, inputs: StepInputs) -> Partial:
        sizes = self._sizes
        partial = Partial(
            q.new_empty(len(q), sizes.num_heads * sizes.head_dim, dtype=torch.float32),
            q.new_empty(q.shape[:2]).float(),
        )
        for span in self._preparation.spans(inputs):
            chunk = self._preparation.long(span)
            own = slice(chunk.begin, chunk.end)
            partial.out[own], partial.lse[own] = self._attend_long(layer, q[own], k[own], v[own], chunk)
        return partial

    def fetch(self, layer: int, host: Tensor, tables: Tensor, first: int, into: Tensor) -> None:
        blocks = into.view(2, -1, *host.shape[3:])
        slots = tables[first : first + blocks.shape[1]].long()
        for half, part in enumerate(blocks):
            torch.index_select(host[:, layer, half], 0, slots, out=part)

    def add_piece(self, partial: Partial, q: Tensor, rows: tuple[int, int], piece: Tensor) -> None:
        """The query heads of a KV head are rows of one matrix, so that no key is copied per head."""
        sizes, own = self._sizes, slice(*rows)
        num_rows = own.stop - own.start
        queries = q[own].transpose(0, 1).reshape(1, sizes.num_kv_heads, -1, sizes.head_dim)
        keys, values = piece.transpose(1, 2).unsqueeze(1)
        out, lse = FLASH(queries, keys, values, scale=sizes.scale)
        out = out.reshape(sizes.num_heads, num_rows, sizes.head_dim).transpose(0, 1).float()
        lse = lse.reshape(sizes.num_heads, num_rows).t().float()
        weight = torch.sigmoid(lse - partial.lse[own])
        joined = partial.out[own].view(num_rows, sizes.num_heads, sizes.head_dim)
        joined.lerp_(out, weight.unsqueeze(-1))
        partial.lse[own] = torch.logaddexp(partial.lse[own], lse)

    def _prepared(self, layer: int, inputs: StepInputs) -> PreparedStep:
        """A replay refills the tensors of `inputs` in place, so layer 0 always starts a new step."""
        if layer == 0 or self._step is None or self._step.inputs is not inputs:
            self._step = self._preparation.step(inputs)
        return self._step

    def _normalise(self, heads: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> Tensor:
        heads = heads.float()
        if q_norm is None or k_norm is None:
            return heads
        split = self._sizes.num_heads
        weight = torch.cat([q_norm.expand(split, -1), k_norm.expand(self._sizes.num_kv_heads, -1)]).float()
        return F.rms_norm(heads, (self._sizes.head_dim,), eps=self._sizes.norm_eps) * weight

    def _attend_lone(self, layer: int, q: Tensor, lone: _Lone) -> Tensor:
        """[heads, head_dim]. Each query head takes a weighted sum of arena rows, so no values are copied."""
        sizes, arena = self._sizes, self._layers[layer]
        queries = q.view(sizes.num_kv_heads, sizes.group, sizes.head_dim)
        for part in lone.parts:
            torch.index_select(arena.blocks, 0, part.gather, out=part.space)
            part.scores.baddbmm_(queries, part.keys, beta=0.0, alpha=sizes.scale)
        if layer >= sizes.blank_from:  # only a key of zeros has this score with every query
            lone.scores.masked_fill_(lone.scores == 0.0, float("-inf"))
        weights = lone.scores.softmax(dim=-1).view(-1)
        # The operation that F.embedding_bag calls, in mode 0 (sum).
        return torch.embedding_bag(arena.heads, lone.values, lone.starts, False, 0, False, weights)[0]

    def _attend_short(self, layer: int, q: Tensor, short: _Short) -> Tensor:
        """[C * q_len, heads, head_dim]. The query heads of a KV head are rows of one small matrix, so that no
        key is copied per head."""
        sizes, (chunks, q_len) = self._sizes, (short.num_chunks, short.q_len)
        kv = torch.index_select(self._layers[layer].rows, 0, short.gather, out=short.space)
        keys, values = kv.view(2, chunks, -1, sizes.num_kv_heads, sizes.head_dim).transpose(2, 3)
        grouped = (
            q.view(chunks, q_len, sizes.num_kv_heads, sizes.group, sizes.head_dim)
            .permute(0, 2, 3, 1, 4)
            .flatten(2, 3)
        )
        mask = short.mask
        if layer >= sizes.blank_from:
            mask = _without(_is_blank(keys[:, 0])[:, None, None], mask, q.dtype)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=sizes.scale)
        return out.unflatten(2, (sizes.group, q_len)).permute(0, 3, 1, 2, 4).reshape(q.shape)

    def _attend_long(self, layer: int, q: Tensor, k: Tensor, v: Tensor, chunk: _Long) -> Partial:
        """The prefix is attended separately and merged by log-sum-exp, so that no mask is built."""
        sizes, partial = self._sizes, self._attend_own(q, k, v)
        if chunk.prefix_len == 0:
            return partial
        kv = torch.index_select(self._layers[layer].blocks, 0, chunk.gather, out=chunk.space)
        past = kv.view(2, -1, sizes.num_kv_heads, sizes.head_dim)[:, : chunk.prefix_len]
        if layer >= sizes.blank_from:
            past = past[:, ~_is_blank(past[0, :, 0])]
        if past.shape[1]:  # not all of the prefix is blank
            self.add_piece(partial, q, (0, len(q)), past)
        return partial

    def _attend_own(self, q: Tensor, k: Tensor, v: Tensor) -> Partial:
        """Causal attention of tokens among themselves."""
        queries, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        heads = (x.repeat_interleave(self._sizes.group, dim=1) for x in (keys, values))
        out, lse = FLASH(queries, *heads, is_causal=True, scale=self._sizes.scale)
        return Partial(out.squeeze(0).transpose(0, 1).flatten(1).float(), lse.squeeze(0).t().float())


# returns the log-sum-exp of the scores as well
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _from_layer(arena: Tensor, layer: int) -> _Layer:
    num_slots, num_layers, _, block_tokens, num_kv_heads, head_dim = arena.shape
    width = num_kv_heads * head_dim
    first = 2 * layer * block_tokens * width
    num = (num_slots - 1) * arena.stride(0) + 2 * num_layers * block_tokens * width - first
    # a slot may hold more layers than these
    flat = arena.as_strided((num,), (1,), arena.storage_offset() + first)
    return _Layer(flat.view(-1, head_dim), flat.view(-1, width), flat.view(-1, block_tokens * width))


def _only(num_tokens: int, lone: list[_Lone], short: list[_Short]) -> _Lone | _Short | None:
    if len(lone) == num_tokens == 1:
        return lone[0]
    for first in short[:1]:
        if first.num_chunks * first.q_len == num_tokens and isinstance(first.rows, slice):
            return first
    return None


def _rows_of(group: list[ChunkSpan]) -> Tensor | slice:
    """The tokens of chunks of equal length; a slice if they are adjacent, so that no copy is needed."""
    begins, q_len = [span.q_begin for span in group], group[0].q_len
    if begins == list(range(begins[0], begins[0] + len(group) * q_len, q_len)):
        return slice(begins[0], begins[0] + len(group) * q_len)
    return (torch.tensor(begins)[:, None] + torch.arange(q_len)).flatten()


@functools.lru_cache(maxsize=KEPT_MASKS)
def _mask(kv_lens: tuple[int, ...], q_len: int, window: int, group: int, dtype: torch.dtype) -> Tensor:
    """[chunks, 1, group * q_len, longest] for chunks whose last tokens see `kv_lens` keys."""
    last_visible = torch.tensor(kv_lens)[:, None] - q_len + torch.arange(q_len)
    last_visible = last_visible[:, None, :, None].expand(-1, group, -1, -1)
    keys = torch.arange(max(kv_lens))
    hidden = keys > last_visible
    if window:
        hidden |= keys <= last_visible - window
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return mask.view(len(kv_lens), 1, group * q_len, -1)


def _is_blank(keys: Tensor) -> Tensor:
    return (keys == 0.0).all(dim=-1)


def _without(hidden: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`mask`, which is added to the scores, with `hidden` masked too."""
    return torch.where(hidden, float("-inf"), torch.zeros((), dtype=dtype) if mask is None else mask)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-rotation of float32 [T, heads, head_dim], into a new tensor without temporaries."""
    out = heads * cos
    first, second = heads.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    out_first.addcmul_(second, sin, value=-1.0)
    out_second.addcmul_(first, sin)
    return out
