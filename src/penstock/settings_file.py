"""Flags from a file: TOML with the names of a command's flags (`--config`). Owns how a value of TOML becomes
that of a flag, and where each comes from; the flags' own parser says what a value may be."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config import ModelSource, ServerConfig, place_of
from penstock.errors import ConfigError
from penstock.flags import Parser

_NOT_IN_FILES = ("help", "config", "print_config")
_WANTED = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
_FOUND = {
    **_WANTED,
    int: "an integer",
    bool: "a boolean",
    float: "a float",
    list: "an array",
    dict: "a table",
}
_UNSET = re.compile(r"\(unset: (.*)\)$")
# values of flags that are not written as they are held
_WRITTEN: Mapping[str, Callable[[Any], Any]] = {
    "lora": lambda adapters: ["=".join(one) for one in adapters],
    "kv_pin_spans": lambda spans: ",".join(f"{first}-{end}" for first, end in spans),
}


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """What a file gives, by the destination of each flag."""

    path: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)  # file and line
    texts: Sequence[str] = ()  # that may have a secret in them
    flags: frozenset[str] = frozenset()  # given on the command line, which counts

    def explained(self, message: str) -> str:
        """Says which flags in a message are the file's."""
        places = [
            f"{flag} is in {self.places[name]}"
            for name in self.values.keys() - self.flags
            if re.search(rf"{(flag := '--' + _dashed(name))}(?![\w-])", message)
        ]
        return f"{message} ({', '.join(sorted(places))})" if places else message


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def add_settings_file(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("settings file")
    text = "TOML with flags by their names, without the dashes in front; a flag that is given wins"
    group.add_argument("--config", metavar="FILE", help=text)
    text = "print every setting and where it comes from, and end"
    group.add_argument("--print-config", action="store_true", help=text)
    parser.set_defaults(parser=parser, file=SettingsFile())


def take_in(args: argparse.Namespace, argv: Sequence[str]) -> SettingsFile:
    """Gives `args` what the file has and no flag gives."""
    if "file" not in args:
        return SettingsFile()
    words = {word.partition("=")[0] for word in argv}
    flags = {action.dest for action in options_of(args.parser).values() if words & {*action.option_strings}}
    if getattr(args, "served_model", None) is not None:
        flags.add("model")
    read = {} if args.config is None else _read(args.config, args.parser)
    values = {name: value for name, (value, _) in read.items()}
    places = {name: place for name, (_, place) in read.items()}
    texts = [value for value in values.values() if isinstance(value, str)]
    args.file = file = SettingsFile(args.config or "", values, places, texts, frozenset(flags))
    for name in values.keys() - flags:
        setattr(args, name, values[name])
    _warn(file)
    return file


def _warn(file: SettingsFile) -> None:
    secrets = [_dashed(name) for name in file.values if _is_secret(name, file.values[name])]
    if secrets and Path(file.path).stat().st_mode & 0o044:
        text = f"others can read {file.path}, which has {' and '.join(secrets)}; run: chmod 600 {file.path}"
        print(f"penstock: warning: {text}", file=sys.stderr)


def _is_secret(name: str, value: Any) -> bool:
    return value is not None and (name == "api_key" or (name == "kv_offload_remote" and "@" in value))


# --------------------------------------------------------------------------------------------------- the file


def options_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """What a file may have, by the first name of its flag."""
    actions = [one for one in parser._actions if one.option_strings and one.dest not in _NOT_IN_FILES]
    return {action.option_strings[0].removeprefix("--"): action for action in actions}


def _read(path: str, parser: Parser) -> dict[str, tuple[Any, str]]:
    """Value and place of each setting."""
    try:
        text = Path(path).read_text("utf-8")
        found = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # not TOML, which names the line, or not UTF-8
        raise ConfigError(f"{path} is not TOML: {error}") from None
    options, read = options_of(parser), dict[str, tuple[Any, str]]()
    for key, value in found.items():
        name, place = _dashed(key), f"{path}{_line(text, key)}"
        action = options.get(name)
        if isinstance(value, dict):
            raise ConfigError(f"{place}: {key} is a table; settings stand in the file without tables")
        if action is None:
            raise ConfigError(f"{place}: {_unknown(name, parser)}")
        if action.dest in read:
            raise ConfigError(f"{place}: {name} is given twice, with dashes and with underscores")
        try:
            read[action.dest] = (_value(name, action, value, parser.prog), place)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from None
    return read


def _line(text: str, key: str) -> str:
    found = re.search(rf"""^[ \t]*\[*["']?{re.escape(key)}(?![\w-])""", text, re.MULTILINE)
    return f", line {text.count(chr(10), 0, found.start()) + 1}" if found else ""


def _unknown(name: str, parser: Parser) -> str:
    if name.startswith("no-") and name.removeprefix("no-") in options_of(parser):
        return f"{name} is no setting: write {name.removeprefix('no-')} = false"
    hint = parser.hint(f"--{name}")
    return f"{name} is no setting of `{parser.prog}`" + (f"; {hint}" if hint else "")


def type_of(action: argparse.Action) -> type:
    """bool, int, float, str, or list: of strings."""
    if action.nargs == 0:
        return bool
    if isinstance(action, argparse._AppendAction) or action.nargs == "+":
        return list
    return action.type if action.type in (int, float) else str


def _value(name: str, action: argparse.Action, value: Any, prog: str) -> Any:
    """By the flag's own action, so that choices, rules and messages are the same."""
    kind, flag = type_of(action), action.option_strings[0]
    if kind is bool:
        return _of_type(bool, name, value)
    given = value if kind is list and isinstance(value, list) else [value]
    if not given:
        return action.default
    if action.nargs == "?" and value is True:
        given = []
    texts = [str(_of_type(str if kind is list else kind, name, one)) for one in given]
    reader = Parser(prog=prog, add_help=False)
    reader._add_action(action)
    words = [flag, *texts] if action.nargs in ("+", "?") else [f"{flag}={one}" for one in texts]
    return getattr(reader.parse_args(words), action.dest)


def _of_type(kind: Any, name: str, value: Any) -> Any:
    """The message has no value: it may be a secret."""
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    found = _FOUND.get(type(value), "a date or time")
    raise ConfigError(f"{name} must be {_WANTED[kind]}, not {found}")


# ----------------------------------------------------------------------------------------------- all settings


def shown(args: argparse.Namespace) -> Iterator[str]:
    """Every setting as TOML, with where it comes from. No secrets. What is refused at a start is refused."""
    if "api_key" in args and args.api_key is None:
        args.api_key = os.environ.get("PENSTOCK_API_KEY")
    ServerConfig.of(vars(args))
    for group in args.parser._action_groups:
        actions = [action for action in options_of(args.parser).values() if action in group._group_actions]
        yield from (f"# {group.title}", *(_shown(action, args) for action in actions)) if actions else ()


def _shown(action: argparse.Action, args: argparse.Namespace) -> str:
    name, value = action.option_strings[0].removeprefix("--"), getattr(args, action.dest)
    if action.dest == "model":
        value = args.served_model if value is None and "served_model" in args else value
        value = value or ModelSource().model
    place = _origin(action.dest, value, args.file)
    is_off = action.choices is not None and value not in action.choices
    if value is None or value == [] or value == () or is_off:
        unset = _UNSET.search(action.help or "")
        return f"# {name}: {unset[1] if unset else 'unset'}"
    if _is_secret(action.dest, value):
        hidden = "set" if action.dest == "api_key" else place_of(value)
        return f"# {name}: {hidden}  # {place}"
    value = _WRITTEN.get(action.dest, lambda same: same)(value)
    return f"{name} = {json.dumps(value, ensure_ascii=False, default=str)}  # {place}"


def _origin(name: str, value: Any, file: SettingsFile) -> str:
    if name in file.flags:
        return "flag"
    if name in file.values:
        return file.places[name]
    return "$PENSTOCK_API_KEY" if name == "api_key" and value is not None else "default"
