"""Estimated cost of compiling a JSON schema, by keyword. Owns the limits on single keywords; compiles
nothing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

MOST_MULTIPLE_OF = 10_000  # one lexer state per remainder: larger values fail, or compile without end
MOST_OPTIONAL = 450  # each takes four items of a parser row, which has 2000
_VALUES = ("const", "enum", "default", "examples")  # no schemas inside
_LISTS = ("anyOf", "oneOf", "allOf", "enum", "properties", "prefixItems")


def check_keywords(text: str) -> None:
    """Raises ValueError that names a keyword over its limit."""
    for schema in _schemas(text):
        multiple = schema.get("multipleOf")
        if isinstance(multiple, int | float) and multiple > MOST_MULTIPLE_OF:
            raise ValueError(f"multipleOf is {multiple}, and can be at most {MOST_MULTIPLE_OF}")
        named, required = schema.get("properties"), schema.get("required")
        if isinstance(named, dict):
            num_optional = len(named.keys() - set(map(str, required if isinstance(required, list) else ())))
            if num_optional > MOST_OPTIONAL:
                limit = f"can have at most {MOST_OPTIONAL}: list more of them in required"
                raise ValueError(f"properties has {num_optional} that are not required, and {limit}")


def costliest(text: str) -> str | None:
    """The keyword with the highest estimated compile cost. None: none costs much."""
    cost: Counter[str] = Counter()
    for schema in _schemas(text):
        if isinstance(multiple := schema.get("multipleOf"), int | float):
            cost["multipleOf"] += abs(int(min(multiple, 1e9)))
        if isinstance(named := schema.get("patternProperties"), dict):
            cost["patternProperties"] += 50 * len(named) ** 2  # each is compared with all others
        if isinstance(pattern := schema.get("pattern"), str):
            cost["pattern"] += 20 * len(pattern)
        for keyword in ("maxLength", "minLength", "maxItems", "minItems", "minProperties", "maxProperties"):
            if isinstance(bound := schema.get(keyword), int | float):
                cost[keyword] += int(min(bound, 1e4)) // 10
        for keyword in _LISTS:
            if isinstance(parts := schema.get(keyword), list | dict):
                cost[keyword] += len(parts)
        cost["$ref"] += "$ref" in schema
    return cost.most_common(1)[0][0] if cost.total() else None


def _schemas(text: str) -> Iterator[dict[str, Any]]:
    """Everything in `text` that may be a schema."""
    try:
        line = [json.loads(text)]
    except (ValueError, RecursionError):
        return  # the compiler reports it
    while line:
        node = line.pop()
        if isinstance(node, dict):
            yield node
            line += [value for name, value in node.items() if name not in _VALUES or isinstance(value, dict)]
        elif isinstance(node, list):
            line += node
