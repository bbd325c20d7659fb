"""Structured output over HTTP: a real server, a real engine with random weights, the `openai` client."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from served import until
from tiered_server import MODEL, Tiered, tiered

from penstock.contract import Grammar
from penstock.engine.execution import grammars as compiling

pytest.importorskip("llguidance", reason="structured output is an extra")

SAY = [{"role": "user", "content": "Say it."}]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["red", "green"]}},
    "required": ["x", "kind"],
    "additionalProperties": False,
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "point", "strict": True, "schema": POINT}}


@pytest.fixture(scope="module")
def server() -> Iterator[Tiered]:
    with tiered(host_blocks=0, blocks=512) as running:
        yield running


def ask(server: Tiered, **fields: Any) -> Any:
    options = {"max_tokens": 300, "temperature": 1, "seed": 1, **fields}
    return server._client.chat.completions.create(model=MODEL, messages=SAY, **options)


def check_point(text: str) -> None:
    point = json.loads(text)
    assert set(point) == {"x", "kind"} and 0 <= point["x"] <= 99 and point["kind"] in ("red", "green")


def test_a_json_schema_is_kept_to_by_every_choice(server: Tiered) -> None:
    reply = ask(server, response_format=SCHEMA, n=4, logprobs=True, top_logprobs=1)
    assert [choice.finish_reason for choice in reply.choices] == ["stop"] * 4
    for choice in reply.choices:
        check_point(choice.message.content)
        assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content


def test_a_stream_has_the_text_of_the_whole(server: Tiered) -> None:
    chunks = list(ask(server, response_format=SCHEMA, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    check_point(text)
    assert text == ask(server, response_format=SCHEMA).choices[0].message.content


class Step(pydantic.BaseModel):
    """As programs describe what they want."""

    kind: Literal["add", "remove"]
    count: int = pydantic.Field(ge=0, le=9)
    note: str = pydantic.Field(max_length=4)


class Plan(pydantic.BaseModel):
    steps: list[Step] = pydantic.Field(min_length=1, max_length=2)


def test_the_clients_own_parsing_gets_a_value_of_the_callers_type(server: Tiered) -> None:
    reply = server._client.chat.completions.parse(model=MODEL, messages=SAY, response_format=Plan, max_tokens=400, seed=2)
    plan = reply.choices[0].message.parsed
    assert isinstance(plan, Plan) and 1 <= len(plan.steps) <= 2


FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"structured_outputs": {"regex": "[a-d]{4}"}}, "[a-d]{4}"),
    "choice": ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
    "grammar": ({"structured_outputs": {"grammar": 'start: "<" /[xy]{2}/ ">"'}}, "<[xy]{2}>"),
    "json": ({"structured_outputs": {"json": POINT}}, r"(?s)\{.*\}"),
    "json as text": ({"structured_outputs": {"json": json.dumps({"type": "integer", "minimum": 1, "maximum": 3})}}, "[123]"),
    "no other form": ({"structured_outputs": {"regex": "[a-d]{4}", "json_object": False, "choice": None}}, "[a-d]{4}"),
    "guided_json": ({"guided_json": {"const": "v"}}, '"v"'),
    "guided_regex": ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
    "guided_choice": ({"guided_choice": ["ja", "nein"]}, "ja|nein"),
    "guided_grammar": ({"guided_grammar": 'start: "a" "b"'}, "ab"),
}


@pytest.mark.parametrize("name", FORMS)
def test_vllms_fields_mean_what_they_mean_there(server: Tiered, name: str) -> None:
    fields, pattern = FORMS[name]
    for text in (
        ask(server, extra_body=fields).choices[0].message.content,
        server._client.completions.create(model=MODEL, prompt="x", max_tokens=300, seed=3, extra_body=fields).choices[0].text,
    ):
        assert re.fullmatch(pattern, text), text


def test_json_mode_gives_an_object_or_runs_out_of_tokens(server: Tiered) -> None:
    choice = ask(server, response_format={"type": "json_object"}).choices[0]
    assert choice.message.content.lstrip()[:1] == "{"
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


def test_a_stop_string_still_ends_the_text(server: Tiered) -> None:
    choice = ask(server, extra_body={"guided_regex": "[ab]{3}#[cd]{20}"}, stop="#").choices[0]
    assert re.fullmatch("[ab]{3}", choice.message.content) and choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": False}}}, "response_format"),
        ({"structured_outputs": {"regex": "(("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"type": "integer", "minimum": 2, "maximum": 1}}, "guided_json"),
    ],
)
def test_what_cannot_be_met_is_a_400_that_names_the_field(server: Tiered, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        ask(server, extra_body=fields)
    assert bad.value.param == param and "cannot be" in bad.value.message


def test_others_stream_on_while_a_schema_is_compiled_and_it_is_refused_when_it_takes_too_long(
    server: Tiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, begun, inner = threading.Event(), threading.Event(), server.engine.grammars._vocabulary.matcher

    def slow(grammar: Grammar) -> Any:
        begun.set()
        assert gate.wait(60)
        return inner(grammar)

    monkeypatch.setattr(server.engine.grammars._vocabulary, "matcher", slow)
    monkeypatch.setattr("penstock.server.service.COMPILE_S", 0.0)
    try:
        assert compiling.COMPILE_S > 1.0
        server.engine.grammars.begin(Grammar("regex", "slow"))
        assert begun.wait(60)
        with pytest.raises(openai.BadRequestError, match="too complex") as bad:
            ask(server, extra_body={"guided_regex": "slow"})
        assert bad.value.param == "guided_regex"
        *_, last = ask(server, stream=True, max_tokens=5)
        assert last.choices[0].finish_reason == "length" and not gate.is_set()
    finally:
        gate.set()
    until(lambda: not server.engine.grammars._compiling, "it is compiled")
