"""Scores where they are most: a full chunk of a prompt beside answers, each with all alternatives; and where
a token ends a request."""

from __future__ import annotations

from collections.abc import Callable

from penstock.contract import MAX_LOGPROBS, FinishReason
from penstock.engine.engine import Engine
from tests.support.driving import generate, run_all, submit

MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]


def test_a_full_chunk_is_scored_beside_answers_that_are(make_engine: MakeEngine, prompts: Prompts) -> None:
    engine = make_engine(max_batch=4, prefill_chunk=16)
    answers = [submit(engine, prompts(4, seed), max_tokens=20, logprobs=MAX_LOGPROBS) for seed in range(3)]
    while any(len(answer.tokens) < 2 for answer in answers):
        engine.step()
    scored = submit(engine, prompts(40, 9), max_tokens=2, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS)
    run_all(engine)
    assert [answer.finish for answer in (*answers, scored)] == [FinishReason.LENGTH] * 4, scored.error
    for answer in (*answers, scored):
        assert [len(entry.top) for entry in answer.logprobs] == [MAX_LOGPROBS] * len(answer.tokens)
    assert scored.prompt_logprobs is not None and len(scored.prompt_logprobs) == 40
    alone = generate(make_engine(), prompts(4, 0), max_tokens=20, logprobs=MAX_LOGPROBS)
    assert answers[0].tokens == alone.tokens
