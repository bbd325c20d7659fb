"""Prompts for measurements: seeded, different from each other, of exactly the length asked for."""

from __future__ import annotations

import pytest

from penstock.bench.run import random_prompts
from penstock.errors import ConfigError


@pytest.mark.parametrize(
    ("num", "num_tokens", "vocab"), [(1, 1, 2), (256, 1, 512), (32, 7, 16), (8, 300, 49152)]
)
def test_prompts_are_different_and_of_the_length_asked_for(num, num_tokens, vocab):
    prompts = random_prompts(num, num_tokens, vocab, (0,))
    assert len({tuple(prompt) for prompt in prompts}) == num
    assert all(len(prompt) == num_tokens for prompt in prompts)
    assert all(0 <= token < vocab for prompt in prompts for token in prompt)


def test_the_seed_decides_everything():
    assert random_prompts(4, 9, 512, (1, 2)) == random_prompts(4, 9, 512, (1, 2))
    assert random_prompts(4, 9, 512, (1, 2)) != random_prompts(4, 9, 512, (1, 3))
    assert random_prompts(1, 9, 512, (-5,)) == random_prompts(1, 9, 512, (-5,))


def test_more_prompts_than_there_can_be_are_refused_rather_than_sought_forever():
    with pytest.raises(ConfigError, match="not enough prompts"):
        random_prompts(512, 1, 512, (0,))
