"""What benchmarks feed the engine: seeded random prompts. Owns no engine; the same arguments always give the same prompts."""

from __future__ import annotations

import math

import numpy as np

from penstock.errors import ConfigError


def random_prompts(num: int, num_tokens: int, vocab: int, seed: tuple[int, ...]) -> list[list[int]]:
    """`num` different prompts of exactly `num_tokens` ids below `vocab`. `seed` may have several parts, such as a run's number."""
    if num_tokens * math.log(vocab) < math.log(2 * num):
        raise ConfigError(f"there are not enough prompts of {num_tokens} tokens over {vocab} ids to make {num} different ones")
    source = np.random.default_rng(np.random.SeedSequence([part % 2**63 for part in seed]))
    prompts: dict[tuple[int, ...], None] = {}
    while len(prompts) < num:
        for row in source.integers(0, vocab, size=(num - len(prompts), num_tokens)).tolist():
            prompts[tuple(row)] = None
    return [list(prompt) for prompt in prompts]
