"""Every field of every generating route that is wrong is a 400 that names it, in the shape of its API, and
nothing reaches the engine.

Holds invariant 26: a field that is unknown or not supported is a 400."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.contract import MAX_LOGPROBS, MAX_STOPS
from tests.cpu.server.apis import APIS, CHAT, FUNCTIONS, MESSAGES, RESPONSES, THINKS, Speaking
from tests.cpu.server.served import MODEL, Served, completion, serving
from tests.support.scripted_engine import ScriptedEngine

DEPTH = 10_000  # far deeper than the interpreter's stack, and not yet too many lists and objects to look at
Row = tuple[dict[str, Any], str, str]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as running:
        yield running


def check_refused(served: Served, path: str, body: object, param: str | None, text: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    before = len(served.engine.submitted)
    reply = served.http.post(path, content=content)
    assert reply.status_code == 400, f"{body!r:.200}: {reply.text}"
    whole, error = reply.json(), reply.json()["error"]
    if path == MESSAGES.path:
        assert (set(whole), whole["type"]) == ({"type", "error", "request_id"}, "error")
        assert whole["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error
    assert text.lower() in error["message"].lower() and len(error["message"]) < 600, error
    assert len(served.engine.submitted) == before and not served.service.generations.taken


# ------------------------------------------------------------------------------------------------- bodies

RAW: dict[str, tuple[bytes, str | None, str]] = {
    "no json": (b"{", None, "valid JSON"),
    "no body": (b"", None, "valid JSON"),
    "not an object": (b"[]", None, "object"),
    "trailing characters": (b'{"model":"scripted","prompt":"x"} x', None, "valid JSON"),
    "not utf-8": (b'{"model":"scripted","prompt":"\xff"}', None, "valid UTF-8"),
    "half a surrogate pair": (b'{"model":"scripted","prompt":"\\ud800 x"}', None, "valid JSON"),
    "nan": (b'{"model":"scripted","prompt":"x","temperature":NaN}', None, "valid JSON"),
    "beyond floats": (b'{"model":"scripted","prompt":"x","temperature":1e999}', "temperature", "range"),
    "deep lists": (b'{"model":"scripted","prompt":' + b"[" * DEPTH, "prompt[0][0]", "expected `int`"),
    "deep objects": (b'{"a":' * DEPTH, "a", "not a field"),
    "too many lists": (
        b'{"model":"scripted","prompt":[' + b"[]," * 20_000 + b"[]]}",
        None,
        "more than 16384 lists and objects",
    ),
    "no model": (b'{"prompt":"x"}', "model", "required"),
    "no prompt": (b'{"model":"scripted"}', "prompt", "required"),
}


def test_bodies_that_are_none_are_refused(served: Served) -> None:
    for body, param, text in RAW.values():
        check_refused(served, "/v1/completions", body, param, text)


TOO_LONG = "maximum context length is 100000 tokens"
COMPLETIONS: tuple[Row, ...] = (
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": ["a", 1]}, "prompt", "mix"),
    ({"prompt": 5}, "prompt", "expected `str | array`"),
    ({"prompt": [1.5]}, "prompt[0]", "expected"),
    ({"prompt": [-1]}, "prompt[0]", ">= 0"),
    ({"prompt": [10**30]}, "prompt[0]", "<="),
    ({"prompt": "x" * 100_001}, "prompt", TOO_LONG),
    ({"prompt": [1] * 100_001}, "prompt", TOO_LONG),
    ({"prompt": "x" * 90_000, "max_tokens": 20_000}, "max_tokens", TOO_LONG),
    ({"temprature": 1}, "temprature", "temprature is not a field"),
    ({"best_of": 2}, "best_of", "best_of is not supported"),
    ({"max_tokens": -1}, "max_tokens", ">= 0"),
    ({"max_tokens": 1.5}, "max_tokens", "`float`"),
    ({"max_tokens": True}, "max_tokens", "`bool`"),
    ({"max_tokens": 10**30}, "max_tokens", "<="),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens", ""),
    ({"min_tokens": -1}, "min_tokens", ""),
    ({"logprobs": True}, "logprobs", "`bool`"),
    ({"stop": [1]}, "stop[0]", "expected `str`"),
    ({"stream": "yes"}, "stream", "`str`"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream is true"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "not a field"),
    ({"cache_salt": 1}, "cache_salt", "expected `str"),
    ({"kv_residency": "sparse"}, "kv_residency", ""),
    ({"kv_pin_spans": [[1, 2, 3]]}, "kv_pin_spans[0]", ""),
    ({"kv_pin_spans": [[-1, 2]]}, "kv_pin_spans[0][0]", ""),
    ({"kv_pin_spans": [[0, 1]] * 65}, "kv_pin_spans", ""),
    ({"logit_bias": {"5": 100.5}}, "logit_bias[...]", "<= 100"),
    ({"logit_bias": {"5": None}}, "logit_bias[...]", "null"),
    ({"logit_bias": {"x": 1}}, "logit_bias", ""),
    ({"logit_bias": {"-5": 1}}, "logit_bias", ""),
    ({"logit_bias": {str(token): 1 for token in range(513)}}, "logit_bias", "<= 512"),
    ({"user": "x" * 1025}, "user", "1024"),
    ({"metadata": {"k": "v" * 513}}, "metadata", "512"),
    ({"metadata": {str(i): "v" for i in range(17)}}, "metadata", "16"),
    ({"priority": "high"}, "priority", "`str`"),
    ({"priority": -(2**31) - 1}, "priority", ">= -2147483648"),
    ({"priority": 2**31}, "priority", "<= 2147483647"),
    ({"session_id": ""}, "session_id", "length >= 1"),
    ({"session_id": "s" * 1025}, "session_id", "length <= 1024"),
    ({"prompt_cache_key": "s" * 1025}, "prompt_cache_key", "length <= 1024"),
    ({"cache_hint": {}}, "cache_hint", "session_id or prompt_cache_key"),
    ({"session_id": "s", "cache_hint": {"retain": 5}}, "cache_hint.retain", "not a field"),
    ({"session_id": "s", "cache_hint": {"retain_s": -1}}, "cache_hint.retain_s", ">= 0"),
    ({"session_id": "s", "cache_hint": {"retain_s": 86_401}}, "cache_hint.retain_s", "<= 86400"),
    ({"session_id": "s", "cache_hint": {"priority": "highest"}}, "cache_hint.priority", "highest"),
    ({"session_id": "s", "cache_hint": {"release": 1}}, "cache_hint.release", "`int`"),
    ({"session_id": "s", "cache_hint": {"release": True, "retain_s": 5}}, "cache_hint", "give one of them"),
)


def test_wrong_fields_of_completions_are_refused_by_name(served: Served) -> None:
    for fields, param, text in COMPLETIONS:
        check_refused(served, "/v1/completions", completion(**fields), param, text)


# fields at their limits, and the one that is refused beyond it
LIMITS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"stop": ["x"] * MAX_STOPS}, {"stop": ["x"] * (MAX_STOPS + 1)}),
    ({"stop": ["x"]}, {"stop": ["x", ""]}),
    ({"logprobs": MAX_LOGPROBS}, {"logprobs": MAX_LOGPROBS + 1}),
    ({"logprobs": 0}, {"logprobs": -1}),
    ({"temperature": 100}, {"temperature": 100.5}),
    ({"temperature": 0}, {"temperature": -0.1}),
    ({"top_p": 1}, {"top_p": 1.01}),
    ({"top_p": 1e-9}, {"top_p": 0}),
    ({"min_p": 1}, {"min_p": 1.01}),
    ({"top_k": -1}, {"top_k": -2}),
    ({"presence_penalty": -2}, {"presence_penalty": 2.1}),
    ({"frequency_penalty": 2}, {"frequency_penalty": -2.1}),
    ({"repetition_penalty": 100}, {"repetition_penalty": 0}),
    ({"n": 128}, {"n": 129}),
    ({"n": 1}, {"n": 0}),
    ({"seed": 2**63 - 1}, {"seed": 2**63}),
    ({"seed": -(2**63) + 1}, {"seed": -(2**63)}),
)


def test_every_field_is_taken_to_its_limit_and_refused_beyond_it(served: Served) -> None:
    for most, beyond in LIMITS:
        reply = served.http.post("/v1/completions", json=completion(max_tokens=1, **most))
        assert reply.status_code == 200, reply.text
        served.assert_idle()
        check_refused(served, "/v1/completions", completion(max_tokens=1, **beyond), next(iter(beyond)), "")


# -------------------------------------------------------------------------------------------- conversations


def nested(depth: int) -> dict[str, Any]:
    """So many lists and objects in one another."""
    value: Any = {}
    for _ in range(depth - 2):
        value = [value]
    return {"a": value}


def test_what_is_wrong_with_tools_and_forms_is_refused_by_the_name_that_each_api_has(served: Served) -> None:
    function = FUNCTIONS[1]
    for api in APIS:
        name = "tools[0].function.name" if api is CHAT else "tools[0].name"
        rows: tuple[Row, ...] = (
            ({"tools": api.tools({"name": "a b"})}, name, "match"),
            ({"tools": api.tools({"name": "a\n"})}, name, "match"),
            ({"tools": api.tools(function, function)}, "tools", "same name"),
            ({"tools": api.tools(*[function] * 129)}, "tools", "length <= 128"),
            ({"tools": api.tools({**function, "parameters": nested(101)})}, "tools", "deeper than 100"),
            (
                {"tools": api.tools({**function, "parameters": nested(900)}), **api.choice("none")},
                "tools",
                "deeper than 100",
            ),
            (
                {"tools": api.tools({**function, "parameters": nested(480)}), **api.choice("required")},
                "tools",
                "deeper than 100",
            ),
            (api.choice("required"), "tool_choice", "where there are tools"),
            (
                {"tools": api.tools(function), **api.choice("other")},
                "tool_choice",
                "no tool has that name",
            ),
            (api.formed(nested(101)), api.form, "deeper than 100"),
            ({api.most: -1}, api.most, ">= 0"),
            ({"temperature": -1}, "temperature", "at least 0"),
            ({"top_p": 2}, "top_p", "at most 1"),
            ({"cache_hint": {"release": True}}, "cache_hint", "session"),
            ({"temperatur": 0}, "temperatur", "not a field"),
        )
        for fields, param, text in rows:
            check_refused(served, api.path, {"model": MODEL, **api.body(**fields)}, param, text)


def said(content: object, role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content, **fields}]}


def called(**call: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "tool_calls": [call]}]}


TOOL = {"type": "function", "function": {"name": "f"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
CHATS: tuple[Row, ...] = (
    ({"messages": []}, "messages", "length >= 1"),
    ({"messages": "hi"}, "messages", "expected `array`"),
    (said("x", "wizard"), "messages[0].role", "wizard"),
    (said(None), "messages[0]", "`null`"),
    (
        said("x", tool_calls=[{"id": "c", "function": {"name": "f", "arguments": "{}"}}]),
        "messages[0]",
        "only an assistant",
    ),
    (called(function={"name": "f", "arguments": "{}"}), "messages[0].tool_calls[0].id", "required"),
    (
        called(id="c", function={"name": "f", "arguments": {}}),
        "messages[0].tool_calls[0].function.arguments",
        "`object`",
    ),
    (said("x", "tool"), "messages[0]", "tool_call_id"),
    (said("x", tool_call_id="c"), "messages[0]", "tool_call_id"),
    (said([{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0].type", "image_url"),
    (said("x", nom="n"), "messages[0].nom", "not a field"),
    (said("x", name="n" * 1025), "messages[0].name", "<= 1024"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
    ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools[0].type", "web_search"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "any"),
    ({"tools": [TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls", "`str`"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema goes with"),
    (
        {"response_format": {"type": "text", "json_schema": {"name": "x", "schema": {}}}},
        "response_format",
        "json_schema goes with",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
        "required",
    ),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "structured output"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "give one of them"),
    ({"structured_outputs": {}}, "structured_outputs", "one of json"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "one of json"),
    (
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        "structured_outputs.choice",
        "give one of them",
    ),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not a field"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "length >= 1"),
    ({"structured_outputs": {"json": nested(900)}}, "structured_outputs.json", "deeper than 100"),
    ({"guided_choice": [""]}, "guided_choice[0]", "length >= 1"),
    ({"guided_regex": "a" * 65_537}, "guided_regex", "length <= 65536"),
    ({"guided_json": {"enum": ["a" * 70_000]}}, "guided_json", "at most 65536"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs is true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "differ"),
    ({"prompt": "x"}, "prompt", "not a field"),
    ({"echo": True}, "echo", "except as false"),
    ({"reasoning_effort": "much"}, "reasoning_effort", ""),
    ({"thinking_token_budget": -1}, "thinking_token_budget", ""),
    *(
        ({"chat_template_kwargs": variables}, "chat_template_kwargs", "")
        for variables in (
            *({name: 1} for name in ("messages", "tools", "range", "add_generation_prompt")),
            {"a": "x" * 4096},
            {"a": nested(101)},
            [1],
        )
    ),
    ({"continue_final_message": True}, "continue_final_message", "assistant"),
    (
        {**said("x", "assistant"), "continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "cannot both",
    ),
)
RESPONSES_ROWS: tuple[Row, ...] = (
    ({"input": []}, "input", "length"),
    ({"input": None}, "input", "expected"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input", "no message"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
        "input[0].content[0].type",
        "reads and writes text",
    ),
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
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.type", ""),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format", "name and schema"),
    ({"text": {"format": {"type": "text", "name": "x"}}}, "text.format", "name and schema"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort", ""),
    ({"max_output_tokens": 1 << 30}, "max_output_tokens", "maximum context length"),
    ({"metadata": {"k": 1}}, "metadata[...]", "expected"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options", "where stream is true"),
    ({"messages": []}, "messages", "not a field"),
    ({"max_tokens": 1}, "max_tokens", "not a field"),
)
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}
MESSAGES_ROWS: tuple[Row, ...] = (
    (said([IMAGE]), "messages[0].content[0].type", "reads and writes text"),
    (said([DOCUMENT]), "messages[0].content[0].type", "reads and writes text"),
    (
        said([{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]),
        "messages[0].content[0].content[0].type",
        "reads and writes text",
    ),
    (said([USE]), "messages[0]", "role user"),
    (said([]), "messages[0].content", "length"),
    (said("x", "tool"), "messages[0].role", "enum"),
    ({"messages": []}, "messages", "length"),
    ({"messages": json.loads("[" * 60 + "]" * 60)}, "messages[0]", "object"),
    (said([{**USE, "input": nested(900)}], "assistant"), "messages[0].content[0]", "deeper than 100"),
    (said([USE], "assistant"), "messages", "assistant"),
    ({"system": [IMAGE]}, "system[0].type", "text"),
    ({"system": 7}, "system", "expected"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type", "runs no tools"),
    ({"tools": [{"name": "f", "input_schema": []}]}, "tools[0].input_schema", "expected"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice", "name goes with"),
    ({"tool_choice": "auto"}, "tool_choice", "expected"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences", ""),
    ({"stop_sequences": [""]}, "stop_sequences", ""),
    ({"max_tokens": None}, "max_tokens", "expected"),
    ({"max_tokens": 2**40}, "max_tokens", ""),
    ({"top_k": -2}, "top_k", ""),
    ({"output_config": {"effort": "much"}}, "output_config.effort", ""),
    ({"output_config": {"format": {"type": "json_schema", "schema": 7}}}, "output_config.format.schema", ""),
    ({"metadata": "u"}, "metadata", "labels"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers", "not supported"),
    ({"container": "c"}, "container", "not supported"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type", ""),
    ({"thinking": {"type": "enabled"}}, "thinking", "budget_tokens goes with"),
    ({"thinking": {"type": "disabled", "budget_tokens": 9}}, "thinking", "budget_tokens goes with"),
    ({"thinking": {"type": "enabled", "budget_tokens": 600}}, "thinking.budget_tokens", "below max_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens", ">= 1"),
    ({"stop": "x"}, "stop", "not a field"),
    ({"session_id": ""}, "session_id", ""),
)


def test_wrong_fields_of_conversations_are_refused_by_name(served: Served) -> None:
    for api, rows in ((CHAT, CHATS), (RESPONSES, RESPONSES_ROWS), (MESSAGES, MESSAGES_ROWS)):
        for fields, param, text in rows:
            check_refused(served, api.path, {"model": MODEL, **api.body(**fields)}, param, text)


def test_reasoning_that_cannot_be_turned_off_is_refused() -> None:
    """The template always opens it, and has no variable."""
    with serving(Speaking("hm</think>Yes.", THINKS + "<think>")) as served:
        for api, fields, param in (
            (CHAT, {"reasoning_effort": "none"}, "reasoning_effort"),
            (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
            (RESPONSES, {"reasoning": {"effort": "none"}}, "reasoning.effort"),
            (MESSAGES, {"thinking": {"type": "disabled"}}, "thinking"),
        ):
            check_refused(served, api.path, {"model": MODEL, **api.body(**fields)}, param, "reasons")
    with serving(Speaking("x", THINKS + "{{ enable_thinking }}")) as served:
        both = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
        check_refused(
            served, CHAT.path, {"model": MODEL, **CHAT.body(**both)}, "reasoning_effort", "give one"
        )


def test_the_small_routes_refuse_what_they_do_not_know(served: Served) -> None:
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "extra": 1}, "extra"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/cache/reset", {"tier": "device"}, "tier"),
        ("/cache/reset", b"device", None),
        ("/cache/flush", {"level": "captured"}, "level"),
        ("/cache/prefetch", {}, "session_id"),
        ("/cache/prefetch", {"session_id": "s", "prompt": "x"}, "session_id"),
        ("/cache/prefetch", {"prompt": []}, "prompt"),
        ("/cache/prefetch", {"prompt": ["a"]}, "prompt[0]"),
        ("/cache/prefetch", {"prompt": [10**6]}, "prompt"),
        ("/cache/prefetch", {"prompt": [1] * 200_000}, "prompt"),
        ("/cache/prefetch", {"prompt": "x", "retain_s": 5}, "retain_s"),
    ):
        check_refused(served, path, body, param, "")
    for path in ("/cache/reset", "/cache/flush"):
        for empty in (b"", b"{}"):
            assert served.http.post(path, content=empty).status_code == 200


def test_a_model_without_a_chat_template_says_so(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(served.engine.tokenizer), "has_chat_template", False)
    check_refused(served, CHAT.path, {"model": MODEL, **CHAT.body()}, "messages", "chat template")


def test_a_prompt_that_does_not_fit_is_refused_in_the_words_that_clients_look_for() -> None:
    with serving(ScriptedEngine(max_model_len=64)) as served:
        for path, body, param in (
            ("/v1/completions", {"prompt": "x" * 65}, "prompt"),
            ("/v1/completions", {"prompt": "x" * 60, "max_tokens": 5}, "max_tokens"),
            (CHAT.path, said("x" * 65), "prompt"),
        ):
            error = served.http.post(path, json={"model": MODEL, **body}).json()["error"]
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
            assert "This model's maximum context length is 64 tokens. However, you" in error["message"]
        side = served.http.post("/detokenize", json={"tokens": [1] * ((1 << 17) + 1)}).json()["error"]
        # a limit of that route, and not the model's
        assert (side["code"], "context" in side["message"]) == (None, False)
        error = MESSAGES.refusal(served, **said("x" * 65))
        assert error["message"].startswith("prompt is too long: ")


def test_a_prompt_that_fails_in_the_middle_of_many_cancels_those_before_it(served: Served) -> None:
    before = len(served.engine.submitted)
    served.engine.hold()
    assert served.http.post("/v1/completions", json=completion(["good", "", "good"])).status_code == 400
    assert len(served.engine.submitted) <= before + 1
    served.assert_idle()
    served.engine.release()
