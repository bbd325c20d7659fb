"""What a server has ready when it says so: no route imports or sets up anything under its first request."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json, sys, threading, urllib.error, urllib.request
sys.path[:0] = json.loads(sys.argv[1])
from penstock.config import ServerConfig
from penstock.server.run import server_here
from tests.support.scripted_engine import ScriptedEngine, ScriptedLoop
import http.client, urllib.response  # the client's own
engine = ScriptedEngine()
server = server_here(engine, ScriptedLoop(engine), ServerConfig(port=0))
ready = threading.Event()
whole = server.startup
async def startup(sockets=None):
    await whole(sockets)
    ready.set()
server.startup = startup
thread = threading.Thread(target=server.run, daemon=True)
thread.start()
assert ready.wait(120)

def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data=data, headers={"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()

ask("/health")
before, statuses = set(sys.modules), {}
words = [{"role": "user", "content": "hello"}]
asked = {
    "completions": ("/v1/completions", {"model": engine.name, "prompt": "hello", "max_tokens": 2}),
    "streamed": ("/v1/completions", {"model": engine.name, "prompt": "hello", "max_tokens": 2, "stream": True}),
    "long": ("/v1/completions", {"model": engine.name, "prompt": "hello " * 4000, "max_tokens": 2}),
    "chat": ("/v1/chat/completions", {"model": engine.name, "messages": words, "max_tokens": 2}),
    "tokenize": ("/tokenize", {"model": engine.name, "prompt": "hello"}),
    "detokenize": ("/detokenize", {"model": engine.name, "tokens": [1, 2]}),
    "models": ("/v1/models", None),
    "metrics": ("/metrics", None),
    "stats": ("/cache/stats", None),
    "refused": ("/v1/completions", {"model": "nobody", "prompt": 1}),
    "unknown": ("/nowhere", None),
}
for name, (path, body) in asked.items():
    statuses[name] = ask(path, body)[0]
print(json.dumps({"imported": sorted(set(sys.modules) - before), "statuses": statuses}))
"""  # noqa: E501


def test_nothing_is_imported_under_a_request() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(sys.path)], capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    told = json.loads(ended.stdout.splitlines()[-1])
    answered = {name: status for name, status in told["statuses"].items() if status < 400}
    assert {"completions", "streamed", "chat", "tokenize", "models", "metrics"} <= set(answered), told[
        "statuses"
    ]
    assert told["imported"] == []
