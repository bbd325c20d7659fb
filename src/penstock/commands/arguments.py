"""Shared parts of commands' arguments: types, groups of flags, and the conversion to a config. Owns no
command.

Nothing here needs torch, so that `--help` and argument errors do not either.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from penstock.commands import vllm_flags
from penstock.config import (
    ADMISSIONS,
    EVICTIONS,
    PROMISES,
    RESIDENCIES,
    SCHEDULINGS,
    SCORERS,
    WEIGHT_FORMS,
    Config,
    EngineConfig,
    GenerationConfigName,
    KvConfig,
    LoraConfig,
    ModelSource,
    OffloadConfig,
    SanitizeConfig,
    SpeculationConfig,
    place_of,
)
from penstock.contract import SamplingParams
from penstock.errors import ConfigError, InvalidRequest
from penstock.kv.tiers.remote import KINDS, schemes

_MOST_IN_USAGE = 8  # flags
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.+", re.DOTALL)
# by setting of a tier: the flag that it needs
_BELONGS_TO = {"ssd_gib": "ssd_dir", "ssd_admission": "ssd_dir", "remote_timeout_s": "remote"}


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Hides defaults that say nothing: None, a switch that is off, an empty list. With many flags, the usage
    line shows only required ones: each flag has its own line below."""

    def add_usage(self, usage: str | None, actions: Any, groups: Any, prefix: str | None = None) -> None:
        needed = [action for action in actions if action.required or not action.option_strings]
        if len(actions) - len(needed) > _MOST_IN_USAGE:
            self._prog, actions, groups = f"{self._prog} [options]", needed, ()
        super().add_usage(usage, actions, groups, prefix)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default is None or action.default is False or action.default in ([], ())
        return action.help if silent else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Errors become ours; abbreviated flags are refused, since a new flag could change what they mean."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", _Help)
        super().__init__(allow_abbrev=False, **options)

    # each command refuses what it does not know by itself
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(
                "; ".join(
                    [f"unrecognized arguments: {' '.join(unknown)}", *filter(None, map(self._hint, unknown))]
                )
            )
        return found, unknown

    def show_help(self, _: argparse.Namespace) -> int:
        """What a command does that needs another word."""
        self.print_help()
        return 0

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see `{self.prog} --help`)")

    def _hint(self, argument: str) -> str | None:
        flag = argument.partition("=")[0]
        if not flag.startswith("-"):
            return None
        if (ours := vllm_flags.ours(flag)) is not None:
            return f"{flag} is vLLM's; here: {ours}"
        close = difflib.get_close_matches(flag, self._option_string_actions, 1)
        return f"did you mean {close[0]}?" if close else None


def number(group: Any, flag: str, help: str, default: Any = None, kind: Callable[[str], Any] = int) -> None:
    """A flag with one number, of which `kind` says what it may be."""
    group.add_argument(
        flag, type=kind, default=default, metavar="N" if kind in (int, positive) else "X", help=help
    )


def engine_flags() -> argparse.ArgumentParser:
    """A parent parser for commands that run the engine. Parents share their actions, so each command gets its
    own."""
    parent = Parser(add_help=False)
    _model_flags(parent.add_argument_group("model"))
    _memory_flags(parent.add_argument_group("KV memory"))
    _offload_flags(parent.add_argument_group("KV offload"))
    _step_flags(parent.add_argument_group("scheduling"))
    _speculation_flags(parent.add_argument_group("speculative decoding"))
    safety = parent.add_argument_group("safety")
    text = "check the order of every KV access; strict stops the engine at the first finding"
    safety.add_argument(
        "--sanitize", nargs="?", const="report", default="off", choices=("report", "strict"), help=text
    )
    safety.add_argument("--sanitize-json", metavar="FILE", help="write the findings there")
    text = "also spoil slots before they are written, and compare blocks that leave and return"
    safety.add_argument("--sanitize-bytes", action="store_true", help=text)
    return parent


def _speculation_flags(group: Any) -> None:
    text = (
        "verify several proposed tokens in one step: ngram looks for what followed the same tokens before, "
        "mtp[:PATH] has a head that was trained for the model, draft:PATH a smaller model with the same "
        "tokens (unset: one token at a time)"
    )
    group.add_argument("--speculate", metavar="PROPOSER", help=text)
    number(
        group,
        "--speculate-tokens",
        "proposed tokens of one request in one step at most (unset: 8 for ngram, 4 for mtp and draft)",
    )


def _model_flags(group: Any) -> None:
    source = ModelSource()
    model_flag(group)
    text = "dummy: random weights, nothing is read from disk"
    group.add_argument("--load-format", choices=("auto", "dummy"), default=source.load_format, help=text)
    device_flag(group)
    dtype_flag(group)
    weights_flag(group)
    text = (
        "on the CPU: the same bits for the same tokens, whether they are computed or reused, alone or in a "
        "batch; prompts take longer"
    )
    group.add_argument("--deterministic", action="store_true", help=text)
    number(group, "--seed", "of dummy weights, and of requests that bring no seed of their own", 0)


def _memory_flags(group: Any) -> None:
    number(group, "--block-tokens", "tokens in one KV block", KvConfig().block_tokens)
    kv_gib_flag(group)
    number(group, "--device-kv-blocks", "the same in blocks; give one of the two")
    text = "reuse no KV across requests; with offload: none on the device, all from colder tiers"
    group.add_argument("--no-prefix-cache", action="store_true", help=text)
    text = (
        "tokens of one sequence that are on the device at most, the rest in host memory "
        "(unset: all where they fit, else half of the device)"
    )
    number(group, "--kv-resident-tokens", text)
    text = (
        "what a sequence that does not fit attends to while it decodes: all of its context, or what is on "
        "the device"
    )
    group.add_argument("--kv-residency", choices=RESIDENCIES, default=KvConfig().residency, help=text)
    text = "with scored residency: tokens A to B-1 are always on the device"
    group.add_argument("--kv-pin-spans", type=_spans, default=(), metavar="A-B,...", help=text)
    text = "with scored residency: which other parts are on the device"
    group.add_argument("--kv-scorer", choices=SCORERS, default=KvConfig().scorer, help=text)


def _offload_flags(group: Any) -> None:
    offload = OffloadConfig()
    text = "keep KV in host memory beyond its time on the device"
    group.add_argument(
        "--kv-offload", action=argparse.BooleanOptionalAction, default=offload.enabled, help=text
    )
    number(
        group,
        "--kv-offload-host-gib",
        "GiB of host memory for KV (unset: 4, or a quarter of what is free)",
        kind=float,
    )
    group.add_argument(
        "--eviction", choices=EVICTIONS, default=offload.eviction, help="what a full tier forgets first"
    )
    ssd_dir_flag(group, required=False)
    # No defaults here: given without their tier, these flags are refused.
    number(group, "--kv-offload-ssd-gib", f"GiB of disk at most (unset: {offload.ssd_gib:g})", kind=float)
    text = (
        "which blocks are written to disk: all, those used twice, those that leave host memory (unset: "
        f"{offload.ssd_admission})"
    )
    group.add_argument("--kv-offload-ssd-admission", choices=ADMISSIONS, help=text)
    remote_flags(group)


def remote_flags(group: Any) -> None:
    offload = OffloadConfig()
    kinds = ", ".join(f"{kind}://" for kind in KINDS)
    group.add_argument(
        "--kv-offload-remote",
        type=_store_url,
        metavar="URL",
        help=f"a store that several engines share: {kinds}",
    )
    text = f"seconds for one call to it; longer means that it is down (unset: {offload.remote_timeout_s:g})"
    number(group, "--kv-offload-remote-timeout-s", text, kind=float)


def ssd_dir_flag(group: Any, required: bool) -> None:
    group.add_argument(
        "--kv-offload-ssd-dir",
        type=_named,
        required=required,
        metavar="DIR",
        help="where KV blocks outlive the process",
    )


def _step_flags(group: Any) -> None:
    engine = EngineConfig()
    max_model_len_flag(group)
    number(group, "--max-batch", "requests that run at once", engine.max_batch)
    number(group, "--prefill-chunk", "prompt tokens in one step at most; 0: 512 on the CPU, 8192 on CUDA", 0)
    text = (
        "milliseconds that prompts may take of a step while others get tokens from it; 0: no limit (unset: "
        "150 on CUDA, 0 on the CPU)"
    )
    number(group, "--prefill-chunk-ms", text, kind=float)
    text = "promise X times the KV memory; over 1 may retract requests"
    number(group, "--overcommit", text, engine.overcommit, float)
    text = "a request needs room for what it is likely to write (expected), or for all that it may (lifetime)"
    group.add_argument("--admission", choices=PROMISES, default=engine.admission, help=text)
    text = (
        "which waiting request runs next: cost: the one that is cheapest to start, within a bound; fifo: "
        "the oldest"
    )
    group.add_argument("--scheduling", choices=SCHEDULINGS, default=engine.scheduling, help=text)
    text = "with --scheduling cost: no request is overtaken by one that arrived more than S seconds later"
    group.add_argument(
        "--max-overtaken-s", type=float, default=engine.max_overtaken_s, metavar="S", help=text
    )
    group.add_argument(
        "--no-capture", action="store_true", help="run decode steps eagerly instead of as captured replays"
    )


def model_flag(group: Any) -> None:
    names = "smollm2-135m; for dummy weights also qwen3-4b, qwen3-0.6b, tiny-qwen3, tiny-llama"
    text = (
        f"a built-in name ({names}), a GGUF file, a directory with safetensors and a config, or ORG/NAME on "
        "the Hugging Face hub"
    )
    group.add_argument("--model", default=ModelSource().model, metavar="NAME|PATH", help=text)


def device_flag(group: Any) -> None:
    group.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: cuda where there is a usable GPU",
    )


def dtype_flag(group: Any) -> None:
    choices = ("auto", "float32", "bfloat16")
    group.add_argument(
        "--dtype",
        choices=choices,
        default=ModelSource().dtype,
        help="auto: float32 on the CPU, bfloat16 on CUDA",
    )


def weights_flag(group: Any) -> None:
    text = (
        "form of matrices on the CPU; auto: what this CPU runs fastest, measured once: 8 bits, or 4 where "
        "the file has 4; float32: exact"
    )
    group.add_argument("--weights", choices=WEIGHT_FORMS, default=ModelSource().weights, help=text)


def kv_gib_flag(group: Any) -> None:
    number(
        group,
        "--device-kv-gib",
        "GiB for KV (unset: 1 on the CPU, what weights leave free on CUDA)",
        kind=float,
    )


def max_model_len_flag(group: Any) -> None:
    text = (
        "tokens of prompt and output together (unset: all the model and memory allow; dummy weights allow "
        "any)"
    )
    number(group, "--max-model-len", text)


def sampling_flags(temperature: float, max_tokens: int) -> argparse.ArgumentParser:
    """A parent for the commands that write text."""
    parent = Parser(add_help=False)
    group = parent.add_argument_group("sampling")
    number(
        group, "--max-tokens", f"tokens to write at most (unset: {max_tokens}, or what the context leaves)"
    )
    number(group, "--temperature", "0: always the likeliest token", temperature, float)
    number(group, "--top-p", "sample from the likeliest tokens that sum to this probability", 1.0, float)
    number(group, "--top-k", "sample from this many likeliest tokens; 0: off", 0)
    number(group, "--min-p", "drop tokens below this share of the likeliest one's probability", 0.0, float)
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be given several times",
    )
    parent.set_defaults(default_max_tokens=max_tokens)
    return parent


def lora_flag(several: bool) -> argparse.ArgumentParser:
    parent = Parser(add_help=False)
    group = parent.add_argument_group("adapters")
    times = "may be given several times" if several else "answers come from it"
    group.add_argument(
        "--lora",
        action="append",
        type=_adapter,
        default=[],
        metavar="NAME=PATH",
        help=f"a PEFT adapter directory; {times}",
    )
    return parent


def config_of(args: argparse.Namespace) -> Config:
    # random weights have no longest context
    positions = args.max_model_len if args.load_format == "dummy" else None
    # other commands have defaults of their own
    generation_config: GenerationConfigName = getattr(args, "generation_config", "none")
    model = ModelSource().model if args.model is None else args.model
    return Config(
        source=ModelSource(
            model,
            args.load_format,
            args.device,
            args.dtype,
            args.seed,
            positions,
            generation_config,
            args.weights,
            args.deterministic,
        ),
        kv=KvConfig(
            args.block_tokens,
            args.device_kv_gib,
            args.device_kv_blocks,
            not args.no_prefix_cache,
            args.kv_resident_tokens,
            args.kv_residency,
            args.kv_pin_spans,
            args.kv_scorer,
        ),
        engine=EngineConfig(
            args.max_model_len,
            args.max_batch,
            args.prefill_chunk,
            args.overcommit,
            args.scheduling,
            args.max_overtaken_s,
            capture=not args.no_capture,
            seed=args.seed,
            admission=args.admission,
            prefill_chunk_ms=args.prefill_chunk_ms,
        ),
        offload=_offload_of(args),
        sanitize=SanitizeConfig(args.sanitize, args.sanitize_json, args.sanitize_bytes),
        lora=LoraConfig(tuple(getattr(args, "lora", ())), getattr(args, "lora_dir", None)),
        speculation=SpeculationConfig(args.speculate, args.speculate_tokens),
    )


def _offload_of(args: argparse.Namespace) -> OffloadConfig:
    """A flag of a missing tier would do nothing, so it is refused."""
    given: dict[str, Any] = {}
    for name, tier in _BELONGS_TO.items():
        if (value := getattr(args, f"kv_offload_{name}")) is None:
            continue
        if getattr(args, f"kv_offload_{tier}") is None:
            raise ConfigError(
                f"--kv-offload-{name.replace('_', '-')} needs --kv-offload-{tier.replace('_', '-')}"
            )
        given[name] = value
    return OffloadConfig(
        args.kv_offload,
        args.kv_offload_host_gib,
        args.eviction,
        ssd_dir=args.kv_offload_ssd_dir,
        remote=args.kv_offload_remote,
        **given,
    )


def config_with_one_lora(args: argparse.Namespace) -> Config:
    """For commands whose answers come from one model."""
    config = config_of(args)
    if len(config.lora.adapters) > 1:
        names = ", ".join(name for name, _ in config.lora.adapters)
        raise ConfigError(
            f"argument --lora: answers can come from one adapter, and {len(config.lora.adapters)} are "
            f"given: {names}"
        )
    return config


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    """With `max_tokens` as given or by default; a command lowers the default where the context leaves
    less."""
    try:
        return SamplingParams(
            max_tokens=args.default_max_tokens if args.max_tokens is None else args.max_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            stop=tuple(args.stop),
            ignore_eos=getattr(args, "ignore_eos", False),
        )
    except InvalidRequest as error:
        raise ConfigError(f"argument --{(error.param or '').replace('_', '-')}: {error}") from None


def counts(text: str) -> tuple[int, ...]:
    """1,8,32 -> (1, 8, 32)"""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of positive whole numbers such as 1,8,32")
    return tuple(dict.fromkeys(numbers))


def _spans(text: str) -> tuple[tuple[int, int], ...]:
    """0-64,1000-1500 -> ((0, 64), (1000, 1500))"""
    if not re.fullmatch(r"\d+-\d+(,\d+-\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of spans of tokens such as 0-64,1000-1500")
    return tuple((int(first), int(end)) for first, end in (part.split("-") for part in text.split(",")))


def _adapter(text: str) -> tuple[str, str]:
    """name=path"""
    name, equals, path = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} must be a name and a directory, as in name=path")
    return name, path


def _named(text: str) -> str:
    """A path to nothing would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    return text


def _store_url(text: str) -> str:
    """No message repeats it: it may have a password in it."""
    scheme, colon, rest = text.partition("://")
    if scheme not in (known := schemes()) or not colon or not rest:
        raise argparse.ArgumentTypeError(
            f"it must be the URL of a store that begins with {', '.join(f'{kind}://' for kind in known)}"
        )
    return text


def without_secrets(message: str, argv: Sequence[str]) -> str:
    """`message` with every URL of the command line as it may be shown, wherever it was typed."""
    for url in (found[0] for argument in argv if (found := _URL.search(argument))):
        for written in (url, repr(url)[1:-1]):
            message = message.replace(written, place_of(url))
    return message


def positive(text: str) -> int:
    (number, *more) = counts(text)
    if more:
        raise argparse.ArgumentTypeError(f"{text!r} is not one positive whole number")
    return number


def new_file(text: str) -> Path:
    """A file that can be written later: found out now, not after minutes of work."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be written: it is a folder, or its folder does not exist"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: permission denied")
    return path


def picture(text: str) -> Path:
    if not text.endswith((".png", ".svg", ".pdf")):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .png, .svg or .pdf")
    return new_file(text)
