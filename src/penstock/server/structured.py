"""What a client says about the form of an answer: OpenAI's `response_format`, vLLM's `structured_outputs` and its older spelling. Owns the
fields and which grammar they stand for; compiling it is the engine's."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from penstock.contract import MAX_GRAMMAR_CHARS, Grammar
from penstock.errors import InvalidRequest

Schema = dict[str, Any] | bool
Text = Annotated[str, msgspec.Meta(max_length=MAX_GRAMMAR_CHARS)]
Words = Annotated[list[Annotated[str, msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=1)]
ANY_OBJECT: dict[str, Any] = {"type": "object"}


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """OpenAI's frame around a schema. It is always kept to, `strict` or not."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    schema: Schema | None = None  # None: any JSON
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def __post_init__(self) -> None:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema, and with no other")


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """vLLM's. Exactly one of them; `json` may be the schema's text."""

    json: Schema | Text | None = None
    regex: Text | None = None
    choice: Words | None = None
    grammar: Text | None = None
    json_object: bool | None = None


class Asked(NamedTuple):
    """A grammar, and the field that asked for it: errors name it."""

    field: str
    grammar: Grammar


def asked_of(body: Any) -> Asked | None:
    """Raises InvalidRequest where several fields ask, or one asks for nothing."""
    found = [Asked(field, grammar) for field, grammar in _all(body) if grammar is not None]
    if len(found) > 1:
        raise InvalidRequest(f"{found[0].field} and {found[1].field} both say what the answer is to be: give one of them", found[1].field)
    if body.structured_outputs is not None and not found:
        raise InvalidRequest("structured_outputs needs one of json, regex, choice, grammar and json_object", "structured_outputs")
    if found and len(found[0].grammar.text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(f"a schema or grammar has at most {MAX_GRAMMAR_CHARS} characters", found[0].field)
    return found[0] if found else None


def _all(body: Any) -> list[tuple[str, Grammar | None]]:
    given, outputs = body.response_format, body.structured_outputs or StructuredOutputs()
    schema = None
    if given is not None and given.type != "text":
        schema = ANY_OBJECT if given.json_schema is None else given.json_schema.schema
        schema = {} if schema is None else schema
    return [
        ("response_format", _json(schema)),
        ("structured_outputs.json", _json(outputs.json)),
        ("structured_outputs.regex", _text("regex", outputs.regex)),
        ("structured_outputs.choice", _choice(outputs.choice)),
        ("structured_outputs.grammar", _text("lark", outputs.grammar)),
        ("structured_outputs.json_object", _json(ANY_OBJECT if outputs.json_object else None)),
        ("guided_json", _json(body.guided_json)),
        ("guided_regex", _text("regex", body.guided_regex)),
        ("guided_choice", _choice(body.guided_choice)),
        ("guided_grammar", _text("lark", body.guided_grammar)),
    ]


def schema_grammar(schema: Schema | str) -> Grammar:
    return Grammar("json_schema", schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False))


def _json(schema: Schema | str | None) -> Grammar | None:
    return None if schema is None else schema_grammar(schema)


def _text(kind: Literal["regex", "lark"], text: str | None) -> Grammar | None:
    return None if text is None else Grammar(kind, text)


def _choice(words: list[str] | None) -> Grammar | None:
    return None if words is None else Grammar("choice", json.dumps(words, ensure_ascii=False))


def named(error: InvalidRequest, asked: Asked) -> InvalidRequest:
    """The engine knows one name for all of these fields; the client gave another."""
    return InvalidRequest(str(error), asked.field) if error.param == "structured_outputs" else error
