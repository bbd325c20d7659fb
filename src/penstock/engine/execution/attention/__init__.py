"""Attention over the paged KV cache: one file per backend, the CPU reference first."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from penstock.engine.execution.batch import StepInputs


class Partial(NamedTuple):
    """Attention of a step's tokens over some of their keys, to which more are added."""

    out: Tensor  # float32 [T, heads * head_dim]
    lse: Tensor  # float32 [T, heads]: log-sum-exp of the scores, to the backend's own base


class Attention(Protocol):
    """One backend over one arena. Built as `Backend(arena, config, rope)`, where `arena` is the block-major tensor
    [num_slots + 1, layers, 2, block_tokens, kv_heads, head_dim] whose last slot is the padding block, `config` the ModelConfig
    and `rope` the model's [max_position, head_dim] table."""

    arena: Tensor
    blank_from: int  # in layers from here on nobody attends to keys that are all zeros: what makes drafts has left these tokens out
    lse_nats: float  # of one unit of what `Partial.lse` holds

    def warm(self, max_chunk: int, max_tokens: int, progress: Callable[[str, int, int], None]) -> None:
        """Compile and plan whatever steps could need, on the thread that will launch them. Chunks have at most `max_chunk` tokens,
        sequences `max_tokens`."""

    def rotate_and_write(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, inputs: StepInputs
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, inputs: StepInputs) -> Tensor: ...

    def attend_resident(self, layer: int, q: Tensor, k: Tensor, v: Tensor, inputs: StepInputs) -> Partial:
        """The same over what is on the device, for a step some of whose sequences begin with blocks in host memory."""

    def fetch(self, layer: int, host: Tensor, tables: Tensor, first: int, into: Tensor) -> None:
        """Copy one layer of blocks of the arena `host`, whose slots are in `tables` from `first` on, into contiguous keys and values
        [2, tokens, kv_heads, head_dim], which they fill."""

    def add_piece(self, partial: Partial, q: Tensor, rows: tuple[int, int], piece: Tensor) -> None:
        """Add such keys and values, all of which the tokens `rows` see, to what these have attended to."""
