"""Answers of a least length through a whole engine: no token that would end one is chosen before, and nothing
else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.contract import FinishReason, Grammar
from penstock.engine.engine import Engine
from penstock.errors import InvalidRequest
from tests.support.driving import generate, run_all, submit

MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]
# the first token would end it
ENDING = {"stop_token_ids": frozenset({7}), "logit_bias": ((7, 100.0),), "ignore_eos": True}
DRAWS = [
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 3},
    {"temperature": 0.7, "seed": 3, "top_k": 5, "frequency_penalty": 0.2},
]


@pytest.mark.parametrize("sampling", DRAWS)
@pytest.mark.parametrize("least", [0, 1, 5])
def test_an_answer_has_its_least_tokens_and_ends_with_the_next(
    make_engine: MakeEngine, prompts: Prompts, sampling: dict[str, Any], least: int
) -> None:
    found = generate(make_engine(), prompts(20), max_tokens=8, min_tokens=least, **ENDING, **sampling)
    assert (len(found.tokens), found.finish) == (least, FinishReason.STOP) and 7 not in found.tokens


def test_until_then_the_tokens_are_those_of_a_request_that_rules_the_ends_out(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    """Also where it has a row after a request with more of them, and beside requests without."""
    engine = make_engine(max_batch=2)
    generate(
        engine,
        prompts(30),
        max_tokens=4,
        min_tokens=4,
        ignore_eos=True,
        stop_token_ids=frozenset(range(100, 400)),
    )
    for draw in DRAWS:
        plain = generate(engine, prompts(20), max_tokens=12, ignore_eos=True, **draw).tokens
        ends = frozenset(plain[2:9])
        banned = tuple((token, -100.0) for token in ends)
        expected = generate(
            engine, prompts(20), max_tokens=6, ignore_eos=True, logit_bias=banned, **draw
        ).tokens
        found = submit(
            engine, prompts(20), max_tokens=12, min_tokens=6, ignore_eos=True, stop_token_ids=ends, **draw
        )
        beside = submit(engine, prompts(20), max_tokens=12, ignore_eos=True, **draw)
        run_all(engine)
        assert found.tokens[:6] == expected and beside.tokens == plain


def test_a_grammar_that_is_over_ends_the_answer_before(make_engine: MakeEngine, prompts: Prompts) -> None:
    pytest.importorskip("llguidance", reason="structured output is an extra")
    engine = make_engine()
    for text in ('["ab"]', '["ab", "abcd"]'):
        found = generate(
            engine,
            prompts(20),
            max_tokens=20,
            min_tokens=12,
            ignore_eos=False,
            seed=1,
            grammar=Grammar("choice", text),
        )
        assert found.finish is FinishReason.STOP and bytes(found.tokens).decode() in ("ab", "abcd")


def test_more_than_there_may_be_is_refused(make_engine: MakeEngine, prompts: Prompts) -> None:
    with pytest.raises(InvalidRequest, match="at most 4 tokens") as refused:
        submit(make_engine(), prompts(20), max_tokens=4, min_tokens=5)
    assert refused.value.param == "min_tokens"


def test_ids_that_the_model_does_not_have_rule_nothing_out(make_engine: MakeEngine, prompts: Prompts) -> None:
    engine = make_engine()
    plain = generate(engine, prompts(20), max_tokens=6, ignore_eos=True, temperature=0.0).tokens
    for ends in (frozenset({2**31 - 1}), frozenset({2**31 - 1, 1 << 20})):
        assert (
            generate(
                engine,
                prompts(20),
                max_tokens=6,
                min_tokens=3,
                ignore_eos=True,
                temperature=0.0,
                stop_token_ids=ends,
            ).tokens
            == plain
        )
