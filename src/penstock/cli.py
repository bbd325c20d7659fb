"""The command line: arguments -> config -> call, and errors -> one line and an exit code. Owns no work of its own.

Commands are imported when they run, so that `--help` and argument errors need neither torch nor a web framework.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from penstock import __version__
from penstock.config import (
    EVICTIONS,
    Config,
    EngineConfig,
    KvConfig,
    LoraConfig,
    ModelSource,
    OffloadConfig,
    SanitizeConfig,
    ServerConfig,
)
from penstock.contract import SamplingParams
from penstock.errors import ConfigError, InvalidRequest, PenstockError, UserError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. `--help` and `--version` raise SystemExit, as argparse has it."""
    try:
        args = make_parser().parse_args(argv)
        code: int = args.run(args)
        sys.stdout.flush()  # while a closed pipe can still be dealt with
        return code
    except PenstockError as error:
        print(f"penstock: error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, UserError) else EXIT_FAILED
    except ModuleNotFoundError as error:
        if (error.name or "penstock").partition(".")[0] == "penstock":
            raise
        print(f"penstock: error: this command needs the package {error.name}, which is not installed", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("penstock: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left. Python flushes stdout once more at exit and must not trip over that again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


class _Parser(argparse.ArgumentParser):
    """Errors become ours; abbreviated flags are refused, since a new flag could change what they mean."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.ArgumentDefaultsHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see `{self.prog} --help`)")


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="penstock", description="An LLM inference engine whose KV cache outlives the accelerator.")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_generate(commands)
    _add_chat(commands)
    _add_bench(commands)
    _add_doctor(commands)
    return parser


# ------------------------------------------------------------------------------------------------------- shared flags


def _engine_flags() -> argparse.ArgumentParser:
    """A parent for every command that runs the engine."""
    parent = _Parser(add_help=False)
    source, kv, engine, offload = ModelSource(), KvConfig(), EngineConfig(), OffloadConfig()
    model = parent.add_argument_group("model")
    _model_flag(model)
    model.add_argument(
        "--load-format", choices=("auto", "dummy"), default=source.load_format, help="dummy: random weights, nothing is read from disk"
    )
    _device_flag(model)
    model.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default=source.dtype, help="auto: float32 on the CPU, bfloat16 on CUDA"
    )
    model.add_argument("--seed", type=int, default=0, metavar="N", help="of dummy weights, and of requests that bring no seed of their own")
    memory = parent.add_argument_group("KV memory")
    memory.add_argument("--block-tokens", type=int, default=kv.block_tokens, metavar="N", help="tokens in one KV block")
    memory.add_argument(
        "--device-kv-gib", type=float, metavar="X", help="GiB for KV (unset: 1 on the CPU, what weights leave free on CUDA)"
    )
    memory.add_argument("--device-kv-blocks", type=int, metavar="N", help="the same in blocks; give one of the two")
    memory.add_argument(
        "--no-prefix-cache",
        action="store_true",
        help="reuse no KV across requests; with offload: none on the device, all from colder tiers",
    )
    tiers = parent.add_argument_group("KV offload")
    tiers.add_argument(
        "--kv-offload",
        action=argparse.BooleanOptionalAction,
        default=offload.enabled,
        help="keep KV in host memory beyond its time on the device",
    )
    tiers.add_argument(
        "--kv-offload-host-gib", type=float, metavar="X", help="GiB of host memory for KV (unset: 4, or a quarter of what is free)"
    )
    tiers.add_argument("--eviction", choices=EVICTIONS, default=offload.eviction, help="what a full tier forgets first")
    steps = parent.add_argument_group("scheduling")
    steps.add_argument(
        "--max-model-len", type=int, metavar="N", help="tokens of prompt and output together (unset: all the model and memory allow)"
    )
    steps.add_argument("--max-batch", type=int, default=engine.max_batch, metavar="N", help="requests that run at once")
    steps.add_argument(
        "--prefill-chunk", type=int, default=0, metavar="N", help="prompt tokens in one step; 0: 512 on the CPU, 8192 on CUDA"
    )
    steps.add_argument(
        "--overcommit",
        type=float,
        default=engine.overcommit,
        metavar="X",
        help="admit lifetimes of X times the KV memory; over 1 may retract requests",
    )
    steps.add_argument("--no-capture", action="store_true", help="run decode steps eagerly instead of as captured replays")
    safety = parent.add_argument_group("safety")
    safety.add_argument(
        "--sanitize",
        nargs="?",
        const="report",
        default="off",
        choices=("report", "strict"),
        help="check the order of every KV access; strict stops the engine at the first finding",
    )
    safety.add_argument("--sanitize-json", metavar="FILE", help="write the findings there")
    return parent


def _model_flag(group: Any) -> None:
    names = "smollm2-135m; for dummy weights also qwen3-4b, qwen3-0.6b, tiny-qwen3, tiny-llama"
    text = f"a built-in name ({names}), a GGUF file, or a directory with safetensors and a config"
    group.add_argument("--model", default=ModelSource().model, metavar="NAME|PATH", help=text)


def _device_flag(group: Any) -> None:
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is a usable GPU")


def _sampling_flags(temperature: float, max_tokens: int) -> argparse.ArgumentParser:
    """A parent for the commands that write text; parents share their actions, so each command gets one of its own."""
    parent = _Parser(add_help=False)
    group = parent.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=int, metavar="N", help=f"tokens to write at most (unset: {max_tokens}, or what the context leaves)"
    )
    group.add_argument("--temperature", type=float, default=temperature, metavar="X", help="0: always the likeliest token")
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="X", help="sample from the likeliest tokens that sum to this probability"
    )
    group.add_argument("--top-k", type=int, default=0, metavar="N", help="sample from this many likeliest tokens; 0: off")
    group.add_argument(
        "--min-p", type=float, default=0.0, metavar="X", help="drop tokens below this share of the likeliest one's probability"
    )
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times")
    parent.set_defaults(default_max_tokens=max_tokens)
    return parent


def _lora_flag(several: bool) -> argparse.ArgumentParser:
    parent = _Parser(add_help=False)
    group = parent.add_argument_group("adapters")
    times = "may be given several times" if several else "answers come from it"
    group.add_argument("--lora", action="append", type=_adapter, default=[], metavar="NAME=PATH", help=f"a PEFT adapter directory; {times}")
    return parent


def _config(args: argparse.Namespace) -> Config:
    return Config(
        source=ModelSource(args.model, args.load_format, args.device, args.dtype, args.seed),
        kv=KvConfig(args.block_tokens, args.device_kv_gib, args.device_kv_blocks, not args.no_prefix_cache),
        engine=EngineConfig(args.max_model_len, args.max_batch, args.prefill_chunk, args.overcommit, not args.no_capture, args.seed),
        offload=OffloadConfig(args.kv_offload, args.kv_offload_host_gib, args.eviction),
        sanitize=SanitizeConfig(args.sanitize, args.sanitize_json),
        lora=LoraConfig(tuple(getattr(args, "lora", ())), getattr(args, "lora_dir", None)),
    )


def _config_with_one_lora(args: argparse.Namespace) -> Config:
    """For commands whose answers come from one model."""
    config = _config(args)
    if len(config.lora.adapters) > 1:
        names = ", ".join(name for name, _ in config.lora.adapters)
        raise ConfigError(f"argument --lora: answers can come from one adapter, and {len(config.lora.adapters)} are given: {names}")
    return config


def _sampling(args: argparse.Namespace) -> SamplingParams:
    """With `max_tokens` as given or by default; a command lowers the default where the context leaves less."""
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


def _counts(text: str) -> tuple[int, ...]:
    """1,8,32 -> (1, 8, 32)"""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of positive whole numbers such as 1,8,32")
    return tuple(dict.fromkeys(numbers))


def _adapter(text: str) -> tuple[str, str]:
    """name=path"""
    name, equals, path = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} must be a name and a directory, as in name=path")
    return name, path


def _positive(text: str) -> int:
    (number, *more) = _counts(text)
    if more:
        raise argparse.ArgumentTypeError(f"{text!r} is not one positive whole number")
    return number


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in EVICTIONS]:
        raise argparse.ArgumentTypeError(f"there is no policy {unknown[0]!r}, only {', '.join(EVICTIONS)}")
    return names


def _new_file(text: str) -> Path:
    """A file that can be written later: found out now, not after minutes of work."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: it is a folder, or its folder does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: permission denied")
    return path


def _picture(text: str) -> Path:
    if not text.endswith((".png", ".svg", ".pdf")):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .png, .svg or .pdf")
    return _new_file(text)


# ----------------------------------------------------------------------------------------------------------- commands


def _add_serve(commands: Any) -> None:
    defaults = ServerConfig()
    about = "Serve a model over HTTP, compatible with OpenAI's API."
    parser = commands.add_parser("serve", help="serve a model over HTTP", description=about, parents=[_engine_flags(), _lora_flag(True)])
    group = parser.add_argument_group("server")
    group.add_argument("--host", default=defaults.host, help="address to listen on")
    group.add_argument("--port", type=int, default=defaults.port, metavar="N", help="port to listen on; 0 picks a free one")
    group.add_argument("--api-key", metavar="KEY", help="clients must send it as a bearer token (unset: $PENSTOCK_API_KEY, or none needed)")
    group.add_argument("--lora-dir", metavar="DIR", help="clients may load adapters from inside DIR (unset: they may load none)")
    group.add_argument("--max-body-bytes", type=int, default=defaults.max_body_bytes, metavar="N", help="larger requests are refused")
    group.add_argument(
        "--max-concurrent", type=int, default=defaults.max_concurrent, metavar="N", help="generations at once; more are answered 429"
    )
    group.add_argument(
        "--shutdown-s", type=float, default=defaults.shutdown_s, metavar="X", help="seconds that running requests get at the end"
    )
    group.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info", help="what goes to stderr")
    parser.set_defaults(run=_serve)


def _serve(args: argparse.Namespace) -> int:
    api_key = os.environ.get("PENSTOCK_API_KEY") if args.api_key is None else args.api_key
    if api_key is not None and not api_key.strip():
        raise ConfigError("--api-key (or $PENSTOCK_API_KEY) is empty: leave it out to serve without one")
    server = ServerConfig(args.host, args.port, api_key, args.max_body_bytes, args.max_concurrent, args.shutdown_s)
    config = _config(args)
    from penstock.commands.serve import serve

    return serve(config, server, args.log_level)


def _add_generate(commands: Any) -> None:
    about = "Write one answer to PROMPT on stdout, as it is generated; progress and figures go to stderr."
    parents = [_engine_flags(), _lora_flag(False), _sampling_flags(temperature=0.0, max_tokens=256)]
    parser = commands.add_parser("generate", help="answer one prompt", description=about, parents=parents)
    parser.add_argument("prompt", metavar="PROMPT", help="what to answer; - reads it from stdin")
    parser.add_argument("--raw", action="store_true", help="continue PROMPT as it stands, without the model's chat template")
    parser.add_argument("--ignore-eos", action="store_true", help="do not stop where the model would")
    parser.add_argument("--json", type=_new_file, metavar="FILE", help="write text and figures there, too")
    parser.set_defaults(run=_generate)


def _generate(args: argparse.Namespace) -> int:
    config, sampling = _config_with_one_lora(args), _sampling(args)
    from penstock.commands.generate import Task, generate

    return generate(config, Task(args.prompt, sampling, args.max_tokens is None, args.raw, args.json))


def _add_chat(commands: Any) -> None:
    about = "Talk with a model. /help lists what can be typed; Ctrl-C stops an answer, Ctrl-D leaves."
    parents = [_engine_flags(), _lora_flag(False), _sampling_flags(temperature=0.7, max_tokens=1024)]
    parser = commands.add_parser("chat", help="talk with a model", description=about, parents=parents)
    parser.add_argument("--system", metavar="TEXT", help="a system message before the conversation")
    parser.set_defaults(run=_chat)


def _chat(args: argparse.Namespace) -> int:
    config, sampling = _config_with_one_lora(args), _sampling(args)
    from penstock.commands.chat import chat

    return chat(config, sampling, args.system)


def _add_bench(commands: Any) -> None:
    parser = commands.add_parser("bench", help="measure speed", description="Measure speed on this machine, without a server.")
    kinds = parser.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    about = "Time of one decode step while so many requests run, prompts done and none finished."
    decode = kinds.add_parser("decode", help="time per decode step", description=about, parents=[_engine_flags(), _bench_flags(3)])
    decode.add_argument("--batch", type=_counts, default="1,8,32,128,256", metavar="N,N", help="requests at once")
    decode.add_argument("--prompt-tokens", type=_positive, default=128, metavar="N", help="tokens of each prompt")
    decode.add_argument("--tokens", type=_positive, default=128, metavar="N", help="tokens that each request writes")
    decode.set_defaults(run=_bench_decode)
    about = "Time from submit to first token of one request: nothing cached, and its prefix in device or host memory."
    ttft = kinds.add_parser("ttft", help="time to first token", description=about, parents=[_engine_flags(), _bench_flags(5)])
    ttft.add_argument("--tokens", type=_counts, default="2048,8192,32768", metavar="N,N", help="prompt lengths")
    ttft.set_defaults(run=_bench_ttft)
    about = "Rate of KV blocks between device and host memory, beside one plain copy of as many bytes. No weights are read."
    transfer = kinds.add_parser("transfer", help="rate between device and host memory", description=about, parents=[_bench_flags(5)])
    _transfer_flags(transfer)
    transfer.set_defaults(run=_bench_transfer)
    about = (
        "Replay a Mooncake trace against policies of eviction: how many blocks each finds, beside the best that any could. Needs no model."
    )
    trace = kinds.add_parser("trace", help="hit rates of eviction policies", description=about)
    trace.add_argument("trace", type=Path, metavar="TRACE", help="a .jsonl file: input_length and hash_ids of one request per line")
    trace.add_argument("--policies", type=_policies, default=",".join(EVICTIONS), metavar="NAME,NAME", help="which to replay")
    trace.add_argument("--capacity-blocks", type=_counts, metavar="N,N", help="blocks kept (unset: doubling up to all that the trace has)")
    trace.add_argument("--requests", type=_positive, metavar="N", help="only the first N (unset: all)")
    _report_flags(trace)
    trace.set_defaults(run=_bench_trace)


def _transfer_flags(parser: argparse.ArgumentParser) -> None:
    """Only the shape of a block counts: most flags of an engine would change nothing."""
    source = ModelSource()
    group = parser.add_argument_group("blocks")
    _model_flag(group)
    group.add_argument("--load-format", choices=("dummy",), default="dummy", help="as elsewhere; there is no other here")
    _device_flag(group)
    group.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default=source.dtype, help="auto: float32 on the CPU, bfloat16 on CUDA"
    )
    group.add_argument("--block-tokens", type=int, default=KvConfig().block_tokens, metavar="N", help="tokens in one KV block")
    group.add_argument(
        "--blocks", type=_counts, default="127,511", metavar="N,N", help="blocks moved at once, scattered over both memories"
    )
    group.add_argument("--layers", type=_counts, default="6,3", metavar="N,N", help="also in groups of so many layers")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the bytes and of where they lie")


def _bench_flags(repeat: int) -> argparse.ArgumentParser:
    parent = _Parser(add_help=False)
    group = parent.add_argument_group("measurement")
    group.add_argument("--repeat", type=_positive, default=repeat, metavar="N", help="measured runs, after one that only warms up")
    _report_flags(group)
    return parent


def _report_flags(group: Any) -> None:
    group.add_argument("--json", type=_new_file, metavar="FILE", help="write settings and results there")
    group.add_argument("--plot", type=_picture, metavar="FILE", help="draw a picture: .png, .svg or .pdf; needs matplotlib")


def _bench_decode(args: argparse.Namespace) -> int:
    config = _config(args)
    from penstock.bench.decode import DecodeBench
    from penstock.commands.bench import run_bench

    bench = DecodeBench(args.batch, args.prompt_tokens, args.tokens, args.repeat, args.seed)
    return run_bench(config, bench, args.json, args.plot)


def _bench_ttft(args: argparse.Namespace) -> int:
    config = _config(args)
    if not config.kv.prefix_cache and not config.offload.enabled:
        raise ConfigError(
            "--no-prefix-cache without offload leaves bench ttft nothing to compare with: it measures how much a cached prefix saves"
        )
    config = replace(config, offload=replace(config.offload, load_always=True))  # a tier is measured, whether or not it pays
    from penstock.bench.ttft import TtftBench
    from penstock.commands.bench import run_bench

    return run_bench(config, TtftBench(args.tokens, args.repeat, args.seed), args.json, args.plot)


def _bench_transfer(args: argparse.Namespace) -> int:
    config = Config(ModelSource(args.model, args.load_format, args.device, args.dtype, args.seed), KvConfig(args.block_tokens))
    from penstock.bench.transfer import TransferBench
    from penstock.commands.bench import run_transfer

    return run_transfer(config, TransferBench(args.blocks, args.layers, args.repeat, args.seed), args.json, args.plot)


def _bench_trace(args: argparse.Namespace) -> int:
    from penstock.commands.trace import Replays, bench_trace

    return bench_trace(Replays(args.trace, args.policies, args.capacity_blocks, args.requests), args.json, args.plot)


def _add_doctor(commands: Any) -> None:
    about = "Check that this machine can run Penstock: packages, devices, memory, weights, and a tiny generation."
    parser = commands.add_parser("doctor", help="check this machine", description=about)
    _model_flag(parser)
    _device_flag(parser)
    parser.add_argument("--json", type=_new_file, metavar="FILE", help="write the checks there")
    parser.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    from penstock.commands.doctor import doctor

    return doctor(args.model, args.device, args.json)
