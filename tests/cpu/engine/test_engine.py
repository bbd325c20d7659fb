"""The engine as a whole on tiny random models: whatever shares a step, a block or a replay, the tokens are
those of a request alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from penstock.contract import (
    FinishReason,
    KvSource,
    SamplingParams,
    Submission,
)
from penstock.engine import sizing
from penstock.engine.engine import Engine
from penstock.engine.execution.replays import cuda_buckets
from penstock.errors import InvalidRequest, StepFailed
from tests.support.driving import generate, run_all, submit

MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]


def check_at_rest(engine: Engine) -> None:
    """Nothing is open, every slot is free or idle, every row is back."""
    engine.parts.scheduler.check()
    engine.parts.cache.check()
    stats = engine.stats()
    assert sum(stats.requests.values()) == 0
    for states in (stats.kv_blocks[tier] for tier in engine.kv.tiers if tier in ("device", "host")):
        assert states["active"] == states["pinned"] == states["reserved"] == 0
    assert stats.traffic is None or stats.traffic.leases_open == 0


@pytest.mark.parametrize("model", ["tiny-qwen3", "tiny-llama"])
def test_requests_in_one_batch_get_the_tokens_they_get_alone(
    make_engine: MakeEngine, prompts: Prompts, model: str
) -> None:
    lengths = [1, 5, 15, 16, 17, 40, 64, 65, 130]
    alone = make_engine(model, prefix_cache=False)
    expected = [generate(alone, prompts(n, seed=n)).tokens for n in lengths]
    together = make_engine(model)
    found = [submit(together, prompts(n, seed=n)) for n in lengths]
    run_all(together)
    assert [c.tokens for c in found] == expected
    assert all(len(tokens) == 8 for tokens in expected)
    assert len({tuple(tokens) for tokens in expected}) == len(expected), (
        "a model that says the same to every prompt proves nothing"
    )
    check_at_rest(together)


@pytest.mark.parametrize("chunk", [1, 33])
def test_the_prefill_chunk_does_not_change_the_tokens(
    make_engine: MakeEngine, prompts: Prompts, chunk: int
) -> None:
    prompt = prompts(100)
    expected = generate(make_engine(prefill_chunk=128), prompt).tokens
    assert generate(make_engine(prefill_chunk=chunk), prompt).tokens == expected


def test_prompts_in_padded_replays_get_the_tokens_of_eager_steps(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes as on CUDA: decodes padded to a batch size, short prompts alone or beside decodes padded to a
    number of tokens."""
    eager = make_engine(capture=False, prefix_cache=False)
    monkeypatch.setattr(sizing, "buckets_for", lambda *_: cuda_buckets(32, 64))
    padded = make_engine(max_batch=32)
    lengths = [3, 16, 40, 64, 70, 130]
    settings = [
        {},
        {"temperature": 0.8, "seed": 4, "frequency_penalty": 0.7},
        {"prompt_logprobs": 1},
        {},
        {"logprobs": 2},
        {"max_tokens": 0},
    ]
    for turn in range(2):  # the second time over cached prefixes
        found = []
        for n, extra in zip(lengths, settings, strict=True):
            found.append(submit(padded, prompts(n, n), **extra))
            padded.step()
        run_all(padded)
        expected = [
            generate(eager, prompts(n, n), **extra) for n, extra in zip(lengths, settings, strict=True)
        ]
        assert [c.tokens for c in found] == [c.tokens for c in expected], f"turn {turn}"
    shapes = padded.parts.executor.target.replays._captured
    assert any(s.num_chunks == 1 and s.num_tokens > 1 for s in shapes) and any(
        s.num_beside > 0 for s in shapes
    )
    check_at_rest(padded)


# Holds invariant 14: no byte of a shared block changes.
def test_a_page_aligned_full_match_computes_exactly_one_token_and_writes_nothing(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = make_engine()
    prompt = prompts(48)
    cold = generate(engine, prompt, max_tokens=1)
    blocks = engine.parts.arena.tensor[:-1]  # all but the padding block
    before = blocks.clone()
    warm = generate(engine, prompt, max_tokens=1)
    assert warm.tokens == cold.tokens
    assert warm.source == KvSource(device=47, computed=1)
    assert bool((blocks == before).all())


# --------------------------------------------------------------------------------------------------- pressure


def test_random_requests_resume_with_the_tokens_of_an_unpressured_run(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    hot: dict[str, Any] = {
        "max_tokens": 60,
        "temperature": 1.0,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
    }
    engine, free = make_engine(blocks=12, overcommit=4.0), make_engine(prefix_cache=False)
    found = [submit(engine, prompts(20 + seed, seed), seed=seed, **hot) for seed in range(5)]
    run_all(engine)
    assert engine.stats().retractions > 0
    assert [c.tokens for c in found] == [
        generate(free, prompts(20 + s, s), seed=s, **hot).tokens for s in range(5)
    ]


# ----------------------------------------------------------------------------------------- cancel and failure


# Holds invariant 20: a cancel at any moment gives everything back.
@pytest.mark.parametrize("turns", range(0, 12, 2))
def test_a_cancel_at_any_moment_ends_the_request_and_leaks_nothing(
    make_engine: MakeEngine, prompts: Prompts, turns: int
) -> None:
    engine = make_engine(blocks=12, prefill_chunk=16)
    other = submit(engine, prompts(20, 1))
    found = submit(engine, prompts(70))
    for _ in range(turns):
        engine.step()
    engine.cancel(found.request_id)
    engine.step()
    assert found.finish is FinishReason.CANCELLED or len(found.tokens) == 8
    engine.cancel(found.request_id)  # again, and after its end: nothing happens
    run_all(engine)
    assert len([e for e in found.events if e.finish]) == 1
    assert len(other.tokens) == 8
    check_at_rest(engine)


def test_a_step_that_fails_ends_its_requests_with_the_error_and_no_others(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(capture=False)  # a graph on CUDA would not call the broken function
    model = engine.parts.executor.target.model
    whole = model.layer
    broken = [True]

    def layer(index: int, *rest: Any) -> Any:
        if broken[0] and index == 1:
            raise StepFailed("the layer burst")
        return whole(index, *rest)

    monkeypatch.setattr(model, "layer", layer)
    prompt = prompts(40)
    failed = generate(engine, prompt)
    assert failed.finish is FinishReason.ERROR
    assert failed.error is not None and "the layer burst" in failed.error
    broken[0] = False
    good = generate(engine, prompt)
    assert good.source == KvSource(device=0, computed=40), (
        "a failed step must not leave blocks behind that look computed"
    )
    assert good.tokens == generate(make_engine(), prompt).tokens
    check_at_rest(engine)


def test_a_listener_that_raises_does_not_disturb_the_engine(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = make_engine()

    def listener(event: object) -> None:
        raise RuntimeError("not my day")

    engine.submit(Submission(prompts(10), SamplingParams(max_tokens=4)), listener)
    other = generate(engine, prompts(10))
    assert len(other.tokens) == 8
    check_at_rest(engine)


# --------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "empty"),
        ([1] * 2048, {}, "maximum context length"),
        ([1], {"max_tokens": 1 << 40}, "maximum context length"),
        ([-1], {}, "token ids must lie"),
        ([10**9], {}, "token ids must lie"),
        ([10**30], {}, "token ids must lie"),
        ([1.5], {}, "list of token ids"),
        (["a"], {}, "list of token ids"),
        ([1] * 300, {"max_tokens": 10}, "do not fit"),
    ],
)
def test_requests_that_can_never_run_are_refused_where_they_are_submitted(
    make_engine: MakeEngine, prompt: list[Any], sampling: dict[str, Any], message: str
) -> None:
    engine = make_engine(blocks=16)
    engine.limits = engine.limits._replace(max_model_len=2000)
    with pytest.raises(InvalidRequest, match=message):
        submit(engine, prompt, **sampling)
    assert not engine.has_work()


# --------------------------------------------------------------------------------------------------- sampling


def test_a_seed_decides_the_tokens_whatever_else_runs(make_engine: MakeEngine, prompts: Prompts) -> None:
    """Zero is one, too."""
    engine = make_engine()
    hot: dict[str, Any] = {"temperature": 1.0, "max_tokens": 16}
    expected = generate(engine, prompts(10), seed=0, **hot).tokens
    crowd = [
        submit(engine, prompts(10, s), seed=s, top_p=0.7, top_k=9, presence_penalty=1.0, **hot)
        for s in range(4)
    ]
    found = submit(engine, prompts(10), seed=0, **hot)
    run_all(engine)
    assert found.tokens == expected
    assert generate(engine, prompts(10), seed=8, **hot).tokens != expected
    assert len({tuple(c.tokens) for c in crowd}) == 4


def test_requests_without_a_seed_differ_and_an_engine_seed_repeats_them(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    hot: dict[str, Any] = {"temperature": 1.0, "max_tokens": 16}
    runs = [
        [generate(engine, prompts(10), **hot).tokens for _ in range(2)]
        for engine in (make_engine(seed=1), make_engine(seed=1))
    ]
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def test_logprobs_are_those_of_the_models_distribution(make_engine: MakeEngine, prompts: Prompts) -> None:
    engine = make_engine()
    found = generate(engine, prompts(20), logprobs=5, max_tokens=6)
    assert [entry.token for entry in found.logprobs] == found.tokens
    for entry in found.logprobs:
        assert entry.rank == 1 and entry.top[0] == (entry.token, entry.logprob)
        assert [p for _, p in entry.top] == sorted((p for _, p in entry.top), reverse=True)
        assert sum(math.exp(p) for _, p in entry.top) < 1.0
    plain = submit(engine, prompts(20), max_tokens=6)
    chosen_only = submit(engine, prompts(20), max_tokens=6, logprobs=0)
    run_all(engine)
    assert plain.logprobs == [] and [e.top for e in chosen_only.logprobs] == [()] * 6


@pytest.mark.parametrize("chunk", [1, 64])
def test_prompt_logprobs_equal_those_of_generating_the_same_tokens(
    make_engine: MakeEngine, prompts: Prompts, chunk: int
) -> None:
    engine = make_engine(prefill_chunk=chunk)
    prompt = prompts(20)
    generated = generate(engine, prompt, logprobs=3, max_tokens=10)
    echoed = generate(engine, prompt + generated.tokens, prompt_logprobs=3, max_tokens=0)
    assert echoed.prompt_logprobs is not None and echoed.prompt_logprobs[0] is None
    assert len(echoed.prompt_logprobs) == 30
    assert echoed.source == KvSource(device=0, computed=30), "echo with prompt logprobs never matches"
    for ours, theirs in zip(echoed.prompt_logprobs[20:], generated.logprobs, strict=True):
        assert ours is not None and ours.token == theirs.token and ours.rank == theirs.rank
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [t for t, _ in ours.top] == [t for t, _ in theirs.top]
