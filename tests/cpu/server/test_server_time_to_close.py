"""How long a server that stops waits for its engine's loop: as long as running requests may take, and a little more."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from penstock.config import ServerConfig
from penstock.contract import FinishReason, SamplingParams
from penstock.server import service as service_module
from penstock.server.service import Service
from penstock.testing.scripted_engine import ScriptedEngine, ScriptedLoop


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


def test_giving_up_tells_readers_and_has_the_engine_drop_what_they_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the engine's loop would let requests that nobody reads run for all the time that a stop leaves them."""
    engine = ScriptedEngine()
    engine.hold()
    cancelled: list[str] = []
    monkeypatch.setattr(engine, "cancel", cancelled.append)

    async def giving_up() -> None:
        service = Service(engine, ScriptedLoop(engine), ServerConfig())
        service.start()
        with service.open_reading() as one, service.open_reading() as other:
            other.widen(2)
            for reading, index in ((one, 0), (other, 0), (other, 1)):
                reading.submit(index, [1, 2, 3], SamplingParams(max_tokens=4))
            service.give_up()
            assert sorted(cancelled) == sorted([f"{one.id}-0", f"{other.id}-0", f"{other.id}-1"])
            for reading, num in ((one, 1), (other, 2)):
                events = await reading.next_events()
                assert [[event.finish for event in events[index]] for index in range(num)] == [[FinishReason.CANCELLED]] * num
        assert service.generations.taken == 0
        engine.release()
        await service.wait_stopped()

    asyncio.run(giving_up())
