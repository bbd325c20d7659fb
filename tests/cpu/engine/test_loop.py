"""The engine's thread: it starts, beats, fails loudly and ends in bounded time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.contract import FinishReason, SamplingParams, StepPlan, TokenEvent
from penstock.engine.engine import Engine
from penstock.engine.execution.outcome import RunningStep
from penstock.engine.loop import EngineLoop
from penstock.errors import EngineClosed, StepFailed
from penstock.testing.driving import generate, run_all, submit, tiny_config
from penstock.testing.sanitized import build_sanitized, check_silent


class Ended:
    """A listener that can be waited on."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.last: TokenEvent | None = None
        self._over = threading.Event()

    def __call__(self, event: TokenEvent) -> None:
        self.tokens += event.tokens
        if event.finish is not None:
            self.last = event
            self._over.set()

    def wait(self) -> TokenEvent:
        assert self._over.wait(30), "the request did not end"
        assert self.last is not None
        return self.last


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Under the sanitizer; each test ends its engine in its own way."""
    built, sanitizer = build_sanitized(tiny_config())
    yield built
    check_silent(sanitizer)


def sampling(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **changes})


def test_requests_from_many_threads_are_all_served(engine: Engine, prompts: Callable[..., list[int]]) -> None:
    loop = EngineLoop(engine)
    loop.start()
    ended = [Ended() for _ in range(12)]
    threads = [threading.Thread(target=engine.submit, args=(prompts(10 + i, i), sampling(), e)) for i, e in enumerate(ended)]
    for thread in threads:
        thread.start()
    assert all(e.wait().finish is FinishReason.LENGTH and len(e.tokens) == 8 for e in ended)
    assert engine.reset_cache() == {"device": 12}, "each has filled one block"
    assert loop.beat_age_s() < 5
    loop.close(5.0)
    assert loop.failed() is None


def test_closing_cancels_what_does_not_end_by_the_deadline(engine: Engine, prompts: Callable[..., list[int]]) -> None:
    loop = EngineLoop(engine)
    loop.start()
    ended = Ended()
    engine.submit(prompts(10), sampling(max_tokens=1900), ended)
    loop.close(0.0)
    assert ended.wait().finish in (FinishReason.CANCELLED, FinishReason.ERROR)
    with pytest.raises(EngineClosed):
        engine.submit(prompts(10), sampling(), ended)


def test_closing_lets_running_requests_end(engine: Engine, prompts: Callable[..., list[int]]) -> None:
    loop = EngineLoop(engine)
    loop.start()
    ended = Ended()
    engine.submit(prompts(10), sampling(max_tokens=100), ended)
    while not ended.tokens:
        assert loop.beat_age_s() < 20
    loop.close(30.0)
    assert ended.wait().finish is FinishReason.LENGTH and len(ended.tokens) == 100


def test_a_failing_loop_ends_every_request_and_says_why(
    engine: Engine, prompts: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def burst(*_: object) -> None:
        raise RuntimeError("the plan is void")

    monkeypatch.setattr(engine._parts.scheduler, "plan", burst)
    loop = EngineLoop(engine)
    ended = Ended()
    engine.submit(prompts(10), sampling(), ended)
    loop.start()
    last = ended.wait()
    assert last.finish is FinishReason.ERROR and last.error is not None and "the plan is void" in last.error
    with pytest.raises(EngineClosed, match="the plan is void"):
        engine.submit(prompts(10), sampling(), ended)
    loop.close(5.0)
    assert isinstance(loop.failed(), RuntimeError)


def test_a_replay_that_fails_ends_its_requests_and_leaves_the_lane_usable(
    engine: Engine, prompts: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = submit(engine, prompts(20), max_tokens=30)
    for _ in range(4):
        engine.step()  # it decodes, in a replay
    model = engine._parts.executor._forward.model
    whole = model.layer

    def layer(*_: Any) -> Any:
        raise StepFailed("the layer burst")

    monkeypatch.setattr(model, "layer", layer)
    run_all(engine)
    assert found.finish is FinishReason.ERROR and 0 < len(found.tokens) < 30
    monkeypatch.setattr(model, "layer", whole)
    assert len(generate(engine, prompts(20)).tokens) == 8
    engine.close(timeout_s=20.0)


def test_an_engine_that_cannot_be_warmed_up_does_not_start_and_says_why(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def burst(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(engine._parts.executor, "warm", burst)
    loop = EngineLoop(engine)
    with pytest.raises(EngineClosed) as raised:
        loop.start()
    assert "no such kernel" in str(raised.value.__cause__) and isinstance(loop.failed(), RuntimeError)
    with pytest.raises(EngineClosed, match="no such kernel"):
        engine.submit([1, 2], sampling(), Ended())
    loop.close(5.0)


def test_a_loop_that_has_started_is_warm(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of every kind have run, on the thread that runs all others, before anybody is served."""
    threads: list[str] = []
    launch = engine._parts.executor.launch

    def noted(plan: StepPlan) -> RunningStep:
        threads.append(threading.current_thread().name)
        return launch(plan)

    monkeypatch.setattr(engine._parts.executor, "launch", noted)
    loop = EngineLoop(engine)
    loop.start()
    assert len(threads) >= 3 and set(threads) == {"engine"}
    loop.start()
    loop.close(5.0)
    assert loop.failed() is None
