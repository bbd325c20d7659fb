"""What crosses the halves checks itself: a bad value names its field."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from penstock.contract import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_GRAMMAR_CHARS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    TOKEN_IN_FLIGHT,
    Chunk,
    Grammar,
    Prefix,
    PromptLogprobs,
    Request,
    SamplingParams,
    StepPlan,
    Thought,
    TokenLogprob,
    TokenScores,
)
from penstock.errors import InvalidRequest, UserError

GOOD: list[tuple[str, Any]] = [
    ("is_free", True),
    ("max_tokens", 0),
    ("max_tokens", 10**9),
    ("temperature", 0.0),
    ("temperature", 100.0),
    ("top_p", 1e-9),
    ("top_p", 1.0),
    ("top_k", -1),
    ("top_k", 0),
    ("top_k", 2**31 - 1),
    ("min_p", 0.0),
    ("min_p", 1.0),
    ("presence_penalty", -2.0),
    ("frequency_penalty", 2.0),
    ("repetition_penalty", 0.01),
    ("repetition_penalty", 100.0),
    ("seed", None),
    ("seed", -MAX_SEED),
    ("seed", MAX_SEED),
    ("logprobs", 0),
    ("logprobs", MAX_LOGPROBS),
    ("prompt_logprobs", 0),
    ("stop", ("x",) * MAX_STOPS),
    ("stop", ("x" * MAX_STOP_CHARS,)),
    ("stop_token_ids", frozenset({0, 1})),
    ("stop_token_ids", frozenset(range(MAX_STOP_TOKEN_IDS))),
    ("ignore_eos", True),
    ("min_tokens", 1),
    ("thought", Thought(3, True, (), (1,))),
    ("logit_bias", ((0, -100.0), (7, 100.0))),
    ("logit_bias", tuple((token, 0.0) for token in range(MAX_LOGIT_BIAS))),
    ("allowed_token_ids", None),
    ("allowed_token_ids", frozenset(range(MAX_ALLOWED_TOKEN_IDS))),
    ("bad_words", ("a" * MAX_BAD_WORD_CHARS,)),
    ("bad_words", ("a",) * MAX_BAD_WORDS),
    ("bad_token_ids", ((1, 2), (3,))),
    ("grammar", None),
    ("grammar", Grammar("regex", "a" * MAX_GRAMMAR_CHARS)),
]
BAD: list[tuple[str, Any]] = [
    ("max_tokens", -1),
    ("temperature", -0.1),
    ("temperature", 100.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("top_p", 0.0),
    ("top_p", -0.5),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("top_k", -2),
    ("top_k", 2**31),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", math.nan),
    ("presence_penalty", -2.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", math.nan),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", math.inf),
    ("seed", MAX_SEED + 1),
    ("seed", -MAX_SEED - 1),
    ("logprobs", -1),
    ("logprobs", MAX_LOGPROBS + 1),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", MAX_LOGPROBS + 1),
    ("stop", ("",)),
    ("stop", ("x",) * (MAX_STOPS + 1)),
    ("stop", ("x", "x" * (MAX_STOP_CHARS + 1))),
    ("stop_token_ids", frozenset(range(MAX_STOP_TOKEN_IDS + 1))),
    ("min_tokens", -1),
    ("min_tokens", 2),
    ("logit_bias", ((0, 100.5),)),
    ("logit_bias", ((0, -100.5),)),
    ("logit_bias", ((0, math.nan),)),
    ("logit_bias", ((0, math.inf),)),
    ("logit_bias", ((3, 1.0), (3, 2.0))),
    ("logit_bias", tuple((token, 0.0) for token in range(MAX_LOGIT_BIAS + 1))),
    ("allowed_token_ids", frozenset()),
    ("allowed_token_ids", frozenset(range(MAX_ALLOWED_TOKEN_IDS + 1))),
    ("bad_words", ("",)),
    ("bad_words", ("a" * (MAX_BAD_WORD_CHARS + 1),)),
    ("bad_words", ("a",) * (MAX_BAD_WORDS + 1)),
]


def params(name: str, value: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 1, name: value})


@pytest.mark.parametrize(("name", "value"), GOOD)
def test_values_at_the_edge_are_taken_as_they_are(name: str, value: Any) -> None:
    assert getattr(params(name, value), name) == value


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_value_beyond_the_edge_is_the_callers_fault_and_names_its_field(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        params(name, value)
    assert refused.value.param == name and name in str(refused.value) and isinstance(refused.value, UserError)


def test_every_field_with_a_range_is_in_both_tables() -> None:
    names = {f.name for f in dataclasses.fields(SamplingParams)}
    assert {name for name, _ in GOOD} == names
    assert {name for name, _ in BAD} == names - {
        "is_free",
        "ignore_eos",
        "grammar",
        "thought",
        "bad_token_ids",
    }


def test_a_grammar_has_a_longest_text_and_says_itself_when_an_answer_is_over() -> None:
    with pytest.raises(InvalidRequest, match="at most 65536 characters") as refused:
        params("grammar", Grammar("regex", "a" * (MAX_GRAMMAR_CHARS + 1)))
    assert refused.value.param == "structured_outputs"
    with pytest.raises(InvalidRequest, match="ignore_eos") as refused:
        SamplingParams(max_tokens=1, ignore_eos=True, grammar=Grammar("regex", "a"))
    assert refused.value.param == "ignore_eos"


def test_the_message_says_what_is_allowed_and_what_came() -> None:
    with pytest.raises(InvalidRequest, match=r"top_p must be above 0 and at most 1, got 0\.0"):
        params("top_p", 0.0)
    with pytest.raises(InvalidRequest, match="max_tokens must be at least 0, got -1"):
        params("max_tokens", -1)


def test_sampling_parameters_cannot_be_changed_behind_the_check() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        params("top_p", 0.5).top_p = 7.0  # type: ignore[misc]


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (1e-6, True), (1e-4, False), (1.0, False)])
def test_a_temperature_of_nothing_is_greedy(temperature: float, greedy: bool) -> None:
    assert params("temperature", temperature).greedy is greedy


# Holds invariant 21: who may match at all.
@pytest.mark.parametrize(
    ("prefix", "prompt_logprobs", "may_match"),
    [(Prefix(b"s", ()), None, True), (Prefix(b"s", ()), 0, False), (None, None, False), (None, 3, False)],
)
def test_only_a_request_that_can_use_cached_kv_may_match(
    prefix: Prefix | None, prompt_logprobs: int | None, may_match: bool
) -> None:
    assert Request("r", [1], params("prompt_logprobs", prompt_logprobs), prefix).may_match is may_match


def test_a_plan_counts_its_tokens_and_knows_a_decode_step() -> None:
    def chunk(name: str, start: int, *tokens: int) -> Chunk:
        return Chunk(name, 0, start, tokens, np.arange(1, dtype=np.int32), True, 1)

    decode, prompt = chunk("a", 5, TOKEN_IN_FLIGHT), chunk("b", 3, 7, 8)
    assert (decode.num_tokens, decode.kv_len) == (1, 6) and (prompt.num_tokens, prompt.kv_len) == (2, 5)
    assert StepPlan(1, (decode, decode), 2).is_decode and not StepPlan(1, (decode, prompt), 1).is_decode
    assert StepPlan(1, (decode, prompt), 1).num_tokens == 3


def scores(*tokens: int) -> TokenScores:
    ints, num = np.array(tokens, np.int32), len(tokens)
    return TokenScores(
        ints,
        np.full(num, -1.0, np.float32),
        np.ones(num, np.int32),
        ints[:, None],
        np.full((num, 1), -0.5, np.float32),
    )


def test_prompt_logprobs_are_put_together_without_making_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later life of a request computes again what an earlier one had: of that only what is new is wanted,
    and it may be nothing."""
    made: list[int] = []
    entries = TokenScores.entries
    monkeypatch.setattr(TokenScores, "entries", lambda one: made.append(len(one.tokens)) or entries(one))  # type: ignore[func-returns-value]
    both = (
        PromptLogprobs([None])
        .followed_by(scores(1, 2))
        .followed_by(scores(2, 3), 1)
        .followed_by(scores(1, 2), 2)
    )
    both = both.followed_by(scores(1), 5).followed_by(scores(8, 9))
    assert len(both) == 6 and not made
    assert [None if entry is None else entry.token for entry in both] == [None, 1, 2, 3, 8, 9] and made == [
        2,
        1,
        0,
        0,
        2,
    ]
    assert (
        both[3] == TokenLogprob(3, -1.0, 1, ((3, -0.5),))
        and both[:2] == (None, both[1])
        and both == tuple(both)
    )
    assert len(made) == 5, "made once"
    longer = both.followed_by(scores(4))
    assert len(longer) == 7 and longer[6] == TokenLogprob(4, -1.0, 1, ((4, -0.5),))
