"""Chats, responses and messages in front of an engine that says what a test sets: what the model is told,
what clients get, whole and streamed. One server for all; what only one API has is in a file of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.server.apis import (
    APIS,
    CALL,
    CHAT,
    FUNCTIONS,
    KNOWS_TOOLS,
    MESSAGES,
    QUESTION,
    RESPONSES,
    THINKS,
    Api,
    Speaking,
    events_of,
)
from tests.cpu.server.served import MODEL, Served, serving
from tests.support.scripted_engine import ScriptedEngine

CALLS = [("weather", {"city": "Bern"}), ("now", {})]


@pytest.fixture(scope="module")
def model() -> Speaking:
    return Speaking()


@pytest.fixture(scope="module")
def served(model: Speaking) -> Iterator[Served]:
    with serving(model) as running:
        yield running
        running.assert_idle()


@pytest.fixture(params=APIS, ids=lambda api: type(api).__name__)
def api(request: pytest.FixtureRequest) -> Api:
    found: Api = request.param
    return found


def test_calls_are_given_out_in_order_and_come_back_with_their_results(
    served: Served, model: Speaking, api: Api
) -> None:
    model.says(CALL, KNOWS_TOOLS)
    tools = api.tools(*FUNCTIONS)
    said = api.ask_both(served, tools=tools)
    assert said.finish == "tool_calls" and said.text == "Let me see."
    assert [call[:2] for call in said.calls] == CALLS and len({call.id for call in said.calls}) == 2
    api.ask(served, tools=tools, **api.after(said, "21 C", "noon"))
    assert model.prompt.startswith("<tools>[{") and '"description": "How warm it is"' in model.prompt
    called = '<tool_call>weather{"city": "Bern"}</tool_call><tool_call>now{}</tool_call>'
    assert f"Let me see.{called}[tool]21 C[tool]noon[user]Well?" in model.prompt
    one = api.ask(served, tools=tools, **api.one_call())
    assert [call[:2] for call in one.calls] == CALLS[:1]


def test_without_tools_or_with_none_a_call_is_text(served: Served, model: Speaking, api: Api) -> None:
    model.says(CALL)
    for fields in ({}, {"tools": []}, {"tools": api.tools(*FUNCTIONS), **api.choice("none")}):
        said = api.ask_both(served, **fields)
        assert (said.parts, said.finish) == ([("text", CALL)], "stop") and "weather" not in model.prompt


def test_an_answer_that_is_cut_inside_a_call_says_so(served: Served, model: Speaking, api: Api) -> None:
    """A client that is told of a call would run it with half of its arguments."""
    model.says(CALL)
    cut = {api.most: CALL.index("Bern") + 2}
    for said in (
        api.ask(served, tools=api.tools(*FUNCTIONS), **cut),
        api.ask_streamed(served, tools=api.tools(*FUNCTIONS), **cut),
    ):
        assert said.finish == "length"


@pytest.mark.parametrize(
    "arguments",
    ['{"city": ', '{"city": "\\ud83d"}', '{"city": ' + "[" * 400],
    ids=["cut", "half a pair", "deep"],
)
def test_arguments_that_are_no_json_are_handed_on(
    served: Served, model: Speaking, api: Api, arguments: str
) -> None:
    model.says(f'<tool_call>{{"name": "weather", "arguments": {arguments}', KNOWS_TOOLS)
    tools = api.tools(*FUNCTIONS)
    try:
        parsed = json.loads(arguments)
    except ValueError:
        parsed = arguments
    expected = [parsed, parsed]
    if api is MESSAGES:  # the words of Anthropic's clients
        invalid = {"INVALID_JSON": arguments}
        expected = [invalid, parsed if isinstance(parsed, dict) else invalid]
    said = api.ask(served, tools=tools)
    for one, wanted in zip((said, api.ask_streamed(served, tools=tools)), expected, strict=True):
        assert [call[:2] for call in one.calls] == [("weather", wanted)]
    if said.finish == "tool_calls":
        api.post(served, tools=tools, **api.after(said, "21 C"))


def test_reasoning_has_a_part_of_its_own_and_is_not_shown_again(
    served: Served, model: Speaking, api: Api
) -> None:
    model.says("<think>\nhm\n</think>\n\nHi", THINKS)
    said = api.ask_both(served)
    assert said.parts == [("reasoning", "hm"), ("text", "Hi")]
    api.ask(served, **api.after(said))
    assert "[assistant]Hi[user]Well?" in model.prompt and "hm" not in model.prompt
    model.says("hm</think>Hi", THINKS + "<think>")  # the prompt has opened it
    assert api.ask_both(served).parts == [("reasoning", "hm"), ("text", "Hi")]


def test_a_stream_that_fails_says_what_came_and_ends_with_the_error(api: Api) -> None:
    engine = ScriptedEngine(lambda prompt, sampling: [*b"ab", RuntimeError("the step failed")])
    with serving(engine) as served:
        text = api.post(served, stream=True).text
        *before, last = events_of(text)
        if api is CHAT:
            came = "".join(event["choices"][0]["delta"].get("content") or "" for event in before)
            error = last["error"]
            assert error["code"] == "step_failed" and "[DONE]" not in text
        elif api is RESPONSES:
            came = "".join(event.get("delta", "") for event in before)
            error = last["response"]["error"]
            assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        else:
            came = "".join(event["delta"]["text"] for event in before if "delta" in event)
            error = last["error"]
            assert (last["type"], error["type"]) == ("error", "api_error")
        assert came == "ab" and "the step failed" in error["message"]
        assert "the step failed" in api.post(served, 500).text


# ------------------------------------------------------------------------------------------ coding agents

RECORDED = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "data" / "agent-requests.jsonl").read_text().splitlines()
]
CALLED = {CHAT.path: "bash", RESPONSES.path: "multi_agent_v1__wait_agent", MESSAGES.path: "Bash"}
NAMED = {  # fields without effect that each agent is told of
    "Claude Code": {"context_management", "metadata", "system[].cache_control"},
    "Codex": {"client_metadata", "tools[web_search]"},
}


def test_every_recorded_request_of_an_agent_is_answered_in_the_shape_that_it_reads(
    served: Served, model: Speaking, api: Api
) -> None:
    call = {"name": CALLED[api.path], "arguments": {"command": "ls"}}
    model.says(f"Let me see.\n<tool_call>\n{json.dumps(call)}\n</tool_call>", KNOWS_TOOLS)
    mine = [one for one in RECORDED if one["path"].partition("?")[0] == api.path]
    assert len(mine) >= 2
    for one in mine:
        said = []
        for stream in (False, True):
            body = {**one["body"], "model": MODEL, "stream": stream}
            if not stream:
                body.pop("stream_options", None)
            reply = served.http.post(one["path"], json=body, headers=one["headers"])
            assert reply.status_code == 200, f"{one['agent']}: {reply.text}"
            named = set(reply.headers.get("x-penstock-ignored", "").split(", "))
            assert NAMED.get(one["agent"], set()) <= named
            said.append(api.read(api.joined(events_of(reply.text)) if stream else reply.json()))
        assert said[0].without_ids() == said[1].without_ids(), one["agent"]
        if one["body"].get("tools"):
            assert said[0].text.strip() == "Let me see."
            assert [name for name, *_ in said[0].calls] == [call["name"]]
            results = json.dumps(one["body"])
            num = sum(results.count(f'"{kind}"') for kind in ("tool_result", "function_call_output"))
            num += sum(message.get("role") == "tool" for message in one["body"].get("messages", ()))
            assert "<tools>" in model.prompt and model.prompt.count("[tool]") == num
            assert "web_search" not in model.prompt


# ------------------------------------------------------------------------- what the engine is handed on

HINTS: dict[str, Any] = {
    "priority": -5,
    "session_id": "agent",
    "cache_hint": {"retain_s": 60, "priority": "high"},
    "cache_salt": "mine",
    "kv_residency": "scored",
    "kv_pin_spans": [[0, 4], [10, 20]],
}


def test_fields_about_kv_reach_the_engine_from_every_route(served: Served, model: Speaking) -> None:
    """Holds invariant 26: no route takes a field and ignores it."""
    model.says("x")
    routes = [(api.path, api.body()) for api in APIS]
    for path, body in (*routes, ("/v1/completions", {"prompt": QUESTION})):
        for given in (HINTS, {}):
            reply = served.http.post(path, json={"model": MODEL, **body, **given})
            assert reply.status_code == 200, reply.text
            priority, session, hint = model.hinted[-1]
            residency, pins = model.resident[-1]
            found = priority, session, model.submitted[-1][2], residency
            assert found == ((-5, "agent", "mine", "scored") if given else (0, "", "", None)), path
            assert [list(span) for span in pins or ()] == (HINTS["kv_pin_spans"] if given else [])
            assert (hint is None) is not given or (hint.retain_s, hint.priority.name) == (60.0, "HIGH")
