"""A JSON schema whose objects have only the listed properties. Owns the rule for closing objects; compiles
nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

# Keywords that apply further schemas or given values to the same value.
_JOINING = frozenset(
    {
        *(
            "$ref",
            "$dynamicRef",
            "$recursiveRef",
            "allOf",
            "anyOf",
            "oneOf",
            "not",
            "if",
            "then",
            "else",
            "const",
            "enum",
        ),
        *("patternProperties", "propertyNames", "dependentSchemas", "dependentRequired", "dependencies"),
        *("unevaluatedProperties", "unevaluatedItems", "contains", "uniqueItems"),
    }
)
# beside `properties`; each applies to other values
_OF_PARTS = ("additionalProperties", "items", "prefixItems", "additionalItems")
# the only schema for a value if no keyword stands beside them; allOf only with one schema
_BRANCHES = ("anyOf", "allOf")
_OWN = frozenset({"properties", "required", "minProperties", "maxProperties", *_OF_PARTS})


def closed(text: str) -> str:
    """`text` with `additionalProperties: false` in each object schema that lists properties and does not
    mention others.

    In JSON Schema such an object is open, and few schemas close it. A model then invents further names, and a
    program that calls `f(**arguments)` fails. An object is closed only if a single schema applies to it and
    requires no other name. It stays open if several schemas apply together (`allOf`; a `$ref` or `anyOf`
    beside `properties`; `not`), and in a `oneOf`, whose branches may exclude each other by open properties.
    So every value of the closed schema is valid for the given one, and a satisfiable schema stays
    satisfiable.
    """
    try:
        root = json.loads(text)
        closable = [schema for schema in _alone(root) if _is_closable(schema)]
    except (ValueError, LookupError, TypeError, RecursionError):
        return text  # not a schema, or an unsupported reference: the compiler reports it
    for schema in closable:
        schema["additionalProperties"] = False
    return json.dumps(root) if closable else text


def _is_closable(schema: dict[str, Any]) -> bool:
    named, required = schema.get("properties"), schema.get("required", [])
    is_open = not schema.keys().isdisjoint({"additionalProperties", "minProperties", *_JOINING})
    return (
        not is_open
        and isinstance(named, dict)
        and isinstance(required, list)
        and set(map(str, required)) <= named.keys()
    )


def _alone(root: Any) -> Iterator[dict[str, Any]]:
    """Schemas that are the only ones for their values wherever they are used. Excludes a schema that is
    combined with others anywhere, and all schemas below it."""
    found: dict[int, tuple[Any, bool]] = {}  # by identity
    line = [(root, True)]
    while line:
        node, alone = line.pop()
        if not isinstance(node, dict | list) or (id(node) in found and found[id(node)][1] <= alone):
            continue
        if node is not root and _has_base(node):
            raise LookupError("references in it begin there")
        alone = alone and not _joins(node)
        found[id(node)] = node, alone
        line += [(one, alone) for one in _parts(node, alone)]
        if isinstance(node, dict) and isinstance(ref := node.get("$ref"), str):
            line.append((_referred(root, ref), alone))
    return (node for node, alone in found.values() if alone and isinstance(node, dict))


def _joins(node: dict[str, Any] | list[Any]) -> bool:
    if isinstance(node, list) or node.keys().isdisjoint(_JOINING):
        return False
    is_one = len(node.keys() & (_JOINING | _OWN)) == 1 and not node.keys().isdisjoint({"$ref", *_BRANCHES})
    return not is_one or len(node.get("allOf", "1")) != 1


def _parts(node: dict[str, Any] | list[Any], alone: bool) -> Iterable[Any]:
    """Schemas inside a schema or a list of schemas. If it is not alone, everything that might be a schema,
    plain values included; these are not changed."""
    if isinstance(node, list):
        return node
    if not alone:
        return node.values()
    named = node.get("properties")
    return [
        *(node.get(name) for name in (*_OF_PARTS, *_BRANCHES)),
        *(named.values() if isinstance(named, dict) else ()),
    ]


def _referred(root: Any, ref: str) -> Any:
    """Only references from the root, without escapes."""
    if "~" in ref or "%" in ref or not f"{ref}/".startswith("#/"):
        raise LookupError(ref)
    node = root
    for name in ref.split("/")[1:]:
        node = node[int(name) if isinstance(node, list) else name]
        if _has_base(node):
            raise LookupError(ref)
    return node


def _has_base(node: Any) -> bool:
    return isinstance(node, dict) and any(isinstance(node.get(name), str) for name in ("$id", "id"))
