"""A run once more from its plans, read from a file: a fresh executor with the same weights computes the same
tokens and logprobs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.contract import Adapter, Chunk, FinishReason, StepPlan, StepResult, TokenLogprob
from penstock.engine import sizing
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.engine.execution.replays import cuda_buckets
from penstock.errors import InvariantBroken
from penstock.testing.tiny_models import TINY_QWEN3
from tests.support.adapters import write_random_adapter
from tests.support.driving import Collected, generate, run_all, submit, tiny_config
from tests.support.recording import Recording, recorded, replay, through_a_file

MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]
OPTIONS: list[dict[str, Any]] = [
    {"max_tokens": 12},
    {"temperature": 0.9, "seed": 7, "logprobs": 3},
    {"temperature": 0.7, "seed": 8, "top_p": 0.8, "top_k": 20, "min_p": 0.02, "max_tokens": 20},
    {
        "temperature": 0.8,
        "seed": 9,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.2,
        "max_tokens": 16,
    },
    {"prompt_logprobs": 2, "logprobs": 0},
    {"prompt_logprobs": 0, "max_tokens": 0},
]


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Engines that have run nothing yet. Nobody watches them: a replay asks no pool for its slots."""
    made: list[Engine] = []

    def make(**settings: Any) -> Engine:
        made.append(build(tiny_config(**settings)))
        made[-1].adapters.load("tuned", write_random_adapter(tmp_path / "tuned", TINY_QWEN3, seed=3))
        return made[-1]

    yield make
    for engine in made:
        engine.close(timeout_s=20.0)


def record(engine: Engine, work: Callable[[Engine], Any]) -> Recording:
    with recorded(engine) as run:
        work(engine)
    return through_a_file(run)


def mixed_work(engine: Engine, prompts: Prompts, adapter: Adapter | None) -> list[Collected]:
    """Prompts in several chunks beside decodes, a prefix found on the device, an adapter, and one that is
    cancelled on the way."""
    found = [submit(engine, prompts(30 + 40 * n, seed=n), **options) for n, options in enumerate(OPTIONS)]
    found.append(submit(engine, prompts(50, seed=20), adapter=adapter, temperature=0.5, seed=1, logprobs=1))
    gone = submit(engine, prompts(33, seed=21), max_tokens=200)
    while len(gone.tokens) < 3:
        engine.step()
    engine.cancel(gone.request_id)
    run_all(engine)
    assert gone.finish is FinishReason.CANCELLED
    again = submit(engine, [*prompts(30 + 40, seed=1), 5, 6], temperature=0.9, seed=4, logprobs=2)
    full = submit(engine, prompts(64, seed=20)[:48], adapter=adapter)  # all of it is cached
    run_all(engine)
    assert (
        again.source is not None
        and again.source.device == 64
        and full.source is not None
        and full.source.device == 47
    )
    return [*found, again, full]


def told(results: list[StepResult]) -> dict[str, tuple[list[int], list[TokenLogprob], list[Any]]]:
    """By request: its tokens, their logprobs, and those of its prompt."""
    found: dict[str, tuple[list[int], list[TokenLogprob], list[Any]]] = {}
    for result in results:
        for one in result.sampled:
            tokens, logprobs, _ = found.setdefault(one.request_id, ([], [], []))
            tokens += one.tokens
            logprobs += one.logprobs or ()
        for request_id, scores in result.prompt_logprobs:
            found.setdefault(request_id, ([], [], []))[2].extend(scores.entries())
    return found


def test_a_replay_computes_the_same_tokens_and_logprobs(
    make_engine: MakeEngine, fresh: Callable[..., Engine], prompts: Prompts, tmp_path: Path
) -> None:
    engine = make_engine(prefill_chunk=48)
    adapter = engine.adapters.load(
        "tuned", write_random_adapter(tmp_path / "tuned", TINY_QWEN3, seed=3)
    ).adapter
    answers: list[Collected] = []
    run = record(engine, lambda engine: answers.extend(mixed_work(engine, prompts, adapter)))
    assert len(run.plans) == len(run.results) == engine.stats().steps
    replayed = list(replay(run, fresh(prefill_chunk=48).parts.executor))
    assert replayed == run.results
    by_request = told(replayed)
    for answer in answers:
        tokens, logprobs, scores = by_request.get(answer.request_id, ([], [], []))
        assert (
            tokens[: len(answer.tokens)] == answer.tokens
            and logprobs[: len(answer.tokens)] == answer.logprobs
        )
        assert scores == list(answer.prompt_logprobs or ())[1:]
    chunks = [chunk for plan in run.plans for chunk in plan.chunks]
    assert (
        any(not chunk.writes for chunk in chunks)
        and any(chunk.adapter for chunk in chunks)
        and any(chunk.echo for chunk in chunks)
    )
    assert any(0 < plan.num_decodes < len(plan.chunks) for plan in run.plans) and any(
        -1 in chunk.tokens for chunk in chunks
    )


def test_retractions_and_padded_replays_come_out_the_same(
    make_engine: MakeEngine,
    fresh: Callable[..., Engine],
    prompts: Prompts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests start again with what they have generated, and steps are padded to captured shapes as on
    CUDA."""
    monkeypatch.setattr(sizing, "buckets_for", lambda *_: cuda_buckets(16, 64))
    settings: dict[str, Any] = {"blocks": 24, "max_model_len": 256, "overcommit": 4.0}
    engine = make_engine(**settings)
    penalties = {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "temperature": 0.8, "seed": 3}

    def work(engine: Engine) -> None:
        for n in range(6):
            submit(engine, prompts(40 + n, seed=n), max_tokens=60, **penalties)
        run_all(engine)

    run = record(engine, work)
    assert engine.stats().retractions > 0 and any(start.output for plan in run.plans for start in plan.starts)
    replaying = fresh(**settings)
    assert list(replay(run, replaying.parts.executor)) == run.results
    assert replaying.parts.executor.target.replays._captured


def test_a_step_that_fails_is_written_down_with_its_reason(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def burst(*_: Any) -> Any:
        raise RuntimeError("the layer burst")

    engine = make_engine()
    monkeypatch.setattr(engine.parts.executor.target.model, "embed", burst)
    run = record(engine, lambda engine: generate(engine, prompts(20), max_tokens=2))
    assert run.results[0].error == ("RuntimeError", "the layer burst", False) and run.results[0].sampled == ()


def some_plan(**changes: Any) -> StepPlan:
    chunk = Chunk("r", 0, 0, (1, 2, 3), np.zeros(1, np.int32), True, 1)
    return dataclasses.replace(StepPlan(1, (chunk,), 0), **changes)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"loads": ("r",)}, "is to wait for r"),
        ({"after": (("save", 3),)}, "is to wait for"),
        ({"chunks": (some_plan().chunks[0]._replace(num_logits=2),)}, "several tokens for one request"),
    ],
    ids=["a load", "a fence", "logits"],
)
def test_a_plan_that_cannot_be_launched_is_refused_before_anything_is(
    make_engine: MakeEngine, changes: dict[str, Any], why: str
) -> None:
    engine = make_engine()
    lane = engine.parts.lanes[0]
    before = lane.record().number
    with pytest.raises(InvariantBroken, match=why):
        engine.parts.executor.launch(some_plan(**changes))
    assert lane.record().number == before, "something is on the lane"
