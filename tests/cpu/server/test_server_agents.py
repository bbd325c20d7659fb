"""What coding agents really send, from their first request on: each is answered in the shape that the agent
reads, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.server.served import MODEL, Served, serving
from tests.cpu.server.test_server_tools import KNOWS_TOOLS, saying

RECORDED = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "data" / "agent-requests.jsonl").read_text().splitlines()
]
SAID = "Let me see."
NAMES = {
    "/v1/messages?beta=true": "Bash",
    "/v1/responses": "multi_agent_v1__wait_agent",
    "/v1/chat/completions": "bash",
}
IGNORED = {
    "Claude Code": {"context_management", "metadata", "system[].cache_control"},
    "Codex": {"client_metadata", "include", "tools[web_search]"},
}


@pytest.fixture(scope="module", params=sorted(NAMES))
def calling(request: pytest.FixtureRequest) -> Iterator[tuple[str, Served]]:
    """Servers whose model says something and calls a tool."""
    call = json.dumps({"name": NAMES[request.param], "arguments": {"command": "ls"}})
    with serving(saying(f"{SAID}\n<tool_call>\n{call}\n</tool_call>", KNOWS_TOOLS)) as running:
        yield request.param, running


def post(served: Served, one: dict[str, Any], stream: bool) -> Any:
    body = {**one["body"], "model": MODEL, "stream": stream}
    if not stream:
        body.pop("stream_options", None)
    reply = served.http.post(one["path"], json=body, headers=one["headers"])
    assert reply.status_code == 200, f"{one['agent']}: {reply.text}"
    assert IGNORED.get(one["agent"], set()) <= set(reply.headers.get("x-penstock-ignored", "").split(", "))
    return reply


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def parts(path: str, reply: dict[str, Any]) -> tuple[str, list[str]]:
    """The text of a whole answer, and the names that it calls."""
    if path.startswith("/v1/messages"):
        blocks = reply["content"]
        calls = [block["name"] for block in blocks if block["type"] == "tool_use"]
        return "".join(block["text"] for block in blocks if block["type"] == "text").strip(), calls
    if path == "/v1/responses":
        calls = [
            "__".join(filter(None, (item.get("namespace"), item["name"])))
            for item in reply["output"]
            if item["type"] == "function_call"
        ]
        said = [
            part["text"] for item in reply["output"] if item["type"] == "message" for part in item["content"]
        ]
        return "".join(said).strip(), calls
    message = reply["choices"][0]["message"]
    return (message["content"] or "").strip(), [
        call["function"]["name"] for call in message.get("tool_calls") or ()
    ]


def streamed_parts(path: str, text: str) -> tuple[str, list[str]]:
    found = events(text)
    if path.startswith("/v1/messages"):
        assert (found[0]["type"], found[-1]["type"]) == ("message_start", "message_stop")
        calls = [
            event["content_block"]["name"]
            for event in found
            if event.get("content_block", {}).get("type") == "tool_use"
        ]
        return "".join(
            event["delta"]["text"] for event in found if event.get("delta", {}).get("type") == "text_delta"
        ).strip(), calls
    if path == "/v1/responses":
        assert (found[0]["type"], found[-1]["type"]) == ("response.created", "response.completed")
        return parts(path, found[-1]["response"])
    assert text.rstrip().endswith("[DONE]")
    deltas = [choice["delta"] for event in found for choice in event["choices"]]
    calls = [
        call["function"]["name"]
        for delta in deltas
        for call in delta.get("tool_calls") or ()
        if call["function"].get("name")
    ]
    return "".join(delta.get("content") or "" for delta in deltas).strip(), calls


def test_every_recorded_request_is_answered_and_its_tools_are_called(calling: tuple[str, Served]) -> None:
    path, served = calling
    mine = [one for one in RECORDED if one["path"] == path]
    assert len(mine) >= 2
    for one in mine:
        expected = (SAID, [NAMES[path]]) if one["body"].get("tools") else None
        whole = parts(path, post(served, one, stream=False).json())
        streamed = streamed_parts(path, post(served, one, stream=True).text)
        assert whole == streamed and (expected is None or whole == expected), one["agent"]


def test_the_model_is_told_of_the_tools_that_can_be_run_and_of_results_of_calls(
    calling: tuple[str, Served],
) -> None:
    path, served = calling
    for one in RECORDED:
        if one["path"] == path and one["body"].get("tools"):
            post(served, one, stream=False)
            prompt = bytes(served.engine.submitted[-1][0]).decode()
            assert "<tools>" in prompt and "web_search" not in prompt
            results = json.dumps(one["body"]).count('"tool_result"') + json.dumps(one["body"]).count(
                '"function_call_output"'
            )
            results += sum(message.get("role") == "tool" for message in one["body"].get("messages", ()))
            assert prompt.count("[tool]") == results
