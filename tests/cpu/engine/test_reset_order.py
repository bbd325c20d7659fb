"""Operators beside the engine thread: resets, flushes, submits and ends in every order that gates can hold
them in. What a flush says is persisted is in the store, and what a reset was asked to forget is forgotten."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from penstock.contract import KvSource
from penstock.engine.engine import Engine
from penstock.engine.loop import EngineLoop
from penstock.errors import StoreFailed
from penstock.testing.stores import MemoryStore
from tests.cpu.engine.test_cold_tiers import held, only_colder, shared  # noqa: F401 - a fixture
from tests.cpu.engine.test_failed_engine import asked, soon
from tests.cpu.engine.test_tiers import turn, until
from tests.support.driving import generate, run_all, settle_all, submit
from tests.support.gates import gates

MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]
SIX = 100  # tokens: six blocks


def done(engine: Engine, *answers: Future[Any]) -> list[Any]:
    """The engine goes round until they are there."""
    until(engine, lambda: all(answer.done() for answer in answers))
    return [answer.result() for answer in answers]


def operator(engine: Engine, call: Callable[[], Any]) -> Future[Any]:
    """The engine thread has begun what it asks for when this returns."""
    num = len(engine.kv.flushes)
    answer = asked(call)
    soon(lambda: len(engine._inbox) > 0)
    engine.step()
    # where it was over in the same turn, the thread that asked is yet to hear
    soon(lambda: answer.done() or len(engine.kv.flushes) > num)
    return answer


def flushing(engine: Engine) -> Future[Any]:
    return operator(engine, lambda: engine.kv.wait_flushed("persisted", 600.0))


def resetting(engine: Engine, *tiers: str) -> Future[Any]:
    return operator(engine, lambda: engine.kv.reset(tiers))


def test_a_flush_while_the_store_is_being_emptied_is_not_acknowledged_before_it_is_true(
    make_engine: MakeEngine,
    prompts: Prompts,
    shared: MemoryStore,  # noqa: F811
) -> None:
    engine = make_engine(host_blocks=64, remote="memory://")
    generate(engine, prompts(SIX))
    settle_all(engine)
    assert len(shared.blocks) == 6
    with held(shared, "reset"):
        reset = resetting(engine, "remote")
        shared.gate.wait_came()
        flush = flushing(engine)
        turn(engine, 50)
        assert not reset.done() and not flush.done(), "the engine goes on, and neither is over"
    assert done(engine, reset, flush)[0] == {"remote": 6}
    assert len(shared.blocks) == 6, "acknowledged, and not there"


def test_a_flush_that_had_begun_when_the_store_was_emptied_writes_again(
    make_engine: MakeEngine,
    prompts: Prompts,
    shared: MemoryStore,  # noqa: F811
) -> None:
    engine = make_engine(host_blocks=64, remote="memory://")
    generate(engine, prompts(SIX))
    settle_all(engine)
    with held(shared, "persist"):
        flush = flushing(engine)
        shared.gate.wait_came()
        reset = resetting(engine, "remote")
        turn(engine, 20)
        assert not flush.done() and not reset.done()
    assert done(engine, reset, flush)[0] == {"remote": 6}
    assert len(shared.blocks) == 6


def test_the_same_on_a_real_disk_with_the_engine_on_its_own_thread(
    make_engine: MakeEngine, prompts: Prompts, tmp_path: Path
) -> None:
    engine = make_engine(host_blocks=64, ssd_dir=str(tmp_path), ssd_gib=0.05)
    generate(engine, prompts(SIX))
    loop = EngineLoop(engine)
    loop.start()
    for _ in range(10):
        engine.kv.wait_flushed("persisted", 60.0)
        flush, reset = (
            asked(lambda: engine.kv.wait_flushed("persisted", 60.0)),
            asked(lambda: engine.kv.reset(("ssd",))),
        )
        assert flush.result(60.0) is None and reset.result(60.0) == {"ssd": 6}
        engine.kv.wait_flushed("persisted", 60.0)
        assert engine.stats().kv_blocks["ssd"]["used"] == 6
    loop.close(5.0)
    assert loop.failed() is None


def test_a_reset_takes_what_was_queued_for_writing_before_it(
    make_engine: MakeEngine,
    prompts: Prompts,
    shared: MemoryStore,  # noqa: F811
) -> None:
    engine = make_engine(host_blocks=64, remote="memory://")
    with held(shared, "write"):
        generate(engine, prompts(SIX))
        until(engine, lambda: engine.cache._num_flying == 0 and engine.cache._num_cold > 0)
        shared.gate.wait_came()
        reset = resetting(engine, "remote")
        turn(engine, 20)
        assert "reset" not in shared.calls
    assert done(engine, reset) == [{"remote": 6}] and not shared.blocks
    done(engine, flushing(engine))
    assert len(shared.blocks) == 6


def test_a_store_that_fails_to_reset_says_so_to_who_asked_and_nothing_else_ends(
    make_engine: MakeEngine,
    prompts: Prompts,
    shared: MemoryStore,  # noqa: F811
) -> None:
    engine = make_engine(host_blocks=64, remote="memory://")
    cold = generate(engine, prompts(SIX))
    settle_all(engine)
    shared.die()
    reset = resetting(engine, "remote")
    until(engine, lambda: reset.done())
    assert isinstance(reset.exception(), StoreFailed)
    assert generate(engine, prompts(SIX)).tokens == cold.tokens


def test_a_reset_of_host_memory_leaves_what_a_request_is_admitted_with(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = make_engine(host_blocks=64)
    cold = generate(engine, prompts(SIX))
    settle_all(engine)
    engine.cache.reset(("device",))
    load, _ = gates(engine)
    load.hold()
    found = submit(engine, prompts(SIX))
    until(engine, lambda: engine.stats().requests["loading"] == 1)
    assert engine.cache.reset(("device", "host")).forgotten == {"device": 0, "host": 0}
    load.let()
    run_all(engine)
    assert found.tokens == cold.tokens and found.source == KvSource(host=96, computed=4)
