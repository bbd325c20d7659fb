"""Attention written to be read: one chunk and one token at a time, as it is defined. The other backends are
tested against it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.engine.execution.attention import Geometry
from penstock.engine.execution.batch import StepInputs
from penstock.errors import InvariantBroken
from penstock.models.model import ModelConfig


class ReferenceAttention:
    """Reference of `Attention`, on any device. All arithmetic is in the type `math`."""

    def __init__(
        self,
        arena: Tensor,
        config: ModelConfig,
        rope: Tensor,
        blank_from: int | None = None,
        math: torch.dtype = torch.float32,
    ) -> None:
        self._sizes = Geometry.of(arena, config, rope, blank_from)
        self.arena = arena
        self._ropes = self._sizes.rope_tables(rope)
        self._math = math

    def warm(self, max_chunk: int, max_tokens: int, progress: Callable[[str, int, int], None]) -> None:
        """Nothing is compiled here."""

    def rotate_and_write(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, inputs: StepInputs
    ) -> tuple[Tensor, Tensor, Tensor]:
        sizes = self._sizes
        heads = qkv.view(qkv.shape[0], -1, sizes.head_dim)
        q, k, v = heads.split([sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads], dim=1)
        turns = self._ropes[layer][inputs.positions.long()]
        q = self._rotate(self._normalise(q, q_norm), turns).to(qkv.dtype)
        k = self._rotate(self._normalise(k, k_norm), turns).to(qkv.dtype)
        for token, at in enumerate(inputs.write_at.tolist()):
            slot, offset = divmod(at, sizes.block_tokens)
            self.arena[slot, layer, 0, offset] = k[token]
            self.arena[slot, layer, 1, offset] = v[token]
        return q, k, v

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, inputs: StepInputs) -> Tensor:
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        q_starts, window = inputs.q_starts.tolist(), self._sizes.windows[layer]
        for chunk, kv_len in enumerate(inputs.kv_lens.tolist()):
            begin, end = q_starts[chunk], q_starts[chunk + 1]
            keys, values = self._cached(layer, chunk, kv_len, inputs)
            for token in range(begin, end):
                visible = kv_len - (end - 1 - token)
                first = max(0, visible - window) if window else 0
                if visible > 0:
                    seen = torch.arange(first, visible, device=keys.device)
                    if layer >= self._sizes.blank_from:
                        seen = seen[keys[first:visible].flatten(1).any(dim=1)]
                    out[token] = self._one_token(q[token], keys[seen], values[seen])
        return out.view(q.shape[0], -1)

    def _normalise(self, heads: Tensor, weight: Tensor | None) -> Tensor:
        heads = heads.to(self._math)
        if weight is None:
            return heads
        mean_square = heads.square().mean(dim=-1, keepdim=True)
        return heads * torch.rsqrt(mean_square + self._sizes.norm_eps) * weight.to(self._math)

    def _rotate(self, heads: Tensor, turns: Tensor) -> Tensor:
        cos, sin = turns.to(self._math).unsqueeze(1).chunk(2, dim=-1)
        first, second = heads.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _cached(self, layer: int, chunk: int, kv_len: int, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Keys and values [kv_len, kv_heads, head_dim] of one chunk, in token order."""
        begin = int(inputs.table_starts[chunk])
        num_blocks = self._sizes.num_blocks(kv_len)
        num_entries = table_end(inputs, begin) - begin
        if num_entries < num_blocks:
            raise InvariantBroken(
                f"chunk {chunk}: {kv_len} tokens need {num_blocks} blocks, its table has {num_entries}"
            )
        slots = inputs.tables[begin : begin + num_blocks].long()
        kv = self.arena[slots, layer].to(self._math).transpose(0, 1).flatten(1, 2)
        return kv[0, :kv_len], kv[1, :kv_len]

    def _one_token(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Softmax attention of q [heads, head_dim] over keys and values [n, kv_heads, head_dim]."""
        keys = keys.repeat_interleave(self._sizes.group, dim=1)
        values = values.repeat_interleave(self._sizes.group, dim=1)
        scores = torch.einsum("hd,nhd->hn", q.to(self._math), keys) * self._sizes.scale
        return torch.einsum("hn,nhd->hd", scores.softmax(dim=-1), values).to(q.dtype)


def table_end(inputs: StepInputs, begin: int) -> int:
    """Upper bound for the end of the table that begins at `begin`: the next table, or the end of the
    tensor."""
    later = inputs.table_starts[inputs.table_starts > begin]
    return int(later.min()) if later.numel() else inputs.tables.numel()
