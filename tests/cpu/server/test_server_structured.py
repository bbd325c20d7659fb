"""Forms of answers over HTTP, before a real engine with random weights: schemas, forced calls, calls beside a
form, bounds of reasoning. One engine for all of them."""

from __future__ import annotations

import dataclasses
import json
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
import openai
import pydantic
import pytest

from penstock.engine.execution import trials
from penstock.models.chat import ChatTemplate
from penstock.server.schema import ChatBody
from tests.cpu.server.apis import APIS, CHAT, FUNCTIONS, KNOWS_TOOLS, MESSAGES, RESPONSES, Api, Said
from tests.cpu.server.served import until
from tests.cpu.server.tiered_server import MODEL, Tiered, tiered

pytest.importorskip("llguidance", reason="structured output is an extra")

SAY = [{"role": "user", "content": "Say it."}]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["red", "green"]}},
    "required": ["x", "kind"],
    "additionalProperties": False,
}
REPORT = {
    "type": "object",
    "properties": {"degrees": {"enum": [20, 21]}},
    "required": ["degrees"],
    "additionalProperties": False,
}
IMPOSSIBLE = {"type": "object", "properties": {"x": False}, "required": ["x"]}


@pytest.fixture(scope="module")
def server() -> Iterator[Tiered]:
    with tiered(host_blocks=0, blocks=1024) as running:
        yield running


def ask(server: Tiered, **fields: Any) -> Any:
    options = {"max_tokens": 600, "temperature": 1, "seed": 3, **fields}
    return server.client.chat.completions.create(model=MODEL, messages=SAY, **options)


def check_point(text: str) -> None:
    point = json.loads(text)
    assert set(point) == {"x", "kind"} and 0 <= point["x"] <= 99 and point["kind"] in ("red", "green")


def check_call(name: str, arguments: Any) -> None:
    if name == "now":
        assert arguments == {}
    else:
        assert name == "weather" and set(arguments) == {"city", "unit"}
        assert arguments["city"] in ("Zürich", "Bern") and arguments["unit"] in ("C", "F")


# -------------------------------------------------------------------------------------------------- schemas


def test_a_json_schema_is_kept_to_by_every_choice(server: Tiered) -> None:
    reply = ask(server, **CHAT.formed(POINT), n=4, logprobs=True, top_logprobs=1)
    assert [choice.finish_reason for choice in reply.choices] == ["stop"] * 4
    for choice in reply.choices:
        check_point(choice.message.content)
        assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content


class Plan(pydantic.BaseModel):
    """As programs describe what they want."""

    kind: Literal["add", "remove"]
    counts: list[int] = pydantic.Field(min_length=1, max_length=2)


def test_the_clients_own_parsing_gets_a_value_of_the_callers_type(server: Tiered) -> None:
    reply = server.client.chat.completions.parse(
        model=MODEL, messages=SAY, response_format=Plan, max_tokens=400, seed=2
    )
    plan = reply.choices[0].message.parsed
    assert isinstance(plan, Plan) and 1 <= len(plan.counts) <= 2


FORMS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"structured_outputs": {"regex": "[a-d]{4}"}}, "[a-d]{4}"),
    ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
    ({"structured_outputs": {"grammar": 'start: "<" /[xy]{2}/ ">"'}}, "<[xy]{2}>"),
    ({"structured_outputs": {"json": POINT}}, r"(?s)\{.*\}"),
    ({"structured_outputs": {"json": '{"type": "integer", "minimum": 1, "maximum": 3}'}}, "[123]"),
    ({"structured_outputs": {"regex": "[a-d]{4}", "json_object": False, "choice": None}}, "[a-d]{4}"),
    ({"guided_json": {"const": "v"}}, '"v"'),
    ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
    ({"guided_choice": ["ja", "nein"]}, "ja|nein"),
    ({"guided_grammar": 'start: "a" "b"'}, "ab"),
)


def test_vllms_fields_mean_what_they_mean_there(server: Tiered) -> None:
    for fields, pattern in FORMS:
        chat = ask(server, extra_body=fields).choices[0].message.content
        asked = {"model": MODEL, "prompt": "x", "max_tokens": 300, "seed": 3, "extra_body": fields}
        for text in (chat, server.client.completions.create(**asked).choices[0].text):
            assert re.fullmatch(pattern, text), (fields, text)


def test_what_cannot_be_met_is_a_400_that_names_the_field(server: Tiered) -> None:
    for fields, param in (
        (CHAT.formed({"$ref": "#"}), "response_format"),
        (CHAT.formed(False), "response_format"),  # type: ignore[arg-type]
        ({"structured_outputs": {"regex": "(("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"type": "integer", "minimum": 2, "maximum": 1}}, "guided_json"),
    ):
        with pytest.raises(openai.BadRequestError) as bad:
            ask(server, extra_body=fields)
        assert bad.value.param == param and "cannot be" in bad.value.message


HOSTILE = {
    "multipleOf": {"type": "integer", "multipleOf": 86_400, "minimum": 0, "maximum": 10**15},
    "properties": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(600)}},
    "patternProperties": {
        "type": "object",
        "patternProperties": {f"^p{i}.*x{i}$": {"type": "string"} for i in range(700)},
    },
}


def test_hostile_schemas_are_refused_by_keyword_and_others_are_answered_meanwhile(server: Tiered) -> None:
    refused: dict[str, openai.BadRequestError] = {}

    def ask_hostile(keyword: str) -> None:
        with pytest.raises(openai.BadRequestError) as bad:
            ask(server, extra_body={"guided_json": HOSTILE[keyword]})
        refused[keyword] = bad.value

    threads = [threading.Thread(target=ask_hostile, args=(keyword,)) for keyword in HOSTILE]
    for thread in threads:
        thread.start()
    for number in range(3):
        fresh = {**POINT, "title": f"not compiled before {number}"}
        check_point(ask(server, extra_body={"guided_json": fresh}).choices[0].message.content)
    assert "patternProperties" not in refused, "the others were answered before"
    for thread in threads:
        thread.join(60.0)
    assert set(refused) == set(HOSTILE)
    for keyword, error in refused.items():
        assert error.param == "guided_json" and keyword in error.message


def test_a_hang_up_ends_the_compiling_of_a_schema(server: Tiered, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "TRIAL_S", 300.0)
    given_up = threading.Event()
    kill = trials.Trial.kill
    monkeypatch.setattr(trials.Trial, "kill", lambda self: (given_up.set(), kill(self)))
    schema = {**HOSTILE["patternProperties"], "title": "hung up"}
    body = json.dumps({"model": MODEL, "messages": SAY, "guided_json": schema}).encode()
    url = urlsplit(str(server.http.base_url))
    with socket.create_connection((url.hostname, url.port)) as connection:
        head = f"POST {CHAT.path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        until(lambda: server.engine.grammars._compiling, "it is being compiled")
    assert given_up.wait(60.0)
    until(lambda: not server.engine.grammars._compiling, "it is given up")


# ------------------------------------------------------------------------------------------- in every API


@pytest.fixture(params=APIS, ids=lambda api: type(api).__name__)
def api(request: pytest.FixtureRequest) -> Api:
    found: Api = request.param
    return found


def said_by(server: Tiered, api: Api, **fields: Any) -> Said:
    return api.ask(server, model=MODEL, **{api.most: 600, "temperature": 1, "seed": 3, **fields})


def test_forced_calls_and_forms_fit_their_schemas(server: Tiered, api: Api) -> None:
    tools = api.tools(FUNCTIONS[0])
    for choice in ("weather", "required"):
        one = api.choice(choice)
        fields = {"tools": tools, **api.one_call(), **one}
        if api is MESSAGES:
            fields["tool_choice"] = {**one["tool_choice"], "disable_parallel_tool_use": True}
        said = said_by(server, api, **fields)
        ((name, arguments, _),) = said.calls
        assert said.finish == "tool_calls" and said.text == ""
        check_call(name, arguments)
    check_point(said_by(server, api, **api.formed(POINT)).text)


def test_a_schema_that_cannot_be_met_is_refused_by_the_name_that_the_api_has(
    server: Tiered, api: Api
) -> None:
    bad = {**FUNCTIONS[0], "parameters": IMPOSSIBLE}
    large = {**FUNCTIONS[0], "parameters": {"description": "x" * 70_000}}
    assert api.refusal(server, model=MODEL, **api.formed(IMPOSSIBLE))["param"] == api.form
    for choice in ("required", "weather"):
        asked = {"tools": api.tools(bad), **api.choice(choice)}
        assert api.refusal(server, model=MODEL, **asked)["param"] == "tools"
    for one in (bad, large):
        asked = {"tools": api.tools(one), **api.formed(REPORT)}
        assert api.refusal(server, model=MODEL, **asked)["param"] == api.form


def call_or_report(said: Said) -> str:
    """Which of them the answer is: it is one, and it fits."""
    if said.calls:
        assert said.finish == "tool_calls" and not said.text
        for name, arguments, _ in said.calls:
            check_call(name, arguments)
        return "calls"
    assert said.finish == "stop" and json.loads(said.text)["degrees"] in (20, 21)
    return "report"


def test_beside_a_form_the_model_calls_or_answers_what_fits(server: Tiered, api: Api) -> None:
    asked = {"tools": api.tools(FUNCTIONS[0]), **api.formed(REPORT), **api.one_call()}
    answers = (call_or_report(said_by(server, api, **asked, seed=seed)) for seed in range(24))
    first = next(answers)
    assert any(kind != first for kind in answers), f"all are {first}"


# ---------------------------------------------------------------------------------------- calls in chats


def said_of(reply: Any) -> list[Said]:
    """A chat's choices, each as an answer."""
    raw = reply.model_dump()
    return [CHAT.read({**raw, "choices": [choice]}) for choice in raw["choices"]]


FORMATS = {  # by parser, what a template says of it
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "mistral, named": "[TOOL_CALLS] [ARGS]",
    "llama3": "<|python_tag|>",
    "json": "",
}
TOOLS: Any = CHAT.tools(*FUNCTIONS)


@pytest.mark.parametrize("words", FORMATS)
def test_calls_beside_a_form_are_found_in_every_format(
    server: Tiered, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate(KNOWS_TOOLS.replace("<tool_call>", FORMATS[words]), {})
    monkeypatch.setattr(server.engine.tokenizer, "chat_template", template)
    if words == "json":
        config = dataclasses.replace(server.service.config, tool_call_parser=words)
        monkeypatch.setattr(server.service, "config", config)
    asked = {**CHAT.formed(REPORT), "tools": TOOLS, "parallel_tool_calls": False}
    found = {call_or_report(said) for said in said_of(ask(server, n=24, **asked))}
    assert found == {"calls", "report"}
    several = said_of(ask(server, n=8, **CHAT.formed(REPORT), tools=TOOLS[1:], max_tokens=900))
    assert all(call_or_report(said) for said in several if said.finish != "length")


def test_beside_a_form_what_has_to_be_called_is_called_and_none_calls_nothing(server: Tiered) -> None:
    asked: Any = {**CHAT.formed(REPORT), "tools": TOOLS, "parallel_tool_calls": False}
    for choice, kind in (("required", "calls"), ("weather", "calls"), ("none", "report")):
        for said in said_of(ask(server, n=4, **asked, **CHAT.choice(choice))):
            assert call_or_report(said) == kind
    free = {**asked, "response_format": {"type": "json_object"}, "max_tokens": 64}
    assert all(said.calls or said.text.startswith("{") for said in said_of(ask(server, n=8, **free)))


def test_required_calls_one_of_the_tools_or_several(server: Tiered) -> None:
    for said in said_of(ask(server, tools=TOOLS[:1], tool_choice="required", n=4)):
        assert said.calls or said.finish == "length"
        for name, arguments, _ in said.calls if said.finish == "tool_calls" else ():
            check_call(name, arguments)


def test_forced_calls_have_only_the_arguments_that_their_tool_has(server: Tiered) -> None:
    """The tools say nothing of other properties, and one of them nothing of parameters at all. The weights
    are random, so that open arguments would be invented."""
    flag = {"type": "object", "properties": {"on": {"type": "boolean"}}}
    tools = [*CHAT.tools({"name": "flag", "parameters": flag}), TOOLS[1]]
    for choice in ("flag", "now", "required"):
        asked = {"tools": tools, **CHAT.choice(choice), "parallel_tool_calls": False, "max_tokens": 200}
        for said in said_of(ask(server, n=8, **asked)):
            ((name, arguments, _),) = said.calls
            assert said.finish == "tool_calls" and set(arguments) <= ({"on"} if name == "flag" else set())


def schema_asked(tools: Any, choice: Any) -> Any:
    body = {"model": MODEL, "messages": SAY, "tools": tools, **CHAT.choice(choice)}
    asked = msgspec.convert(body, ChatBody).asked()
    assert asked is not None
    return json.loads(asked.grammar.text)


def test_schemas_of_several_tools_keep_their_references_and_an_empty_one_takes_any_arguments() -> None:
    """Where a schema is not the root, what it says of its root is said of where it lies."""
    tree = {
        "type": "object",
        "properties": {"left": {"$ref": "#"}, "right": {"anyOf": [{"$ref": "#/properties/left"}]}},
    }
    tools = [*TOOLS, *CHAT.tools({"name": "plant", "parameters": tree}, {"name": "any", "parameters": {}})]
    definitions = schema_asked(tools, "required")["$defs"]
    assert definitions["tool2"]["properties"] == {
        "left": {"$ref": "#/$defs/tool2"},
        "right": {"anyOf": [{"$ref": "#/$defs/tool2/properties/left"}]},
    }
    assert definitions["tool3"] == schema_asked(tools, "any") == {"type": "object"}


# --------------------------------------------------------------------------------- bounds of reasoning

# Random weights, of a model that always reasons and would never end it.
THINKS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}<think>{# </think> #}"


def budgeted(server: Tiered, budget: int, **fields: Any) -> Any:
    body = {"model": MODEL, "messages": SAY, "max_tokens": 90, "seed": 3, "thinking_token_budget": budget}
    return server.http.post(CHAT.path, json={**body, **fields})


def test_reasoning_is_ended_when_its_budget_is_spent(server: Tiered, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a stream, in front of a form, and in Anthropic's words."""
    monkeypatch.setattr(server.engine.tokenizer, "chat_template", ChatTemplate(THINKS, {}))
    endless = CHAT.read(budgeted(server, 90).json())
    assert endless.reasoning and not endless.text
    for budget in (0, 1, 20):
        for choice in budgeted(server, budget, n=3, return_token_ids=True).json()["choices"]:
            assert bytes(choice["token_ids"][budget : budget + 8]) == b"</think>"
            assert choice["message"]["content"]
            assert bool(choice["message"].get("reasoning_content")) == bool(budget)
    for form in ({}, CHAT.formed({"enum": [20, 21]})):
        asked = {"max_tokens": 90, "seed": 3, "thinking_token_budget": 12, "messages": SAY, **form}
        whole = CHAT.ask_both(server, model=MODEL, **asked)
        assert whole.reasoning and whole.text
        assert not form or (whole.text.strip() in ("20", "21") and whole.finish == "stop")
    budget = {"thinking": {"type": "enabled", "budget_tokens": 10}, "max_tokens": 60, "seed": 3}
    said = MESSAGES.ask(server, model=MODEL, **budget)
    assert [kind for kind, _ in said.parts] == ["reasoning", "text"] and said.reasoning and said.text
    assert RESPONSES.ask(server, model=MODEL, max_output_tokens=20, seed=3).finish == "length"
