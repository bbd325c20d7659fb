"""What single keywords of a schema may ask for, and which keyword is named where a schema as a whole is too
much."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.engine.execution.schema_limits import MOST_MULTIPLE_OF, MOST_OPTIONAL, check_keywords, costliest


def wide(num_optional: int) -> dict[str, Any]:
    names = [f"p{number}" for number in range(num_optional + 3)]
    return {"type": "object", "properties": {name: {} for name in names}, "required": names[:3]}


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"multipleOf": MOST_MULTIPLE_OF + 1}, "multipleOf"),
        ({"anyOf": [{"type": "null"}, {"items": {"multipleOf": 86_400.5}}]}, "multipleOf"),
        ({"$defs": {"a": wide(MOST_OPTIONAL + 1)}, "$ref": "#/$defs/a"}, "properties"),
    ],
)
def test_a_keyword_over_its_limit_is_named_wherever_it_stands(schema: Any, keyword: str) -> None:
    with pytest.raises(ValueError, match=f"^{keyword} "):
        check_keywords(json.dumps(schema))


def test_what_is_within_limits_no_keyword_or_no_json_passes() -> None:
    named = {name: {"type": "null"} for name in ("multipleOf", "properties", "required")}
    for schema in (
        *({"multipleOf": MOST_MULTIPLE_OF}, {"multipleOf": 0.01}, wide(MOST_OPTIONAL)),
        *({"enum": [{"multipleOf": 86_400}]}, {"properties": named}, True, "no schema"),
        {"properties": ["none"], "required": 3, "multipleOf": "none"},
    ):
        check_keywords(json.dumps(schema))
    check_keywords("{")
    check_keywords('{"items":' * 30_000)
    assert costliest("{") is None


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"prefixItems": [{"multipleOf": 9000 + number} for number in range(9)]}, "multipleOf"),
        (
            {"patternProperties": {f"a{number}": {"pattern": "b"} for number in range(99)}},
            "patternProperties",
        ),
        ({"allOf": [{"pattern": "a.{12}b" * 20}, {"enum": ["x"]}]}, "pattern"),
        ({"enum": list(range(5000))}, "enum"),
        ({"type": "string", "maxLength": 10**9}, "maxLength"),
        ({"type": "string"}, None),
    ],
)
def test_the_keyword_that_most_of_the_work_is_for(schema: Any, keyword: str | None) -> None:
    assert costliest(json.dumps(schema)) == keyword
