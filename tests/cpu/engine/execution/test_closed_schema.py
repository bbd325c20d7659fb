"""JSON schemas as they are compiled: an object has the properties that its schema lists and no others, unless
the schema opens it. What is written always fits the schema as it was given, and a schema that could be met
can still be met. llguidance is the judge of both."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.contract import Grammar
from penstock.engine.execution import grammars as module
from penstock.engine.execution.closed_schema import closed
from penstock.engine.execution.grammars import Grammars, Matcher
from penstock.errors import InvalidRequest
from penstock.models.tokenizer import ByteTokenizer

llguidance = pytest.importorskip("llguidance", reason="structured output is an extra")

INT: dict[str, Any] = {"type": "integer"}
NULL: dict[str, Any] = {"type": "null"}


def listing(*names: str, **more: Any) -> dict[str, Any]:
    """An object schema that lists properties and says nothing of others."""
    return {"type": "object", "properties": dict.fromkeys(names, INT), **more}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(ByteTokenizer(258), 258, [])
    yield made
    made.close()


def compiled(grammars: Grammars, schema: Any) -> Matcher:
    return grammars.wait_compiled(Grammar("json_schema", json.dumps(schema))).copy()


def as_given(grammars: Grammars, schema: Any) -> Matcher:
    """The user's schema as JSON Schema means it."""
    source = llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(schema), overrides={"whitespace_pattern": module._BLANKS}
    )
    made = llguidance.LLMatcher(grammars._vocabulary._seen_by(llguidance), source, log_level=0)
    return Matcher(made, 258, np.zeros(grammars.num_words, np.int32))


def takes(matcher: Matcher, value: Any) -> bool:
    matcher.consume(list(json.dumps(value).encode()))
    return matcher.error is None and matcher.is_accepting


# What is closed: the schema, a value that is taken, and one that JSON Schema allows and that is not written.
CLOSED: dict[str, tuple[Any, Any, Any]] = {
    "one that lists properties": (listing("a", "b", required=["a"]), {"a": 1}, {"a": 1, "c": 2}),
    "a property": (listing(o={}, properties={"o": listing("a")}), {"o": {"a": 1}}, {"o": {"c": 2}}),
    "an item": ({"type": "array", "items": listing("a")}, [{"a": 1}], [{"c": 2}]),
    "an item of an older draft": (
        {"type": "array", "items": [INT], "additionalItems": listing("a")},
        [1, {"a": 1}],
        [1, {"c": 2}],
    ),
    "any other property": (
        {"type": "object", "additionalProperties": listing("a")},
        {"x": {"a": 1}},
        {"x": {"c": 2}},
    ),
    "a branch of anyOf": ({"anyOf": [listing("a"), NULL], "default": None, "title": "T"}, {"a": 1}, {"c": 2}),
    "an allOf of one": (
        {"allOf": [listing("a")], "description": "as older pydantic writes it"},
        {"a": 1},
        {"c": 2},
    ),
    "a reference": (
        {"$ref": "#/$defs/A", "$defs": {"A": listing("a")}, "description": "x"},
        {"a": 1},
        {"c": 2},
    ),
    "a reference to the root": (
        listing(properties={"next": {"$ref": "#"}}),
        {"next": {"next": {}}},
        {"next": {"c": 2}},
    ),
    "a reference into properties": (
        listing(properties={"x": listing("a"), "y": {"$ref": "#/properties/x"}}),
        {"x": {"a": 1}, "y": {"a": 1}},
        {"y": {"c": 2}},
    ),
    "a keyword that nobody knows": (
        listing("a", propertyOrdering=["a"], **{"x-order": {"allOf": []}}),
        {"a": 1},
        {"c": 2},
    ),
    "a property called properties": (
        listing(properties={"properties": listing("a"), "required": INT, "additionalProperties": INT}),
        {"properties": {"a": 1}, "additionalProperties": 1},
        {"properties": {"c": 1}},
    ),
    "one beside joined ones": (
        listing(properties={"x": listing("a"), "y": {"allOf": [listing("a"), listing("b")]}}),
        {"x": {"a": 1}, "y": {"a": 1, "b": 2}},
        {"x": {"c": 2}},
    ),
}
AS_IT_IS = {"type": "object", "properties": {"a": INT}}
# What stays open: the schema, and a value that has to be taken though not all of its names are listed.
OPEN: dict[str, tuple[Any, Any]] = {
    "one without properties": ({"type": "object"}, {"c": 2}),
    "one with patterns": (listing("a", patternProperties={"^b": NULL}), {"b1": None, "c": 2}),
    "below patterns": (
        {"type": "object", "properties": {"ab": listing("x")}, "patternProperties": {"^a": listing("y")}},
        {"ab": {"x": 1, "y": 2}},
    ),
    "one that requires what it does not list": (listing("a", required=["a", "z"]), {"a": 1, "z": 2}),
    "one that requires more than it lists": (listing("a", required=["a"], minProperties=2), {"a": 1, "c": 2}),
    "allOf": ({"allOf": [listing("a", required=["a"]), listing("b", required=["b"])]}, {"a": 1, "b": 2}),
    "below allOf": (
        {"allOf": [listing(properties={"p": listing("a")}), listing(properties={"p": listing("b")})]},
        {"p": {"a": 1, "b": 2}},
    ),
    "what is referred to beside properties and elsewhere alone": (
        {
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/B"}, "y": listing("a", **{"$ref": "#/$defs/B"})},
            "$defs": {"B": {"$ref": "#/$defs/C"}, "C": listing("b")},
        },
        {"x": {"c": 1}, "y": {"a": 1, "b": 2}},
    ),
    "what is used in its place, and joined elsewhere": (
        listing(
            properties={
                "x": listing("a"),
                "y": {"allOf": [{"$ref": "#/properties/x"}, listing("b", required=["b"])]},
            }
        ),
        {"x": {"c": 1}, "y": {"a": 1, "b": 2}},
    ),
    "anyOf beside properties": (
        listing("a", anyOf=[listing("b", required=["b"]), listing("c", required=["c"])]),
        {"a": 1, "c": 2},
    ),
    "oneOf": (
        {
            "oneOf": [
                listing(properties={"k": {"const": "x"}}, required=["k"]),
                listing(properties={"k": {"const": "y"}}, required=["k"]),
            ]
        },
        {"k": "x", "c": 2},
    ),
    "enum": (listing("a", enum=[{"a": 1, "c": 2}]), {"a": 1, "c": 2}),
    "a value that looks like a schema": ({"enum": [AS_IT_IS]}, AS_IT_IS),
    "a reference by an anchor": (
        listing(
            properties={"x": {"$anchor": "b", **listing("b")}, "y": {"allOf": [{"$ref": "#b"}, listing("a")]}}
        ),
        {"y": {"b": 1, "a": 2}},
    ),
    "a reference by an address": (
        {
            "$id": "http://x/y",
            "properties": {
                "x": listing("b"),
                "y": {"allOf": [{"$ref": "http://x/y#/properties/x"}, listing("a")]},
            },
        },
        {"y": {"b": 1, "a": 2}},
    ),
    "a reference with an escape": (
        listing(
            properties={
                "x/y": listing("b"),
                "y": {"allOf": [{"$ref": "#/properties/x~1y"}, listing("a")]},
                "x~1y": NULL,
            }
        ),
        {"y": {"b": 1, "a": 2}},
    ),
    "a reference from a root of its own": (
        listing(
            properties={
                "p": NULL,
                "y": {
                    "$id": "http://b",
                    **listing(
                        properties={
                            "p": listing("b"),
                            "q": {"allOf": [{"$ref": "#/properties/p"}, listing("a")]},
                        }
                    ),
                },
            }
        ),
        {"y": {"q": {"b": 1, "a": 2}}},
    ),
    "a reference into what has a root of its own": (
        {
            "properties": {"p": listing("b"), "y": {"$ref": "#/$defs/B/$defs/Q"}},
            "$defs": {
                "B": {
                    "$id": "http://b",
                    "properties": {"p": listing("c")},
                    "$defs": {"Q": {"$ref": "#/properties/p"}},
                }
            },
        },
        {"y": {"c": 1, "d": 2}},
    ),
    "what this library takes no notice of in an old draft": (
        listing(
            "a", **{"$schema": "http://json-schema.org/draft-04/schema#", "if": {"properties": {"a": INT}}}
        ),
        {"a": 1, "c": 2},
    ),
}


def test_an_object_has_the_properties_that_its_schema_lists_and_no_others(grammars: Grammars) -> None:
    for name, (schema, right, wrong) in CLOSED.items():
        assert takes(compiled(grammars, schema), right), name
        assert takes(as_given(grammars, schema), wrong), f"{name}: the schema itself forbids it"
        assert not takes(compiled(grammars, schema), wrong), name


def test_an_object_stays_open_where_closing_it_could_be_wrong(grammars: Grammars) -> None:
    for name, (schema, value) in OPEN.items():
        assert takes(as_given(grammars, schema), value), name
        assert takes(compiled(grammars, schema), value), name


@pytest.mark.parametrize(
    "schema",
    [
        # {"a": 1, "b": 1} fits both; so may {"a": 1}
        {"oneOf": [listing("a", required=["a"]), listing("b", required=["b"])]},
        listing("a", **{"if": listing("a"), "then": listing("b")}),
        listing("a", **{"not": listing("a")}),
        listing("a", unevaluatedProperties=False),
        listing("a", required=[{}]),
        listing("a", allOf=1),
        {"type": "object", "properties": []},
        {"$ref": "#/$defs/none"},
        {"$ref": "#/anyOf/x", "anyOf": [NULL]},
        {"$ref": "#"},
    ],
    ids=json.dumps,
)
def test_what_is_refused_is_refused_as_before(grammars: Grammars, schema: Any) -> None:
    given = as_given(grammars, schema)
    if given.error is None:  # the first mask says it
        Matcher.fill([(given, 0)], np.zeros((1, grammars.num_words), np.int32))
    with pytest.raises(InvalidRequest, match="cannot be") as refused:
        compiled(grammars, schema)
    assert given.error is None or given.error.splitlines()[0] in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "",
        "[" * 50_000,
        '{"properties": {}, "minimum": ' + "9" * 5000 + "}",
        '{"a": "\\ud800"}',
        "true",
    ],
)
def test_what_is_no_schema_is_left_to_the_library(grammars: Grammars, text: str) -> None:
    assert closed(text) == text
    with pytest.raises(InvalidRequest, match="cannot be"):
        grammars.wait_compiled(Grammar("json_schema", text))


def test_a_long_chain_of_references_is_followed_to_its_end() -> None:
    chain = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(2000)}
    found = json.loads(closed(json.dumps({"$ref": "#/$defs/d0", "$defs": {**chain, "d2000": listing("a")}})))
    assert found["$defs"]["d2000"]["additionalProperties"] is False


def test_a_schema_in_which_nothing_is_closed_stays_as_it_was_written() -> None:
    text = '{ "type": "object", "default": {"properties": {}}, "examples": [{"properties": {}}], "minimum": 1.50 }'  # noqa: E501
    assert closed(text) == text


# -------------------------------------------------------------------------------------------------- at random

NAMES = st.sampled_from(["a", "b", "c"])
REFS = st.sampled_from(["#", "#/$defs/x", "#/$defs/y", "#/$defs/x/properties/a", "#/properties/a"]).map(
    lambda ref: {"$ref": ref}
)
LEAVES = st.sampled_from(
    [
        {"type": "boolean"},
        {"enum": [0, {"a": True}]},
        {"const": {"b": 0}},
        NULL,
        True,
        False,
        {},
        {"type": "object"},
    ]
)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    more = {
        "required": st.lists(NAMES, unique=True, max_size=2),
        "additionalProperties": inner,
        "maxProperties": st.integers(1, 3),
        "minProperties": st.integers(1, 3),
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "b$"]), inner, max_size=1),
        "allOf": st.lists(inner, min_size=1, max_size=2),
        "anyOf": st.lists(inner, min_size=1, max_size=2),
        "$ref": st.sampled_from(["#/$defs/x", "#/$defs/y"]),
    }
    few = st.sets(st.sampled_from(sorted(more)), max_size=2).flatmap(
        lambda names: st.fixed_dictionaries({name: more[name] for name in names})
    )
    of_properties = st.dictionaries(NAMES, inner, max_size=3)
    return st.builds(lambda own, rest: {"type": "object", "properties": own, **rest}, of_properties, few)


def extended(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=2)
    joined = st.sampled_from(["allOf", "anyOf", "oneOf"]).flatmap(
        lambda name: several.map(lambda parts: {name: parts})
    )
    return st.one_of(
        objects(inner),
        objects(inner),
        joined,
        inner.map(lambda one: {"type": "array", "items": one, "maxItems": 2}),
    )


PARTS = st.recursive(LEAVES | REFS, extended, max_leaves=6)
SCHEMAS = st.builds(
    lambda root, x, y: {**root, "$defs": {"x": x, "y": y}}, objects(PARTS), objects(PARTS), PARTS
)
MOST_BYTES = 120
ENDS = [*b'"}]']


def next_byte(grammars: Grammars, matcher: Matcher, draw: random.Random) -> int | None:
    words = np.zeros((1, grammars.num_words), np.int32)
    Matcher.fill([(matcher, 0)], words)
    allowed = [
        byte for byte in range(256) if words[0, byte // 32] >> (byte % 32) & 1 and byte not in b" \n\\"
    ]
    ends = [byte for byte in ENDS if byte in allowed]
    return None if not allowed else draw.choice(ends if ends and draw.random() < 0.5 else allowed)


def check_written(grammars: Grammars, schema: Any, draw: random.Random) -> None:
    """Whatever the compiled schema lets a model write, the given one takes, byte by byte."""
    writes, judge = compiled(grammars, schema), as_given(grammars, schema)
    written = b""
    while (
        len(written) < MOST_BYTES
        and not writes.is_over
        and (byte := next_byte(grammars, writes, draw)) is not None
    ):
        written += bytes([byte])
        writes.consume([byte])
        judge.consume([byte])
        assert writes.error is None and judge.error is None, (written, judge.error)
    assert writes.is_accepting <= judge.is_accepting, written


@settings(max_examples=100, deadline=None)
@given(SCHEMAS, st.integers(0, 999))
def test_of_any_schema_what_is_written_fits_it_and_it_can_be_met_as_before(
    grammars: Grammars, schema: Any, seed: int
) -> None:
    given = as_given(grammars, schema)
    words = np.zeros((1, grammars.num_words), np.int32)
    if given.error is None:
        Matcher.fill([(given, 0)], words)
    if given.error is not None or not words.any():
        return  # refused as it is
    draw = random.Random(seed)
    for _ in range(3):
        check_written(grammars, schema, draw)
