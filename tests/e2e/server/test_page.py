"""The page of a server of several processes: its stream, lives of requests of other fronts, and its end."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import httpx

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
SECRETS = {"session_id": "a-session", "cache_salt": "a-salt"}

StartServer = Callable[..., tuple["subprocess.Popen[str]", str]]


def events_of(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    return (json.loads(line.removeprefix("data: ")) for line in reply.iter_lines() if line)


def test_a_viewer_of_one_front_sees_requests_of_all_and_the_end(start_server: StartServer) -> None:
    process, url = start_server(*FLAGS, "--api-processes", "2")
    ask = {"model": "tiny-qwen3", "prompt": "a b c d " * 20, "max_tokens": 4, "ignore_eos": True, **SECRETS}
    with (
        httpx.Client(base_url=url, timeout=DEADLINE_S) as viewer,
        viewer.stream("GET", "/page/events") as reply,
    ):
        events = events_of(reply)
        assert next(events)["all"] == []
        ids = {
            httpx.post(f"{url}/v1/completions", json=ask, timeout=DEADLINE_S).json()["id"] for _ in range(6)
        }
        wanted = {f"{one.removeprefix('cmpl-')}-0" for one in ids}
        rows: dict[str, Any] = {}
        while {name for name, row in rows.items() if row["ended"]} != wanted:
            event = next(events)
            rows |= {row["id"]: row for row in (*event.get("all", ()), *event.get("changed", ()))}
        assert sum(row["source"]["device"] > 0 for row in rows.values()) >= 4  # the prompt came back
        life = httpx.get(f"{url}/page/requests/{wanted.pop()}", timeout=DEADLINE_S)
        assert [state for state, _ in life.json()["states"]][-1] == "running"
        assert (life.json()["finish"], life.json()["route"]) == ("length", "completions")
        shown = life.text + json.dumps(rows) + json.dumps(next(events))
        assert not any(secret in shown for secret in (*SECRETS.values(), "a b c d"))
        process.terminate()
        assert len(list(islice(events, 100))) < 100, "the stream ends"
    assert process.wait(DEADLINE_S) == 0
