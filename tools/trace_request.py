"""Prints how much of src/penstock one request passes: a server on a tiny model in this process, and the same
prompt sent three times over HTTP, with its prefix computed, in host memory and on disk.

    .venv/bin/python tools/trace_request.py [--list]

Counts calls on all threads, from the first byte that is read of a request to the last that is written of its
answer. A call into another file is a change of file, also through a library. The engine's loop turns more or
less often while it waits, so that calls vary.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

import penstock
from penstock.config import ServerConfig
from penstock.engine.build import build
from penstock.engine.loop import EngineLoop
from penstock.server.connection import Connection
from penstock.server.run import server_here

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.driving import tiny_config

PACKAGE = str(Path(penstock.__file__).parent) + "/"
MODEL = "tiny-qwen3"
PROMPT = "A penstock is a gate that lets the right amount of water from a reservoir to a turbine. " * 4
FIRST, LAST = Connection.data_received.__code__, Connection.on_response_complete.__code__


class Tracer:
    """Counts calls of the package's functions, not of comprehensions and lambdas, during one request; in
    threads that start after it."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()  # in order of first entry
        self.num_changes = 0
        self._armed = self._counting = False
        threading.setprofile(self._see)

    def arm(self) -> None:
        self.calls, self.num_changes, self._armed = Counter(), 0, True

    def by_file(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for code, num_calls in list(self.calls.items()):
            found.setdefault(code.co_filename.removeprefix(PACKAGE), []).append(num_calls)
        return found

    def _see(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE) or code.co_name.startswith("<"):
            return
        if self._armed and code is FIRST:
            self._armed, self._counting = False, True
        if self._counting:
            self.calls[code] += 1
            caller = frame.f_back
            while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
                caller = caller.f_back
            self.num_changes += caller is not None and caller.f_code.co_filename != code.co_filename
            if code is LAST:
                self._counting = False


def post(client: http.client.HTTPConnection, path: str, body: object = None) -> str:
    client.request("POST", path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
    reply = client.getresponse()
    if reply.status != 200:
        raise SystemExit(f"{path}: {reply.status} {reply.read().decode()}")
    return reply.read().decode()


def ask(client: http.client.HTTPConnection, prompt: str) -> dict[str, int]:
    """Returns the tokens of the prompt by where their KV came from."""
    fields = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": 4,
    }
    text = post(client, "/v1/completions", {"model": MODEL, "prompt": prompt, **fields})
    return dict(json.loads(text.split("data: ")[-2])["usage"]["prompt_tokens_details"]["kv_source"])


def trace(tracer: Tracer, url: str, listed: bool) -> None:
    client = http.client.HTTPConnection(url.removeprefix("http://"))
    ask(client, "Another prompt first: what is done once is done then.")
    for place, forgotten in (("computed", ()), ("host", ("device",)), ("ssd", ("device", "host"))):
        post(client, "/cache/flush?level=persisted")  # nothing of the request before is under way any more
        for tier in forgotten:
            post(client, f"/cache/reset?tier={tier}")
        tracer.arm()
        if 2 * (source := ask(client, PROMPT))[place] <= sum(source.values()):
            raise SystemExit(f"the prefix was to come from {place}: {source}")
        files = tracer.by_file()
        counts = [
            len(files),
            sum(map(len, files.values())),
            sum(map(sum, files.values())),
            tracer.num_changes,
        ]
        print(
            ("{:8} {:4} files {:5} functions {:6} calls {:6} changes of file").format(place, *counts),
            flush=True,
        )
        for name, calls in files.items() if listed else ():
            print(f"    {name:40} {len(calls):4} functions {sum(calls):6} calls")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="also the files, in order of first entry")
    listed, tracer = parser.parse_args().list, Tracer()
    with tempfile.TemporaryDirectory() as folder:
        engine = build(tiny_config(MODEL, host_blocks=64, ssd_dir=folder, ssd_gib=0.01, prefill_chunk=512))
        server = server_here(engine, EngineLoop(engine), ServerConfig(port=0, shutdown_s=5.0))
        (thread := threading.Thread(target=server.run)).start()
        while thread.is_alive() and not server.started:
            time.sleep(0.01)
        try:
            trace(tracer, server.url, listed)
        finally:
            server.should_exit = True
            thread.join()


if __name__ == "__main__":
    main()
