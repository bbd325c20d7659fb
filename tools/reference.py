"""Writes the reference as Markdown: flags from the parsers, settings of a configuration file, routes and
fields from the types that requests are decoded with, metrics from their tables. Owns the layout of these
pages, and none of what they say.

python tools/reference.py FOLDER    writes cli.md, config.md, http.md and metrics.md
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from penstock.cli import make_parser
from penstock.contract import SamplingParams
from penstock.flags import SETTINGS
from penstock.server import metrics, routes
from penstock.server.about import ROUTES, openapi
from penstock.server.faults import KINDS
from penstock.server.schema import OwnFields
from penstock.settings_file import options_of
from penstock.settings_file import type_of as type_of_setting

_MADE = "<!-- Made by tools/reference.py from the source: change it there. -->"
_UNSET = re.compile(r" ?\((?:unset|default): (?P<default>.*)\)")
_WHEN = {
    "engine": "Always",
    "offload": "With a tier behind the device",
    "drafts": "While drafts are verified",
    "sanitizer": "With `--sanitize`",
    "requests": "Requests as clients saw them",
    "build": "The build",
    "vLLM": "Under vLLM's names",
}
_SAMPLING = {one.name: one.default for one in fields(SamplingParams) if one.name != "max_tokens"}

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "list of strings"}

Row = tuple[str, ...]


def table(titles: Row, rows: Iterable[Row]) -> Iterator[str]:
    yield _line(titles)
    yield _line(("---",) * len(titles))
    yield from map(_line, rows)
    yield ""


def _line(cells: Row) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def prose(text: str) -> str:
    """Nothing in it is HTML."""
    return text.replace("<", "&lt;")


def code(text: object) -> str:
    return f"`{text}`"


# ------------------------------------------------------------------------------------------------- commands


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Commands that do something, in the order of the help."""
    below = subcommands(parser)
    if not below:
        yield parser
    for one in below.values():
        yield from leaves(one)


def takes(action: argparse.Action) -> str:
    """What a flag takes: its choices, or its placeholder and rule."""
    if action.choices is not None:
        optional = action.nargs == "?" and action.option_strings
        return (", ".join(map(code, action.choices))) + (", or nothing" if optional else "")
    if action.nargs == 0:
        return ""
    shown = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    one = SETTINGS.get(action.dest)
    rule = f", {one.rule}" if one is not None and one.rule is not None and one.kind is not str else ""
    several = " ..." if action.nargs in ("+", "*") else ""
    return f"{code(shown + several)}{rule}"


def default_and_help(action: argparse.Action) -> tuple[str, str]:
    """What is unset says what it is then in brackets at the end of its help."""
    text = action.help or ""
    if (found := _UNSET.search(text)) is not None:
        return found["default"], text[: found.start()] + text[found.end() :]
    if action.default is True:
        return "on", text
    silent = action.default in (None, [], argparse.SUPPRESS) or action.default is False or action.required
    return "" if silent else code(_text(action.default)), text


def _text(value: object) -> str:
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def flag_row(action: argparse.Action) -> Row:
    names = ", ".join(map(code, action.option_strings)) or code(action.metavar or action.dest)
    default, text = default_and_help(action)
    return (names, takes(action), "required" if action.required else default, prose(text))


def shown_groups(parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[Row]]]:
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if not isinstance(action, argparse._HelpAction)]
        if actions:
            title = (group.title or "").replace("positional ", "")
            yield title, [flag_row(action) for action in actions]


def command(parser: argparse.ArgumentParser, seen: dict[str, tuple[str, list[Row]]]) -> Iterator[str]:
    """A group that an earlier command has, too, is shown there; here only the rows that differ."""
    words = parser.prog
    yield from (f"## {words}", "", parser.description or "", "")
    same: dict[str, list[str]] = {}
    for title, rows in shown_groups(parser):
        first, known = seen.setdefault(title, (words, rows))
        if first != words and {row[0] for row in rows} == {row[0] for row in known}:
            same.setdefault(first, []).append(title)
            rows = [row for row in rows if row not in known]  # with another default
        if rows:
            yield from (f"### {title}: {words.removeprefix('penstock ')}", "")
            yield from table(("flag", "takes", "default", ""), rows)
    for first, titles in same.items():
        anchor = first.replace(" ", "-")
        yield from (f"As [{first}](#{anchor}): {', '.join(titles)}.", "")


def cli_page() -> Iterator[str]:
    yield from ("# Reference: the command line", "", _MADE, "")
    seen: dict[str, tuple[str, list[Row]]] = {}
    for parser in leaves(make_parser()):
        yield from command(parser, seen)


# ------------------------------------------------------------------------------------------------------- HTTP


def type_of(schema: Mapping[str, Any]) -> str:
    """Of a JSON schema, in words; links lead to the objects below."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        kinds = [type_of(one) for one in schema["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds)) or "null"
    if "enum" in schema:
        return ", ".join(code(one) for one in schema["enum"])
    if "const" in schema:
        return code(schema["const"])
    kind = schema.get("type")
    if kind == "array":
        return _array(schema)
    if kind == "object":
        inner = schema.get("additionalProperties")
        return f"object of {type_of(inner)}" if isinstance(inner, dict) and inner else "object"
    return str(kind or "any")


def _array(schema: Mapping[str, Any]) -> str:
    if "prefixItems" in schema:
        return f"[{', '.join(map(type_of, schema['prefixItems']))}]"
    items = type_of(schema.get("items") or {})
    return f"list of ({items})" if " or " in items else f"list of {items}"


def bounds_of(schema: Mapping[str, Any]) -> str:
    """Its limits, in words."""
    parts = [bounds_of(one) for one in schema.get("anyOf", ()) if one.get("type") != "null"]
    for unit, low, high in (
        ("", "minimum", "maximum"),
        (" characters", "minLength", "maxLength"),
        (" items", "minItems", "maxItems"),
        (" fields", "minProperties", "maxProperties"),
    ):
        parts.append(_between(schema.get(low), schema.get(high), unit))
    if (above := schema.get("exclusiveMinimum")) is not None:
        parts.append(f"above {above:g}")
    if "pattern" in schema:
        parts.append(code(schema["pattern"]))
    return ", ".join(dict.fromkeys(filter(None, parts)))


def _between(low: float | None, high: float | None, unit: str) -> str:
    if low is None and high is None:
        return ""
    low, high = (None if one is None else int(one) for one in (low, high))
    unit = unit.removesuffix("s") if (low if high is None else high) == 1 else unit
    if high is None:
        return f"at least {low}{unit}"
    return f"at most {high}{unit}" if low is None else f"{low} to {high}{unit}"


def field_rows(schema: Mapping[str, Any]) -> Iterator[Row]:
    needed = schema.get("required", ())
    for name, one in schema.get("properties", {}).items():
        default = "required" if name in needed else _json(one.get("default"))
        if type_of(one) == "null":  # known, and refused with a value
            yield (code(name), "null", "", "not supported")
        else:
            yield (code(name), type_of(one), default, bounds_of(one))


def body_rows(body: type, schemas: Mapping[str, Any]) -> Iterator[Row]:
    """A field of sampling that is left out has the default of `SamplingParams`."""
    for name, kind, default, limits in field_rows(schemas[body.__name__]):
        unset = _SAMPLING.get(name.strip("`")) if issubclass(body, OwnFields) else None
        yield (name, kind, default or ("" if unset in (None, (), frozenset()) else _json(unset)), limits)


def _json(value: object) -> str:
    if value is None or value == []:
        return ""
    return code(json.dumps(value))


def http_page() -> Iterator[str]:
    yield from ("# Reference: HTTP", "", _MADE, "")
    found, told = openapi(with_key=False), set()
    bodies = found["components"]["schemas"]
    for path, row in ROUTES.items():
        for method in row.methods:
            yield from (f"## {method.upper()} {path}", "", row.about, "")
            queries = routes.QUERIES.get(row.name)
            if queries and not (method == "post" and "get" in row.methods):  # there it is in the body
                rows = [(code(name), _allowed(some)) for name, some in queries.items()]
                yield from table(("query", "value"), rows)
            if method == "post" and row.body is not None:
                told.add(row.body.__name__)
                yield from table(("field", "type", "default", "limits"), body_rows(row.body, bodies))
    yield from ("# Objects", "")
    for name, schema in bodies.items():
        if name not in told:
            yield from _object(name, schema)
    yield from ("# Errors", "", "`code` of the error object, where it has one of these:", "")
    titles = ("status", "code", "when")
    yield from table(
        titles, [(str(status), code(name), _about(kind)) for kind, status, name, _ in KINDS if name]
    )


def _object(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"## {name}", "")
    if "properties" in schema:
        yield from table(("field", "type", "default", "limits"), field_rows(schema))
    else:
        yield from (type_of(schema), "")


def _allowed(values: Sequence[str]) -> str:
    shown = [code(value) for value in values if value]
    return ", ".join(shown) or "any text"


def _about(kind: type) -> str:
    text = " ".join((kind.__doc__ or "").split())
    return re.split(r"(?<=\.) |; ", text)[0].removesuffix(".")


# ----------------------------------------------------------------------------------------- settings, metrics


def settings_page() -> Iterator[str]:
    yield from ("# Reference: settings of a configuration file", "", _MADE, "")
    yield from ("For `penstock serve --config FILE`: TOML with the names of flags, without tables.", "")
    serve = subcommands(make_parser())["serve"]
    options = {action.dest: name for name, action in options_of(serve).items()}
    for group in serve._action_groups:
        some = [action for action in group._group_actions if action.dest in options]
        rows = [setting_row(options[action.dest], action) for action in some]
        if rows:
            yield from (f"## {group.title}", "")
            yield from table(("name", "type", "default", ""), rows)


def setting_row(name: str, action: argparse.Action) -> Row:
    kind, (default, text) = _TYPES[type_of_setting(action)], default_and_help(action)
    if action.choices is not None:
        kind = ", ".join(code(f'"{choice}"') for choice in action.choices)
        kind += ", `true`" if action.nargs == "?" else ""
    elif kind != _TYPES[str] and (rule := SETTINGS[action.dest].rule) is not None:
        kind += f", {rule}"
    return (code(name), kind, "`true`" if default == "on" else default, prose(text))


def metrics_page() -> Iterator[str]:
    yield from ("# Reference: metrics", "", _MADE, "")
    for name, (lines, *fixed) in metrics.TABLES.items():
        yield from (f"## {_WHEN.get(name, name)}", "")
        rows = []
        for one in metrics.described(lines):
            labels = ",".join([*fixed, *one.labels])
            full = (
                one.name + ("_total" if one.kind == "counter" else "") + (f"{{{labels}}}" if labels else "")
            )
            rows.append((code(full), one.kind, one.about))
        yield from table(("name", "kind", ""), rows)


PAGES = {"cli.md": cli_page, "config.md": settings_page, "http.md": http_page, "metrics.md": metrics_page}


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (folder / name).write_text("\n".join(page()))


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/reference.py FOLDER")
    write(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
