"""Requests that ask for several things at once, beside others that ask for something else: each gets what it
gets alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.contract import (
    FinishReason,
    TokenLogprob,
)
from penstock.engine import sizing
from penstock.engine.engine import Engine
from penstock.engine.execution.replays import cuda_buckets
from penstock.engine.execution.sampling import SamplePass
from penstock.errors import InvalidRequest
from tests.support.driving import generate, pass_of, run_all, submit

MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]


def assert_same_scores(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        if isinstance(one, TokenLogprob):
            assert (one.token, one.rank, [token for token, _ in one.top]) == (
                other.token,
                other.rank,
                [token for token, _ in other.top],
            )
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_prompts_that_are_scored_beside_others_in_one_step_get_their_own_scores(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    settings: list[dict[str, Any]] = [
        {}, {"prompt_logprobs": 3, "logprobs": 1}, {"logprobs": 4}, {"prompt_logprobs": 0, "max_tokens": 0},
        {"prompt_logprobs": 1},
    ]  # fmt: skip
    alone = make_engine(prefill_chunk=512, prefix_cache=False)
    expected = [generate(alone, prompts(30 + n, n), **asked) for n, asked in enumerate(settings)]
    together = make_engine(prefill_chunk=512, prefix_cache=False)
    running = submit(together, prompts(9, 9), max_tokens=20)
    together.step()
    found = [submit(together, prompts(30 + n, n), **asked) for n, asked in enumerate(settings)]
    run_all(together)
    assert len(running.tokens) == 20
    for ours, theirs, asked in zip(found, expected, settings, strict=True):
        assert ours.tokens == theirs.tokens
        assert_same_scores(ours.logprobs, theirs.logprobs)
        assert (ours.prompt_logprobs is None) == ("prompt_logprobs" not in asked)
        if ours.prompt_logprobs is not None:
            assert_same_scores(ours.prompt_logprobs, theirs.prompt_logprobs)


def test_scores_end_with_the_text_where_a_token_stops_it(make_engine: MakeEngine, prompts: Prompts) -> None:
    """The token that ends it is neither among the tokens nor among the scores, but it was generated."""
    engine = make_engine()
    whole = generate(engine, prompts(12), max_tokens=12).tokens
    place = next(n for n in range(2, 12) if whole[n] not in whole[:n])
    before = engine.stats().generated_tokens
    found = generate(engine, prompts(12), max_tokens=12, logprobs=1, stop_token_ids=(whole[place],))
    assert found.tokens == whole[:place] == [entry.token for entry in found.logprobs]
    assert engine.stats().generated_tokens - before == place + 1


def test_ignoring_the_end_of_text_ignores_no_other_stop_token(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = make_engine()
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 3}
    whole = generate(engine, prompts(12), **asked).tokens
    first, second = [n for n in range(2, 12) if whole[n] not in whole[:n]][:2]
    engine.parts.scheduler._events.stop_ids = frozenset({whole[first]})
    listed = (whole[second],)
    for ignore_eos, stop_ids, length in (
        (True, (), 12),
        (True, listed, second),
        (False, listed, first),
        (False, (), first),
    ):
        found = generate(engine, prompts(12), ignore_eos=ignore_eos, stop_token_ids=stop_ids, **asked)
        assert found.tokens == whole[:length]
        assert found.finish is (FinishReason.LENGTH if length == 12 else FinishReason.STOP)


def test_only_tokens_that_were_generated_count_towards_penalties(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that is not a prompt's last is sampled as well where its step is padded to a captured shape,
    into nobody's row."""
    eager = make_engine(capture=False, prefix_cache=False)
    monkeypatch.setattr(sizing, "buckets_for", lambda *_: cuda_buckets(32, 64))
    padded = make_engine(max_batch=32, prefix_cache=False)
    asked: dict[str, Any] = {"max_tokens": 12, "frequency_penalty": 1.5, "temperature": 0.7, "seed": 2}
    for _ in range(2):
        found = generate(padded, prompts(64 + 64 + 20), **asked)
        assert found.tokens == generate(eager, prompts(64 + 64 + 20), **asked).tokens
        counts = pass_of(padded, SamplePass).sampler._counts
        assert counts is not None
        assert int(counts[:-1].sum()) == len(found.tokens), (
            "the last row is that of padding, which nobody reads"
        )


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
