"""Reasoning of a bounded length through a whole engine: it is ended when it has to be, and not before, and
the answer goes on behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock.contract import FinishReason, Grammar, Thought
from penstock.engine.engine import Engine
from tests.support.driving import Collected, generate, run_all, submit
from tests.support.forced import forced

MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]
OPEN, CLOSE = tuple(b"<think>"), tuple(b"</think>")
DRAWS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 0.9, "seed": 4, "frequency_penalty": 0.3},
]


def thought(most: int, begun: bool = True) -> Thought:
    return Thought(most, begun, OPEN, CLOSE)


def found_at(tokens: Sequence[int], part: Sequence[int]) -> int:
    return next((at for at in range(len(tokens)) if tuple(tokens[at : at + len(part)]) == tuple(part)), -1)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("most", [0, 1, 6])
def test_reasoning_ends_where_its_budget_does(
    make_engine: MakeEngine, prompts: Prompts, draw: dict[str, Any], most: int
) -> None:
    """Until then, and behind it, the tokens are those of plain decoding."""
    engine = make_engine()
    found = generate(
        engine, prompts(20), max_tokens=24, ignore_eos=True, thought=thought(most), **draw
    ).tokens
    plain = generate(engine, prompts(20), max_tokens=24, ignore_eos=True, **draw).tokens
    assert (
        found[:most] == plain[:most] and tuple(found[most : most + len(CLOSE)]) == CLOSE and len(found) == 24
    )
    if "frequency_penalty" not in draw:
        rest = generate(
            engine,
            [*prompts(20), *found[: most + len(CLOSE)]],
            max_tokens=24 - most - len(CLOSE),
            ignore_eos=True,
            **draw,
        )
        assert found[most + len(CLOSE) :] == rest.tokens


def test_reasoning_that_ends_by_itself_or_is_not_begun_is_left_alone(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = make_engine()
    plain = generate(engine, prompts(20), max_tokens=24, ignore_eos=True, temperature=0.0).tokens
    unopened = generate(
        engine, prompts(20), max_tokens=24, ignore_eos=True, temperature=0.0, thought=thought(4, begun=False)
    )
    assert unopened.tokens == plain


@pytest.mark.parametrize("begun", [True, False])
def test_an_answer_behind_reasoning_fits_its_grammar(
    make_engine: MakeEngine, prompts: Prompts, begun: bool
) -> None:
    pytest.importorskip("llguidance", reason="structured output is an extra")
    engine = make_engine()
    for most in (0, 5):
        answers = [
            submit(
                engine,
                prompts(20),
                max_tokens=60,
                ignore_eos=False,
                seed=seed,
                thought=thought(most, begun),
                grammar=Grammar("choice", '["yes", "no"]'),
            )
            for seed in range(4)
        ]
        run_all(engine)
        for answer in answers:
            before = () if begun else OPEN
            text = bytes(answer.tokens[len(before) + most + len(CLOSE) :]).decode()
            assert tuple(answer.tokens[: len(before)]) == before and text in ("yes", "no")
            assert found_at(answer.tokens, CLOSE) == len(before) + most and answer.finish is FinishReason.STOP


def drafting(engine: Engine) -> Engine:
    forced(engine)
    return engine


@pytest.mark.parametrize("draw", DRAWS)
def test_drafts_stop_before_the_budget_and_change_nothing(
    make_engine: MakeEngine, prompts: Prompts, draw: dict[str, Any]
) -> None:
    plain, engine = make_engine(), drafting(make_engine(speculate="ngram"))
    prompt, drafted = prompts(6) * 6, 0
    for most in range(3, 26, 4):
        asked: Any = {"max_tokens": 40, "ignore_eos": True, "thought": thought(most), **draw}
        expected: Collected = generate(plain, prompt, **asked)
        found = generate(engine, prompt, **asked)
        assert found.tokens == expected.tokens and found_at(found.tokens, CLOSE) == most
        drafted += sum(event.drafted for event in found.events)
    assert drafted
