"""Biases of single tokens through a whole engine: they decide, they bother nobody else, and they are the
request's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.engine.engine import Engine
from penstock.errors import InvalidRequest
from tests.support.driving import generate, run_all, submit

MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {"temperature": 0.7, "seed": 3}, {"temperature": 0.7, "seed": 3, "top_k": 5}],
)
def test_a_bias_decides_every_token(
    make_engine: MakeEngine, prompts: Prompts, sampling: dict[str, Any]
) -> None:
    engine = make_engine()
    found = generate(engine, prompts(20), max_tokens=8, ignore_eos=True, logit_bias=((7, 100.0),), **sampling)
    assert list(found.tokens) == [7] * 8


def test_a_ban_keeps_a_token_out_and_a_bias_of_zero_changes_nothing(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = make_engine()
    plain = generate(engine, prompts(20), max_tokens=8, ignore_eos=True, temperature=0.0)
    banned = tuple((token, -100.0) for token in dict.fromkeys(plain.tokens))
    without = generate(engine, prompts(20), max_tokens=8, ignore_eos=True, temperature=0.0, logit_bias=banned)
    assert not set(without.tokens) & set(plain.tokens)
    zero = generate(
        engine, prompts(20), max_tokens=8, ignore_eos=True, temperature=0.0, logit_bias=((5, 0.0),)
    )
    assert zero.tokens == plain.tokens


def test_requests_beside_a_biased_one_are_as_they_are_alone(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = make_engine()
    asked = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 5},
        {"temperature": 0.8, "seed": 6, "frequency_penalty": 0.5},
    ]
    alone = [
        generate(engine, prompts(20, seed=n), max_tokens=8, ignore_eos=True, **one).tokens
        for n, one in enumerate(asked)
    ]
    biased = submit(
        engine, prompts(20, seed=9), max_tokens=8, ignore_eos=True, temperature=0.0, logit_bias=((7, 100.0),)
    )
    beside = [
        submit(engine, prompts(20, seed=n), max_tokens=8, ignore_eos=True, **one)
        for n, one in enumerate(asked)
    ]
    run_all(engine)
    assert list(biased.tokens) == [7] * 8
    assert [one.tokens for one in beside] == alone


def test_a_row_with_fewer_biases_has_none_of_the_request_before(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = make_engine(max_batch=1)
    first = generate(
        engine,
        prompts(20),
        max_tokens=4,
        ignore_eos=True,
        temperature=0.0,
        logit_bias=((3, -100.0), (7, 100.0)),
    )
    then = generate(
        engine, prompts(20), max_tokens=4, ignore_eos=True, temperature=0.0, logit_bias=((3, 99.0),)
    )
    assert (list(first.tokens), list(then.tokens)) == ([7] * 4, [3] * 4)


@pytest.mark.parametrize("token", [-1, 1 << 20, 2**31 - 1])
def test_tokens_that_the_model_does_not_have_are_refused(
    make_engine: MakeEngine, prompts: Prompts, token: int
) -> None:
    with pytest.raises(InvalidRequest, match="token ids of logit_bias must lie between") as refused:
        submit(make_engine(), prompts(20), max_tokens=1, logit_bias=((token, 1.0),))
    assert refused.value.param == "logit_bias"
