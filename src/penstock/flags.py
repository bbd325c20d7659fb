"""Flags, for all commands and the Python interface: made from the settings of `penstock.config`, and read
back into a config. Owns the parser, how text becomes a value, and the pointers from vLLM's flags to ours.

Nothing here needs torch, so that `--help` and argument errors do not either.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from penstock.config import (
    Config,
    EngineConfig,
    ExpertsConfig,
    KvConfig,
    LoraConfig,
    ModelSource,
    OffloadConfig,
    RanksConfig,
    SanitizeConfig,
    ServerConfig,
    Setting,
    SpeculationConfig,
    TraceConfig,
    place_of,
    settings_of,
)
from penstock.contract import SamplingParams
from penstock.errors import ConfigError, InvalidRequest
from penstock.kv.tiers.remote import schemes

# titles in the help, by config; all but the last two are flags of an engine
TITLES = {
    ModelSource: "model",
    KvConfig: "KV memory",
    OffloadConfig: "KV offload",
    EngineConfig: "scheduling",
    SpeculationConfig: "speculative decoding",
    ExpertsConfig: "experts",
    SanitizeConfig: "safety",
    TraceConfig: "trace",
    RanksConfig: "several processes",
    LoraConfig: "adapters",
    ServerConfig: "server",
}
ENGINE = tuple(TITLES)[:-2]
# by name
SETTINGS = {one.name: one for config in TITLES for one in settings_of(config) if one.help}

_MOST_IN_USAGE = 8  # flags
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.+", re.DOTALL)


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Hides defaults that say nothing: None, a switch that is off, an empty list. With many flags, the usage
    line shows only required ones: each flag has its own line below."""

    def add_usage(self, usage: str | None, actions: Any, groups: Any, prefix: str | None = None) -> None:
        needed = [action for action in actions if action.required or not action.option_strings]
        if len(actions) - len(needed) > _MOST_IN_USAGE:
            self._prog, actions, groups = f"{self._prog} [options]", needed, ()
        super().add_usage(usage, actions, groups, prefix)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default is None or action.default is False or action.default == []
        return action.help if silent else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Errors become ours; abbreviated flags are refused, since a new flag could change what they mean."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **{"formatter_class": _Help, **options})

    # each command refuses what it does not know by itself
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            hints = filter(None, map(self.hint, unknown))
            self.error("; ".join([f"unrecognized arguments: {' '.join(unknown)}", *hints]))
        return found, unknown

    def show_help(self, _: argparse.Namespace) -> int:
        """What a command does that needs another word."""
        self.print_help()
        return 0

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see `{self.prog} --help`)")

    def hint(self, argument: str) -> str | None:
        flag = argument.partition("=")[0]
        if not flag.startswith("-"):
            return None
        if (ours := instead_of(flag)) is not None:
            return f"{flag} is vLLM's; here: {ours}"
        close = difflib.get_close_matches(flag, self._option_string_actions, 1)
        return f"did you mean {close[0]}?" if close else None


# ----------------------------------------------------------------------------------------- flags from configs


def engine_flags(*more: type) -> Parser:
    """A parent parser for commands that run the engine: its flags and those of more configs, each config's in
    a group of the help."""
    parent, configs = Parser(add_help=False), (*ENGINE, *more)
    groups = {TITLES[config]: parent.add_argument_group(TITLES[config]) for config in configs}
    for config in configs:
        for one in settings_of(config):
            title = one.group or TITLES[config]
            if one.help and title in groups:
                groups[title].add_argument(one.flag, **_options(one))
    return parent


def add_flags(group: Any, *names: str, **changed: Any) -> None:
    """Single flags of the configs, for commands that do not have all of them."""
    for name in names:
        group.add_argument(SETTINGS[name].flag, **_options(SETTINGS[name]), **changed)


def _options(one: Setting) -> dict[str, Any]:
    """For argparse."""
    options = {"help": one.help, "default": one.default, **one.options}
    if one.kind is bool:
        on = one.default and not one.name.startswith("no_")
        return options | {"default": on, "action": argparse.BooleanOptionalAction if on else "store_true"}
    if one.kind in (int, float):
        options = {"metavar": _METAVARS[one.kind], "type": one.kind, **options}
    if one.name in _READ:
        options["type"] = _READ[one.name]
    if one.kind is tuple:
        options["default"] = list(one.default)
    elif one.needs and one.default:  # no default here: given without what it needs, it is refused
        unset = f"{one.default:g}" if one.kind is float else one.default
        options |= {"default": None, "help": f"{one.help} (unset: {unset})"}
    return options


def number(group: Any, flag: str, help: str, default: Any = None, kind: Callable[[str], Any] = int) -> None:
    """A flag with one number, of which `kind` says what it may be."""
    group.add_argument(flag, type=kind, default=default, metavar=_METAVARS.get(kind, "X"), help=help)


def sampling_flags(parser: argparse.ArgumentParser, temperature: float, max_tokens: int) -> None:
    """For the commands that write text."""
    group = parser.add_argument_group("sampling")
    unset = f"(unset: {max_tokens}, or what the context leaves)"
    number(group, "--max-tokens", f"tokens to write at most {unset}")
    number(group, "--temperature", "0: always the likeliest token", temperature, float)
    number(group, "--top-p", "sample from the likeliest tokens that sum to this probability", 1.0, float)
    number(group, "--top-k", "sample from this many likeliest tokens; 0: off", 0)
    number(group, "--min-p", "drop tokens below this share of the likeliest one's probability", 0.0, float)
    text = "end before this text; may be given several times"
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help=text)
    parser.set_defaults(default_max_tokens=max_tokens, ignore_eos=False)


# -------------------------------------------------------------------------------------------- back to configs


def config_of(args: argparse.Namespace) -> Config:
    values = {"generation_config": "none", **vars(args)}  # commands but serve have defaults of their own
    if values.get("load_format") == "dummy":  # random weights have no longest context
        values["positions"] = values.get("max_model_len")
    return Config(**{part.name: type(part.default).of(values) for part in fields(Config)})  # type: ignore[union-attr]


def config_from(options: Mapping[str, Any]) -> Config:
    """Of flags with underscores and their values. Through the parser, so that names, defaults and errors are
    the same."""
    parser = Parser(prog="LLM", add_help=False, parents=[engine_flags(LoraConfig)])
    return config_of(parser.parse_args(typed(options)))


def typed(options: Mapping[str, Any]) -> list[str]:
    """The same on a command line. None and False: not given, but for a flag that is on by itself."""
    words: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is False and name == "kv_offload":
            words.append("--no-kv-offload")
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is not None and one is not False:
                words += [flag] if one is True else [flag, str(one)]
    return words


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    """With `max_tokens` as given or by default; a command lowers the default where the context leaves
    less."""
    names = ("temperature", "top_p", "top_k", "min_p", "ignore_eos")
    most = args.default_max_tokens if args.max_tokens is None else args.max_tokens
    try:
        return SamplingParams(most, stop=tuple(args.stop), **{name: getattr(args, name) for name in names})
    except InvalidRequest as error:
        raise ConfigError(f"argument --{(error.param or '').replace('_', '-')}: {error}") from None


def without_secrets(message: str, argv: Sequence[str]) -> str:
    """`message` with every URL of the command line as it may be shown, wherever it was typed."""
    for url in (found[0] for argument in argv if (found := _URL.search(argument))):
        for written in (url, repr(url)[1:-1]):
            message = message.replace(written, place_of(url))
    return message


# --------------------------------------------------------------------------------------------- text to values


def refused(message: str) -> NoReturn:
    raise argparse.ArgumentTypeError(message)


def counts(text: str) -> tuple[int, ...]:
    """1,8,32 -> (1, 8, 32)"""
    try:
        numbers = dict.fromkeys(map(int, text.split(",")))
    except ValueError:
        numbers = {0: None}
    if min(numbers) < 1:
        refused(f"{text!r} is no list of positive whole numbers such as 1,8,32")
    return tuple(numbers)


def positive(text: str) -> int:
    (number, *more) = counts(text)
    return number if not more else refused(f"{text!r} is not one positive whole number")


def _spans(text: str) -> tuple[tuple[int, int], ...]:
    """0-64,1000-1500 -> ((0, 64), (1000, 1500))"""
    if not re.fullmatch(r"\d+-\d+(,\d+-\d+)*", text):
        refused(f"{text!r} is no list of spans of tokens such as 0-64,1000-1500")
    return tuple((int(first), int(end)) for first, end in (part.split("-") for part in text.split(",")))


def _adapter(text: str) -> tuple[str, str]:
    """name=path"""
    name, equals, path = text.partition("=")
    return (name, path) if equals else refused(f"{text!r} must be a name and a directory, as in name=path")


def _named(text: str) -> str:
    """A path to nothing would be the current folder."""
    return text or refused("it is empty")


def _store_url(text: str) -> str:
    """No message repeats it: it may have a password in it."""
    scheme, _, rest = text.partition("://")
    kinds = ", ".join(f"{kind}://" for kind in schemes())
    known = scheme in schemes() and rest
    return text if known else refused(f"it must be the URL of a store that begins with {kinds}")


def new_file(text: str) -> Path:
    """A file that can be written later: found out now, not after minutes of work."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        refused(f"{text!r} cannot be written: it is a folder, or its folder does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        refused(f"{text!r} cannot be written: permission denied")
    return path


def picture(text: str) -> Path:
    if not text.endswith((".png", ".svg", ".pdf")):
        refused(f"{text!r} must end in .png, .svg or .pdf")
    return new_file(text)


_METAVARS: dict[Any, str] = {int: "N", positive: "N", counts: "N,N", float: "X"}
_READ: dict[str, Callable[[str], Any]] = {
    "kv_pin_spans": _spans,
    "lora": _adapter,
    "kv_offload_ssd_dir": _named,
    "kv_offload_remote": _store_url,
    "trace": lambda text: str(new_file(text)),
    "record_routing": lambda text: str(new_file(text)),
}


# ---------------------------------------------------------------------------------------------- vLLM's flags

# Names without dashes before them; what there is here, as docs/coming-from-vllm.md says it. Flags that are
# the same here are not listed.
VLLM = {
    "max-num-seqs": "`--max-batch`",
    "max-num-batched-tokens": "`--prefill-chunk` (prompt tokens of a step)",
    "enable-chunked-prefill long-prefill-token-threshold": (
        "always on; `--prefill-chunk`, `--prefill-chunk-ms`"
    ),
    "gpu-memory-utilization kv-cache-memory-bytes": (
        "`--device-kv-gib`: GiB for KV; unset it is 90 % of what weights leave free"
    ),
    "num-gpu-blocks-override": "`--device-kv-blocks`",
    "block-size": "`--block-tokens`",
    "enable-prefix-caching no-enable-prefix-caching": "on; `--no-prefix-cache` turns it off",
    "kv-offloading-size swap-space cpu-offload-gb": (
        "`--kv-offload-host-gib`: GiB of host memory for KV; of weights only experts may be there: "
        "`--experts-on-device`"
    ),
    "kv-events-config": "`--kv-events`, `--kv-events-replay`, `--kv-events-topic`",
    "kv-transfer-config kv-offloading-backend": "`--kv-offload-ssd-dir`, `--kv-offload-remote`",
    "enable-lora lora-modules": "`--lora NAME=PATH`, `--lora-dir`",
    "allowed-origins": "`--cors-origin`",
    "api-server-count": "`--api-processes`",
    "scheduling-policy": "`--scheduling`",
    "speculative-config": "`--speculate`, `--speculate-tokens`",
    "enable-auto-tool-choice": "always on; `--tool-call-parser` names the format",
    "enable-reasoning": "always on; `--reasoning-parser` names the format",
    "uvicorn-log-level disable-log-requests enable-log-requests disable-log-stats": "`--log-level`",
    "enforce-eager compilation-config": "`--no-capture` for the first; nothing is compiled",
    "tokenizer hf-config-path": "none: tokenizer and config are read from the model's own files",
    "chat-template": "none: the template of the model is used",
    "trust-remote-code": "none: no code of a model is executed",
    "tensor-parallel-size tp": "`--tensor-parallel`",
    "pipeline-parallel-size pp data-parallel-size dp": "none: several servers behind a router",
    "quantization q": "none: GGUF files are read as they are; `--weights` chooses the form on a CPU",
    "kv-cache-dtype": "none: KV has the type of `--dtype`",
}


def instead_of(flag: str) -> str | None:
    """What to take instead of `flag`, as plain text. None: it is none of vLLM's."""
    name = flag.lstrip("-").replace("_", "-")
    return next((text.replace("`", "") for names, text in VLLM.items() if name in names.split()), None)
