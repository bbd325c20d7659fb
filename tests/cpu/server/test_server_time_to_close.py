"""How long a server that stops waits for its engine, what its readers and operators are told meanwhile, and
when the engine is in trouble."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from penstock.contract import FinishReason, SamplingParams
from penstock.errors import DeadlineExceeded, EngineClosed, Overloaded
from penstock.server import service as service_module
from penstock.server.service import BEAT_LIMIT_S
from tests.cpu.server.served import service_of
from tests.support.scripted_engine import ScriptedEngine, ScriptedLoop


@pytest.fixture
def loop() -> ScriptedLoop:
    return ScriptedLoop(ScriptedEngine())


@pytest.mark.parametrize("ends", [True, False])
def test_a_loop_has_all_the_time_of_its_requests_and_is_left_behind_after_it(
    loop: ScriptedLoop, ends: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s, gate = 1000.0, threading.Event()
    monkeypatch.setattr(service_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(loop, "close", lambda deadline_s: gate.wait())

    async def stopping() -> None:
        nonlocal now_s
        service = service_of(loop, shutdown_s=100.0)
        service.start()
        service.stop()
        now_s += 100.0 if ends else 1000.0
        waiting = asyncio.create_task(service.wait_stopped())
        for _ in range(100):
            await asyncio.sleep(0)
        assert waiting.done() is not ends
        gate.set()
        await waiting

    asyncio.run(stopping())
    wrong = [record.message for record in caplog.records]
    assert wrong == ([] if ends else ["the engine loop did not close in time"])
    loop._stop.set()


def test_a_loop_that_closes_with_an_error_says_so_in_the_log_and_readers_are_told_the_end(
    loop: ScriptedLoop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def close(deadline_s: float) -> None:
        raise ZeroDivisionError("out of order")

    monkeypatch.setattr(loop, "close", close)

    async def stopping() -> None:
        service = service_of(loop)
        service.start()
        await service.wait_stopped()

    asyncio.run(stopping())
    (record,) = [record for record in caplog.records if record.name == "penstock.server"]
    assert record.levelname == "ERROR" and "closed with an error" in record.message
    assert record.exc_info is not None and isinstance(record.exc_info[1], ZeroDivisionError)
    loop._stop.set()


def test_giving_up_tells_readers_and_has_the_engine_drop_what_they_waited_for(loop: ScriptedLoop) -> None:
    """Else the engine's loop would let requests that nobody reads run for all the time that a stop leaves
    them."""
    engine = loop.engine
    engine.hold()

    async def giving_up() -> None:
        service = service_of(loop)
        service.start()
        with service.open_reading() as one, service.open_reading() as other:
            other.seats.widen(2)
            for reading, index in ((one, 0), (other, 0), (other, 1)):
                reading.submit(index, [1, 2, 3], SamplingParams(max_tokens=4))
            while engine.num_open < 3:
                await asyncio.sleep(0.001)
            service.engine.give_up()
            for reading, num in ((one, 1), (other, 2)):
                events = await reading.next_events()
                assert [[event.finish for event in events[index]] for index in range(num)] == [
                    [FinishReason.ERROR]
                ] * num
        assert service.generations.taken == 0
        while engine.num_open:
            await asyncio.sleep(0.001)
        await service.wait_stopped()

    asyncio.run(giving_up())


def test_a_server_that_is_stopping_takes_no_request(loop: ScriptedLoop) -> None:
    async def asking() -> None:
        service = service_of(loop)
        service.start()
        with service.open_reading():
            assert service.generations.taken == 1
        service.stop()
        service.stop()
        with pytest.raises(EngineClosed, match="not taking requests"):
            service.open_reading()
        await service.wait_stopped()
        assert service.generations.taken == 0

    asyncio.run(asking())


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [("reset_cache", (("device",),), {"device": 3}), ("wait_flushed", ("visible", 1.0), None)],
)
def test_an_operator_is_answered_though_the_engine_does_not_come_round(
    loop: ScriptedLoop,
    name: str,
    arguments: tuple[object, ...],
    answer: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is under way goes on, and keeps the next one out until it is over."""
    gate = threading.Event()
    monkeypatch.setattr(loop.engine, name, lambda *_: gate.wait() and answer)
    _, late = service_module.PATIENCE[name]

    async def asking() -> None:
        service = service_of(loop)
        service.start()
        monkeypatch.setitem(service_module.PATIENCE, name, (0.0, late))
        with pytest.raises(DeadlineExceeded if name == "reset_cache" else EngineClosed):
            await service.ask(name, *arguments)
        monkeypatch.setitem(service_module.PATIENCE, name, (30.0, late))
        with pytest.raises(Overloaded, match="reset" if name == "reset_cache" else "flush"):
            await service.ask(name, *arguments)
        gate.set()
        by_s = time.monotonic() + 30.0
        while time.monotonic() < by_s:
            try:
                assert await service.ask(name, *arguments) == answer
                break
            except Overloaded:
                await asyncio.sleep(0.001)
        await service.wait_stopped()

    asyncio.run(asking())


def test_a_loop_is_in_trouble_when_it_has_failed_or_is_silent_for_longer_than_it_may(
    loop: ScriptedLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = service_of(loop)
    for age_s, is_alive in ((0.0, True), (BEAT_LIMIT_S, True), (BEAT_LIMIT_S + 0.1, False)):
        monkeypatch.setattr(service.engine, "beat_age_s", lambda age_s=age_s: age_s)
        assert (service.trouble() is None) == is_alive
    monkeypatch.undo()
    service.engine.error = EngineClosed("no")
    assert service.trouble() == "the engine loop has failed"
