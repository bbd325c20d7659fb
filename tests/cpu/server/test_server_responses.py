"""OpenAI's `/v1/responses` in front of a scripted engine: what the model is told, what its clients get, whole
and streamed.

Holds invariant 26: what is unknown or not supported is a 400."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.cpu.server.served import MODEL, Served, serving
from tests.cpu.server.test_server_tools import CALL, KNOWS_TOOLS, WEATHER, saying
from tests.cpu.server.tiered_server import MODEL as REAL_MODEL
from tests.cpu.server.tiered_server import tiered
from tests.support.scripted_engine import ScriptedEngine

ASK = "How warm is it in Bern?"
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "weather",
        "description": "How warm it is",
        "parameters": WEATHER,
        "strict": True,
    },
    {"type": "function", "name": "now"},
]
THINKS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{# <think></think> #}"
FORM = {"type": "json_schema", "name": "answer", "schema": WEATHER}


def ask(served: Served, **fields: Any) -> Any:
    return served.http.post(
        "/v1/responses", json={"model": MODEL, "input": ASK, "max_output_tokens": 200, **fields}
    )


def answer(served: Served, **fields: Any) -> dict[str, Any]:
    reply = ask(served, **fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(served: Served, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream; each has its name twice, and they are numbered from zero."""
    found = []
    for text in filter(None, ask(served, stream=True, **fields).text.split("\n\n")):
        name, data = text.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """The types in their order, deltas in a row as one: how many tokens an event has is a matter of time."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [
        name for i, name in enumerate(names) if not (name.endswith(".delta") and i and names[i - 1] == name)
    ]


def joined(events: list[dict[str, Any]], kind: str) -> str:
    return "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta")


def prompt_of(served: Served) -> str:
    return bytes(served.engine.submitted[-1][0]).decode()


def plain(response: dict[str, Any]) -> list[dict[str, Any]]:
    """Its items without what differs from one answer to the next."""
    return [
        {key: value for key, value in item.items() if key not in ("id", "call_id")}
        for item in response["output"]
    ]


# ---------------------------------------------------------------------------------------------------- answers

TEXT = [
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
    "output_item.done",
]


def test_an_answer_is_an_item_whole_and_streamed() -> None:
    with serving(saying("It is warm.")) as served:
        whole = answer(served, instructions="Be brief", metadata={"k": "v"})
        (item,) = whole["output"]
        assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
        assert item["content"] == [
            {"type": "output_text", "text": "It is warm.", "annotations": [], "logprobs": []}
        ]
        assert (whole["object"], whole["status"], whole["model"], whole["error"]) == (
            "response",
            "completed",
            MODEL,
            None,
        )
        assert whole["id"].startswith("resp_") and whole["metadata"] == {"k": "v"} and whole["store"] is True
        assert prompt_of(served) == f"system: Be brief\nuser: {ASK}\nassistant: "
        found = events(served, instructions="Be brief")
        assert kinds(found) == ["created", "in_progress", *TEXT, "completed"]
        assert joined(found, "output_text") == "It is warm."
        assert found[0]["response"]["output"] == [] and found[0]["response"]["status"] == "in_progress"
        last = found[-1]["response"]
        assert plain(last) == plain(whole) and last["id"] == found[0]["response"]["id"]
        assert {event.get("item_id") or event["item"]["id"] for event in found[2:-1]} == {
            last["output"][0]["id"]
        }
        first, again = whole["usage"], last["usage"]
        assert (
            first["input_tokens_details"]["cached_tokens"],
            again["input_tokens_details"]["cached_tokens"],
        ) == (0, 48)
        assert first["input_tokens"] == again["input_tokens"] == len(prompt_of(served))
        assert (
            again["output_tokens"] == len("It is warm.") + 1
            and again["total_tokens"] == again["input_tokens"] + again["output_tokens"]
        )


def test_an_answer_that_is_cut_is_incomplete() -> None:
    with serving(saying("one two three")) as served:
        whole, *_, last = answer(served, max_output_tokens=3), *events(served, max_output_tokens=3)
        assert last["type"] == "response.incomplete"
        for response in (whole, last["response"]):
            assert (response["status"], response["incomplete_details"]) == (
                "incomplete",
                {"reason": "max_output_tokens"},
            )
            assert (response["output"][0]["status"], response["output"][0]["content"][0]["text"]) == (
                "incomplete",
                "one",
            )


def test_a_stream_that_fails_ends_with_the_failed_response() -> None:
    with serving(
        ScriptedEngine(lambda prompt, sampling: [*b"ab", RuntimeError("the step failed")])
    ) as served:
        *before, last = events(served)
        assert (
            kinds(before) == ["created", "in_progress", *TEXT[:3]] and joined(before, "output_text") == "ab"
        )
        assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
        assert last["response"]["error"] == {"code": "server_error", "message": "the step failed"}


def test_padded_events_do_not_tell_the_length_of_their_text() -> None:
    with serving(saying("It is warm.")) as served:
        padded = events(served, stream_options={"include_obfuscation": True})
        deltas = [event for event in padded if event["type"].endswith(".delta")]
        assert {len(json.dumps(event, separators=(",", ":"), ensure_ascii=False)) for event in deltas} == {
            512
        }
        assert not any(
            "obfuscation" in event for event in events(served, stream_options={"include_obfuscation": False})
        )


# ------------------------------------------------------------------------------------------------------ tools


def test_calls_are_items_and_come_back_with_their_results() -> None:
    with serving(saying(CALL, KNOWS_TOOLS)) as served:
        whole = answer(served, tools=TOOLS)
        text, weather, now = whole["output"]
        assert text["content"][0]["text"] == "Let me see." and whole["status"] == "completed"
        assert (weather["type"], weather["name"], json.loads(weather["arguments"])) == (
            "function_call",
            "weather",
            {"city": "Bern"},
        )
        assert (now["name"], now["arguments"]) == ("now", "{}") and now["call_id"] != weather["call_id"]
        found = events(served, tools=TOOLS)
        call = [
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
        ]
        assert kinds(found) == ["created", "in_progress", *TEXT, *call, *call, "completed"]
        assert joined(found, "function_call_arguments") == weather["arguments"] + now["arguments"]
        assert [event["output_index"] for event in found if event["type"].endswith("item.added")] == [0, 1, 2]
        assert plain(found[-1]["response"]) == plain(whole)
        results = [
            {"type": "function_call_output", "call_id": weather["call_id"], "output": "21 C"},
            {
                "type": "function_call_output",
                "call_id": now["call_id"],
                "output": [{"type": "input_text", "text": "noon"}],
            },
        ]
        answer(served, tools=TOOLS, input=[{"role": "user", "content": ASK}, *whole["output"], *results])
        prompt = prompt_of(served)
    assert prompt.startswith("<tools>[{") and '"description": "How warm it is"' in prompt
    assert (
        'Let me see.<tool_call>weather{"city": "Bern"}</tool_call><tool_call>now{}</tool_call>[tool]21 C[tool]noon'  # noqa: E501
        in prompt
    )


def test_an_answer_that_is_cut_inside_a_call_is_incomplete_whole_and_streamed() -> None:
    with serving(saying(CALL)) as served:
        fields = {"tools": TOOLS, "max_output_tokens": CALL.index("Bern") + 2}
        for reply in (answer(served, **fields), events(served, **fields)[-1]["response"]):
            assert reply["status"] == "incomplete" and reply["incomplete_details"] == {
                "reason": "max_output_tokens"
            }
            assert reply["output"][-1]["status"] == "incomplete"


def test_forced_calls_and_formats_fit_their_schemas() -> None:
    pytest.importorskip("llguidance", reason="structured output is an extra")
    with tiered(host_blocks=0, blocks=1024) as server:
        base = {"model": REAL_MODEL, "input": ASK, "max_output_tokens": 600, "temperature": 1, "seed": 3}
        for choice in ({"type": "function", "name": "weather"}, "required"):
            fields = {"tools": TOOLS[:1], "tool_choice": choice, "parallel_tool_calls": False}
            (item,) = server.http.post("/v1/responses", json={**base, **fields}).json()["output"]
            assert item["name"] == "weather" and json.loads(item["arguments"])["unit"] in ("C", "F")
        reply = server.http.post("/v1/responses", json={**base, "text": {"format": FORM}}).json()
        assert (
            json.loads(reply["output"][0]["content"][0]["text"])["unit"] in ("C", "F")
            and reply["text"]["format"] == FORM
        )
        reply = server.http.post(
            "/v1/responses", json={**base, "text": {"format": {"type": "json_object"}}}
        ).json()
        assert reply["output"][0]["content"][0]["text"].startswith("{")
        bad = {**FORM, "schema": {"type": "object", "properties": {"x": False}, "required": ["x"]}}
        error = server.http.post("/v1/responses", json={**base, "text": {"format": bad}}).json()["error"]
        assert error["param"] == "text.format"


def test_reasoning_is_an_item_and_is_not_shown_again() -> None:
    with serving(saying("<think>hm</think>Hi", THINKS)) as served:
        whole = answer(served)
        thought, said = whole["output"]
        assert (thought["type"], thought["content"]) == (
            "reasoning",
            [{"type": "reasoning_text", "text": "hm"}],
        )
        assert said["content"][0]["text"] == "Hi" and whole["usage"]["output_tokens_details"] == {
            "reasoning_tokens": 2
        }
        found = events(served)
        assert joined(found, "reasoning_text") == "hm" and plain(found[-1]["response"]) == plain(whole)
        answer(
            served,
            input=[{"role": "user", "content": ASK}, thought, said, {"role": "user", "content": "so?"}],
        )
        assert "[assistant]Hi[user]so?" in prompt_of(served) and "hm" not in prompt_of(served)


# --------------------------------------------------------------------------------------------------- refusals


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    """Of tests that are refused everything."""
    with serving() as running:
        yield running


IMAGE = {"type": "input_image", "image_url": "data:"}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"input": []}, "input", "length"),
    ({"input": None}, "input", "expected"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input", "no message"),
    ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].type", "reads and writes text"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "enum"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "enum"),
    ({"input": [{"content": "x"}]}, "input[0]", "role is required"),
    ({"input": [{"role": "user"}]}, "input[0]", "content is required"),
    (
        {"input": [{"type": "function_call", "call_id": "a", "name": "f"}]},
        "input[0]",
        "arguments is required",
    ),
    ({"input": [{"role": "user", "content": "x", "call_id": "a"}]}, "input[0]", "call_id is not a field"),
    (
        {"input": [{"type": "function_call_output", "call_id": "", "output": "x"}]},
        "input[0].call_id",
        "length",
    ),
    ({"input": json.loads("[" * 60 + "]" * 60)}, "input[0]", "object"),
    ({"instructions": 7}, "instructions", "expected"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "runs no tools itself"),
    ({"tools": [{"type": "function", "name": "f g"}]}, "tools[0].name", "match"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "same name"),
    ({"tools": [TOOLS[0]] * 129}, "tools", "length"),
    ({"tool_choice": "required"}, "tool_choice", "where there are tools"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}},
        "tool_choice",
        "no tool has that name",
    ),
    (
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        "tool_choice.type",
        "",
    ),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format", "name and schema"),
    ({"text": {"format": {"type": "text", "name": "x"}}}, "text.format", "name and schema"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort", ""),
    ({"max_output_tokens": -1}, "max_output_tokens", ""),
    ({"max_output_tokens": 1 << 30}, "max_output_tokens", "maximum context length"),
    ({"temperature": -1}, "temperature", ""),
    ({"top_p": 2}, "top_p", ""),
    ({"metadata": {"k": 1}}, "metadata[...]", "expected"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options", "where stream is true"),
    ({"messages": []}, "messages", "not a field"),
    ({"max_tokens": 1}, "max_tokens", "not a field"),
    ({"cache_hint": {"release": True}}, "cache_hint", "session"),
]


@pytest.mark.parametrize(("fields", "param", "words"), BAD)
def test_what_is_wrong_is_refused_by_name(
    shared: Served, fields: dict[str, Any], param: str, words: str
) -> None:
    reply = ask(shared, **fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), error
    assert words in error["message"].lower() and shared.engine.submitted == [], error


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/v1/embeddings", "make no embeddings"),
        ("/v1/score", "score none"),
        ("/rerank", "score none"),
        ("/v1/rerank", "score none"),
        ("/v1/audio/transcriptions", "text"),
        ("/v1/chat/completions/chatcmpl-1", "not stored"),
        ("/v1/files", "not stored"),
    ],
)
def test_a_route_of_other_servers_is_a_404_that_says_what_is_here(
    shared: Served, path: str, why: str
) -> None:
    for reply in (shared.http.post(path, json={"model": MODEL, "input": "x"}), shared.http.get(path)):
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (404, "not_found")
        assert why in error["message"] and "/v1/responses" in error["message"]
    assert shared.http.get(f"/v9{path}").json()["error"]["message"] == "there is no such path"


# ----------------------------------------------------------------------------------------------- their client


def test_openais_client_answers_streams_and_calls_tools() -> None:
    with serving(saying(CALL)) as served:
        create = served.client().responses.create
        response = create(model=MODEL, input=ASK, tools=TOOLS)
        assert response.output_text == ("Let me see.") and [item.type for item in response.output] == [
            "message",
            *["function_call"] * 2,
        ]
        with served.client().responses.stream(model=MODEL, input=ASK, tools=TOOLS[:1]) as stream:
            seen = [event.type for event in stream]
            final = stream.get_final_response()
        assert (
            seen[0] == "response.created"
            and seen[-1] == "response.completed"
            and final.output_text == "Let me see."
        )
        call = response.output[1]
        turns = [
            *response.output,
            {"type": "function_call_output", "call_id": call.call_id, "output": "21 C"},
        ]
        assert create(model=MODEL, input=turns, tools=TOOLS).status == "completed"
        again = create(model=MODEL, input=turns[-1:], tools=TOOLS, previous_response_id=response.id)
        assert again.previous_response_id == response.id
        assert served.client().responses.retrieve(response.id).output == response.output
        served.client().responses.delete(response.id)
        with pytest.raises(
            openai.NotFoundError, match=r"Previous response with id 'resp_[0-9a-f]+' not found"
        ):
            create(model=MODEL, input=ASK, previous_response_id=response.id)
