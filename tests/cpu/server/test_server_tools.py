"""Tools over HTTP: what the model is told, what the client gets, whole and streamed, with the `openai`
client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from penstock.models.chat import ChatTemplate
from penstock.server.schema import ChatBody
from tests.cpu.server.served import MODEL, serving
from tests.cpu.server.tiered_server import MODEL as REAL_MODEL
from tests.cpu.server.tiered_server import Tiered, tiered
from tests.support.scripted_engine import EOS, ScriptedEngine

ASK = [{"role": "user", "content": "How warm is it in Zürich?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Zürich", "Bern"]}, "unit": {"$ref": "#/$defs/unit"}},
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "How warm it is", "parameters": WEATHER},
    },
    {"type": "function", "function": {"name": "now"}},
]
CALL = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>\n<tool_call>{"name": "now"}</tool_call>'  # noqa: E501
KNOWS_TOOLS = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}[{{ m.role }}]{{ "
    "m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments | "
    "tojson }}</tool_call>{% endfor %}{% endfor %}"
)


def saying(text: str, template: str | None = None) -> ScriptedEngine:
    engine = ScriptedEngine(lambda prompt, sampling: [*text.encode(), EOS])
    if template is not None:
        engine.tokenizer.chat_template = ChatTemplate(template, {})
    return engine


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def gathered(stream: Any) -> tuple[str, list[tuple[str, str]], str]:
    """What a client puts together from chunks: text, calls by name, the reason."""
    text, calls, finish = "", {}, ""
    for chunk in stream:
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            known = calls.setdefault(call.index, ["", "", ""])
            # id and name once, at first
            assert (call.id is None) == (call.function.name is None) == bool(known[0])
            known[0], known[1] = known[0] or call.id or "", known[1] or call.function.name or ""
            known[2] += call.function.arguments or ""
        finish = choice.finish_reason or finish
    assert len({known[0] for known in calls.values()}) == len(calls)
    return text, [(name, arguments) for _, name, arguments in calls.values()], finish


def test_what_the_model_calls_is_in_the_message_and_in_the_stream() -> None:
    with serving(saying(CALL)) as served:
        create = served.client().chat.completions.create
        (choice,) = create(model=MODEL, messages=ASK, tools=TOOLS).choices
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
        assert calls_of(choice.message) == [("weather", {"city": "Bern"}), ("now", {})]
        assert all(
            call.id.startswith("call_") and call.type == "function" for call in choice.message.tool_calls
        )
        text, calls, finish = gathered(create(model=MODEL, messages=ASK, tools=TOOLS, stream=True))
        assert (text, calls, finish) == (
            "Let me see.",
            [("weather", '{"city": "Bern"}'), ("now", "{}")],
            "tool_calls",
        )
        only = create(model=MODEL, messages=ASK, tools=TOOLS, parallel_tool_calls=False).choices[0].message
        assert calls_of(only) == [("weather", {"city": "Bern"})]


def test_an_answer_that_is_cut_inside_a_call_says_so_whole_and_streamed() -> None:
    with serving(saying(CALL)) as served:
        create, most = served.client().chat.completions.create, CALL.index("Bern") + 2
        assert (
            create(model=MODEL, messages=ASK, tools=TOOLS, max_tokens=most).choices[0].finish_reason
            == "length"
        )
        assert (
            gathered(create(model=MODEL, messages=ASK, tools=TOOLS, max_tokens=most, stream=True))[2]
            == "length"
        )


@pytest.mark.parametrize(
    ("stop", "finish"), [("Bern", "stop"), ("</tool_call>", "tool_calls"), ("now", "tool_calls")]
)
def test_a_stop_string_inside_a_call_is_no_call(stop: str, finish: str) -> None:
    """Behind all of its arguments it is one: clients stop there to have one call. So it is where the next one
    has no name yet."""
    with serving(saying(CALL)) as served:
        create = served.client().chat.completions.create
        asked = {"model": MODEL, "messages": ASK, "tools": TOOLS, "stop": stop}
        assert create(**asked).choices[0].finish_reason == finish == gathered(create(**asked, stream=True))[2]


def test_without_tools_or_with_none_a_call_is_text() -> None:
    with serving(saying(CALL)) as served:
        for fields in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
            (choice,) = served.client().chat.completions.create(model=MODEL, messages=ASK, **fields).choices
            assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (
                CALL,
                None,
                "stop",
            )
        prompts = {bytes(prompt) for prompt, _, _ in served.engine.submitted}
        assert len(prompts) == 1 and b"weather" not in prompts.pop()


def conversation(first: Any) -> list[Any]:
    """As a client sends it back: our own message, and the result."""
    return [
        *ASK,
        first.model_dump(),
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "21 C"},
    ]


def test_calls_and_results_come_back_to_a_template_that_knows_tools_as_it_wants_them() -> None:
    with serving(saying(CALL, KNOWS_TOOLS)) as served:
        create = served.client().chat.completions.create
        first = create(model=MODEL, messages=ASK, tools=TOOLS).choices[0].message
        create(model=MODEL, messages=conversation(first), tools=TOOLS)
        prompt = bytes(served.engine.submitted[-1][0]).decode()
    assert prompt.startswith("<tools>[{") and '"name": "weather"' in prompt and "Zürich" in prompt
    assert '<tool_call>weather{"city": "Bern"}</tool_call><tool_call>now{}</tool_call>[tool]21 C' in prompt


@pytest.mark.parametrize("depth", [101, 950, 100_000])
def test_arguments_that_are_nested_without_end_are_passed_on_as_text(depth: int) -> None:
    """They need not be JSON, so whoever sends them gets no error; no stack is deep enough to take them
    apart."""
    arguments = "[" * depth + "]" * depth
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": arguments}}
    said = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "x"},
    ]
    engine = saying("Yes.", KNOWS_TOOLS)
    engine.max_model_len = 1 << 20
    with serving(engine) as served:
        (choice,) = served.client().chat.completions.create(model=MODEL, messages=said).choices
        assert choice.message.content == "Yes."
        assert f'<tool_call>now"{arguments}"</tool_call>' in bytes(served.engine.submitted[-1][0]).decode()


def test_a_call_with_half_a_surrogate_pair_is_given_out_and_taken_back() -> None:
    call = '{"city": "\\ud83d"}'
    with serving(
        saying(f'<tool_call>{{"name": "weather", "arguments": {call}}}</tool_call>', KNOWS_TOOLS)
    ) as served:
        create = served.client().chat.completions.create
        first = create(model=MODEL, messages=ASK, tools=TOOLS).choices[0].message
        assert first.tool_calls[0].function.arguments == call
        assert (
            create(model=MODEL, messages=conversation(first), tools=TOOLS).choices[0].finish_reason
            == "tool_calls"
        )


def test_a_template_that_knows_no_tools_is_told_of_them_in_the_system_message() -> None:
    with serving(saying(CALL)) as served:
        create = served.client().chat.completions.create
        first = create(model=MODEL, messages=ASK, tools=TOOLS).choices[0].message
        told = [{"role": "system", "content": "Be brief."}, *conversation(first)]
        create(model=MODEL, messages=told, tools=TOOLS)
        plain, system = (bytes(prompt).decode() for prompt, _, _ in served.engine.submitted)
    assert plain.startswith("system: You may call functions") and plain.index("</tools>") < plain.index(
        "user: How warm"
    )
    assert system.startswith("system: Be brief.\n\nYou may call functions") and system.count("<tools>\n") == 1
    assert (
        'assistant: Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'  # noqa: E501
        in system
    )
    assert "user: <tool_response>\n21 C\n</tool_response>" in system


def test_a_model_with_a_template_for_tools_is_told_of_them_by_that_one() -> None:
    """And its calls are read as that one has them; without tools it is the other's."""
    engine = saying('[TOOL_CALLS][{"name": "now", "arguments": {}}]')
    default = "{% for m in messages %}({{ m.role }}){{ m.content }}{% endfor %}"
    engine.tokenizer.chat_template = ChatTemplate(
        default, {}, KNOWS_TOOLS.replace("<tool_call>", "[TOOL_CALLS]")
    )
    with serving(engine) as served:
        create = served.client().chat.completions.create
        first = create(model=MODEL, messages=ASK, tools=TOOLS).choices[0].message
        create(model=MODEL, messages=conversation(first))
        with_tools, without = (bytes(prompt).decode() for prompt, _, _ in served.engine.submitted)
    assert calls_of(first) == [("now", {})]
    assert with_tools.startswith("<tools>[{") and with_tools.endswith("[user]How warm is it in Zürich?")
    assert without.startswith("(user)How warm") and "(user)<tool_response>\n21 C" in without


def test_the_parser_is_chosen_by_the_template_and_by_the_flag() -> None:
    mistral = '[TOOL_CALLS][{"name": "now", "arguments": {}}]'
    with serving(saying(mistral, KNOWS_TOOLS.replace("<tool_call>", "[TOOL_CALLS]"))) as served:
        (call,) = (
            served.client()
            .chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS)
            .choices[0]
            .message.tool_calls
        )
        assert call.function.name == "now" and len(call.id) == 9 and call.id.isalnum()
    for flag, num_calls in (("json", 1), ("none", 0), ("hermes", 0)):
        with serving(saying('{"name": "now", "arguments": {}}'), tool_call_parser=flag) as served:
            message = (
                served.client()
                .chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS)
                .choices[0]
                .message
            )
            assert len(message.tool_calls or ()) == num_calls


def test_reasoning_is_a_field_of_its_own_where_the_template_has_it() -> None:
    text, template = (
        "<think>\nhm\n</think>\n\nHi",
        ("{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}"),
    )
    with serving(saying(text, template)) as served:
        message = served.client().chat.completions.create(model=MODEL, messages=ASK).choices[0].message
        assert (message.content, message.reasoning_content) == ("Hi", "hm")
        chunks = [
            chunk.choices[0].delta
            for chunk in served.client().chat.completions.create(model=MODEL, messages=ASK, stream=True)
        ]
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in chunks) == "hm"
        assert "".join(delta.content or "" for delta in chunks) == "Hi"
        again = [*ASK, message.model_dump(), *ASK]
        assert (
            served.client().chat.completions.create(model=MODEL, messages=again).choices[0].message.content
            == "Hi"
        )
    with serving(saying("hm</think>Hi", template + "<think>")) as served:
        message = served.client().chat.completions.create(model=MODEL, messages=ASK).choices[0].message
        assert (message.content, message.reasoning_content) == ("Hi", "hm")
    for engine, flag in ((saying(text, template), "none"), (saying(text), "auto")):
        with serving(engine, reasoning_parser=flag) as served:
            assert (
                served.client().chat.completions.create(model=MODEL, messages=ASK).choices[0].message.content
                == text
            )


# ----------------------------------------------------------------------------------------------- forced calls


@pytest.fixture(scope="module")
def server() -> Iterator[Tiered]:
    pytest.importorskip("llguidance", reason="structured output is an extra")
    with tiered(host_blocks=0, blocks=1024) as running:
        yield running


def force(server: Tiered, choice: Any, **fields: Any) -> Any:
    options = {
        "tools": TOOLS[:1],
        "tool_choice": choice,
        "max_tokens": 600,
        "temperature": 1,
        "seed": 3,
        **fields,
    }
    return server._client.chat.completions.create(model=REAL_MODEL, messages=ASK, **options)


def check_weather(arguments: dict[str, Any]) -> None:
    assert (
        set(arguments) == {"city", "unit"}
        and arguments["city"] in ("Zürich", "Bern")
        and arguments["unit"] in ("C", "F")
    )


def test_arguments_may_be_made_of_themselves_also_where_one_of_several_tools_has_to_be_called() -> None:
    """Where their schema is not the root, what it says of its root is said of where it lies."""
    tree = {
        "type": "object",
        "properties": {"left": {"$ref": "#"}, "right": {"anyOf": [{"$ref": "#/properties/left"}]}},
    }
    fields: Any = {
        "tools": [*TOOLS, {"type": "function", "function": {"name": "plant", "parameters": tree}}],
        "tool_choice": "required",
    }
    asked = msgspec.convert({"model": MODEL, "messages": ASK, **fields}, ChatBody).asked()
    assert asked is not None
    assert json.loads(asked.grammar.text)["$defs"]["tool2"]["properties"] == {
        "left": {"$ref": "#/$defs/tool2"},
        "right": {"anyOf": [{"$ref": "#/$defs/tool2/properties/left"}]},
    }


NAMED = {"type": "function", "function": {"name": "weather"}}


def test_required_calls_one_of_the_tools_or_several(server: Tiered) -> None:
    for choice in force(server, "required", n=4).choices:
        calls = calls_of(choice.message)
        assert calls or choice.finish_reason == "length"
        for name, arguments in calls if choice.finish_reason == "tool_calls" else ():
            assert name == "weather"
            check_weather(arguments)
    (one,) = calls_of(force(server, "required", parallel_tool_calls=False).choices[0].message)
    check_weather(one[1])


def test_forced_calls_have_only_the_arguments_that_their_tool_has(server: Tiered) -> None:
    """The tools say nothing of other properties, and one of them nothing of parameters at all. The weights
    are random, so that open arguments would be invented."""
    flag = {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "$schema": "https://json-schema.org/draft/2020-12/schema",
    }
    tools = [{"type": "function", "function": {"name": "flag", "parameters": flag}}, TOOLS[1]]
    for name, known in (("flag", {"on"}), ("now", set())):
        for choice in force(
            server, {"type": "function", "function": {"name": name}}, tools=tools, n=8, max_tokens=200
        ).choices:
            ((_, arguments),) = calls_of(choice.message)
            assert choice.finish_reason == "tool_calls" and set(arguments) <= known
    for choice in force(server, "required", tools=tools, n=8, parallel_tool_calls=False).choices:
        ((name, arguments),) = calls_of(choice.message)
        assert set(arguments) <= ({"on"} if name == "flag" else set())


def test_a_tool_with_an_empty_schema_takes_any_arguments() -> None:
    fields: Any = {"tools": [{"type": "function", "function": {"name": "any", "parameters": {}}}]}
    for choice, found in (
        ({"type": "function", "function": {"name": "any"}}, ()),
        ("required", ("$defs", "tool0")),
    ):
        asked = msgspec.convert(
            {"model": MODEL, "messages": ASK, **fields, "tool_choice": choice}, ChatBody
        ).asked()
        schema = json.loads(asked.grammar.text)
        for name in found:
            schema = schema[name]
        assert schema == {"type": "object"}


def test_a_schema_that_cannot_be_met_is_refused_where_the_call_is_forced(server: Tiered) -> None:
    bad = [
        {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {"type": "object", "properties": {"x": False}, "required": ["x"]},
            },
        }
    ]
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        reply = server.http.post(
            "/v1/chat/completions",
            json={"model": REAL_MODEL, "messages": ASK, "tools": bad, "tool_choice": choice, "max_tokens": 9},
        )
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "tools"


# ------------------------------------------------------------------------------ calls, or an answer that fits

REPORT = {
    "type": "object",
    "properties": {"degrees": {"enum": [20, 21]}},
    "required": ["degrees"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "report", "schema": REPORT}}


def call_or_report(choice: Any) -> str:
    """Which of them the answer is: it is one, and it fits."""
    calls = calls_of(choice.message)
    if calls:
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        for name, arguments in calls:
            check_weather(arguments) if name == "weather" else check_none(name, arguments)
        return "calls"
    assert choice.finish_reason == "stop" and json.loads(choice.message.content)["degrees"] in (20, 21)
    return "report"


def check_none(name: str, arguments: dict[str, Any]) -> None:
    assert (name, arguments) == ("now", {})


FORMATS = {  # by parser, what a template says of it
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "mistral, named": "[TOOL_CALLS] [ARGS]",
    "llama3": "<|python_tag|>",
    "json": "",
}


@pytest.mark.parametrize("words", FORMATS)
def test_beside_a_form_the_model_calls_with_arguments_that_fit_or_answers_what_fits(words: str) -> None:
    pytest.importorskip("llguidance", reason="structured output is an extra")
    flags = {"tool_call_parser": words} if words == "json" else None
    with tiered(flags, host_blocks=0, blocks=1024) as server:
        server.engine.tokenizer.chat_template = ChatTemplate(
            KNOWS_TOOLS.replace("<tool_call>", FORMATS[words]), {}
        )
        asked = {"response_format": FORM, "tools": TOOLS, "parallel_tool_calls": False}
        found = {call_or_report(choice) for choice in force(server, "auto", n=24, **asked).choices}
        assert found == {"calls", "report"}
        several = force(server, "auto", n=8, response_format=FORM, tools=TOOLS[1:], max_tokens=900).choices
        assert all(call_or_report(choice) for choice in several if choice.finish_reason != "length")


def test_beside_a_form_what_has_to_be_called_is_called_and_none_calls_nothing(server: Tiered) -> None:
    asked: Any = {"response_format": FORM, "tools": TOOLS, "parallel_tool_calls": False}
    for choice in (
        force(server, "required", n=3, **asked).choices + force(server, NAMED, n=3, **asked).choices
    ):
        assert call_or_report(choice) == "calls"
    for choice in force(server, "none", n=8, **asked).choices:
        assert call_or_report(choice) == "report"
    free = force(
        server, "auto", n=8, **{**asked, "response_format": {"type": "json_object"}}, max_tokens=64
    ).choices
    assert all(choice.message.tool_calls or choice.message.content.startswith("{") for choice in free)


def test_a_tool_whose_schema_cannot_be_met_beside_a_form_is_refused_and_a_large_one_is_too(
    server: Tiered,
) -> None:
    for parameters in ({"type": "object", "properties": {"x": {"not": {}}}}, {"description": "x" * 70_000}):
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        asked = {
            "model": REAL_MODEL,
            "messages": ASK,
            "tools": tools,
            "response_format": FORM,
            "max_tokens": 9,
        }
        reply = server.http.post("/v1/chat/completions", json=asked)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "response_format"


def test_tools_beside_a_form_work_in_the_other_apis_too(server: Tiered) -> None:
    function = TOOLS[0]["function"]
    responses = {
        "input": "How warm is it?",
        "max_output_tokens": 600,
        "tools": [{"type": "function", **function}],
        "text": {"format": {"type": "json_schema", "name": "report", "schema": REPORT}},
    }
    messages = {
        "messages": ASK,
        "max_tokens": 600,
        "tools": [{"name": "weather", "input_schema": WEATHER}],
        "output_config": {"format": {"type": "json_schema", "schema": REPORT}},
    }
    found = set()
    for seed in range(12):
        own = {"model": REAL_MODEL, "seed": seed}
        (item,) = server.http.post(
            "/v1/responses", json={**responses, **own, "parallel_tool_calls": False}
        ).json()["output"]
        reply = server.http.post(
            "/v1/messages",
            json={**messages, **own, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        )
        (block,) = reply.json()["content"]
        found |= {item["type"], block["type"]}
        assert reply.json()["stop_reason"] == ("tool_use" if block["type"] == "tool_use" else "end_turn")
        if item["type"] == "function_call":
            check_weather(json.loads(item["arguments"]))
        else:
            assert json.loads(item["content"][0]["text"])["degrees"] in (20, 21)
        if block["type"] == "tool_use":
            check_weather(block["input"])
        else:
            assert json.loads(block["text"])["degrees"] in (20, 21)
    assert found == {"function_call", "message", "tool_use", "text"}
