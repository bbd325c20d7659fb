"""Fields that have no effect, over all generating routes: taken and named, or refused with the reason; and
tools that cannot be run.

Holds invariant 26: nothing that would change the answer is ignored."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest

from penstock.server import ignored, messages, responses, schema
from tests.cpu.server.apis import KNOWS_TOOLS, RESPONSES, Speaking, events_of
from tests.cpu.server.served import MODEL, Served, serving

HEADER = "x-penstock-ignored"
ASK = "How warm is it?"
SAID = [{"role": "user", "content": [{"type": "text", "text": ASK}]}]
CALLED = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT_TURNS = [
    *SAID,
    {"role": "assistant", "content": "", "tool_calls": [CALLED]},
    {"role": "tool", "content": "7", "tool_call_id": "call_1"},
]
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "7"}]}
USE = {"type": "tool_use", "id": "call_1", "name": "f", "input": {}}
TURNS = [*SAID, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}]
CHAT_TOOL = {"type": "function", "function": {"name": "f"}}
TOOL = {"type": "function", "name": "f"}
SPACE = {"type": "namespace", "name": "space", "tools": [{"type": "function", "name": "g"}]}
OWN_TOOL = {"name": "f", "input_schema": {"type": "object"}}
PATHS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": ASK, "max_tokens": 5},
    "chat": {"messages": CHAT_TURNS, "tools": [CHAT_TOOL], "max_tokens": 5},
    "responses": {
        "reasoning": {},
        "input": [{"role": "user", "content": [{"type": "input_text", "text": ASK}]}],
        "tools": [TOOL, SPACE],
        "text": {},
        "max_output_tokens": 5,
    },
    "messages": {
        "messages": TURNS,
        "system": [{"type": "text", "text": "Be brief."}],
        "tools": [OWN_TOOL],
        "output_config": {},
        "max_tokens": 5,
    },
}
KINDS: dict[str, type[msgspec.Struct]] = {
    "completions": schema.CompletionBody,
    "chat": schema.ChatBody,
    "responses": responses.ResponsesBody,
    "messages": messages.MessagesBody,
}
# Of types: what is taken. Where a type is Any, these are some of everything.
TAKEN: dict[str, list[Any]] = {
    "context_management": [
        {},
        {"edits": []},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ],
    "truncation": ["auto", "disabled"],
    "verbosity": ["low", "medium", "high"],
    "service_tier": ["auto", "flex", "priority"],
    "prompt_cache_retention": ["24h", "in_memory"],
    "store": [True, False],
    "metadata": [{}, {"user_id": "u"}],
    "caller": [{"type": "direct"}],
    "usage": [{"include": True}],
    "output_config.task_budget": [{"type": "tokens", "total": 1000}],
}
REFUSED: dict[str, list[Any]] = {
    "context_management": [
        {"edits": [{"type": "clear_tool_uses_20250919"}]},
        {"edits": [{"type": "compact_20260112"}]},
        [{"type": "compaction"}],
    ],
    "truncation": ["middle"],
    "verbosity": ["silent", 7],
    "metadata": ["u", 7],
    "user": ["x" * 1025, 7],
    "caller": [{"type": "code_execution_20250825", "tool_id": "x"}],
    "tools[].allowed_callers": [["programmatic"], []],
}
SAMPLES: tuple[Any, ...] = ("x", True, 7, {"a": {"b": [1]}}, [], ["x"], [{"type": "x"}])


def places(value: Any, steps: list[str]) -> Iterator[dict[str, Any]]:
    """Objects that the field may be put into."""
    if not steps:
        if isinstance(value, dict):
            yield value
    elif steps[0] == "[]":
        for one in value if isinstance(value, list) else ():
            yield from places(one, steps[1:])
    elif isinstance(value, dict) and steps[0] in value:
        yield from places(value[steps[0]], steps[1:])


def ask(served: Served, api: str, body: dict[str, Any], **fields: Any) -> Any:
    return served.http.post(PATHS[api], json={"model": MODEL, "seed": 7, **body, **fields})


def with_field(api: str, row: ignored.IgnoredField, value: Any) -> dict[str, Any]:
    """A body in which one object has the field."""
    body: dict[str, Any] = json.loads(json.dumps(BODIES[api]))
    next(places(body, row.path.replace("[]", ".[]").split(".")[:-1]))[row.name] = value
    return body


def examples(row: ignored.IgnoredField, table: dict[str, list[Any]]) -> list[Any]:
    listed = row.takes if isinstance(row.takes, tuple) else SAMPLES
    return [*(table.get(row.path) or table.get(row.name) or ()), *listed]


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with serving(Speaking("Warm.", KNOWS_TOOLS)) as running:
        yield running


@pytest.mark.parametrize("api", PATHS)
def test_a_field_of_the_table_is_named_and_changes_nothing_or_is_refused_with_the_reason(
    shared: Served, api: str
) -> None:
    plain = ask(shared, api, BODIES[api])
    prompt = bytes(shared.engine.submitted[-1][0])
    assert plain.status_code == 200 and HEADER not in plain.headers, plain.text
    for row in ignored.rows_of(api).values():
        check_field(shared, api, row, prompt)


def check_field(shared: Served, api: str, row: ignored.IgnoredField, prompt: bytes) -> None:
    taken = [value for value in examples(row, TAKEN) if row.refusal(value) is None]
    assert taken or row.meaning == "change"
    for value in taken:
        reply = ask(shared, api, with_field(api, row, value))
        assert reply.status_code == 200, f"{value}: {reply.text}"
        assert reply.headers[HEADER] == row.path and bytes(shared.engine.submitted[-1][0]) == prompt
    nothing = ask(shared, api, with_field(api, row, None))
    assert nothing.status_code == 200 and HEADER not in nothing.headers  # null is absent
    before = len(shared.engine.submitted)
    for value in [*REFUSED.get(row.path, REFUSED.get(row.name, [])), *SAMPLES]:
        # lists have a test below
        if row.refusal(value) is None or (row.path == "mcp_servers" and isinstance(value, list)):
            continue
        reply = ask(shared, api, with_field(api, row, value))
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["param"].endswith(row.name), reply.text
        assert row.why in error["message"] and len(error["message"]) < 600
    assert len(shared.engine.submitted) == before


def fields_at(kind: Any, steps: list[str]) -> set[str]:
    """Names of fields of the objects that the steps lead to, in types of bodies."""
    if get_origin(kind) is not None or isinstance(kind, UnionType):
        inner = [one for one in get_args(kind) if one is not NoneType]
        steps = steps[1:] if get_origin(kind) is list and steps[:1] == ["[]"] else steps
        return set().union(*(fields_at(one, steps) for one in inner))
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)) or steps[:1] == ["[]"]:
        return set()
    hints = get_type_hints(kind)
    if not steps:
        return {name for name in kind.__struct_fields__ if hints[name] is not NoneType}
    return fields_at(hints[steps[0]], steps[1:]) if steps[0] in hints else set()


@pytest.mark.parametrize("api", PATHS)
def test_no_field_is_both_in_the_table_and_in_the_type(api: str) -> None:
    """It would have an effect in some bodies and none in others."""
    assert {"format"} <= fields_at(messages.MessagesBody, ["output_config"]) and "name" in fields_at(
        messages.MessagesBody, ["tools", "[]"]
    )
    for path, row in ignored.rows_of(api).items():
        assert row.name not in fields_at(KINDS[api], path.replace("[]", ".[]").split(".")[:-1]), path


def test_streams_and_refusals_have_the_header_too(shared: Served) -> None:
    assert ask(shared, "chat", BODIES["chat"], user="u", stream=True).headers[HEADER] == "user"
    refused = ask(shared, "messages", BODIES["messages"], metadata={}, temperature=-1)
    assert (refused.status_code, refused.headers[HEADER]) == (400, "metadata")
    counted = shared.http.post(
        "/v1/messages/count_tokens", json={"model": MODEL, "messages": SAID, "speed": "fast"}
    )
    assert (counted.status_code, counted.headers[HEADER]) == (200, "speed")


def test_the_log_names_a_field_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "penstock.server"), serving() as served:
        for _ in range(3):
            ask(served, "chat", BODIES["chat"], user="u", verbosity="low")
    said = [record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()]
    assert len(said) == 2 and "user" in said[0] and "verbosity" in said[1]


# ------------------------------------------------------------------------------------------------------ tools

HOSTED = {
    "chat": [{"type": "custom", "custom": {"name": "patch"}}],
    "responses": [
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
        {"type": "custom", "name": "patch", "format": {"type": "grammar"}},
        {"type": "mcp", "server_label": "x"},
    ],
    "messages": [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "bash_20250124", "name": "bash"},
    ],
}
FORCING = {
    "chat": {"type": "custom", "custom": {"name": "patch"}},
    "responses": {"type": "web_search"},
    "messages": {"type": "tool", "name": "web_search"},
}


@pytest.mark.parametrize("api", HOSTED)
def test_tools_that_cannot_be_run_are_left_out_where_others_remain_and_refused_otherwise(
    shared: Served, api: str
) -> None:
    ask(shared, api, BODIES[api])
    prompt = bytes(shared.engine.submitted[-1][0])
    tools = [*HOSTED[api], *BODIES[api]["tools"]]
    reply = ask(shared, api, BODIES[api], tools=tools)
    assert reply.status_code == 200, reply.text
    assert reply.headers[HEADER] == ", ".join(f"tools[{tool['type']}]" for tool in HOSTED[api])
    assert bytes(shared.engine.submitted[-1][0]) == prompt  # the model is told of the others
    refused = [({"tools": [tool]}, "tools[0].type") for tool in HOSTED[api]]
    for fields, param in (*refused, ({"tools": tools, "tool_choice": FORCING[api]}, "tool_choice")):
        error = ask(shared, api, BODIES[api], **fields).json()["error"]
        assert error["param"] == param and "runs no tools itself" in error["message"]
    none = {"type": "none"} if api == "messages" else "none"
    assert ask(shared, api, BODIES[api], tools=HOSTED[api], tool_choice=none).status_code == 200


def test_servers_of_tools_are_left_out_where_other_tools_remain(shared: Served) -> None:
    server = {"type": "url", "name": "x", "url": "http://127.0.0.1:1"}
    assert ask(shared, "messages", BODIES["messages"], mcp_servers=[server]).headers[HEADER] == "mcp_servers"
    assert ask(shared, "messages", {**BODIES["messages"], "tools": []}, mcp_servers=[]).status_code == 200
    alone = ask(shared, "messages", {**BODIES["messages"], "tools": []}, mcp_servers=[server])
    assert (alone.status_code, alone.json()["error"]["param"]) == (400, "mcp_servers")


def test_functions_of_a_namespace_are_called_by_both_names_whole_and_streamed() -> None:
    call = '<tool_call>\n{"name": "space__g", "arguments": {"a": 1}}\n</tool_call>'
    model = Speaking(call, KNOWS_TOOLS)
    with serving(model) as served:
        space = {**SPACE, "tools": [*SPACE["tools"], HOSTED["responses"][2]]}
        body = {**BODIES["responses"], "max_output_tokens": 200, "tools": [TOOL, space]}
        reply = ask(served, "responses", body)
        assert reply.headers[HEADER] == "tools[custom]" and "space__g" in model.prompt
        streamed = RESPONSES.joined(events_of(ask(served, "responses", body, stream=True).text))
        for answer in (reply.json(), streamed):
            (item,) = [item for item in answer["output"] if item["type"] == "function_call"]
            assert (item["namespace"], item["name"], item["arguments"]) == ("space", "g", '{"a": 1}')
        result = {"type": "function_call_output", "call_id": item["call_id"], "output": "7"}
        assert ask(served, "responses", body, input=[*body["input"], item, result]).status_code == 200
        assert model.prompt.count("space__g") >= 2  # as a tool, and as what was called
