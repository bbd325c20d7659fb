"""The tensors of one step. Owns their layout; what they mean to the kernels is written here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class StepInputs:
    """Device-side inputs of a step of T tokens in B chunks. All int32.

    Chunk b computes tokens q_starts[b]..q_starts[b+1] of the step, which are the last q_len positions of a sequence of
    kv_lens[b] tokens. Its slots are tables[table_starts[b] :][: ceil(kv_lens[b] / block_tokens)], exactly: there is nothing
    behind them that belongs to it. The first `num_decodes` chunks have exactly one token each.

    A captured replay reads the same tensors, refilled in place, so kernels must take everything that changes from step to step
    from them and not from host numbers; `max_q_len` and `max_kv_len` are only for eager steps (0 in a capture).
    """

    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    write_at: Tensor  # [T] slot * block_tokens + offset at which the token's KV is written; the padding block's where it must not be
    q_starts: Tensor  # [B + 1]
    kv_lens: Tensor  # [B]
    table_starts: Tensor  # [B]
    tables: Tensor  # [at least the sum of all table lengths] slots
    rows: Tensor  # [B] row of per-request device state
    sample_at: Tensor  # [S] indices into the T tokens whose logits are wanted
    sample_rows: Tensor  # [S] rows of the requests they belong to
    num_decodes: int
    max_q_len: int
    max_kv_len: int
