"""`penstock serve --trace`: the engine's process writes the file, and a killed one leaves a file that can be
read."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil

from tests.support.trace_reader import read_trace

DEADLINE_S = 120.0
FLAGS = (
    "--model",
    "tiny-qwen3",
    "--load-format",
    "dummy",
    "--device",
    "cpu",
    "--kv-offload-host-gib",
    "0.01",
)
QUESTION = {"model": "tiny-qwen3", "prompt": "a b c d " * 20, "temperature": 0, "ignore_eos": True}

StartServer = Callable[..., tuple["subprocess.Popen[str]", str]]


def wait_written(file: Path, text: str) -> None:
    by_s = time.monotonic() + DEADLINE_S
    while text not in file.read_text():
        assert time.monotonic() < by_s, f"{text} is not in the file"
        time.sleep(0.02)


def test_the_trace_of_an_engine_that_is_killed_shows_what_was_open(
    start_server: StartServer, tmp_path: Path
) -> None:
    file = tmp_path / "trace.json"
    process, url = start_server(*FLAGS, "--trace", str(file))
    (engine,) = [one for one in psutil.Process(process.pid).children() if "engine" in one.cmdline()]
    with httpx.Client(base_url=url, timeout=DEADLINE_S) as http:
        http.post("/v1/completions", json={**QUESTION, "max_tokens": 4}).raise_for_status()
        ask = {**QUESTION, "max_tokens": 1800, "stream": True}
        with http.stream("POST", "/v1/completions", json=ask) as reply:
            lines = reply.iter_lines()
            assert next(line for line in lines if line).startswith("data: ")
            wait_written(file, '"prompt tokens from":{"device"')  # of the second one
            engine.send_signal(signal.SIGKILL)
            process.wait(DEADLINE_S)
    trace = read_trace(file)
    (ended,) = [slices[-1].args for slices in trace.of("request").values() if slices[-1].name == "request"]
    assert (ended["finish"], ended["tokens"]) == ("length", 4)
    (left,) = [names for (category, _), names in trace.open.items() if category == "request"]
    assert left == ["request", "running"]
    assert all(one["pid"] == engine.pid for one in trace.events)


def test_the_trace_of_a_server_that_is_stopped_has_an_end(start_server: StartServer, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    process, url = start_server(*FLAGS, "--api-processes", "0", "--trace", str(file))
    httpx.post(f"{url}/v1/completions", json={**QUESTION, "max_tokens": 4}, timeout=DEADLINE_S)
    process.terminate()
    assert process.wait(DEADLINE_S) == 0
    trace = read_trace(file)
    assert trace.events[-1]["name"] == "end of the trace" and not trace.open
    assert trace.events[-1]["args"] == {"events dropped": 0} and len(trace.of("request")) == 1
