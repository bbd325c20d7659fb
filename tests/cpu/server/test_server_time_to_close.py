"""How long a server that stops waits for its engine's loop: as long as running requests may take, and a little more."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from penstock.config import ServerConfig
from penstock.server import service as service_module
from penstock.server.service import Service
from support.scripted_engine import ScriptedEngine, ScriptedLoop


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
