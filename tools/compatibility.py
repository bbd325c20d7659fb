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
# Fields of OpenAI's and vLLM's APIs that the schema has never heard of. One that it learns leaves this list
# by itself.
ELSEWHERE = (
    "allowed_token_ids", "chat_template", "guided_choice", "guided_grammar", "guided_json", "guided_regex",
    "include_reasoning",
    "kv_transfer_params", "logits_processors", "mm_processor_kwargs", "prompt_embeds", "prompt_logprobs",
    "request_id",
    "structured_outputs", "thinking_token_budget", "truncate_prompt_tokens", "vllm_xargs",
)  # fmt: skip


# Of a type that one word does not describe.
SOME = {
    "context_management": "edits of the type `clear_thinking_20251015`, or none",
    "input[].caller": "of the type `direct`",
    "messages[].content[].caller": "of the type `direct`",
}


def tables() -> str:
    lines = ["| field | `/v1/completions` | `/v1/chat/completions` | |", "|---|---|---|---|", *_rows()]
    told = {*hints(schema.CompletionBody), *hints(schema.ChatBody), *(row.path for row in ignored.ROWS)}
    unknown = [name for name in ELSEWHERE if name not in told]
    lines += [
        "",
        "Fields of OpenAI's or vLLM's that are not known here, and so refused: "
        + ", ".join(f"`{name}`" for name in unknown)
        + ".",
    ]
    for path, body in DOORS.items():
        lines += [
            "",
            f"Fields "
            f"of "
            f"`{path}` "
            f"that "
            f"are "
            f"honoured: "
            f"{_listed([name for name, hint in hints(body).items() if hint is not NoneType])}.",
        ]
    lines += [
        "",
        "| field without effect | of | why it is taken | values | |",
        "|---|---|---|---|---|",
        *_without_effect(),
    ]
    lines += ["", "| object | fields that are taken | taken as null only |", "|---|---|---|"]
    for name, kind in PARTS.items():
        taken = [field for field, hint in hints(kind).items() if hint is not NoneType]
        null = [field for field, hint in hints(kind).items() if hint is NoneType]
        lines.append(f"| {name if ' ' in name else f'`{name}`'} | {_listed(taken)} | {_listed(null)} |")
    return "\n".join(lines)


def hints(kind: type[Any]) -> dict[str, Any]:
    """Fields and their types, in the order of their names; `None` alone is a field that is known and not
    supported."""
    found = get_type_hints(kind)
    return {name: found[name] for name in sorted(kind.__struct_fields__)}


def _rows() -> Iterator[str]:
    known = {route: hints(body) for route, body in BODIES.items()}
    for field in sorted(set().union(*known.values())):
        cells = [_cell(field, known[route]) for route in BODIES]
        yield f"| `{field}` | {' | '.join(cells)} | {_note(field)} |"


def _without_effect() -> Iterator[str]:
    for row in sorted(ignored.ROWS, key=lambda row: (row.meaning == "change", row.path)):
        routes = (
            ", ".join(f"`{ROUTES[api]}`" for api in row.apis.split())
            if len(row.apis.split()) < len(ROUTES)
            else "all"
        )
        yield f"| `{row.path}` | {routes} | {ignored.MEANINGS[row.meaning]} | {_values(row)} | {row.why} |"


def _values(row: ignored.IgnoredField) -> str:
    if row.meaning == "change":
        return "refused"
    if isinstance(row.takes, tuple):
        return ", ".join(f"`{json.dumps(value)}`" for value in row.takes)
    inner = get_args(row.takes)[0] if get_origin(row.takes) is list and get_args(row.takes) else row.takes
    if get_origin(inner) is Literal:
        listed = ", ".join(f"`{json.dumps(value)}`" for value in get_args(inner))
        return listed if inner is row.takes else f"some of {listed}"
    return SOME.get(row.path, "any")


def _cell(field: str, known: dict[str, Any]) -> str:
    if field not in known:
        return "refused"
    if known[field] is NoneType:
        return "null only"
    return "yes"


def _note(field: str) -> str:
    if field == "response_format":
        return "types: " + ", ".join(f"`{name}`" for name in _types(get_type_hints(schema.ChatBody)[field]))
    return ""


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
