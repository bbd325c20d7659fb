"""What the server does beside generating: how long a text of a tokenize call may be, and what is left behind
where it cannot listen."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys

import pytest

from penstock.config import ServerConfig
from penstock.server import schema, service
from penstock.server.generate import encode_chat
from penstock.server.run import bind
from tests.cpu.server.served import Served, service_of, serving
from tests.support.scripted_engine import ScriptedEngine, ScriptedLoop


@pytest.mark.parametrize(
    ("context", "side", "most"),
    [(10, 50, 50), (50, 10, 50)],
    ids=["longer than a prompt", "as long as a prompt"],
)
def test_a_text_may_be_longer_than_a_prompt_and_is_bounded_all_the_same(
    monkeypatch: pytest.MonkeyPatch, context: int, side: int, most: int
) -> None:
    monkeypatch.setattr(service, "SIDE_TOKENS", side)
    with serving(ScriptedEngine(max_model_len=context)) as served:
        for path, name, item in (("/tokenize", "prompt", "x"), ("/detokenize", "tokens", [120])):
            assert served.http.post(path, json={name: item * most}).status_code == 200
            refused = served.http.post(path, json={name: item * (most + 1)})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == name


def test_a_server_that_is_shutting_down_is_alive_and_not_ready(served: Served) -> None:
    """Whoever sends it requests is told to send no more; whoever restarts dead processes has no reason to."""
    assert served.http.get("/health").json() == {"status": "ready"}
    served.service.stop()
    health, live = served.http.get("/health"), served.http.get("/live")
    assert (health.status_code, live.status_code) == (503, 200)
    assert health.json() == {"status": "unavailable", "reason": "the server is shutting down"}


def test_a_port_that_the_server_before_has_just_left_can_be_had_again() -> None:
    """Whoever closes a connection first keeps its address for a minute; a server that is restarted must not
    wait for that."""
    with contextlib.closing(bind(ServerConfig(port=0))) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        with contextlib.closing(socket.create_connection(("127.0.0.1", port))) as client:
            listener.accept()[0].close()
            assert client.recv(1) == b""
    with contextlib.closing(bind(ServerConfig(port=port))) as again:
        assert again.getsockname()[1] == port


@pytest.mark.parametrize("allowed", [False, True])
def test_whether_messages_may_spell_special_tokens_is_for_the_operator_to_say(allowed: bool) -> None:
    engine = ScriptedEngine(max_model_len=50)
    rules = service_of(ScriptedLoop(engine), allow_special_tokens_in_text=allowed)
    assert (rules.prompt_rules.most, rules.prompt_rules.special_in_text) == (50, allowed)
    assert (rules.side_rules.most, rules.side_rules.special_in_text) == (service.SIDE_TOKENS, allowed)
    asked: list[tuple[int, bool]] = []
    engine.tokenizer.encode_chat = lambda messages, most, special, tools, how: (
        asked.append((most, special)) or [1]
    )  # type: ignore[method-assign, assignment]
    message = schema.Message(role="user", content="<|im_end|>")
    assert encode_chat(engine.tokenizer, [message], rules.prompt_rules) == [1] and asked == [(50, allowed)]


@pytest.mark.parametrize(
    "path",
    ["/tokenize", "/detokenize", "/cache/prefetch", "/v1/messages/count_tokens"],
    ids=lambda path: path.rpartition("/")[2],
)
def test_every_small_route_that_reads_a_text_takes_a_seat(served: Served, path: str) -> None:
    """Before it reads the body: what waits in memory is bounded."""
    with served.service.side.take(service.NUM_SIDE):
        refused = served.http.post(path, json={})
    assert (
        refused.status_code == 429
        and (f"its limit of {service.NUM_SIDE} concurrent tokenize and prefetch calls") in refused.text
    )
    assert served.http.post(path, json={}).status_code == 400  # there is a seat, and the body is read


# ----------------------------------------------------------------------------------------------- what is warm


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
