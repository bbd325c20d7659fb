"""Probes, metrics, cache routes, tokenising, and how the server ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.config import ServerConfig
from penstock.errors import ConfigError, DeadlineExceeded, EngineClosed, Overloaded
from penstock.server import service as service_module
from penstock.server.run import server_here
from tests.cpu.server.served import DEADLINE_S, MODEL, Served, completion, service_of, serving, until
from tests.support.scripted_engine import ScriptedEngine, ScriptedLoop


def scrape(served: Served) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    reply = served.http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(reply.text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_prompt_and_generated_tokens_are_conserved_between_usage_and_metrics(served: Served) -> None:
    client = served.client()
    prompt_tokens, generated, cached = 0, 0, 0
    for prompt, count in [("p" * 40, 3), ("p" * 40, 5), ("q" * 17, 1), ("p" * 40, 2)]:
        usage = client.completions.create(model=MODEL, prompt=prompt, max_tokens=count).usage
        prompt_tokens += usage.prompt_tokens
        generated += usage.completion_tokens
        cached += usage.prompt_tokens_details.cached_tokens
    seen = scrape(served)
    by_source = {
        labels[0][1]: value
        for (name, labels), value in seen.items()
        if name == "penstock_prompt_tokens_total"
    }
    assert sum(by_source.values()) == prompt_tokens
    assert by_source["device"] == cached == 64
    assert seen["penstock_generated_tokens_total", ()] == generated == 11
    assert seen["penstock_steps_total", ()] >= 11


def test_a_live_loop_is_ready_and_a_silent_one_is_not(served: Served) -> None:
    assert served.http.get("/health").json() == {"status": "ready"}
    assert served.http.get("/live").json() == {"status": "live"}
    served.loop.age_s = 60.0
    until(lambda: served.service.trouble(), "it is known")
    for path in ("/health", "/live"):
        reply = served.http.get(path)
        assert reply.status_code == 503
        assert "silent for 60." in reply.json()["reason"]
    served.loop.age_s = None
    until(lambda: served.http.get("/live").status_code == 200, "it is alive")


def test_while_the_engine_warms_up_the_server_is_live_and_not_ready(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever balances load sends nobody there yet, and whoever restarts what hangs leaves it alone."""
    monkeypatch.setattr(served.loop, "is_warm", False)
    until(lambda: served.service.not_ready(), "it is known")
    reply = served.http.get("/health")
    assert reply.status_code == 503 and reply.json()["reason"] == "the engine is warming up"
    assert served.http.get("/live").json() == {"status": "live"} and "warming up" in served.http.get("/").text
    monkeypatch.undo()
    until(lambda: served.http.get("/health").json() == {"status": "ready"}, "it is warm")


def test_a_dead_loop_ends_everyones_wait() -> None:
    with serving() as served:
        served.engine.hold()
        client = served.client()
        stream = client.completions.create(model=MODEL, prompt="x", stream=True)
        outcome: list[Exception] = []

        def ask() -> None:
            try:
                client.completions.create(model=MODEL, prompt="x")
            except openai.APIError as error:
                outcome.append(error)

        waiting = threading.Thread(target=ask)
        waiting.start()
        until(lambda: served.engine.num_open == 2, "the engine has both")
        served.loop.fail(RuntimeError("out of order"))
        waiting.join(DEADLINE_S)
        assert isinstance(outcome[0], openai.InternalServerError)
        with pytest.raises(openai.APIError, match="engine has failed"):
            list(stream)
        until(lambda: served.service.generations.taken == 0, "the seats are free")
        for path in ("/health", "/live"):
            assert served.http.get(path).status_code == 503


def test_a_large_prompt_is_tokenised_off_the_event_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads stuck on large prompts keep nobody with a small one waiting."""
    entered, leave = threading.Semaphore(0), threading.Event()
    encode = served.engine.tokenizer.encode

    def slow_encode(text: str, add_special: bool = True, most: int | None = None) -> list[int]:
        if len(text) > 1000:
            entered.release()
            assert leave.wait(DEADLINE_S)
        return encode(text, add_special, most)

    monkeypatch.setattr(served.engine.tokenizer, "encode", slow_encode)
    stuck = [served.send("/v1/completions", completion("x" * 50_000, max_tokens=1)) for _ in range(4)]
    for _ in range(2):
        assert entered.acquire(timeout=DEADLINE_S)
    assert (
        served.client().completions.create(model=MODEL, prompt="small", max_tokens=1).usage.prompt_tokens == 5
    )
    assert not entered.acquire(blocking=False), "more threads than were allowed"
    stuck.pop().close()
    stuck.pop().close()
    until(lambda: served.service.generations.taken == 2, "those who waited for a thread and left are gone")
    leave.set()
    for connection in stuck:
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        connection.close()
    assert len(served.engine.submitted) == 3


# --------------------------------------------------------------------------------------------------- shutdown


# Holds invariant 27: a shutdown lets requests end.
def test_a_shutdown_lets_running_requests_end() -> None:
    with serving() as served:
        served.engine.hold()
        stream = served.client().completions.create(model=MODEL, prompt="x", max_tokens=5, stream=True)
        until(lambda: served.engine.num_open == 1, "the engine has the request")
        served.server.should_exit = True
        until(lambda: served.service.stopping, "the server is stopping")
        served.engine.release()
        assert sum(len(chunk.choices[0].text) for chunk in stream) == 5


# Holds invariant 27: a shutdown ends at its deadline what still runs.
def test_a_shutdown_that_has_waited_long_enough_tells_the_readers() -> None:
    with serving(shutdown_s=0.1) as served:
        served.engine.hold()
        stream = served.client().completions.create(model=MODEL, prompt="x", max_tokens=5, stream=True)
        until(lambda: served.engine.num_open == 1, "the engine has the request")
        served.server.should_exit = True
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        until(lambda: served.service.generations.taken == 0, "the seat is free")


def test_a_request_that_slips_in_while_admission_closes_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine took it and then ended its thread without a word: the end of the loop is its end."""
    with serving() as served:
        monkeypatch.setattr(served.engine, "submit", lambda *args, **fields: "lost")
        outcome: list[int] = []
        waiting = threading.Thread(
            target=lambda: outcome.append(served.http.post("/v1/completions", json=completion()).status_code)
        )
        waiting.start()
        until(lambda: served.service.generations.taken == 1, "the request is waiting")
        served.server.should_exit = True
        waiting.join(DEADLINE_S)
        assert outcome == [503]


# Holds invariant 27: a server ends though its engine does not.
def test_a_wedged_engine_does_not_keep_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.server.service.CLOSE_GRACE_S", 0.1)
    never = threading.Event()
    engine = ScriptedEngine()
    loop = ScriptedLoop(engine)
    monkeypatch.setattr(loop, "close", lambda deadline_s: never.wait())
    server = server_here(engine, loop, ServerConfig(port=0, shutdown_s=0.1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started, "the server is up")
    server.should_exit = True
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    never.set()


def test_a_port_that_is_taken_is_a_configuration_error(served: Served) -> None:
    port = int(served.url.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=f"port {port}"):
        server_here(ScriptedEngine(), ScriptedLoop(ScriptedEngine()), ServerConfig(port=port))
    with pytest.raises(ConfigError, match="not an address"):
        server_here(
            ScriptedEngine(),
            ScriptedLoop(ScriptedEngine()),
            ServerConfig(host="no.such.host.invalid", port=0),
        )
    with pytest.raises(ConfigError, match="api-key is empty"):
        server_here(ScriptedEngine(), ScriptedLoop(ScriptedEngine()), ServerConfig(port=0, api_key=""))


PROGRAM = """
from penstock.config import ServerConfig
from penstock.server.run import server_here
from tests.support.scripted_engine import ScriptedEngine, ScriptedLoop
engine = ScriptedEngine()
engine.hold()
server_here(engine, ScriptedLoop(engine), ServerConfig(port=0, shutdown_s=30.0)).run()
print("clean end", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_says_where_it_listens_and_ends_on_a_signal(number: signal.Signals) -> None:
    with process() as (running, url):
        assert openai.OpenAI(base_url=f"{url}/v1", api_key="x").models.list().data[0].id == MODEL
        running.send_signal(number)
        assert running.wait(DEADLINE_S) == 0
        assert running.stdout.read() == "clean end\n"


def test_a_second_interrupt_gives_up_on_a_request_that_would_never_end() -> None:
    with process() as (running, url):
        stream = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0).completions.create(
            model=MODEL, prompt="x", stream=True
        )
        running.send_signal(signal.SIGINT)
        address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
        until(lambda: socket.socket().connect_ex(address) != 0, "the first interrupt has closed the door")
        assert running.poll() is None
        running.send_signal(signal.SIGINT)
        assert running.wait(DEADLINE_S) == 0
        assert running.stdout.read() == "clean end\n"
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)


@contextlib.contextmanager
def process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    running = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        line = running.stdout.readline()
        assert line.startswith("Penstock is ready on http://127.0.0.1:")
        yield running, line.split()[-1]
    finally:
        running.kill()
        running.wait()
        running.stdout.close()


# ---------------------------------------------------------------------------------------------------- the end


@pytest.fixture
def loop() -> ScriptedLoop:
    return ScriptedLoop(ScriptedEngine())


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [("kv.reset", (("device",),), {"device": 3}), ("kv.wait_flushed", ("visible", 1.0), None)],
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
    monkeypatch.setattr(loop.engine, name.removeprefix("kv."), lambda *_: gate.wait() and answer)
    _, late = service_module.PATIENCE[name]

    async def asking() -> None:
        service = service_of(loop)
        service.start()
        monkeypatch.setitem(service_module.PATIENCE, name, (0.0, late))
        with pytest.raises(DeadlineExceeded if name == "kv.reset" else EngineClosed):
            await service.ask(name, *arguments)
        monkeypatch.setitem(service_module.PATIENCE, name, (30.0, late))
        with pytest.raises(Overloaded, match="reset" if name == "kv.reset" else "flush"):
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
