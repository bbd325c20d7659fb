"""Attention over the paged KV cache: one file per backend, the CPU reference first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from penstock.engine.execution.batch import StepInputs


class Attention(Protocol):
    """One backend over one arena. Built as `Backend(arena, config, rope)`, where `arena` is the block-major tensor
    [num_slots + 1, layers, 2, block_tokens, kv_heads, head_dim] whose last slot is the padding block, `config` the ModelConfig
    and `rope` the model's [max_position, head_dim] table."""

    arena: Tensor

    def warm(self, max_chunk: int, max_tokens: int, progress: Callable[[str, int, int], None]) -> None:
        """Compile and plan whatever steps could need, on the thread that will launch them. Chunks have at most `max_chunk` tokens,
        sequences `max_tokens`."""

    def rotate_and_write(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, inputs: StepInputs
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, inputs: StepInputs) -> Tensor: ...
