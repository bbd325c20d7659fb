"""`penstock serve` as several processes: what is killed, told to end or asked through another front. Real
processes, real signals."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

import penstock
from penstock.testing.tiny_models import TINY_LLAMA, write_tiny_model
from tests.support.adapters import write_random_adapter

QUICK_BEATS = Path(__file__).parents[2] / "support" / "quick_beats"
READY = "Penstock is ready on "
DEADLINE_S = 120.0
TINY = (
    "--model",
    "tiny-llama",
    "--load-format",
    "dummy",
    "--device",
    "cpu",
    "--device-kv-gib",
    "0.1",
    "--max-model-len",
    "60000",
)
LONG = {"model": "tiny-llama", "prompt": "x", "max_tokens": 50_000, "ignore_eos": True, "stream": True}
SHORT = {"model": "tiny-llama", "prompt": "x", "max_tokens": 3}


def until(condition: Callable[[], object], what: str) -> None:
    by_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < by_s, what
        time.sleep(0.01)


class Running:
    """A server in a process group of its own."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Any) -> None:
        self.process = process
        self.url = url
        self._log = log
        self._parent = psutil.Process(process.pid)

    def children(self, kind: str) -> list[psutil.Process]:
        found = []
        for child in self._parent.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if kind in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
        return found

    def engine(self) -> psutil.Process:
        (found,) = self.children("engine")
        return found

    def connect(self, front: psutil.Process) -> http.client.HTTPConnection:
        """To this front: the others are stopped while it takes the connection."""
        others = [one for one in self.children("front") if one.pid != front.pid]
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=DEADLINE_S)
        for other in others:
            other.suspend()
        try:
            connection.request("GET", "/version")
            assert connection.getresponse().read()
        finally:
            for other in others:
                other.resume()
        return connection

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def metrics(self) -> dict[str, float]:
        with httpx.Client(base_url=self.url, timeout=DEADLINE_S) as session:
            return figures_in(session.get("/metrics").text)

    def num_open(self) -> int:
        return int(
            sum(value for name, value in self.metrics().items() if name.startswith("penstock_requests "))
        )

    def assert_idle(self) -> None:
        until(lambda: self.num_open() == 0, "the engine has open requests")
        held = {name: n for name, n in self.metrics().items() if name.startswith("penstock_kv_blocks") and n}
        assert all({"free", "idle"} & set(name.split()) for name in held), held


@contextlib.contextmanager
def running(*flags: str, also: tuple[Path, ...] = ()) -> Iterator[Running]:
    """`also`: folders of modules that come before the tree's."""
    command = [sys.executable, "-m", "penstock", "serve", "--port", "0", *flags]
    # appending: its place is shared with the processes that write to it
    with tempfile.TemporaryFile("a+") as log:
        # the tree that these tests are of, whatever is installed
        source = str(Path(penstock.__file__).parents[1])
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([*map(str, also), source]),
        }
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True
        )
        assert process.stdout is not None
        try:
            line = next((line for line in process.stdout if line.startswith(READY)), None)
            if line is None:
                log.seek(0)
                pytest.fail(
                    f"the server ended with {process.wait()} before it was ready:\n{log.read()[-4000:]}"
                )
            yield Running(process, line.removeprefix(READY).strip(), log)
            left = [] if process.poll() is None else group_of(process.pid)
            assert not left, f"processes are left: {left}"
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def group_of(pgid: int) -> list[int]:
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(one.pid) == pgid and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one.pid)
    return found


@pytest.fixture(scope="module")
def two() -> Iterator[Running]:
    """Two fronts, three seats, adapters."""
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder) / "tiny-llama")
        write_random_adapter(Path(folder) / "adapters" / "a", TINY_LLAMA, 1)
        model = (
            "--model",
            f"{folder}/tiny-llama",
            "--device",
            "cpu",
            "--device-kv-gib",
            "0.1",
            "--lora-dir",
            f"{folder}/adapters",
        )
        with running(*model, "--api-processes", "2", "--max-concurrent", "3") as server:
            yield server
            assert server.process.poll() is None


def post(connection: http.client.HTTPConnection, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse()


def figures_in(text: str) -> dict[str, float]:
    families = text_string_to_metric_families(text)
    return {" ".join([s.name, *s.labels.values()]): s.value for family in families for s in family.samples}


def metrics_of(connection: http.client.HTTPConnection) -> dict[str, float]:
    """As that front has them."""
    connection.request("GET", "/metrics")
    return figures_in(connection.getresponse().read().decode())


def ask(
    connection: http.client.HTTPConnection, path: str, body: dict[str, Any] | None = None
) -> tuple[int, dict[str, Any]]:
    if body is None:
        connection.request("GET", path)
        reply = connection.getresponse()
    else:
        reply = post(connection, path, body)
    return reply.status, json.loads(reply.read())


def begin(connection: http.client.HTTPConnection, **fields: Any) -> http.client.HTTPResponse:
    """A stream whose first token has come."""
    reply = post(connection, "/v1/completions", {**LONG, **fields})
    assert reply.status == 200
    assert reply.readline().startswith(b"data: {")
    return reply


# -------------------------------------------------------------------------------- one server, whoever answers


def test_fronts_have_no_torch_and_the_engine_no_port(two: Running) -> None:
    fronts = two.children("front")
    assert len(fronts) == 2
    for front in fronts:
        assert not any("torch" in mapped.path for mapped in front.memory_maps())
    assert not [one for one in two.engine().net_connections() if one.status == psutil.CONN_LISTEN]


def test_a_front_that_has_more_connections_leaves_new_ones_to_the_others(two: Running) -> None:
    one, other = two.children("front")
    address = ("127.0.0.1", int(two.url.rsplit(":", 1)[1]))

    def num_open(front: psutil.Process) -> int:
        return sum(found.status == psutil.CONN_ESTABLISHED for found in front.net_connections("tcp"))

    with contextlib.ExitStack() as stack:
        before = num_open(one), num_open(other)
        other.suspend()
        for _ in range(20):
            stack.enter_context(socket.create_connection(address))
        until(lambda: num_open(one) == before[0] + 20, "the front that runs takes all")
        other.resume()
        for _ in range(20):
            stack.enter_context(socket.create_connection(address))
        until(lambda: num_open(one) + num_open(other) == sum(before) + 40, "all are taken")
        assert num_open(other) - before[1] >= 17


def test_seats_are_the_servers_and_a_refusal_is_exact(two: Running) -> None:
    one, other = two.children("front")
    with contextlib.ExitStack() as stack:
        held = []
        for front in (one, other, one):
            connection = two.connect(front)
            stack.callback(connection.close)
            held.append((connection, begin(connection, max_tokens=1800)))
        for front in (one, other):
            connection = two.connect(front)
            stack.callback(connection.close)
            status, said = ask(connection, "/v1/completions", SHORT)
            assert status == 429 and "limit of 3 concurrent generations" in said["error"]["message"]
        held[0][0].close()
        held[0][1].close()
        status = 429
        until(
            lambda: ask(connection, "/v1/completions", SHORT)[0] == 200,
            "the seat of the one that left was not given back",
        )
    two.assert_idle()


def test_an_adapter_is_seen_by_every_front_when_loading_it_is_answered(two: Running) -> None:
    one, other = (two.connect(front) for front in two.children("front"))
    with contextlib.closing(one), contextlib.closing(other):
        for first, second in ((one, other), (other, one)):
            status, _ = ask(first, "/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": "a"})
            assert status == 200
            assert "mine" in [card["id"] for card in ask(second, "/v1/models")[1]["data"]]
            assert ask(second, "/v1/completions", {**SHORT, "model": "mine"})[0] == 200
            assert ask(first, "/v1/unload_lora_adapter", {"lora_name": "mine"})[0] == 200
            assert ask(second, "/v1/completions", {**SHORT, "model": "mine"})[0] == 404


def test_figures_are_of_all_fronts_whichever_answers(two: Running) -> None:
    name = "penstock_finished_total tiny-llama length"
    before = two.metrics().get(name, 0)
    connections = [two.connect(front) for front in two.children("front")]
    for num, connection in enumerate(connections, 1):
        for _ in range(num):
            assert ask(connection, "/v1/completions", {**SHORT, "ignore_eos": True})[0] == 200
    for connection in connections:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        (found,) = [
            line
            for line in lines
            if line.startswith('penstock_finished_total{model="tiny-llama",reason="length"}')
        ]
        assert float(found.split()[-1]) == before + 3
        assert len({ask(one, "/v1/models")[1]["data"][0]["created"] for one in connections}) == 1
        connection.close()


def test_a_response_is_gone_on_from_at_whichever_front(two: Running) -> None:
    one, other = (two.connect(front) for front in two.children("front"))
    with contextlib.closing(one), contextlib.closing(other):
        for first, second in ((one, other), (other, one)):
            fields = {"model": "tiny-llama", "input": "Once upon a time", "max_output_tokens": 3}
            status, kept = ask(first, "/v1/responses", fields)
            assert status == 200
            status, after = ask(second, "/v1/responses", {**fields, "previous_response_id": kept["id"]})
            assert status == 200 and after["usage"]["input_tokens"] > kept["usage"]["input_tokens"] + 3
            assert ask(second, f"/v1/responses/{kept['id']}") == (200, kept)
            status, missing = ask(second, "/v1/responses", {**fields, "previous_response_id": "resp_none"})
            assert (status, missing["error"]["code"]) == (404, "response_not_found")


def test_a_schema_is_compiled_in_the_engine_and_an_impossible_one_is_refused_before_the_stream_begins(
    two: Running,
) -> None:
    pytest.importorskip("llguidance")
    connection = two.connect(two.children("front")[0])
    with contextlib.closing(connection):
        for stream in (False, True):
            reply = post(connection, "/v1/completions", {**SHORT, "guided_regex": "(", "stream": stream})
            assert (reply.status, json.loads(reply.read())["error"]["param"]) == (400, "guided_regex")
        status, said = ask(
            connection, "/v1/completions", {**SHORT, "guided_choice": ["yes", "no"], "max_tokens": 20}
        )
        assert status == 200 and said["choices"][0]["text"] in ("yes", "no")


# ----------------------------------------------------------------------------------------------------- crowds


def test_of_240_streams_over_two_fronts_a_third_hang_up_and_nothing_is_left() -> None:
    with running(*TINY, "--api-processes", "2", "--max-concurrent", "600", "--max-batch", "64") as server:
        port = int(server.url.rsplit(":", 1)[1])

        async def one(number: int) -> bytes | None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            leaves = number % 3 == 2
            body = json.dumps(
                {**LONG, "prompt": f"Number {number}", "max_tokens": 20_000 if leaves else 8}
            ).encode()
            writer.write(
                (
                    b"POST "
                    b"/v1/completions "
                    b"HTTP/1.1\r\nHost: "
                    b"x\r\nConnection: "
                    b"close\r\nContent-Length: %d\r\n\r\n"
                )
                % len(body)
                + body
            )
            if leaves and number % 2:
                await reader.readuntil(b"data: {")
            answer = None if leaves else await reader.read()
            writer.close()
            return answer

        async def all_of_them() -> list[bytes | None]:
            return await asyncio.wait_for(asyncio.gather(*map(one, range(240))), DEADLINE_S * 3)

        fronts = server.children("front")
        answers = [answer for answer in asyncio.run(all_of_them()) if answer is not None]
        assert len(answers) == 160
        assert all(
            b" 200 OK" in answer and b'"finish_reason":"length"' in answer and b"[DONE]" in answer
            for answer in answers
        )
        server.assert_idle()
        assert [front.pid for front in fronts] == [front.pid for front in server.children("front")]
        statuses = {name: num for name, num in server.metrics().items() if "/v1/completions" in name}
        assert sum(statuses.values()) == 240
        with httpx.Client(base_url=server.url, timeout=DEADLINE_S) as session:  # all seats are back
            assert session.post("/v1/completions", json={**SHORT, "n": 128}).status_code == 200


# ---------------------------------------------------------------------------------------------- who is killed


def test_a_front_that_is_killed_is_started_again_and_its_requests_are_cancelled() -> None:
    with running(*TINY, "--api-processes", "2", "--max-concurrent", "2") as server:
        victim, other = server.children("front")
        lost, kept = server.connect(victim), server.connect(other)
        assert ask(lost, "/v1/completions", SHORT)[0] == 200
        # By the other front, which has it from the engine: what only the victim has counted is lost with it.
        until(
            lambda: metrics_of(kept).get("penstock_finished_total tiny-llama length", 0) == 1,
            "the figures have come",
        )
        stream, also = begin(lost), begin(kept)
        assert server.num_open() == 2
        victim.kill()
        with contextlib.suppress(http.client.HTTPException, OSError):
            assert b"[DONE]" not in stream.read()
        until(lambda: server.num_open() == 1, "the request of the front that is gone goes on")
        assert also.readline() is not None and also.readline() is not None  # the other one's, too
        until(lambda: len(server.children("front")) == 2, "there is no new front")
        until(lambda: "is started again" in server.log(), "the new front is not spoken of")
        new = next(front for front in server.children("front") if front.pid != other.pid)
        fresh = server.connect(new)
        status, said = ask(fresh, "/v1/completions", SHORT)  # the seat is free, and only that one
        assert (status, said["usage"]["completion_tokens"]) == (200, 3)
        also.close()
        kept.close()
        server.assert_idle()
        finished = server.metrics()["penstock_finished_total tiny-llama length"]
        assert finished == 2  # what the killed one had counted is not lost
        fresh.close()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(DEADLINE_S) == 0


def test_a_front_that_stands_still_holds_up_nobody_and_is_started_again() -> None:
    with running(*TINY, "--api-processes", "2", "--max-concurrent", "2", also=(QUICK_BEATS,)) as server:
        victim, other = server.children("front")
        paused = server.connect(victim)
        stream = begin(paused, max_tokens=200)
        victim.suspend()
        victim.resume()
        assert stream.read().endswith(b"data: [DONE]\n\n")  # a moment is no matter
        paused.close()
        kept = server.connect(other)
        also = begin(kept)
        lost = server.connect(victim)
        until(lambda: server.num_open() == 1, "the other one's is running")
        before = server.engine().memory_info().rss
        victim.suspend()
        # Nothing is generated for it, so that no number of events can tell: only that it answers no beat.
        lost.request("POST", "/v1/completions", json.dumps(SHORT), {"Content-Type": "application/json"})
        assert all(also.readline() for _ in range(40))
        with pytest.raises((http.client.HTTPException, OSError)):
            lost.getresponse()
        until(lambda: "is started again" in server.log(), "there is no new front")
        assert "is cut off: it has said nothing for 80 beats" in server.log()
        assert all(also.readline() for _ in range(40))
        assert server.engine().memory_info().rss - before < 64 << 20
        (new,) = (front for front in server.children("front") if front.pid != other.pid)
        fresh = server.connect(new)
        assert ask(fresh, "/v1/completions", SHORT)[0] == 200  # its seat is free
        for connection in (also, kept, fresh):
            connection.close()
        server.assert_idle()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(DEADLINE_S) == 0


def test_an_engine_that_is_killed_ends_every_request_with_an_error_and_the_server_with_it() -> None:
    with running(*TINY, "--api-processes", "2") as server:
        one, other = server.children("front")
        streaming, waiting, probe = server.connect(one), server.connect(other), server.connect(one)
        stream = begin(streaming)
        waiting.request(
            "POST",
            "/v1/completions",
            json.dumps({**LONG, "stream": False}),
            {"Content-Type": "application/json"},
        )
        until(lambda: server.num_open() == 2, "both are running")
        server.engine().kill()
        last = [line for line in stream.read().split(b"\n\n") if line][-1]
        said = json.loads(last.removeprefix(b"data: "))["error"]
        assert said["code"] == "unavailable" and "the engine's process has ended" in said["message"]
        reply = waiting.getresponse()
        assert (reply.status, json.loads(reply.read())["error"]["code"]) == (503, "unavailable")
        for path in ("/health", "/live"):
            status, body = ask(probe, path)
            assert (status, body["reason"]) == (503, "the engine loop has failed")
        assert ask(probe, "/v1/completions", SHORT)[0] == 503
        assert server.process.wait(DEADLINE_S) == 1
        assert "penstock: error: the engine process was ended by signal SIGKILL" in server.log()


def test_the_children_end_with_a_parent_that_is_killed() -> None:
    with running(*TINY, "--api-processes", "2") as server:
        children = [server.engine(), *server.children("front")]
        assert len(children) == 3
        server.process.kill()
        server.process.wait()
        gone, left = psutil.wait_procs(children, DEADLINE_S)
        assert len(gone) == 3 and not left


# ---------------------------------------------------------------------------------------------------- signals


def test_an_interrupt_of_the_whole_group_lets_streams_end() -> None:
    """As a terminal sends it: children get it as well, and leave it to the parent."""
    with running(*TINY, "--api-processes", "2") as server:
        connection = server.connect(server.children("front")[0])
        stream = begin(connection, max_tokens=300)
        os.killpg(server.process.pid, signal.SIGINT)
        rest = stream.read()
        assert b'"finish_reason":"length"' in rest and rest.endswith(b"data: [DONE]\n\n")
        assert server.process.wait(DEADLINE_S) == 0
        assert "Traceback" not in server.log()


def test_a_second_interrupt_ends_at_once() -> None:
    with running(*TINY, "--api-processes", "2", "--shutdown-s", "3600") as server:
        stream = begin(server.connect(server.children("front")[0]))
        os.killpg(server.process.pid, signal.SIGINT)
        until(lambda: _refused(server.url), "it takes no new connections")
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.process.wait(DEADLINE_S) == 0
        assert b"[DONE]" not in stream.read()


def _refused(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=DEADLINE_S).status_code == 503
    except httpx.HTTPError:
        return True


def test_one_process_does_everything_when_asked_to() -> None:
    with running(*TINY, "--api-processes", "0") as server:
        beside = psutil.Process(server.process.pid).children()
        assert [one for one in beside if "trial_process" not in " ".join(one.cmdline())] == []
        assert httpx.post(f"{server.url}/v1/completions", json=SHORT, timeout=DEADLINE_S).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(DEADLINE_S) == 0
