"""An engine that cannot go on, or that closes while something hangs: everybody who waits is told, exactly
once and with the reason, and nobody's wait outlasts it.

Holds invariant 25: an exception of the engine thread reaches everybody who waits for it. Holds invariant 27:
closing is bounded whatever hangs."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from penstock.contract import Adapter, FinishReason, SamplingParams, Submission, TokenEvent
from penstock.engine import cache_calls as calls_module
from penstock.engine.engine import Engine
from penstock.engine.loop import EngineLoop
from penstock.errors import DeadlineExceeded, EngineClosed, InvalidRequest
from penstock.models.lora import AdapterWeights
from penstock.testing.sanitized import build_sanitized
from penstock.testing.stores import MemoryStore
from tests.cpu.engine.test_cold_tiers import held, only_colder, shared  # noqa: F401 - a fixture
from tests.cpu.engine.test_tiers import until
from tests.support.driving import Collected, generate, run_all, settle_all, submit, tiny_config
from tests.support.gates import gates

Prompts = Callable[..., list[int]]
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def build(**settings: Any) -> Engine:
    """One that its test ends, or leaves behind."""
    return build_sanitized(tiny_config(**settings))[0]


def asked(call: Callable[[], Any]) -> Future[Any]:
    """On a thread of its own, as an operator does."""
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer


def failure_of(answer: Future[Any]) -> BaseException | None:
    return answer.exception(timeout=30.0)


def soon(condition: Callable[[], bool]) -> None:
    """Another thread is about to bring it about."""
    for _ in range(10_000_000):
        if condition():
            return
    raise AssertionError("it never came to that")


def burst(*_: object) -> Any:
    raise RuntimeError("the device is gone")


class Raising:
    """A listener that raises, after it has noted what it was told."""

    def __init__(self, error: BaseException) -> None:
        self.events: list[TokenEvent] = []
        self._error = error

    def __call__(self, event: TokenEvent) -> None:
        self.events.append(event)
        raise self._error


# --------------------------------------------------------------------------------------------- the loop fails


def test_a_failed_engine_tells_everybody_though_its_inbox_raises_as_well(
    prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(host_blocks=64)
    _, save = gates(engine)
    save.hold()
    running = submit(engine, prompts(40))
    until(engine, lambda: len(running.tokens) > 2 and engine.cache.num_in_flight > 0)
    flush = asked(lambda: engine.kv.wait_flushed("visible", 600.0))
    until(engine, lambda: bool(engine.kv.flushes))
    monkeypatch.setattr(engine.parts.scheduler, "cancel", burst)
    engine.cancel(running.request_id)  # a command that raises, and stands before all others
    queued = submit(engine, prompts(20, seed=1))
    reset = asked(engine.kv.reset)
    late_flush = asked(lambda: engine.kv.wait_flushed("captured", 600.0))
    soon(lambda: len(engine._inbox) == 4)
    prefetch, given_up = engine.kv.prefetch(prompts(20)), engine.kv.prefetch(session="agent")
    assert given_up.cancel()
    engine.fail_all(RuntimeError("the device is gone"))
    assert isinstance(prefetch.exception(timeout=0), EngineClosed)
    for one in (running, queued):
        assert [event.finish for event in one.events if event.finish is not None] == [FinishReason.ERROR]
        assert "the device is gone" in str(one.error)
    for answer in (flush, reset, late_flush):
        assert isinstance(failure_of(answer), EngineClosed) and ("the device is gone") in str(
            failure_of(answer)
        )
    save.let()


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit("mine")])
def test_a_listener_that_raises_keeps_nobody_from_being_told(prompts: Prompts, error: BaseException) -> None:
    engine = build()
    first, raising, last = submit(engine, prompts(10)), Raising(error), Collected()
    engine.submit(Submission(prompts(10, seed=1), PARAMS), raising)
    engine.submit(Submission(prompts(10, seed=2), PARAMS), last.events.append)
    engine._inbox.run_all()
    in_the_inbox = Raising(error)
    engine.submit(Submission(prompts(10, seed=3), PARAMS), in_the_inbox)
    behind_it = submit(engine, prompts(10, seed=4))
    engine.fail_all(RuntimeError("the device is gone"))
    for one in (first, raising, last, in_the_inbox, behind_it):
        assert [event.finish for event in one.events] == [FinishReason.ERROR]


def test_after_a_failure_everything_is_refused_with_its_reason_and_nothing_piles_up(prompts: Prompts) -> None:
    engine = build(host_blocks=16)
    engine.fail_all(RuntimeError("the device is gone"))
    engine.refuse("the server is shutting down")
    calls: list[Callable[[], object]] = [
        lambda: submit(engine, prompts(10)),
        engine.kv.reset,
        lambda: engine.kv.wait_flushed("visible", 600.0),
        lambda: engine.kv.prefetch(session="agent"),
    ]
    for call in calls:
        with pytest.raises(EngineClosed, match="the device is gone"):
            call()
    for _ in range(100):
        engine.cancel("somebody")
    assert len(engine._inbox) == 0


def test_a_request_that_the_scheduler_does_not_take_is_told_once_and_leaves_no_lease(
    prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(host_blocks=64)
    generate(engine, prompts(100))
    settle_all(engine)
    engine.cache.reset(("device",))
    found = submit(engine, prompts(100))
    assert len(engine.cache.host.leases) == 1
    monkeypatch.setattr(engine.parts.scheduler, "add", burst)
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.step()
    engine.fail_all(RuntimeError("the device is gone"))
    assert (
        len(found.events) == 1
        and found.finish is FinishReason.ERROR
        and ("the device is gone") in str(found.error)
    )
    assert len(engine.cache.host.leases) == 0
    engine.close(20.0)


# ----------------------------------------------------------------------------------------- closing is bounded


@pytest.mark.parametrize("hanging", ["write", "close", "reset", "persist"])
def test_closing_is_bounded_though_a_store_hangs(prompts: Prompts, shared: MemoryStore, hanging: str) -> None:  # noqa: F811
    engine = build(host_blocks=64, remote="memory://")
    generate(engine, prompts(40))
    settle_all(engine)
    reset = flush = None
    with held(shared, hanging):
        if hanging == "write":
            generate(engine, prompts(40, seed=1))
        if hanging == "reset":
            reset = asked(lambda: engine.kv.reset(("remote",)))
        if hanging in ("write", "persist"):
            flush = asked(lambda: engine.kv.wait_flushed("persisted", 600.0))
        if reset is not None or flush is not None:
            until(engine, lambda: bool(engine.kv.flushes))
        if hanging != "close":
            until(engine, lambda: hanging in shared.calls and engine.is_transferring())
        with pytest.raises(DeadlineExceeded):
            engine.close(0.2)
        for answer in (reset, flush):
            assert answer is None or isinstance(failure_of(answer), EngineClosed)
        with pytest.raises(EngineClosed):
            submit(engine, prompts(40))
    engine.close(20.0)  # and what hung has let go


# ---------------------------------------------------------------- a submit that is refused at the last moment


class Files:
    digest = "digest"
    weights = AdapterWeights(())


def adapted(engine: Engine) -> Adapter:
    """An adapter that changes nothing, under a name."""
    engine.adapters._read = lambda directory: Files()  # type: ignore[assignment, return-value]
    return engine.adapters.load("tuned", Path("anywhere")).adapter


def test_a_device_that_fails_while_a_step_is_waited_for_ends_its_requests_with_the_error(
    prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build()
    found = submit(engine, prompts(10))
    engine.step()
    assert engine.turns.running is not None
    engine.turns.running = dataclasses.replace(engine.turns.running, fence=Lost())
    run_all(engine)
    assert found.finish is FinishReason.ERROR and "the device is gone" in str(found.error)
    engine.parts.lanes[0].drain(20.0)
    assert len(generate(engine, prompts(10)).tokens) == 8, "the engine goes on"
    engine.close(20.0)


class Lost:
    """A fence of a device that has failed."""

    lane, number = "compute", 0

    def passed(self) -> bool:
        return False

    def wait_passed(self, timeout_s: float | None = None) -> None:
        raise RuntimeError("the device is gone")


@pytest.mark.parametrize("late", ["closed", "ended", "no lease"])
def test_a_submit_that_is_refused_at_the_last_moment_keeps_nothing(
    prompts: Prompts, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    engine = build(host_blocks=64)
    adapter = adapted(engine)
    generate(engine, prompts(100))
    settle_all(engine)
    engine.cache.reset(("device",))
    lease = engine.cache.lease
    prefix_of = engine.cache.prefix_of

    def refuses(owner: str, prefix: Any) -> Any:
        found = lease(owner, prefix_of(prompts(100)))  # type: ignore[arg-type]
        assert found is not None and engine.adapters._num_holds[adapter.digest] == 1
        if late == "no lease":
            found.end()
            raise InvalidRequest("something about it")
        (engine.refuse if late == "closed" else engine._inbox.end)("just now")
        return found

    monkeypatch.setattr(engine.cache, "lease", refuses)
    told: list[TokenEvent] = []
    with pytest.raises((EngineClosed, InvalidRequest)):
        engine.submit(Submission(prompts(100), PARAMS, adapter=adapter), told.append)
    assert engine.adapters._num_holds[adapter.digest] == 0, "its adapter's hold"
    assert len(engine.cache.host.leases) == 0, "its lease"
    assert told == [] and len(engine._inbox) == 0
    engine.close(20.0)


MakeEngine = Callable[..., Engine]


def divides(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("of all things")


def nothing_held(engine: Engine) -> bool:
    return all(
        counts["free"] + counts["idle"] == sum(counts.values())
        for counts in engine.stats().kv_blocks.values()
    )


@pytest.mark.parametrize("part", ["warm.run_all", "executor.Executor.launch"])
def test_a_warm_up_that_fails_gives_back_its_block(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    engine = make_engine()
    with monkeypatch.context() as patched:
        patched.setattr(f"penstock.engine.execution.{part}", divides)
        with pytest.raises(ZeroDivisionError):
            engine.warm()
    assert nothing_held(engine)
    engine.warm()
    assert nothing_held(engine)


# ---------------------------------------------------------------------------------------------- whoever waits


def test_a_reset_and_a_flush_that_take_too_long_say_which_and_for_how_long(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody runs the engine."""
    engine = make_engine(host_blocks=16)
    monkeypatch.setattr(calls_module, "RESET_DEADLINE_S", 0.001)
    with pytest.raises(
        DeadlineExceeded, match=r"the cache was not reset within 0\.001 s; it continues in the background"
    ):
        engine.kv.reset()
    for level in ("captured", "visible"):
        with pytest.raises(DeadlineExceeded, match=rf"the cache was not {level} within 0\.002 s"):
            engine.kv.wait_flushed(level, 0.002)  # type: ignore[arg-type]
    run_all(engine)
    assert not engine.kv.flushes


def test_what_can_be_waited_for_depends_on_the_tiers(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(host_blocks=16)
    with pytest.raises(InvalidRequest, match="nothing outlives this process"):
        engine.kv.wait_flushed("persisted", 1.0)
    durable = make_engine(host_blocks=16, ssd_dir=str(tmp_path / "kv"), ssd_gib=0.1)
    begun: list[str] = []
    for name in ("persist", "submit_saves"):
        # None: there is nothing to wait for
        monkeypatch.setattr(durable.cache, name, lambda name=name: begun.append(name))
    loop = EngineLoop(durable)
    loop.start()
    for level in ("captured", "visible", "persisted"):
        durable.kv.wait_flushed(level, 30.0)  # type: ignore[arg-type]
    loop.close(20.0)
    assert begun == ["submit_saves", "submit_saves", "persist"]
