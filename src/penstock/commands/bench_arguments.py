"""The arguments of `penstock bench`, and what each kind of measurement is made of. Owns no measurement.

Measurements are imported when they run, so that `--help` and argument errors need no torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import EVICTIONS, Config
from penstock.errors import ConfigError
from penstock.flags import (
    SETTINGS,
    add_flags,
    config_of,
    counts,
    engine_flags,
    new_file,
    number,
    picture,
    positive,
)

if TYPE_CHECKING:
    from penstock.bench.report import BenchReport
    from penstock.bench.run import Bench
    from penstock.bench.trace_files import Asking, RecordedConversation

_URL_VOCAB = 32000  # ids that most models have
_SCAN_BLOCKS = 128  # 65,536 tokens


def add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench", help="measure speed", description="Measure speed on this machine, without a server."
    )
    kinds = parser.add_subparsers(title="what to measure", metavar="WHAT")
    parser.set_defaults(run=parser.show_help)
    _add_decode(kinds)
    _add_ttft(kinds)
    _add_turns(kinds)
    _add_agents(kinds)
    _add_transfer(kinds)
    _add_trace(kinds)
    _add_restore(kinds)
    _add_deep(kinds)
    _add_soak(kinds)


def _add_kind(
    kinds: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    help: str,
    about: str,
    engine: bool = True,
) -> Any:
    parents = [engine_flags()] if engine else []
    parser = kinds.add_parser(name, help=help, description=about, parents=parents)
    parser.set_defaults(run=run)
    return parser


def _measurement_flags(parser: Any, repeat: int) -> None:
    group = parser.add_argument_group("measurement")
    number(group, "--repeat", "measured runs, after one that only warms up", repeat, positive)
    _report_flags(group)


def _report_flags(group: Any) -> None:
    group.add_argument("--json", type=new_file, metavar="FILE", help="write settings and results there")
    text = "draw a picture: .png, .svg or .pdf; needs matplotlib"
    group.add_argument("--plot", type=picture, metavar="FILE", help=text)


def _show(args: argparse.Namespace, measure: Callable[[], BenchReport]) -> int:
    from penstock.commands.bench import show

    return show(measure, args.json, args.plot)


def _measured(args: argparse.Namespace, config: Config, bench: Bench) -> int:
    from penstock.commands.bench import run_bench

    return _show(args, lambda: run_bench(config, bench))


def _always_loading(config: Config) -> Config:
    """A tier is measured, whether or not it pays."""
    return replace(config, offload=replace(config.offload, load_always=True))


# --------------------------------------------------------------------------------------------- with an engine


def _add_decode(kinds: Any) -> None:
    about = "Time of one decode step while so many requests run, prompts done and none finished."
    parser = _add_kind(kinds, "decode", _decode, "time per decode step", about)
    number(parser, "--batch", "requests at once", "1,8,32,128,256", counts)
    number(parser, "--prompt-tokens", "tokens of each prompt", 128, positive)
    number(parser, "--tokens", "tokens that each request writes", 128, positive)
    _measurement_flags(parser, 3)


def _decode(args: argparse.Namespace) -> int:
    config = config_of(args)
    from penstock.bench.decode import DecodeBench

    bench = DecodeBench(args.batch, args.prompt_tokens, args.tokens, args.repeat, args.seed)
    return _measured(args, config, bench)


def _add_ttft(kinds: Any) -> None:
    about = (
        "Time from submit to first token of one request: nothing cached, and its prefix in each tier alone."
    )
    parser = _add_kind(kinds, "ttft", _ttft, "time to first token", about)
    number(parser, "--tokens", "prompt lengths", "2048,8192,32768", counts)
    text = "from the disk in a new process, beside nothing cached; the directory is a temporary one"
    parser.add_argument("--restart", action="store_true", help=text)
    _measurement_flags(parser, 5)


def _ttft(args: argparse.Namespace) -> int:
    config = _always_loading(config_of(args))
    if not config.kv.prefix_cache and not config.offload.enabled:
        raise ConfigError(
            "--no-prefix-cache without offload leaves bench ttft nothing to compare with: it measures how "
            "much a cached prefix saves"
        )
    if args.restart and not config.offload.enabled:
        raise ConfigError("--restart needs --kv-offload: nothing else outlives a process")
    from penstock.bench.ttft import RestartBench, TtftBench
    from penstock.commands.bench import run_restart

    if args.restart:
        restart = RestartBench(args.tokens, args.repeat, args.seed)
        return _show(args, lambda: run_restart(config, restart))
    return _measured(args, config, TtftBench(args.tokens, args.repeat, args.seed))


def _add_turns(kinds: Any) -> None:
    about = (
        "Many conversations at once, turn after turn: how long each turn takes, and where the KV of what "
        "was said before comes from."
    )
    parser = _add_kind(kinds, "turns", _turns, "time per turn of many conversations", about)
    number(parser, "--conversations", "conversations, all asking at once", 64, positive)
    number(parser, "--turns", "turns of each", 5, positive)
    number(parser, "--prompt-tokens", "new tokens that each turn brings", 1024, positive)
    number(parser, "--tokens", "tokens that each answer has", 128, positive)
    _measurement_flags(parser, 1)


def _turns(args: argparse.Namespace) -> int:
    config = config_of(args)
    from penstock.bench.turns import TurnsBench

    sizes = args.conversations, args.turns, args.prompt_tokens, args.tokens
    return _measured(args, config, TurnsBench(*sizes, args.repeat, args.seed))


def _add_agents(kinds: Any) -> None:
    about = (
        "Replay recorded conversations of coding agents, many users at once: when each request is "
        "answered, and where its KV comes from. In this process, or with --url against a server. Lengths "
        "are in tokens of the trace."
    )
    parser = _add_kind(kinds, "agents", _agents, "recorded agents, many users", about)
    text = "a .jsonl or .jsonl.gz file with one conversation per line"
    parser.add_argument("trace", type=Path, metavar="TRACE", help=text)
    group = parser.add_argument_group("replay")
    number(group, "--users", "conversations, each with requests that fit --context", 20, positive)
    number(group, "--context", "requests with longer prompts are left out", 65536, positive)
    number(group, "--requests", "requests of each conversation at most", 16, positive)
    number(group, "--tokens", "tokens that each answer has at most", 200, positive)
    number(group, "--think", "factor of the recorded pauses before requests", 0.0, _not_negative)
    text = "no pause is longer; some that were recorded take hours"
    number(group, "--max-think-s", text, kind=_not_negative)
    text = "stop after so long, and report what was done (unset: at the end)"
    number(group, "--limit-s", text, kind=_not_negative)
    text = "divide all lengths, blocks included, by this"
    group.add_argument("--scale", type=positive, default=1, metavar="D", help=text)
    text = "whether they share the tokens that they shared with their parents"
    group.add_argument("--subagents", choices=("apart", "shared"), default="apart", help=text)
    _report_flags(group)
    text = "An OpenAI-compatible one, instead of an engine in this process."
    server = parser.add_argument_group("server", text)
    server.add_argument("--url", metavar="URL", help="such as http://host:port/v1; --model names its model")
    server.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    number(server, "--vocab", f"token ids are below this (unset: {_URL_VOCAB})", kind=positive)
    text = "send the conversation as prompt_cache_key and session_id"
    server.add_argument("--hints", action="store_true", help=text)


def _agents(args: argparse.Namespace) -> int:
    from penstock.bench.trace_files import Asking, read_conversations, select

    chosen = select(read_conversations(args.trace), args.users, args.context, args.requests)
    given = {field.name: getattr(args, field.name) for field in fields(Asking) if field.name != "trace"}
    run = _agents_here if args.url is None else _agents_at_url
    return run(args, Asking(args.trace.name, **given), chosen)


def _agents_here(args: argparse.Namespace, asking: Asking, chosen: list[RecordedConversation]) -> int:
    if args.api_key is not None or args.vocab is not None or args.hints:
        raise ConfigError("--api-key, --vocab and --hints need --url: they are for a server")
    longest = asking.longest(chosen)
    if args.max_model_len is None and args.load_format == "dummy":
        args.max_model_len = longest  # random weights know no longest context
    config = config_of(args)
    from penstock.bench.agents import AgentsBench

    return _measured(args, config, AgentsBench(asking, chosen))


def _agents_at_url(args: argparse.Namespace, asking: Asking, chosen: list[RecordedConversation]) -> int:
    for name, default in vars(engine_flags().parse_args([])).items():
        if name not in ("model", "seed", "block_tokens") and getattr(args, name) != default:
            raise ConfigError(
                f"{SETTINGS[name].flag} is for an engine in this process, and --url names a server"
            )
    from penstock.bench.agents import AgentsBench
    from penstock.bench.agents_replay import ServerAddress
    from penstock.commands.bench import run_agents_url

    server = ServerAddress(args.url, args.model, args.api_key, args.hints)
    server.parts()
    vocab, bench = args.vocab or _URL_VOCAB, AgentsBench(asking, chosen)
    return _show(args, lambda: run_agents_url(bench, server, vocab, args.block_tokens))


def _not_negative(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return number


def _add_restore(kinds: Any) -> None:
    about = (
        "Time between tokens of running requests while prefixes come back from host memory, beside the "
        "same without."
    )
    parser = _add_kind(kinds, "restore", _restore, "decoding beside a restore", about)
    number(parser, "--batch", "requests that decode", "8,32", counts)
    number(parser, "--gib", "GiB of KV that come back", 2.5, float)
    number(parser, "--tokens", "tokens that each decoding request writes", 512, positive)
    _measurement_flags(parser, 3)


def _restore(args: argparse.Namespace) -> int:
    config = _always_loading(config_of(args))
    if not config.offload.enabled or not 0 < args.gib < 1024:
        raise ConfigError(
            "bench restore needs --kv-offload and a positive --gib: it brings KV back from host memory"
        )
    from penstock.bench.decode import RestoreBench

    return _measured(args, config, RestoreBench(args.batch, args.gib, args.tokens, args.repeat, args.seed))


def _add_deep(kinds: Any) -> None:
    about = (
        "Long sequences with all of their KV on the device, and with --kv-resident-tokens there and the "
        "rest in host memory: prefill, time per token, and the first token of a second turn, beside the "
        "rate of the link; with --kv-residency scored also a turn whose tokens attend to what is on the "
        "device alone. One request at a time."
    )
    parser = _add_kind(kinds, "deep", _deep, "sequences larger than device memory", about)
    group = parser.add_argument_group("measurement")
    number(group, "--lengths", "tokens of the prompts", "32768,131072,524288", counts)
    number(group, "--tokens", "tokens that each answer has", 8, positive)
    _report_flags(group)


def _deep(args: argparse.Namespace) -> int:
    from penstock.bench.deep import DeepBench
    from penstock.commands.bench import run_deep

    bench = DeepBench(args.lengths, args.tokens, args.seed)
    if args.max_model_len is None and args.load_format == "dummy":
        args.max_model_len = bench.tokens_of(max(args.lengths))  # random weights know no longest context
    config = config_of(args)
    if not config.offload.enabled:
        raise ConfigError("bench deep needs --kv-offload: what is not on the device is in host memory")
    if args.tokens < 2:
        raise ConfigError("bench deep needs --tokens of at least 2: it measures the time between them")
    return _show(args, lambda: run_deep(config, bench))


def _add_soak(kinds: Any) -> None:
    about = (
        "Random requests from several threads, cancels, retractions, cache resets, copies that fail or "
        "stall, adapters that change; then every answer is compared with the same request alone, and every "
        "balance has to be zero. Exit code 1 where anything is wrong. Unless sizes are given, 48 KV blocks "
        "on the device and 4 MiB of host memory, so that there is always too little. A disk or store that "
        "is named fails, stalls and damages blocks as well; then 1 MiB of host memory, and 16 of disk in a "
        "temporary directory."
    )
    parser = _add_kind(kinds, "soak", _soak, "minutes of trouble, and a verdict", about)
    group = parser.add_argument_group("soak")
    number(group, "--seconds", "how long requests come", 60, positive)
    number(group, "--threads", "that submit requests", 4, positive)
    number(group, "--adapters", "random LoRA adapters that take turns under one name; 0: none", 3)
    text = "write settings, counts and violations there"
    group.add_argument("--json", type=new_file, metavar="FILE", help=text)
    parser.set_defaults(
        model="tiny-qwen3", load_format="dummy", max_batch=12, prefill_chunk=64, overcommit=3.0
    )


def _soak(args: argparse.Namespace) -> int:
    if args.adapters < 0:
        raise ConfigError(f"argument --adapters: there cannot be {args.adapters} of them")
    # Unless sizes are given, always short of memory on the device, and now and then in the host tier.
    if args.device_kv_gib is None and args.device_kv_blocks is None:
        args.device_kv_blocks = 48
    if args.kv_offload and args.kv_offload_host_gib is None:
        colder = args.kv_offload_ssd_dir is not None or args.kv_offload_remote is not None
        args.kv_offload_host_gib = 0.001 if colder else 0.004
    if args.kv_offload_ssd_dir is not None and args.kv_offload_ssd_gib is None:
        args.kv_offload_ssd_gib = 0.016
    if args.kv_offload and args.kv_resident_tokens is None and not args.no_prefix_cache:
        args.kv_resident_tokens = 12 * args.block_tokens  # so that longer requests are paged out
    config = config_of(args)
    from penstock.bench.soak import SoakBench
    from penstock.commands.bench import run_soak

    return run_soak(config, SoakBench(args.seconds, args.threads, args.adapters, args.seed), args.json)


# ------------------------------------------------------------------------------------------------ without one


def _add_transfer(kinds: Any) -> None:
    """Only the shape of a block counts: most flags of an engine would change nothing."""
    about = (
        "Rate of KV blocks between device and host memory, beside one plain copy of as many bytes; also to "
        "and from a disk, beside raw O_DIRECT, and a shared store, where they are named. No weights are "
        "read."
    )
    parser = _add_kind(kinds, "transfer", _transfer, "rate between tiers", about, engine=False)
    _measurement_flags(parser, 5)
    group = parser.add_argument_group("blocks")
    add_flags(group, "model", "device", "dtype", "block_tokens")
    text = "as elsewhere; there is no other here"
    group.add_argument("--load-format", choices=("dummy",), default="dummy", help=text)
    text = "blocks moved at once, scattered over both memories"
    number(group, "--blocks", text, "127,511", counts)
    number(group, "--layers", "also in groups of so many layers", "6,3", counts)
    number(group, "--seed", "of the bytes and of where they lie", 0)
    tiers = parser.add_argument_group("tiers behind host memory")
    add_flags(tiers, "kv_offload_ssd_dir", "kv_offload_remote", "kv_offload_remote_timeout_s")


def _transfer(args: argparse.Namespace) -> int:
    config = config_of(args)
    from penstock.bench.transfer import TransferBench
    from penstock.commands.bench import run_transfer

    bench = TransferBench(args.blocks, args.layers, args.repeat, args.seed)
    return _show(args, lambda: run_transfer(config, bench))


def _add_trace(kinds: Any) -> None:
    about = (
        "Replay a trace against policies of eviction: how many blocks each finds, beside the best that any "
        "could. Mooncake's form and that of recorded agents are known; blocks have 512 tokens either way. "
        "Needs no model."
    )
    parser = _add_kind(kinds, "trace", _trace, "hit rates of eviction policies", about, engine=False)
    text = "a .jsonl or .jsonl.gz file: one request, or one conversation, per line"
    parser.add_argument("trace", type=Path, metavar="TRACE", help=text)
    every = ",".join(EVICTIONS)
    parser.add_argument(
        "--policies", type=_policies, default=every, metavar="NAME,NAME", help="which to replay"
    )
    text = "blocks kept (unset: doubling up to all that the trace has)"
    number(parser, "--capacity-blocks", text, kind=counts)
    number(parser, "--requests", "only the first N (unset: all)", kind=positive)
    text = "conversations all begin at once, and go on by their recorded times, or take turns (unset: time)"
    parser.add_argument("--interleave", choices=("time", "turns"), help=text)
    text = "put N documents that never come back between the requests (unset: none)"
    number(parser, "--scan", text, kind=positive)
    number(parser, "--scan-blocks", f"blocks of each (unset: {_SCAN_BLOCKS})", kind=positive)
    _report_flags(parser)


def _trace(args: argparse.Namespace) -> int:
    """Here, and not with the others: it needs no torch."""
    if args.scan is None and args.scan_blocks is not None:
        raise ConfigError("--scan-blocks needs --scan")
    from penstock.bench.report import print_table, require_matplotlib
    from penstock.bench.trace import TraceReport, ladder, measure
    from penstock.bench.trace_files import read_any, with_scan
    from penstock.progress import ProgressBar

    if args.plot is not None:
        require_matplotlib()
    trace = read_any(args.trace, args.requests, args.interleave)
    if args.scan:
        trace = with_scan(trace, args.scan, args.scan_blocks or _SCAN_BLOCKS)
    with ProgressBar() as bar:
        report = TraceReport(trace, measure(trace, args.policies, args.capacity_blocks or ladder(trace), bar))
    for heading, (titles, lines) in report.tables().items():
        print(heading)
        print_table(titles, lines)
    if args.json is not None:
        report.write(args.json)
    if args.plot is not None:
        report.draw(args.plot)
    return 0


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in EVICTIONS]:
        raise argparse.ArgumentTypeError(f"there is no policy {unknown[0]!r}, only {', '.join(EVICTIONS)}")
    return names
