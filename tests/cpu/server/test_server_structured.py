"""Structured output over HTTP: a real server, a real engine with random weights, the `openai` client."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any, Literal
from urllib.parse import urlsplit

import openai
import pydantic
import pytest

from penstock.engine.execution import trials
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


class Step(pydantic.BaseModel):
    """As programs describe what they want."""

    kind: Literal["add", "remove"]
    count: int = pydantic.Field(ge=0, le=9)
    note: str = pydantic.Field(max_length=4)


class Plan(pydantic.BaseModel):
    steps: list[Step] = pydantic.Field(min_length=1, max_length=2)


def test_the_clients_own_parsing_gets_a_value_of_the_callers_type(server: Tiered) -> None:
    reply = server._client.chat.completions.parse(
        model=MODEL, messages=SAY, response_format=Plan, max_tokens=400, seed=2
    )
    plan = reply.choices[0].message.parsed
    assert isinstance(plan, Plan) and 1 <= len(plan.steps) <= 2


FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"structured_outputs": {"regex": "[a-d]{4}"}}, "[a-d]{4}"),
    "choice": ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
    "grammar": ({"structured_outputs": {"grammar": 'start: "<" /[xy]{2}/ ">"'}}, "<[xy]{2}>"),
    "json": ({"structured_outputs": {"json": POINT}}, r"(?s)\{.*\}"),
    "json as text": (
        {"structured_outputs": {"json": json.dumps({"type": "integer", "minimum": 1, "maximum": 3})}},
        "[123]",
    ),
    "no other form": (
        {"structured_outputs": {"regex": "[a-d]{4}", "json_object": False, "choice": None}},
        "[a-d]{4}",
    ),
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
        server._client.completions.create(model=MODEL, prompt="x", max_tokens=300, seed=3, extra_body=fields)
        .choices[0]
        .text,
    ):
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"$ref": "#"}},
                }
            },
            "response_format",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": False}}},
            "response_format",
        ),
        ({"structured_outputs": {"regex": "(("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"type": "integer", "minimum": 2, "maximum": 1}}, "guided_json"),
    ],
)
def test_what_cannot_be_met_is_a_400_that_names_the_field(
    server: Tiered, fields: dict[str, Any], param: str
) -> None:
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
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: "
            f"application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        until(lambda: server.engine.grammars._compiling, "it is being compiled")
    assert given_up.wait(60.0)
    until(lambda: not server.engine.grammars._compiling, "it is given up")
