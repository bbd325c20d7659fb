"""The limits that planning keeps: rows, tokens per step, promises of blocks. A pure value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of every step."""

    max_batch: int  # requests that run at once
    prefill_chunk: int  # prompt tokens per step
    overcommit: float = 1.0  # how many times available blocks may be promised
    max_overtaken_s: float = 0.0  # how much later a request may arrive and still start first; 0: first come, first served


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_tokens)
