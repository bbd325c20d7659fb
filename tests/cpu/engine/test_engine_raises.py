"""Where something in the middle of an engine raises: what had been taken goes back, and whoever waits is told
what it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.engine import engine as engine_module
from penstock.engine.engine import Engine
from penstock.engine.loop import EngineLoop
from penstock.errors import DeadlineExceeded, InvalidRequest, Overloaded
from penstock.kv.table import BlockTable
from tests.support.driving import generate, run_all, submit

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


# ---------------------------------------------------------------------------------------------- whoever waits


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
