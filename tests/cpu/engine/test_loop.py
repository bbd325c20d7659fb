"""The engine's thread: it starts, beats, fails loudly and ends in bounded time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.contract import FinishReason, SamplingParams, Submission, TokenEvent
from penstock.engine import engine as engine_module
from penstock.engine import loop as loop_module
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.engine.loop import EngineLoop
from penstock.errors import EngineClosed
from penstock.models.progress import Progress
from penstock.testing.sanitized import build_sanitized, check_silent
from tests.support.driving import tiny_config


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
    threads = [
        threading.Thread(target=engine.submit, args=(Submission(prompts(10 + i, i), sampling()), e))
        for i, e in enumerate(ended)
    ]
    for thread in threads:
        thread.start()
    assert all(e.wait().finish is FinishReason.LENGTH and len(e.tokens) == 8 for e in ended)
    assert engine.kv.reset() == {"device": 12}, "each has filled one block"
    assert loop.beat_age_s() < 5
    loop.close(5.0)
    assert loop.failed() is None


# Holds invariant 27: closing is bounded.
def test_closing_cancels_what_does_not_end_by_the_deadline(
    engine: Engine, prompts: Callable[..., list[int]]
) -> None:
    loop = EngineLoop(engine)
    loop.start()
    ended = Ended()
    engine.submit(Submission(prompts(10), sampling(max_tokens=1900)), ended)
    loop.close(0.0)
    assert ended.wait().finish in (FinishReason.CANCELLED, FinishReason.ERROR)
    with pytest.raises(EngineClosed):
        engine.submit(Submission(prompts(10), sampling()), ended)


# Holds invariant 27: closing is bounded. Lanes that are idle end in a moment, and have one though nothing is
# left of the time.
@pytest.mark.parametrize(
    ("transfers_s", "left_s"), [(5.0, 3.0), (8.0, engine_module._GRACE_S), (30.0, engine_module._GRACE_S)]
)
def test_all_that_closing_waits_for_has_one_deadline(
    transfers_s: float, left_s: float, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, given = 100.0, {}
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: now_s))

    def taking(seconds: float, name: str, close: Callable[..., None]) -> Callable[[float | None], None]:
        def closing(timeout_s: float | None = None) -> None:
            nonlocal now_s
            given[name], now_s = timeout_s, now_s + seconds
            close()

        return closing

    monkeypatch.setattr(
        engine, "snapshots", SimpleNamespace(close=taking(12.0, "snapshots", lambda: engine.cache.check()))
    )
    monkeypatch.setattr(engine.cache, "close", taking(transfers_s, "transfers", engine.cache.close))
    monkeypatch.setattr(engine.parts.lanes[0], "close", taking(1.0, "lane", engine.parts.lanes[0].close))
    engine.close(timeout_s=20.0)
    assert given == {"snapshots": 20.0, "transfers": 8.0, "lane": left_s}


# Holds invariant 25: the engine thread does not die silently.
def test_a_failing_loop_ends_every_request_and_says_why(
    engine: Engine, prompts: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def burst(*_: object, **__: object) -> None:
        raise RuntimeError("the plan is void")

    monkeypatch.setattr(engine.parts.scheduler, "plan", burst)
    loop = EngineLoop(engine)
    ended = Ended()
    engine.submit(Submission(prompts(10), sampling()), ended)
    loop.start()
    last = ended.wait()
    assert last.finish is FinishReason.ERROR and last.error is not None and "the plan is void" in last.error
    with pytest.raises(EngineClosed, match="the plan is void"):
        engine.submit(Submission(prompts(10), sampling()), ended)
    loop.close(5.0)
    assert isinstance(loop.failed(), RuntimeError)


def test_an_engine_that_cannot_be_warmed_up_does_not_start_and_says_why(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def burst(*_: object, **__: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("penstock.engine.execution.warm.run_all", burst)
    loop = EngineLoop(engine)
    with pytest.raises(EngineClosed) as raised:
        loop.start()
    assert "no such kernel" in str(raised.value.__cause__) and isinstance(loop.failed(), RuntimeError)
    with pytest.raises(EngineClosed, match="no such kernel"):
        engine.submit(Submission([1, 2], sampling()), Ended())
    loop.close(5.0)


def test_an_engine_that_cannot_be_warmed_up_leaves_its_directory_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def burst(*_: object, **__: object) -> None:
        raise RuntimeError("no such kernel")

    config = tiny_config(host_blocks=16, ssd_dir=str(tmp_path), ssd_gib=0.05)
    engine = build(config)
    monkeypatch.setattr("penstock.engine.execution.warm.run_all", burst)
    with pytest.raises(EngineClosed, match="could not be warmed up"):
        EngineLoop(engine).start()
    build(config).close(timeout_s=20.0)


def test_a_loop_that_is_closed_before_it_is_started_closes_its_engine_and_never_starts(
    tmp_path: Path,
) -> None:
    """An engine's process may be told to stop at any time."""
    config = tiny_config(host_blocks=16, ssd_dir=str(tmp_path), ssd_gib=0.05)
    loop = EngineLoop(engine := build(config))
    loop.close(5.0)
    loop.close(5.0)
    build(config).close(timeout_s=20.0)
    with pytest.raises(EngineClosed, match="before it was started"):
        loop.start()
    assert loop.failed() is None and engine.ended is not None


def test_a_loop_that_warms_up_beats_as_it_gets_further_and_is_warm_when_it_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Busy(2, has_work=False)
    seen: list[tuple[float, bool]] = []

    def warm(progress: Progress) -> None:
        assert engine.loop is not None
        for done in range(3):
            engine.now += 60.0
            seen.append((engine.loop.beat_age_s(), engine.loop.is_warm))
            progress("warming up", done, 3)

    monkeypatch.setattr(engine, "warm", warm)
    run_busy(engine, 0.0, monkeypatch)
    assert seen == [(60.0, False)] * 3 and engine.loop is not None and engine.loop.is_warm


class Busy:
    """An engine that is busy for some steps and then waits until it is closed, on a clock that only its turns
    move."""

    def __init__(self, num_busy: int, has_work: bool) -> None:
        self.now = 1000.0
        self.num_turns = 0
        self.ages: list[float] = []  # of the beat, at every step
        self.loop: EngineLoop | None = None
        self.idle, self.refused = threading.Event(), threading.Event()
        self._num_busy = num_busy
        self._has_work = has_work

    def monotonic(self) -> float:
        return self.now

    def launching(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def warm(self, progress: object) -> None:
        """It is."""

    def step(self) -> bool:
        assert self.loop is not None
        self.num_turns += 1
        self.ages.append(self.loop.beat_age_s())
        self.now += 7.0
        return self.num_turns < self._num_busy

    def wait_work(self, timeout_s: float) -> None:
        self.idle.set()
        assert self.refused.wait(30), "nobody closed the loop"

    def has_work(self) -> bool:
        return self._has_work

    def refuse(self, why: str) -> None:
        self.refused.set()

    def close(self, timeout_s: float) -> None:
        pass


def run_busy(engine: Busy, deadline_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop over it that is closed when it waits; returns when it has ended."""
    made: Any = engine
    monkeypatch.setattr(loop_module, "time", engine)
    monkeypatch.setattr(loop_module, "settle_process", lambda: None)
    engine.loop = EngineLoop(made)
    engine.loop.start()
    assert engine.idle.wait(30)
    engine.loop.close(deadline_s)
    assert engine.loop.failed() is None


def test_a_busy_loop_beats_in_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Busy(num_busy=20, has_work=False)
    run_busy(engine, 0.0, monkeypatch)
    assert engine.ages == [0.0] * 20, (
        "right before each step, whether the one before has done something or not"
    )


@pytest.mark.parametrize(("has_work", "num_turns"), [(False, 3), (True, 3 + 100)])
def test_a_loop_ends_when_nothing_is_left_and_at_its_deadline_otherwise(
    has_work: bool, num_turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Busy(num_busy=3, has_work=has_work)
    run_busy(engine, 100 * 7.0, monkeypatch)
    assert engine.num_turns == num_turns
