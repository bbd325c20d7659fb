"""Random JSON schemas, and a plain check of values against them, written apart from any library. Owns the
subset that it makes."""

from __future__ import annotations

import random
import re
from typing import Any

Schema = dict[str, Any]


def random_schema(rng: random.Random, depth: int = 3) -> Schema:
    """An object at the top, as clients send it."""
    return _object(rng, depth)


def _any(rng: random.Random, depth: int) -> Schema:
    makers = [_string, _string, _integer, _number, _enum, _simple]
    if depth > 0:
        makers += [_object, _array, _any_of]
    return rng.choice(makers)(rng, depth)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["a", "b c", "count", "näme", 'quo"te', "x_1", "Ω"], rng.randint(1, 4))
    required = [name for name in names if rng.random() < 0.7]
    return {
        "type": "object",
        "properties": {name: _any(rng, depth - 1) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(0, 2)
    return {
        "type": "array",
        "items": _any(rng, depth - 1),
        "minItems": low,
        "maxItems": low + rng.randint(0, 2),
    }


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randint(1, 3))]}


def _string(rng: random.Random, depth: int) -> Schema:
    return rng.choice(
        [
            {"type": "string", "maxLength": rng.randint(0, 6)},
            {"type": "string", "minLength": 2, "maxLength": 4},
            {"type": "string", "pattern": "^[a-f]{2}-[0-9]{1,3}$"},
        ]
    )


def _integer(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}


def _number(rng: random.Random, depth: int) -> Schema:
    return {"type": "number", "minimum": 0, "exclusiveMaximum": 10}


def _enum(rng: random.Random, depth: int) -> Schema:
    return rng.choice(
        [{"enum": ["red", "grün", 3, None, {"k": [1]}]}, {"const": rng.choice(["only", 7, True])}]
    )


def _simple(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.choice(["boolean", "null"])}


def fits(value: Any, schema: Schema) -> bool:
    """Whether `value` is valid under a schema that `random_schema` made."""
    if "anyOf" in schema:
        return any(fits(value, one) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return any(_same(value, one) for one in schema.get("enum", [schema.get("const")]))
    kind = schema["type"]
    if kind == "object":
        known = (
            isinstance(value, dict)
            and set(value) <= set(schema["properties"])
            and set(schema["required"]) <= set(value)
        )
        return known and all(fits(one, schema["properties"][name]) for name, one in value.items())
    if kind == "array":
        sized = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return sized and all(fits(one, schema["items"]) for one in value)
    if kind == "string":
        long_enough = isinstance(value, str) and schema.get("minLength", 0) <= len(value) <= schema.get(
            "maxLength", len(value)
        )
        return long_enough and re.search(schema.get("pattern", ""), value) is not None
    if kind in ("integer", "number"):
        if isinstance(value, bool) or not isinstance(value, int if kind == "integer" else int | float):
            return False
        below = value <= schema["maximum"] if "maximum" in schema else value < schema["exclusiveMaximum"]
        return bool(schema["minimum"] <= value and below)
    return isinstance(value, bool) if kind == "boolean" else value is None


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other
