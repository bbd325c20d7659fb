"""What one request asks for is none of its neighbours' business, nor lost when it has to make room for
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.engine.engine import Engine
from tests.support.driving import generate, run_all, submit

MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]


@pytest.mark.parametrize(
    "penalty", [{"frequency_penalty": 1.5}, {"presence_penalty": 1.5}, {"repetition_penalty": 1.3}], ids=str
)
def test_a_penalty_counts_what_was_generated_before_a_retraction(
    make_engine: MakeEngine, prompts: Prompts, penalty: dict[str, Any]
) -> None:
    engine, alone = make_engine(blocks=6, overcommit=4.0, block_tokens=8), make_engine()
    asked = [prompts(6, seed=i) for i in range(2)]
    found = [submit(engine, prompt, max_tokens=30, **penalty) for prompt in asked]
    run_all(engine)
    assert engine.stats().retractions > 0
    expected = [generate(alone, prompt, max_tokens=30, **penalty).tokens for prompt in asked]
    assert [one.tokens for one in found] == expected
    assert expected[1] != generate(alone, asked[1], max_tokens=30).tokens, "the penalty changes something"
