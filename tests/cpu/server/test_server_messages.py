"""Anthropic's `/v1/messages` in front of a scripted engine: what the model is told, what its clients get,
whole and streamed.

Holds invariant 26: what is unknown or not supported is a 400 in Anthropic's shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.errors import (
    DeadlineExceeded,
    EngineClosed,
    InvalidRequest,
    Overloaded,
    SessionMissing,
    SnapshotTaken,
)
from penstock.server.access import Exchange
from penstock.server.faults import Refused, error_response
from tests.cpu.server.served import MODEL, Served, serving
from tests.cpu.server.test_server_tools import CALL, KNOWS_TOOLS, WEATHER, saying
from tests.cpu.server.tiered_server import MODEL as REAL_MODEL
from tests.cpu.server.tiered_server import tiered
from tests.support.scripted_engine import ScriptedEngine

ASK = [{"role": "user", "content": "How warm is it in Bern?"}]
TOOLS = [
    {"name": "weather", "description": "How warm it is", "input_schema": WEATHER},
    {"name": "now", "input_schema": {"type": "object"}},
]
THINKS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{# <think></think> #}"


def ask(served: Served, **fields: Any) -> Any:
    return served.http.post(
        "/v1/messages", json={"model": MODEL, "messages": ASK, "max_tokens": 200, **fields}
    )


def answer(served: Served, **fields: Any) -> dict[str, Any]:
    reply = ask(served, **fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(served: Served, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream; each has its name twice."""
    found = []
    for text in filter(None, ask(served, stream=True, **fields).text.split("\n\n")):
        name, data = text.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of a stream, which also checks its order."""
    start, *middle, delta, stop = events
    assert (start["type"], delta["type"], stop) == (
        "message_start",
        "message_delta",
        {"type": "message_stop"},
    )
    message = start["message"]
    assert (
        message["content"] == [] and message["stop_reason"] is None and message["usage"]["input_tokens"] > 0
    )
    json_text = ""
    for event in middle:
        content = message["content"]
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(content)
                content.append(event["content_block"])
                json_text = ""
            case "content_block_delta":
                assert event["index"] == len(content) - 1
                kind, *_ = event["delta"].pop("type").split("_")
                if kind == "input":
                    json_text += event["delta"]["partial_json"]
                else:
                    content[-1][kind] += event["delta"][kind]
            case "content_block_stop":
                if content[-1]["type"] == "tool_use":
                    content[-1]["input"] = json.loads(json_text or "{}")
    assert sum(event["type"] == "content_block_stop" for event in middle) == len(message["content"])
    return {**message, **delta["delta"], "usage": delta["usage"]}


def prompt_of(served: Served) -> str:
    return bytes(served.engine.submitted[-1][0]).decode()


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {**message, "content": content, "id": ""}


# ---------------------------------------------------------------------------------------------------- answers


def test_an_answer_is_a_message_of_blocks_whole_and_streamed() -> None:
    with serving(saying("It is warm.")) as served:
        whole = answer(served, system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}])
        assert whole["content"] == [{"type": "text", "text": "It is warm."}]
        assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", MODEL) and whole[
            "id"
        ].startswith("msg_")
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)
        assert prompt_of(served) == "system: Be\nbrief\nuser: How warm is it in Bern?\nassistant: "
        streamed = put_together(events(served, system="Be\nbrief"))
        assert without_ids(streamed) == {**without_ids(whole), "usage": streamed["usage"]}
        # Sixteen tokens are a block of the cache; cached tokens are not counted as input tokens.
        first, again = whole["usage"], streamed["usage"]
        assert (first["cache_read_input_tokens"], again["cache_read_input_tokens"]) == (0, 48)
        assert (
            first["input_tokens"]
            == again["input_tokens"] + again["cache_read_input_tokens"]
            == len(prompt_of(served))
        )
        assert first["output_tokens"] == again["output_tokens"] == len("It is warm.") + 1


def test_an_answer_without_text_has_an_empty_block() -> None:
    with serving(saying("")) as served:
        for message in (answer(served), put_together(events(served))):
            assert message["content"] == [{"type": "text", "text": ""}]
            assert message["stop_reason"] == "end_turn"


def test_why_an_answer_ended() -> None:
    with serving(saying("one two three"), max_concurrent=4) as served:
        for fields, reason, sequence, text in (
            ({"stop_sequences": ["zero", " two"]}, "stop_sequence", " two", "one"),
            ({"max_tokens": 3}, "max_tokens", None, "one"),
            ({}, "end_turn", None, "one two three"),
        ):
            for message in (answer(served, **fields), put_together(events(served, **fields))):
                assert (message["stop_reason"], message["stop_sequence"], message["content"][0]["text"]) == (
                    reason,
                    sequence,
                    text,
                )


def test_an_answer_may_be_allowed_more_than_the_context_has_and_ends_with_it() -> None:
    with serving(ScriptedEngine(max_model_len=64)) as served:
        for message in (answer(served), put_together(events(served))):
            assert message["stop_reason"] == "model_context_window_exceeded"
            assert message["usage"]["output_tokens"] == 64 - len(prompt_of(served))
        refused = ask(served, messages=[{"role": "user", "content": "x" * 65}]).json()["error"]
        assert refused["type"] == "invalid_request_error" and refused["message"].startswith(
            "prompt is too long: "
        )


def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    with serving(
        ScriptedEngine(lambda prompt, sampling: [*b"ab", RuntimeError("the step failed")])
    ) as served:
        *before, last = events(served)
        assert [event["type"] for event in before[:2]] == ["message_start", "content_block_start"]
        assert "".join(event["delta"]["text"] for event in before[2:]) == "ab"
        assert (
            last["type"] == "error"
            and last["error"]["type"] == "api_error"
            and ("the step failed") in last["error"]["message"]
        )


# ------------------------------------------------------------------------------------------------------ tools


def test_calls_are_blocks_and_come_back_with_their_results() -> None:
    with serving(saying(CALL, KNOWS_TOOLS)) as served:
        whole = answer(served, tools=TOOLS)
        text, weather, now = whole["content"]
        assert text == {"type": "text", "text": "Let me see."} and whole["stop_reason"] == "tool_use"
        assert (weather["type"], weather["name"], weather["input"]) == (
            "tool_use",
            "weather",
            {"city": "Bern"},
        )
        assert (
            (now["name"], now["input"]) == ("now", {})
            and now["id"] != weather["id"]
            and now["id"].startswith("toolu_")
        )
        streamed = put_together(events(served, tools=TOOLS))
        assert without_ids(streamed) == {**without_ids(whole), "usage": streamed["usage"]}
        results = [
            {
                "type": "tool_result",
                "tool_use_id": weather["id"],
                "content": [{"type": "text", "text": "21 C"}],
            },
            {"type": "tool_result", "tool_use_id": now["id"], "content": "no clock", "is_error": True},
            {"type": "text", "text": "Well?"},
        ]
        answer(
            served,
            tools=TOOLS,
            messages=[
                *ASK,
                {"role": "assistant", "content": whole["content"]},
                {"role": "user", "content": results},
            ],
        )
        prompt = prompt_of(served)
    assert prompt.startswith("<tools>[{") and '"description": "How warm it is"' in prompt
    assert ("Let me see.<tool_call>weather") in prompt and (
        "</tool_call>[tool]21 C[tool]Error: no clock[user]Well?"
    ) in prompt


def test_blocks_are_in_the_order_in_which_the_model_wrote_them_whole_and_streamed() -> None:
    with serving(
        saying('A<tool_call>{"name": "now"}</tool_call>B<tool_call>{"name": "now"}</tool_call>C')
    ) as served:
        for message in (answer(served, tools=TOOLS), put_together(events(served, tools=TOOLS))):
            said = [block.get("text") or block["name"] for block in message["content"]]
            assert said == ["A", "now", "B", "now", "C"]


@pytest.mark.parametrize(
    "arguments",
    ['{"city": ', '{"city": "\\ud83d"}', '{"city": ' + "[" * 2000],
    ids=["cut", "half a pair", "deep"],
)
def test_calls_that_are_no_json_are_handed_on_as_text(arguments: str) -> None:
    with serving(saying(f'<tool_call>{{"name": "weather", "arguments": {arguments}')) as served:
        (block,) = answer(served, tools=TOOLS, max_tokens=4000)["content"]
        assert block["input"] == {"INVALID_JSON": arguments}
        said = [
            event["delta"]
            for event in events(served, tools=TOOLS, max_tokens=4000)
            if event["type"] == "content_block_delta"
        ]
        assert "".join(delta["partial_json"] for delta in said) == arguments


def test_an_answer_that_is_cut_inside_a_call_says_so_whole_and_streamed() -> None:
    """Whoever is told that it is a call would run it with half of its arguments."""
    with serving(saying(CALL)) as served:
        fields = {"tools": TOOLS, "max_tokens": CALL.index("Bern") + 2}
        assert answer(served, **fields)["stop_reason"] == "max_tokens"
        assert events(served, **fields)[-2]["delta"]["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("choice", "seen"),
    [({"type": "auto"}, 2), ({"type": "auto", "disable_parallel_tool_use": True}, 1), ({"type": "none"}, 0)],
)
def test_how_many_calls_a_choice_leaves(choice: dict[str, Any], seen: int) -> None:
    with serving(saying(CALL)) as served:
        found = [
            block
            for block in answer(served, tools=TOOLS, tool_choice=choice)["content"]
            if block["type"] == "tool_use"
        ]
        assert len(found) == seen and ("weather" in prompt_of(served)) == bool(seen)


def test_a_forced_call_fits_its_schema_whole_and_streamed() -> None:
    pytest.importorskip("llguidance", reason="structured output is an extra")
    with tiered(host_blocks=0, blocks=1024) as server:
        base = {
            "model": REAL_MODEL,
            "messages": ASK,
            "tools": TOOLS[:1],
            "max_tokens": 600,
            "temperature": 1,
            "seed": 3,
        }
        for choice in (
            {"type": "tool", "name": "weather"},
            {"type": "any", "disable_parallel_tool_use": True},
        ):
            reply = server.http.post("/v1/messages", json={**base, "tool_choice": choice}).json()
            (block,) = reply["content"]
            assert (block["name"], reply["stop_reason"]) == ("weather", "tool_use")
            assert block["input"]["city"] in ("Zürich", "Bern") and block["input"]["unit"] in ("C", "F")
        form = {"format": {"type": "json_schema", "schema": WEATHER}}
        fields = {key: value for key, value in base.items() if key != "tools"}
        reply = server.http.post("/v1/messages", json={**fields, "output_config": form}).json()
        assert json.loads(reply["content"][0]["text"])["unit"] in ("C", "F")
        bad = {
            "format": {
                "type": "json_schema",
                "schema": {"type": "object", "properties": {"x": False}, "required": ["x"]},
            }
        }
        error = server.http.post("/v1/messages", json={**fields, "output_config": bad}).json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", "output_config.format")


# --------------------------------------------------------------------------------------------------- thinking


def test_reasoning_is_a_thinking_block_and_is_not_shown_again() -> None:
    with serving(saying("<think>hm</think>Hi", THINKS)) as served:
        whole = answer(served, thinking={"type": "adaptive"})
        assert whole["content"] == [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "Hi"},
        ]
        assert put_together(events(served))["content"] == whole["content"]
        answer(served, messages=[*ASK, {"role": "assistant", "content": whole["content"]}, *ASK])
        assert "[assistant]Hi[user]" in prompt_of(served) and "hm" not in prompt_of(served)
        error = ask(served, thinking={"type": "disabled"}).json()["error"]
        assert error["param"] == "thinking" and "reasons" in error["message"]


# ----------------------------------------------------------------------------------------------------- tokens


def test_tokens_are_counted_as_a_message_would_have_them() -> None:
    with serving(saying("x")) as served:
        for fields in (
            {},
            {"system": "Be brief", "tools": TOOLS},
            {"tools": TOOLS, "tool_choice": {"type": "none"}},
        ):
            counted = served.http.post(
                "/v1/messages/count_tokens?beta=true", json={"model": MODEL, "messages": ASK, **fields}
            )
            usage = answer(served, **fields, cache_salt=repr(fields))["usage"]
            assert counted.json() == {"input_tokens": usage["input_tokens"]}, counted.text
        for fields in ({"max_tokens": 1}, {"messages": []}, {"tools": [{"name": "x"}]}, {"model": "other"}):
            refused = served.http.post(
                "/v1/messages/count_tokens", json={"model": MODEL, "messages": ASK, **fields}
            )
            assert refused.status_code in (400, 404) and refused.json()["type"] == "error"


# --------------------------------------------------------------------------------------------------- refusals


ERRORS: list[tuple[Exception, int, str]] = [
    (InvalidRequest("no"), 400, "invalid_request_error"),
    (Refused(401, "no"), 401, "authentication_error"),
    (Refused(403, "no"), 403, "permission_error"),
    (SessionMissing("no"), 404, "not_found_error"),
    (Refused(408, "no"), 408, "timeout_error"),
    (SnapshotTaken("no"), 409, "invalid_request_error"),
    (Refused(413, "no"), 413, "request_too_large"),
    (Overloaded("no"), 429, "rate_limit_error"),
    (RuntimeError("no"), 500, "api_error"),
    (EngineClosed("no"), 503, "overloaded_error"),
    (DeadlineExceeded("no"), 504, "timeout_error"),
]


@pytest.mark.parametrize(("error", "status", "kind"), ERRORS, ids=[kind for _, _, kind in ERRORS])
def test_errors_are_of_the_kinds_that_clients_tell_apart(error: Exception, status: int, kind: str) -> None:
    """They try again after some, and not after others."""
    reply = error_response(error, Exchange("POST", "/v1/messages", 0.0, id="mine"))
    body = json.loads(bytes(reply.body))
    assert (reply.status_code, body["type"], body["error"]["type"], body["request_id"]) == (
        status,
        "error",
        kind,
        "mine",
    )


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    """Of tests that are refused everything."""
    with serving() as running:
        yield running


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
DEEP = json.loads("[" * 60 + "]" * 60)
DEEPER = {"a": json.loads("[" * 900 + "]" * 900)}
BAD: list[tuple[dict[str, Any], str, str]] = [
    (
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        "messages[0].content[0].type",
        "reads and writes text",
    ),
    (
        {"messages": [{"role": "user", "content": [DOCUMENT]}]},
        "messages[0].content[0].type",
        "reads and writes text",
    ),
    (
        {
            "messages": [
                *ASK,
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}],
                },
            ]
        },
        "messages[1].content[0].content[0].type",
        "reads and writes text",
    ),
    ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0]", "role user"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "length"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "enum"),
    ({"messages": []}, "messages", "length"),
    ({"messages": DEEP}, "messages[0]", "object"),
    (
        {"messages": [*ASK, {"role": "assistant", "content": [{**USE, "input": DEEPER}]}, *ASK]},
        "messages[1].content[0]",
        "deeper than 100",
    ),
    ({"tools": [{"name": "f", "input_schema": DEEPER}]}, "tools", "deeper than 100"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": DEEPER}}},
        "output_config.format",
        "deeper than 100",
    ),
    ({"system": [IMAGE]}, "system[0].type", "text"),
    ({"system": 7}, "system", "expected"),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools[0].type",
        "runs no tools itself",
    ),
    ({"tools": [{"name": "f", "input_schema": []}]}, "tools[0].input_schema", "expected"),
    ({"tools": [{"name": "f g", "input_schema": {}}]}, "tools[0].name", "match"),
    ({"tools": [{"name": "f\n", "input_schema": {}}]}, "tools[0].name", "match"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "same name"),
    ({"tools": [TOOLS[0]] * 129}, "tools", "length"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "where there are tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice", "name goes with"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}},
        "tool_choice",
        "no tool has that name",
    ),
    ({"tools": TOOLS, "tool_choice": "auto"}, "tool_choice", "expected"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences", ""),
    ({"stop_sequences": "x"}, "stop_sequences", "expected"),
    ({"stop_sequences": [""]}, "stop_sequences", ""),
    ({"max_tokens": -1}, "max_tokens", ""),
    ({"max_tokens": None}, "max_tokens", "expected"),
    ({"max_tokens": 2**40}, "max_tokens", ""),
    ({"temperature": -1}, "temperature", ""),
    ({"top_p": 2}, "top_p", ""),
    ({"top_k": -2}, "top_k", ""),
    ({"output_config": {"effort": "much"}}, "output_config.effort", ""),
    ({"output_config": {"format": {"type": "json_schema", "schema": 7}}}, "output_config.format.schema", ""),
    ({"metadata": "u"}, "metadata", "labels"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers", "not supported"),
    ({"container": "c"}, "container", "not supported"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type", ""),
    ({"stop": "x"}, "stop", "not a field"),
    ({"session_id": ""}, "session_id", ""),
    ({"cache_hint": {"release": True}}, "cache_hint", "session"),
]


@pytest.mark.parametrize(("fields", "param", "words"), BAD)
def test_what_is_wrong_is_refused_by_name_in_anthropics_shape(
    shared: Served, fields: dict[str, Any], param: str, words: str
) -> None:
    reply = ask(shared, **fields)
    assert reply.status_code == 400, reply.text
    body = reply.json()
    assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
    assert body["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    assert (body["error"]["type"], body["error"]["param"]) == ("invalid_request_error", param), body
    assert words in body["error"]["message"].lower() and shared.engine.submitted == [], body


def test_every_error_of_this_door_has_anthropics_shape() -> None:
    with serving(api_key="k", max_body_bytes=4096) as served:
        right = {"x-api-key": "k", "anthropic-version": "2023-06-01"}
        body = {"model": MODEL, "messages": ASK, "max_tokens": 1}
        for status, kind, options in (
            (401, "authentication_error", {"json": body}),
            (401, "authentication_error", {"json": body, "headers": {"x-api-key": "other"}}),
            (404, "not_found_error", {"json": {**body, "model": "other"}, "headers": right}),
            (413, "request_too_large", {"content": b"x" * 5000, "headers": right}),
            (400, "invalid_request_error", {"content": b"{", "headers": right}),
        ):
            reply = served.http.post("/v1/messages", **options)
            assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind), reply.text
        for headers in (right, {"authorization": "Bearer k"}):
            assert served.http.post("/v1/messages", json=body, headers=headers).status_code == 200
        assert served.http.get("/v1/models", headers=right).status_code == 200
        both = {"x-api-key": "other", "authorization": "Bearer k"}
        assert served.http.post("/v1/messages", json=body, headers=both).status_code == 200
        assert (
            served.http.get("/v1/messages", headers=right).json()["error"]["type"] == "invalid_request_error"
        )
        assert (
            served.http.post("/v1/messages/batches", headers=right).json()["error"]["type"]
            == "not_found_error"
        )


# ----------------------------------------------------------------------------------------------- their client


def test_anthropics_client_chats_streams_and_calls_tools() -> None:
    anthropic = pytest.importorskip("anthropic", reason="anthropic is in the dev extra")
    with serving(saying(CALL), api_key="k") as served:
        client = anthropic.Anthropic(base_url=served.url, api_key="k", max_retries=0)
        options: Any = {"model": MODEL, "max_tokens": 200, "tools": TOOLS, "messages": ASK}
        message = client.messages.create(**options)
        assert [block.type for block in message.content] == [
            "text",
            "tool_use",
            "tool_use",
        ] and message._request_id
        with client.messages.stream(**options) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert (
            text == ("Let me see.")
            and final.content[1].input == {"city": "Bern"}
            and final.stop_reason == "tool_use"
        )
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "21 C"}
            for block in message.content[1:]
        ]
        turns: Any = [*ASK, message.to_param(), {"role": "user", "content": results}]
        assert client.messages.create(**{**options, "messages": turns}).stop_reason == "tool_use"
        assert client.beta.messages.create(**options).content[0].text == "Let me see."
        assert client.messages.count_tokens(model=MODEL, messages=ASK).input_tokens == len(
            "user: How warm is it in Bern?\nassistant: "
        )
        with pytest.raises(anthropic.BadRequestError, match="reads and writes text"):
            client.messages.create(**{**options, "messages": [{"role": "user", "content": [IMAGE]}]})
        with pytest.raises(anthropic.AuthenticationError):
            client.with_options(api_key="other").messages.create(**options)
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**{**options, "model": "other"})
