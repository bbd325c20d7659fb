"""Where something in the middle of an engine raises: what had been taken goes back, and whoever waits is told
what it was."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.contract import FinishReason, SamplingParams, TokenEvent
from penstock.engine import engine as engine_module
from penstock.engine.engine import Engine
from penstock.engine.loop import EngineLoop
from penstock.errors import DeadlineExceeded, EngineClosed, InvalidRequest, Overloaded
from penstock.kv.table import BlockTable
from tests.support.driving import generate, run_all, settle_all, submit

MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]


def burst(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("of all things")


def nothing_held(engine: Engine) -> bool:
    return all(
        counts["free"] + counts["idle"] == sum(counts.values())
        for counts in engine.stats().kv_blocks.values()
    )


@pytest.mark.parametrize("part", ["warm", "launch"])
def test_a_warm_up_that_fails_gives_back_its_block_and_the_adapters(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    engine = make_engine()
    executor = engine._parts.executor
    weights_of = executor._weights_of
    with monkeypatch.context() as patched:
        patched.setattr(executor, part, burst)
        with pytest.raises(ZeroDivisionError):
            engine.warm()
    assert nothing_held(engine) and executor._weights_of == weights_of
    engine.warm()
    assert nothing_held(engine) and executor._weights_of == weights_of


def test_a_warm_up_goes_without_a_block_where_there_is_none(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    monkeypatch.setattr(BlockTable, "try_extend", lambda table, num: False)
    monkeypatch.setattr(engine._parts.executor, "warm", burst)
    engine.warm()
    assert nothing_held(engine)


@pytest.mark.parametrize("what", ["prefix_of", "lease"])
def test_a_submission_that_fails_on_its_way_is_nobodys(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    engine = make_engine(host_blocks=16)
    generate(engine, prompts(40))
    with monkeypatch.context() as patched:
        patched.setattr(engine.cache, what, burst)
        with pytest.raises(ZeroDivisionError):
            submit(engine, prompts(40))
    assert not engine.has_work() and len(engine._outbox) == 0
    assert len(generate(engine, prompts(40)).tokens) == 8


def test_a_name_that_is_in_use_is_refused_and_its_first_owner_goes_on(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = make_engine(host_blocks=16)
    generate(engine, prompts(40))
    settle_all(engine)
    engine.cache.reset(["device"])
    first, second = list[TokenEvent](), list[TokenEvent]()
    for listener in (first, second):
        engine.submit(
            prompts(40), SamplingParams(max_tokens=3, ignore_eos=True), listener.append, request_id="same"
        )
    cache = engine.cache
    assert len(cache.saves.host.leases) == 2, "each has what host memory has of its prompt"
    run_all(engine)
    assert [event.finish for event in second] == [FinishReason.ERROR] and second[0].error == (
        "request id same is in use"
    )
    assert first[-1].finish is FinishReason.LENGTH and len(cache.saves.host.leases) == 0


# ---------------------------------------------------------------------------------------------- whoever waits


@contextmanager
def asked(call: Callable[[], object]) -> Iterator[list[Any]]:
    """Somebody who waits on a thread of its own; what comes of it."""
    came: list[Any] = []

    def ask() -> None:
        try:
            came.append(call())
        except BaseException as error:
            came.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    yield came
    thread.join(10.0)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.reset_cache(),
        lambda engine: engine.wait_flushed("visible", 30.0),
        lambda engine: engine.prefetch([1] * 40).result(30),
    ],
    ids=["a reset", "a flush", "a prefetch"],
)
def test_whoever_waits_for_the_engine_thread_is_told_when_it_ends(
    make_engine: MakeEngine, call: Callable[[Engine], object]
) -> None:
    engine = make_engine(host_blocks=16)
    with asked(lambda: call(engine)) as came:
        while not engine.has_work():
            pass
        engine.fail_all(ZeroDivisionError("of all things"))
    assert isinstance(came[0], EngineClosed) and "ZeroDivisionError: of all things" in str(came[0])
    with pytest.raises(EngineClosed, match="of all things"):
        call(engine)


def test_a_reset_and_a_flush_that_take_too_long_say_which_and_for_how_long(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody runs the engine."""
    engine = make_engine(host_blocks=16)
    monkeypatch.setattr(engine_module, "RESET_DEADLINE_S", 0.001)
    with pytest.raises(
        DeadlineExceeded, match=r"the cache was not reset within 0\.001 s; it continues in the background"
    ):
        engine.reset_cache()
    for level in ("captured", "visible"):
        with pytest.raises(DeadlineExceeded, match=rf"the cache was not {level} within 0\.002 s"):
            engine.wait_flushed(level, 0.002)  # type: ignore[arg-type]
    run_all(engine)
    assert not engine._flushes


def test_what_can_be_waited_for_depends_on_the_tiers(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(host_blocks=16)
    with pytest.raises(InvalidRequest, match="nothing outlives this process"):
        engine.wait_flushed("persisted", 1.0)
    durable = make_engine(host_blocks=16, ssd_dir=str(tmp_path / "kv"), ssd_gib=0.1)
    begun: list[str] = []
    for name in ("persist", "submit_saves"):
        # None: there is nothing to wait for
        monkeypatch.setattr(durable.cache, name, lambda name=name: begun.append(name))
    loop = EngineLoop(durable)
    loop.start()
    for level in ("captured", "visible", "persisted"):
        durable.wait_flushed(level, 30.0)  # type: ignore[arg-type]
    loop.close(20.0)
    assert begun == ["submit_saves", "submit_saves", "persist"]


def test_a_prefetch_that_nobody_waits_for_any_more_is_not_begun(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    begun: list[Any] = []
    monkeypatch.setattr(engine._sessions, "prefetch", lambda *args: begun.append(args))
    assert engine.prefetch(prompts(40)).cancel()
    engine.step()
    assert begun == []


def test_an_overload_ends_the_prefetch_that_met_it_and_nothing_else(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()

    def full(*_: Any) -> Any:
        raise Overloaded("16 are under way")

    monkeypatch.setattr(engine._sessions, "prefetch", full)
    done = engine.prefetch(prompts(40))
    engine.step()
    assert isinstance(done.exception(0), Overloaded)
    assert len(generate(engine, prompts(20)).tokens) == 8


def test_a_prompt_whose_kv_is_not_shared_has_nothing_to_prefetch(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    monkeypatch.setattr(engine.cache, "prefix_of", lambda *args: None)
    done = engine.prefetch(prompts(40))
    engine.step()
    assert done.result(0) == (0, False)


def test_a_loop_whose_start_has_failed_says_so_however_often_it_is_started(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    monkeypatch.setattr(engine._parts.executor, "warm", burst)
    loop = EngineLoop(engine)
    for _ in range(2):
        with pytest.raises(EngineClosed, match="could not be warmed up"):
            loop.start()
    loop.close(0.0)
