"""Who runs at the same time, over HTTP before a real engine: chats that do not say how long they will be, and
those that say far too much."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.cpu.server.served import DEADLINE_S
from tests.cpu.server.tiered_server import MODEL, Tiered, tiered

NUM_CHATS = 6
CONTEXT = 2048
# As on the default server: memory for 2.8 contexts.
SIZES: dict[str, Any] = {"max_model_len": CONTEXT, "blocks": 28 * CONTEXT // 160, "host_blocks": 1024}
ASK = {"role": "user", "content": "Tell me all."}
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [ASK]}),
    "completions": ("/v1/completions", {"prompt": "Once", "max_tokens": CONTEXT - 64}),
    "responses": ("/v1/responses", {"input": "Tell me all."}),
    "messages": ("/v1/messages", {"messages": [ASK], "max_tokens": 32_000}),
}


def num_started_together(server: Tiered, path: str, body: dict[str, Any]) -> int:
    """How many of the chats had a token before any of them was over."""
    started, over = [threading.Event() for _ in range(NUM_CHATS)], threading.Event()

    def read(own: threading.Event) -> None:
        asked = {"model": MODEL, "stream": True, "temperature": 0, **body}
        with server.http.stream("POST", path, json=asked) as reply:
            for line in reply.iter_lines():
                if says_something(line) and not over.is_set():
                    own.set()
                if over.is_set() or all(one.is_set() for one in started):
                    return  # it hangs up, and its request is cancelled
        over.set()

    with ThreadPoolExecutor(NUM_CHATS) as threads:
        for one in [threads.submit(read, own) for own in started]:
            one.result(DEADLINE_S)
    return sum(one.is_set() for one in started)


def says_something(line: str) -> bool:
    if not line.startswith("data: {"):
        return False
    event = json.loads(line.removeprefix("data: "))
    choice = next(iter(event.get("choices", ())), {})
    said = choice.get("text") or choice.get("delta", {}).get("content")
    return bool(said) or str(event.get("type")).endswith("delta")


@pytest.mark.parametrize("route", ROUTES)
def test_chats_run_together_though_their_contexts_do_not_fit_together(route: str) -> None:
    path, body = ROUTES[route]
    with tiered(**SIZES) as server:
        assert num_started_together(server, path, body) == NUM_CHATS
