"""Deterministic attention on the CPU: the result for a token depends only on the token and its context, bit
by bit, not on the rest of the batch or on cache hits. Owns its masks and one step's plan; the arena owns the
KV.

A token is always computed in calls of the same shape. Its query heads are rows of a small matrix, together
with those of a fixed number of neighbours; neighbours that are not computed are zeros. Its keys are its
context, masked and padded to a multiple of `PAD_TOKENS`. The order of sums in the fused kernel depends only
on these shapes and on memory alignment.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.execution.attention.cpu import FLASH, ChunkSpan, CpuAttention, Preparation, PreparedStep
from penstock.engine.execution.batch import StepInputs
from penstock.errors import InvariantBroken
from penstock.models.model import ModelConfig

PAD_TOKENS = 128  # contexts are padded to a multiple of this many tokens
# rows of a query matrix are a multiple of this: then the kernel's buffers are aligned alike in all threads
QUERY_ROWS = 8


class _Call(NamedTuple):
    """Tokens of one chunk whose contexts are padded to the same length."""

    begin: int  # of the step's tokens
    end: int
    first: int  # position of the first token, modulo `PAD_TOKENS`
    padded: int  # keys


class _Chunk(NamedTuple):
    """Consecutive tokens of one request: their keys are gathered once."""

    gather: Tensor  # [2 * padded] rows of the arena at layer 0: all keys, then all values
    space: Tensor  # where they are gathered
    calls: list[_Call]


class SteadyAttention(CpuAttention):
    """`Attention` in float32 on the CPU. Whole sequences are on the device, and all layers have KV of every
    token."""

    def __init__(
        self, arena: Tensor, config: ModelConfig, rope: Tensor, blank_from: int | None = None
    ) -> None:
        super().__init__(arena, config, rope, blank_from)
        if arena.dtype != torch.float32:
            raise InvariantBroken(f"steady attention is computed in float32, not in {arena.dtype}")
        self._preparation = self._steady = _SteadyPreparation(arena, self._sizes, rope)
        group = self._sizes.group
        # tokens of a query matrix
        self._tile = max(1, 1 << (QUERY_ROWS // group).bit_length() - 1) if group <= QUERY_ROWS else 1
        self._num_rows = -(-group * self._tile // QUERY_ROWS) * QUERY_ROWS
        self._masks: dict[int, Tensor] = {}  # by window

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, inputs: StepInputs) -> Tensor:
        if self._step is None or self._step.inputs is not inputs:
            raise InvariantBroken("attend before this step's KV was written")
        sizes, out = self._sizes, q.new_zeros(q.shape)
        for chunk in self._steady.chunks:
            kv = torch.index_select(self._layers[layer].rows, 0, chunk.gather, out=chunk.space)
            keys, values = kv.view(2, -1, sizes.num_kv_heads, sizes.head_dim).transpose(1, 2)
            for call in chunk.calls:
                out[call.begin : call.end] = self._attend_call(
                    q[call.begin : call.end],
                    keys[:, : call.padded],
                    values[:, : call.padded],
                    call,
                    sizes.windows[layer],
                )
        return out.flatten(1)

    def _attend_call(self, q: Tensor, keys: Tensor, values: Tensor, call: _Call, window: int) -> Tensor:
        sizes, tile, group = self._sizes, self._tile, self._sizes.group
        first_tile, end_tile = call.first // tile, -(-(call.first + len(q)) // tile)
        num_tiles, skipped = end_tile - first_tile, call.first - first_tile * tile
        tokens = q.new_zeros(num_tiles * tile, sizes.num_heads, sizes.head_dim)
        tokens[skipped : skipped + len(q)] = q
        queries = q.new_zeros(num_tiles, sizes.num_kv_heads, self._num_rows, sizes.head_dim)
        grouped = tokens.view(num_tiles, tile, sizes.num_kv_heads, group, sizes.head_dim).permute(
            0, 2, 3, 1, 4
        )
        queries[:, :, : group * tile] = grouped.flatten(2, 3)
        mask = self._mask(window, call.padded)[first_tile:end_tile]
        of_all = (x.expand(num_tiles, -1, -1, -1) for x in (keys, values))
        attended = FLASH(queries, *of_all, attn_mask=mask, scale=sizes.scale)[0][:, :, : group * tile]
        attended = attended.unflatten(2, (group, tile)).permute(0, 3, 1, 2, 4).reshape(tokens.shape)
        return attended[skipped : skipped + len(q)]

    def _mask(self, window: int, num_keys: int) -> Tensor:
        """[tiles, 1, query rows, keys], added to the scores of all tokens whose contexts are padded to
        `num_keys`. It is the tail of the longest mask so far, since visibility is counted from the end."""
        mask = self._masks.get(window)
        if mask is None or mask.shape[-1] < num_keys:
            length = num_keys if mask is None else max(num_keys, 2 * mask.shape[-1])
            mask = self._masks[window] = self._make_mask(window, length)
        return mask[..., mask.shape[-1] - num_keys :]

    def _make_mask(self, window: int, length: int) -> Tensor:
        tile, group = self._tile, self._sizes.group
        last = length - PAD_TOKENS + torch.arange(PAD_TOKENS).view(-1, 1, tile, 1)  # visible to each token
        keys = torch.arange(length)
        hidden = keys > last
        if window:
            hidden |= keys <= last - window
        mask = torch.zeros(PAD_TOKENS // tile, 1, self._num_rows, length)
        mask[:, 0, : group * tile].unflatten(1, (group, tile)).masked_fill_(hidden, float("-inf"))
        return mask


class _SteadyPreparation(Preparation):
    """Makes a step's plan, the same for all layers."""

    chunks: tuple[_Chunk, ...] = ()

    def step(self, inputs: StepInputs) -> PreparedStep:
        self.chunks = tuple(self._chunk(span) for span in self.spans(inputs))
        return PreparedStep(inputs, self._tokens(inputs), ())

    def _chunk(self, span: ChunkSpan) -> _Chunk:
        rows = self.key_rows(span)
        # masked, but must be finite: memory after the end may hold anything
        padding = -span.kv_len % PAD_TOKENS
        keys = torch.cat([rows, rows[:1].expand(padding)])
        gather = torch.cat([keys, keys + self._sizes.block_tokens])
        return _Chunk(gather, self._space(len(gather), self._token_width), list(_calls(span)))


def _calls(span: ChunkSpan) -> Iterator[_Call]:
    begin, position = span.q_begin, span.kv_len - span.q_len
    while position < span.kv_len:
        end = min(span.kv_len, (position // PAD_TOKENS + 1) * PAD_TOKENS)
        yield _Call(begin, begin + end - position, position % PAD_TOKENS, -(-end // PAD_TOKENS) * PAD_TOKENS)
        begin, position = begin + end - position, end
