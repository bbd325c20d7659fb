"""Writes the tables of docs/compatibility.md from the types that requests are decoded with. Owns the tables;
the prose is the page's.

PYTHONPATH=src python3 tools/compatibility.py [--write]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from penstock.server import ignored, messages, responses, schema

PAGE = Path(__file__).resolve().parents[1] / "docs" / "compatibility.md"
BEGIN, END = "<!-- tables: tools/compatibility.py --write -->", "<!-- end of tables -->"
BODIES: dict[str, type[Any]] = {"completions": schema.CompletionBody, "chat": schema.ChatBody}
# Routes of other APIs: each has fields of its own.
DOORS: dict[str, type[Any]] = {
    "/v1/responses": responses.ResponsesBody,
    "/v1/messages": messages.MessagesBody,
    "/v1/messages/count_tokens": messages.CountTokensBody,
}
ROUTES = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
PARTS: dict[str, type[Any]] = {
    "message": schema.Message,
    "stream_options": schema.StreamOptions,
    "cache_hint": schema.CacheHintOptions,
    "an item of `/v1/responses`": responses.Item,
    "a tool of `/v1/responses`": responses.FunctionTool,
    "`text.format` of `/v1/responses`": responses.TextFormat,
    "a tool of `/v1/messages`": messages.CustomTool,
    "`tool_choice` of `/v1/messages`": messages.Choice,
    "`thinking` of `/v1/messages`": messages.ThinkingOptions,
    **{f"a block of the type `{kind.__struct_config__.tag}`": kind for kind in get_args(messages.Block)},
}
# Of a type that one word does not describe.
SOME = {
    "context_management": "edits of the type `clear_thinking_20251015`, or none",
    "input[].caller": "of the type `direct`",
    "messages[].content[].caller": "of the type `direct`",
}


def tables() -> str:
    lines = [*_shared()]
    for path, body in DOORS.items():
        lines += ["", f"`{path}`: {_listed(_honoured(body))}."]
    lines += ["", "### Taken without effect", "", *_taken_whatever_they_say()]
    lines += ["", "| field | of | values | note |", "|---|---|---|---|", *_taken_with_some_values()]
    lines += ["", "### Refused", "", "| field | of | why |", "|---|---|---|", *_refused()]
    lines += ["", "### Objects", ""]
    for name, kind in PARTS.items():
        null = _null_only(kind)
        only = f"; null only: {_listed(null)}" if null else ""
        lines.append(f"- {name if ' ' in name else f'`{name}`'}: {_listed(_honoured(kind))}{only}")
    return "\n".join(lines)


def hints(kind: type[Any]) -> dict[str, Any]:
    """Fields and their types, in the order of their names; `None` alone is a field that is known and not
    supported."""
    found = get_type_hints(kind)
    return {name: found[name] for name in sorted(kind.__struct_fields__)}


def _honoured(kind: type[Any]) -> list[str]:
    return [name for name, hint in hints(kind).items() if hint is not NoneType]


def _null_only(kind: type[Any]) -> list[str]:
    return [name for name, hint in hints(kind).items() if hint is NoneType]


def _shared() -> Iterator[str]:
    """Fields of completions and chats: those of both, then those of one."""
    known = {route: set(_honoured(body)) for route, body in BODIES.items()}
    both = set.intersection(*known.values())
    yield f"`/v1/completions` and `/v1/chat/completions`: {_listed(sorted(both))}."
    for route, names in known.items():
        yield ""
        yield f"`{ROUTES[route]}` alone: {_listed(sorted(names - both))}."
    null = sorted({name for body in BODIES.values() for name in _null_only(body)})
    if null:
        yield ""
        yield f"Null only: {_listed(null)}."
    types = _types(get_type_hints(schema.ChatBody)["response_format"])
    yield ""
    yield f"Types of `response_format`: {_listed(types)}."


def _routes(row: ignored.IgnoredField) -> str:
    apis = row.apis.split()
    return _listed([ROUTES[api].removeprefix("/v1/") for api in apis]) if len(apis) < len(ROUTES) else "all"


def _taken_whatever_they_say() -> Iterator[str]:
    """One line for each set of routes: their fields that may have any value."""
    found: dict[str, list[str]] = {}
    for row in sorted(ignored.ROWS):
        if row.meaning != "change" and _values(row) == "any":
            found.setdefault(_routes(row), []).append(row.path)
    for routes, paths in sorted(found.items()):
        yield f"- {routes}: {_listed(paths)}"


def _taken_with_some_values() -> Iterator[str]:
    for row in sorted(ignored.ROWS):
        if row.meaning != "change" and _values(row) != "any":
            yield f"| `{row.path}` | {_routes(row)} | {_values(row)} | {row.why} |"


def _refused() -> Iterator[str]:
    for row in sorted(ignored.ROWS):
        if row.meaning == "change":
            yield f"| `{row.path}` | {_routes(row)} | {row.why} |"


def _values(row: ignored.IgnoredField) -> str:
    if isinstance(row.takes, tuple):
        return ", ".join(f"`{json.dumps(value)}`" for value in row.takes)
    inner = get_args(row.takes)[0] if get_origin(row.takes) is list and get_args(row.takes) else row.takes
    if get_origin(inner) is Literal:
        listed = ", ".join(f"`{json.dumps(value)}`" for value in get_args(inner))
        return listed if inner is row.takes else f"some of {listed}"
    return SOME.get(row.path, "any")


def _types(hint: Any) -> list[str]:
    """The tags of the objects that a field can be."""
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    return sorted(name for kind in kinds for name in get_args(get_type_hints(kind).get("type")))


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def with_tables(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(with_tables(PAGE.read_text()))
    else:
        print(tables())
