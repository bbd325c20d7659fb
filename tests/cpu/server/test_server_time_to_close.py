"""How long a server that stops waits for its engine's loop: as long as running requests may take, and a
little more."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable
from types import SimpleNamespace

import pytest

from penstock.config import ServerConfig
from penstock.contract import FinishReason, SamplingParams
from penstock.errors import DeadlineExceeded, EngineClosed, Overloaded
from penstock.server import service as service_module
from penstock.server.service import BEAT_LIMIT_S, Service, _in_thread
from tests.support.scripted_engine import ScriptedEngine, ScriptedLoop


def test_a_loop_that_lets_requests_end_for_all_their_time_closes_in_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(service_module, "time", SimpleNamespace(monotonic=lambda: now_s, time=time.time))
    engine = ScriptedEngine()
    loop = ScriptedLoop(engine)
    gate = threading.Event()
    monkeypatch.setattr(loop, "close", lambda deadline_s: gate.wait())

    async def stopping() -> None:
        nonlocal now_s
        service = Service(engine, loop, ServerConfig(shutdown_s=100.0))
        service.stop()
        now_s += 100.0
        waiting = asyncio.create_task(service.wait_stopped())
        for _ in range(100):
            await asyncio.sleep(0)
        assert not waiting.done()
        gate.set()
        await waiting

    asyncio.run(stopping())
    assert not caplog.records


def test_giving_up_tells_readers_and_has_the_engine_drop_what_they_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the engine's loop would let requests that nobody reads run for all the time that a stop leaves
    them."""
    engine = ScriptedEngine()
    engine.hold()
    cancelled: list[str] = []
    monkeypatch.setattr(engine, "cancel", cancelled.append)

    async def giving_up() -> None:
        service = Service(engine, ScriptedLoop(engine), ServerConfig())
        service.start()
        with service.open_reading() as one, service.open_reading() as other:
            other.seats.widen(2)
            for reading, index in ((one, 0), (other, 0), (other, 1)):
                reading.submit(index, [1, 2, 3], SamplingParams(max_tokens=4))
            service.give_up()
            assert sorted(cancelled) == sorted([f"{one.id}-0", f"{other.id}-0", f"{other.id}-1"])
            for reading, num in ((one, 1), (other, 2)):
                events = await reading.next_events()
                assert [[event.finish for event in events[index]] for index in range(num)] == [
                    [FinishReason.CANCELLED]
                ] * num
        assert service.generations.taken == 0
        engine.release()
        await service.wait_stopped()

    asyncio.run(giving_up())


def test_a_server_that_has_not_started_or_is_stopping_takes_no_request() -> None:
    engine = ScriptedEngine()

    async def asking() -> None:
        service = Service(engine, ScriptedLoop(engine), ServerConfig())
        with pytest.raises(EngineClosed, match="not taking requests"):
            service.open_reading()
        service.start()
        with service.open_reading():
            assert service.generations.taken == 1
        stop = service.stop()
        assert service.stop() is stop and service.stopping
        with pytest.raises(EngineClosed, match="not taking requests"):
            service.open_reading()
        await service.wait_stopped()
        assert service.generations.taken == 0

    asyncio.run(asking())


def test_a_loop_that_closes_with_an_error_says_so_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine()
    loop = ScriptedLoop(engine)

    def close(deadline_s: float) -> None:
        raise ZeroDivisionError("out of order")

    monkeypatch.setattr(loop, "close", close)

    async def stopping() -> None:
        await Service(engine, loop, ServerConfig()).wait_stopped()

    asyncio.run(stopping())
    (record,) = [record for record in caplog.records if record.name == "penstock.server"]
    assert record.levelname == "ERROR" and "closed with an error" in record.message
    assert record.exc_info is not None and isinstance(record.exc_info[1], ZeroDivisionError)


def test_a_loop_that_never_closes_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine()
    loop = ScriptedLoop(engine)
    gate = threading.Event()
    monkeypatch.setattr(loop, "close", lambda deadline_s: gate.wait())
    monkeypatch.setattr(service_module, "CLOSE_GRACE_S", 0.0)

    async def stopping() -> None:
        await Service(engine, loop, ServerConfig(shutdown_s=0.0)).wait_stopped()

    asyncio.run(stopping())
    gate.set()
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "the engine loop did not close in time"
    ]


@pytest.mark.parametrize("what", ["reset", "flush"])
def test_an_operator_is_answered_though_the_engine_does_not_come_round(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """One that is under way goes on, and keeps the next one out until it is over."""
    engine = ScriptedEngine()
    gate = threading.Event()
    for name in ("RESET_TIMEOUT_S", "FLUSH_TIMEOUT_S", "CLOSE_GRACE_S"):
        monkeypatch.setattr(service_module, name, 0.0)
    monkeypatch.setattr(engine, "reset_cache", lambda tiers: gate.wait() and {"device": 3})
    monkeypatch.setattr(engine, "wait_flushed", lambda level, timeout_s: gate.wait() and None)

    async def asking() -> None:
        service = Service(engine, ScriptedLoop(engine), ServerConfig())

        def call() -> Awaitable[object]:
            return service.reset_cache(("device",)) if what == "reset" else service.flush_cache("visible")

        with pytest.raises(DeadlineExceeded if what == "reset" else EngineClosed):
            await call()
        with pytest.raises(Overloaded, match=what):
            await call()
        gate.set()
        under_way = service._under_way[what]
        assert under_way is not None and await under_way == ({"device": 3} if what == "reset" else None)
        monkeypatch.setattr(service_module, "RESET_TIMEOUT_S", 30.0)
        monkeypatch.setattr(service_module, "FLUSH_TIMEOUT_S", 30.0)
        assert await call() == ({"device": 3} if what == "reset" else None)

    asyncio.run(asking())


def test_a_loop_is_in_trouble_when_it_has_failed_or_is_silent_for_longer_than_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = ScriptedEngine()
    loop = ScriptedLoop(engine)
    service = Service(engine, loop, ServerConfig())
    for age_s, is_alive in ((0.0, True), (BEAT_LIMIT_S, True), (BEAT_LIMIT_S + 0.1, False)):
        loop.age_s = age_s
        assert (service.trouble() is None) == is_alive
    loop.age_s = 0.0
    monkeypatch.setattr(loop, "failed", lambda: ZeroDivisionError())
    assert service.trouble() == "the engine loop has failed"


def test_whatever_ends_work_on_a_thread_of_its_own_ends_the_wait_for_it() -> None:
    class Odd(BaseException):
        """Nothing that anybody catches as an Exception."""

    def fail() -> None:
        raise Odd

    async def waiting() -> None:
        assert await _in_thread(lambda: 7, "penstock-test") == 7
        with pytest.raises(Odd):
            await asyncio.wait_for(_in_thread(fail, "penstock-test"), 30.0)

    asyncio.run(waiting())


def test_work_that_outlives_the_server_or_whoever_waited_disturbs_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = threading.Event()
    unheard: list[object] = []

    async def leaving() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unheard.append(context))
        given_up = _in_thread(lambda: 1, "penstock-given-up")
        given_up.cancel()
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "penstock-given-up"] or [
            None
        ]
        if thread is not None:
            thread.join(30.0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        _in_thread(gate.wait, "penstock-late")

    asyncio.run(leaving())
    (late,) = [thread for thread in threading.enumerate() if thread.name == "penstock-late"]
    assert late.daemon, "it keeps no process"
    gate.set()
    late.join(30.0)
    assert [record.message for record in caplog.records] == [
        "penstock-late ended after the server had closed"
    ]
    assert unheard == []
