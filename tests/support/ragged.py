"""Random steps over a paged arena, made to catch kernels that read what they should not. Owns the tensors of
one step; judges nothing.

Every value of the arena that no chunk may read is NaN: unused slots, the rest of a last block, the padding
block, tokens not written yet. Slots are shuffled, and requests may share the blocks of a common prefix.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.execution.attention import Attention
from penstock.engine.execution.batch import StepInputs
from penstock.models.model import ModelConfig


class Span(NamedTuple):
    """One chunk of a step: `q_len` tokens after `prefix_len` cached ones."""

    prefix_len: int
    q_len: int
    writes: bool = True  # False: its KV is cached already and must not be written (a full match)

    @property
    def kv_len(self) -> int:
        return self.prefix_len + self.q_len


@dataclass(frozen=True, slots=True)
class RaggedStep:
    """An arena with cached prefixes, and the inputs of a step over it."""

    config: ModelConfig
    arena: Tensor
    rope: Tensor
    inputs: StepInputs
    spans: tuple[Span, ...]
    seed: int

    @property
    def num_tokens(self) -> int:
        return sum(span.q_len for span in self.spans)

    def with_own_arena(self) -> RaggedStep:
        """The same step over a copy, so that two backends can be compared."""
        return replace(self, arena=self.arena.clone())

    def qkv(self, layer: int = 0) -> Tensor:
        """Random projections of the step's tokens, the same for every call with the same layer."""
        width = self.config.qkv_width
        return _random(
            (self.num_tokens, width), self.arena.dtype, self.arena.device, self.seed * 1000 + layer
        )


def ragged_config(
    num_heads: int = 6, num_kv_heads: int = 2, head_dim: int = 32, num_layers: int = 2
) -> ModelConfig:
    """Only what attention looks at matters."""
    return ModelConfig(
        architecture="qwen3",
        num_layers=num_layers,
        hidden=num_heads * head_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn=64,
        vocab=64,
        max_position=4096,
        rope_theta=10000.0,
        norm_eps=1e-6,
        tied_embeddings=True,
    )


def rope_table(config: ModelConfig, device: torch.device | str = "cpu") -> Tensor:
    """float32 [max_position, head_dim]: cos of the half-rotation angles, then their sin. Below it the same of
    the layers that turn otherwise."""
    half = torch.arange(config.head_dim // 2, dtype=torch.float64)
    thetas = [config.rope_theta, *([] if config.other_rope is None else [config.other_rope.theta])]
    tables = []
    for theta in thetas:
        turns = theta ** (-2.0 * half / config.head_dim) if theta else torch.zeros_like(half)
        angles = torch.arange(config.max_position, dtype=torch.float64)[:, None] * turns
        tables.append(torch.cat([angles.cos(), angles.sin()], dim=1))
    return torch.cat(tables).float().to(device)


def ragged_step(
    config: ModelConfig,
    spans: Sequence[Span],
    *,
    block_tokens: int = 16,
    shared_blocks: int = 0,
    spare_slots: int = 2,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> RaggedStep:
    """A step of `spans`, which must be ordered with single tokens first. Requests share the first
    `shared_blocks` blocks as far as their prefixes reach. Behind every table stands an entry that belongs to
    nobody and points at NaN."""
    spans = tuple(spans)
    assert max(span.kv_len for span in spans) <= config.max_position, "the rotary table has no such position"
    device = torch.device(device)
    lengths = [-(-span.kv_len // block_tokens) for span in spans]
    shared = [min(shared_blocks, span.prefix_len // block_tokens) for span in spans]
    num_slots = max(shared, default=0) + sum(lengths) - sum(shared) + 1 + spare_slots
    order = torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed)).tolist()
    common = [order.pop() for _ in range(max(shared, default=0))]
    nobody = order.pop()
    tables = [
        common[:kept] + [order.pop() for _ in range(length - kept)]
        for kept, length in zip(shared, lengths, strict=True)
    ]

    shape = (num_slots + 1, config.num_layers, 2, block_tokens, config.num_kv_heads, config.head_dim)
    arena = torch.full(shape, float("nan"), dtype=dtype, device=device)
    write_at: list[int] = []
    for number, (table, span) in enumerate(zip(tables, spans, strict=True)):
        _fill(arena, table, span.prefix_len if span.writes else span.kv_len, seed * 100 + number)
        for position in range(span.prefix_len, span.kv_len):
            slot = table[position // block_tokens] if span.writes else num_slots
            write_at.append(slot * block_tokens + position % block_tokens)
    inputs = step_inputs(spans, [[*table, nobody] for table in tables], write_at, device)
    return RaggedStep(config, arena, rope_table(config, device), inputs, spans, seed)


def _fill(arena: Tensor, table: Sequence[int], num_tokens: int, seed: int) -> None:
    """Random KV in the first `num_tokens` tokens of a table."""
    block_tokens = arena.shape[3]
    positions = torch.arange(num_tokens, device=arena.device)
    slots = torch.tensor(table, dtype=torch.int64, device=arena.device)[positions // block_tokens]
    values = _random((num_tokens, arena.shape[1], 2, *arena.shape[4:]), arena.dtype, arena.device, seed)
    arena[slots, :, :, positions % block_tokens] = values


def outputs(backend: Attention, step: RaggedStep, *, norms: bool = True) -> list[Tensor]:
    """What a backend over the step's own arena makes of it: q, k, v and attention of every layer, then the
    arena without its padding block, which may hold anything."""
    dim, dtype, device = step.config.head_dim, step.arena.dtype, step.arena.device
    q_norm, k_norm = (_random((2, dim), dtype, device, step.seed + 7) * 0.2 + 1.0) if norms else (None, None)
    made: list[Tensor] = []
    for layer in range(step.config.num_layers):
        q, k, v = backend.rotate_and_write(layer, step.qkv(layer), q_norm, k_norm, step.inputs)
        made += [q, k, v, backend.attend(layer, q, k, v, step.inputs)]
    return [*made, step.arena[:-1]]


def step_inputs(
    spans: Sequence[Span],
    tables: Sequence[Sequence[int]],
    write_at: Sequence[int],
    device: torch.device | str,
) -> StepInputs:
    """The tensors of a step whose chunks have these tables, one behind the other."""

    def whole(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    q_starts, table_starts = [0], [0]
    for span, table in zip(spans, tables, strict=True):
        q_starts.append(q_starts[-1] + span.q_len)
        table_starts.append(table_starts[-1] + len(table))
    return StepInputs(
        tokens=whole([0] * q_starts[-1]),
        positions=whole([p for span in spans for p in range(span.prefix_len, span.kv_len)]),
        write_at=whole(write_at),
        q_starts=whole(q_starts),
        kv_lens=whole([span.kv_len for span in spans]),
        table_starts=whole(table_starts[:-1]),
        tables=whole([slot for table in tables for slot in table]),
        rows=whole(range(len(spans))),
        sample_at=whole([]),
        sample_rows=whole([]),
        num_decodes=next((i for i, span in enumerate(spans) if span.q_len != 1), len(spans)),
        max_q_len=max((span.q_len for span in spans), default=0),
        max_kv_len=max((span.kv_len for span in spans), default=0),
        spans=tuple(
            (span.prefix_len, span.q_len) for span in itertools.dropwhile(lambda span: span.q_len == 1, spans)
        ),
    )


@functools.lru_cache(maxsize=32)  # made once, so that a capture may use what an earlier call has made
def _random(shape: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(dtype)


def leave_out(step: RaggedStep, tokens: Sequence[int]) -> None:
    """What makes drafts has no KV of these tokens of every request, as far as they come before its chunk."""
    block_tokens = step.arena.shape[3]
    for start, span in zip(step.inputs.table_starts.tolist(), step.spans, strict=True):
        for position in tokens:
            if position < span.prefix_len:
                step.arena[
                    int(step.inputs.tables[start + position // block_tokens]), :, :, position % block_tokens
                ] = 0.0
