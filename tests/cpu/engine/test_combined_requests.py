"""Requests that ask for several things at once, beside others that ask for something else: each gets what it
gets alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.contract import FinishReason, TokenLogprob
from penstock.engine import build
from penstock.engine.engine import Engine
from penstock.engine.execution.replays import cuda_buckets
from penstock.engine.execution.sampling import LOGPROB_ROWS, SamplePass
from tests.support.driving import Collected, generate, pass_of, run_all, submit

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


def test_a_prompt_is_scored_whole_however_many_positions_are_scored_at_once(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    """The first token has no score, so a prompt of n tokens has n - 1 that are computed in slices of so
    many."""
    small, large = make_engine(prefill_chunk=16), make_engine(prefill_chunk=512)
    for num_tokens in (LOGPROB_ROWS, LOGPROB_ROWS + 1, LOGPROB_ROWS + 2, 2 * LOGPROB_ROWS + 2):
        asked = {"prompt_logprobs": 2, "max_tokens": 0}
        expected, found = (
            generate(engine, prompts(num_tokens), **asked).prompt_logprobs for engine in (small, large)
        )
        assert expected is not None and len(expected) == num_tokens
        assert_same_scores(found, expected)


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


def num_alternatives(found: Collected) -> list[int]:
    return [len(entry.top) for entry in found.logprobs]


def test_each_request_of_a_step_gets_as_many_alternatives_as_it_asked_for(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = make_engine()
    asked = (5, 0, None, 2, 20)
    found = [submit(engine, prompts(12, n), logprobs=num, max_tokens=4) for n, num in enumerate(asked)]
    run_all(engine)
    assert [num_alternatives(one) for one in found] == [[num] * 4 if num is not None else [] for num in asked]


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
    engine._parts.scheduler._events.stop_ids = frozenset({whole[first]})
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


def test_a_stop_token_at_the_last_place_is_a_stop_and_not_a_length(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = make_engine()
    whole = generate(engine, prompts(12), max_tokens=12).tokens
    place = next(n for n in range(2, 12) if whole[n] not in whole[:n])
    found = generate(engine, prompts(12), max_tokens=place + 1, stop_token_ids=(whole[place],))
    assert (found.tokens, found.finish) == (whole[:place], FinishReason.STOP)


@pytest.mark.parametrize(
    "penalty", [{"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 3.0}]
)
def test_a_row_that_others_had_before_penalises_nothing_of_theirs(
    make_engine: MakeEngine, prompts: Prompts, penalty: dict[str, float]
) -> None:
    """One row, used in turn by requests with and without penalties, with short and long prompts."""
    fresh = [make_engine(max_batch=1, prefix_cache=False) for _ in range(3)]
    used = make_engine(max_batch=1, prefix_cache=False)
    generate(used, prompts(60, 8), max_tokens=30, **penalty)
    settings: list[dict[str, Any]] = [penalty, {}, {**penalty, "temperature": 1.0, "seed": 3}]
    for n, (engine, extra) in enumerate(zip(fresh, settings, strict=True)):
        assert (
            generate(used, prompts(9, n), max_tokens=20, **extra).tokens
            == generate(engine, prompts(9, n), max_tokens=20, **extra).tokens
        )


def test_only_tokens_that_were_generated_count_towards_penalties(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that is not a prompt's last is sampled as well where its step is padded to a captured shape,
    into nobody's row."""
    eager = make_engine(capture=False, prefix_cache=False)
    monkeypatch.setattr(build, "_buckets", lambda *_: cuda_buckets(32, 64))
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


def test_a_token_whose_id_is_zero_is_a_token_like_any_other(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    """At the beginning of a prompt, of a chunk and of a step beside others, in rows whose last request ended
    with another token."""
    zeros = ([0], [0, 5, 9], [*prompts(8), 0, *prompts(7), 0], [0] * 20)
    fresh = [make_engine(prefill_chunk=8, prefix_cache=False) for _ in zeros]
    expected = [generate(engine, prompt).tokens for engine, prompt in zip(fresh, zeros, strict=True)]
    used = make_engine(prefill_chunk=8, prefix_cache=False)
    for _ in range(2):
        for seed in range(5):
            submit(used, prompts(9, seed), max_tokens=3, temperature=1.0, seed=seed)
        run_all(used)
        assert pass_of(used, SamplePass).sampler.last_tokens[:5].ne(0).all()
        found = [submit(used, prompt) for prompt in zeros]
        run_all(used)
        assert [one.tokens for one in found] == expected
