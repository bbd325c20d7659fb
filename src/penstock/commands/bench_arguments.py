"""The arguments of `penstock bench`, and what each kind of measurement is made of. Owns no measurement.

Measurements are imported when they run, so that `--help` and argument errors need no torch.
"""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.commands.arguments import (
    Parser,
    config_of,
    counts,
    device_flag,
    dtype_flag,
    engine_flags,
    model_flag,
    new_file,
    number,
    picture,
    positive,
    remote_flags,
    ssd_dir_flag,
)
from penstock.config import EVICTIONS, Config, KvConfig, ModelSource, OffloadConfig
from penstock.errors import ConfigError

if TYPE_CHECKING:
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


def _measurement_flags(repeat: int) -> argparse.ArgumentParser:
    parent = Parser(add_help=False)
    group = parent.add_argument_group("measurement")
    number(group, "--repeat", "measured runs, after one that only warms up", repeat, positive)
    _report_flags(group)
    return parent


def _report_flags(group: Any) -> None:
    group.add_argument("--json", type=new_file, metavar="FILE", help="write settings and results there")
    group.add_argument(
        "--plot", type=picture, metavar="FILE", help="draw a picture: .png, .svg or .pdf; needs matplotlib"
    )


# --------------------------------------------------------------------------------------------- with an engine


def _add_decode(kinds: Any) -> None:
    about = "Time of one decode step while so many requests run, prompts done and none finished."
    parser = kinds.add_parser(
        "decode",
        help="time per decode step",
        description=about,
        parents=[engine_flags(), _measurement_flags(3)],
    )
    parser.add_argument(
        "--batch", type=counts, default="1,8,32,128,256", metavar="N,N", help="requests at once"
    )
    number(parser, "--prompt-tokens", "tokens of each prompt", 128, positive)
    number(parser, "--tokens", "tokens that each request writes", 128, positive)
    parser.set_defaults(run=_decode)


def _decode(args: argparse.Namespace) -> int:
    config = config_of(args)
    from penstock.bench.decode import DecodeBench

    return _measured(
        args, config, DecodeBench(args.batch, args.prompt_tokens, args.tokens, args.repeat, args.seed)
    )


def _measured(args: argparse.Namespace, config: Config, bench: Bench) -> int:
    from penstock.commands.bench import run_bench, show

    return show(lambda: run_bench(config, bench), args.json, args.plot)


def _add_ttft(kinds: Any) -> None:
    about = (
        "Time from submit to first token of one request: nothing cached, and its prefix in each tier alone."
    )
    parser = kinds.add_parser(
        "ttft", help="time to first token", description=about, parents=[engine_flags(), _measurement_flags(5)]
    )
    parser.add_argument(
        "--tokens", type=counts, default="2048,8192,32768", metavar="N,N", help="prompt lengths"
    )
    text = "from the disk in a new process, beside nothing cached; the directory is a temporary one"
    parser.add_argument("--restart", action="store_true", help=text)
    parser.set_defaults(run=_ttft)


def _ttft(args: argparse.Namespace) -> int:
    config = config_of(args)
    if not config.kv.prefix_cache and not config.offload.enabled:
        raise ConfigError(
            "--no-prefix-cache without offload leaves bench ttft nothing to compare with: it measures how "
            "much a cached prefix saves"
        )
    if args.restart and not config.offload.enabled:
        raise ConfigError("--restart needs --kv-offload: nothing else outlives a process")
    # a tier is measured, whether or not it pays
    config = replace(config, offload=replace(config.offload, load_always=True))
    from penstock.bench.ttft import RestartBench, TtftBench
    from penstock.commands.bench import run_restart, show

    if args.restart:
        return show(
            lambda: run_restart(config, RestartBench(args.tokens, args.repeat, args.seed)),
            args.json,
            args.plot,
        )
    return _measured(args, config, TtftBench(args.tokens, args.repeat, args.seed))


def _add_turns(kinds: Any) -> None:
    about = (
        "Many conversations at once, turn after turn: how long each turn takes, and where the KV of what "
        "was said before comes from."
    )
    parents = [engine_flags(), _measurement_flags(1)]
    parser = kinds.add_parser(
        "turns", help="time per turn of many conversations", description=about, parents=parents
    )
    number(parser, "--conversations", "conversations, all asking at once", 64, positive)
    number(parser, "--turns", "turns of each", 5, positive)
    number(parser, "--prompt-tokens", "new tokens that each turn brings", 1024, positive)
    number(parser, "--tokens", "tokens that each answer has", 128, positive)
    parser.set_defaults(run=_turns)


def _turns(args: argparse.Namespace) -> int:
    config = config_of(args)
    from penstock.bench.turns import TurnsBench

    return _measured(
        args,
        config,
        TurnsBench(args.conversations, args.turns, args.prompt_tokens, args.tokens, args.repeat, args.seed),
    )


def _add_agents(kinds: Any) -> None:
    about = (
        "Replay recorded conversations of coding agents, many users at once: when each request is "
        "answered, and where its KV comes from. In this process, or with --url against a server. Lengths "
        "are in tokens of the trace."
    )
    parser = kinds.add_parser(
        "agents", help="recorded agents, many users", description=about, parents=[engine_flags()]
    )
    parser.add_argument(
        "trace", type=Path, metavar="TRACE", help="a .jsonl or .jsonl.gz file with one conversation per line"
    )
    group = parser.add_argument_group("replay")
    number(group, "--users", "conversations, each with requests that fit --context", 20, positive)
    number(group, "--context", "requests with longer prompts are left out", 65536, positive)
    number(group, "--requests", "requests of each conversation at most", 16, positive)
    number(group, "--tokens", "tokens that each answer has at most", 200, positive)
    number(group, "--think", "factor of the recorded pauses before requests", 0.0, _not_negative)
    number(
        group, "--max-think-s", "no pause is longer; some that were recorded take hours", kind=_not_negative
    )
    number(
        group,
        "--limit-s",
        "stop after so long, and report what was done (unset: at the end)",
        kind=_not_negative,
    )
    group.add_argument(
        "--scale", type=positive, default=1, metavar="D", help="divide all lengths, blocks included, by this"
    )
    text = "whether they share the tokens that they shared with their parents"
    group.add_argument("--subagents", choices=("apart", "shared"), default="apart", help=text)
    _report_flags(group)
    server = parser.add_argument_group(
        "server", "An OpenAI-compatible one, instead of an engine in this process."
    )
    server.add_argument("--url", metavar="URL", help="such as http://host:port/v1; --model names its model")
    server.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    number(server, "--vocab", f"token ids are below this (unset: {_URL_VOCAB})", kind=positive)
    server.add_argument(
        "--hints", action="store_true", help="send the conversation as prompt_cache_key and session_id"
    )
    parser.set_defaults(run=_agents)


def _agents(args: argparse.Namespace) -> int:
    from penstock.bench.trace_files import read_conversations, select

    chosen = select(read_conversations(args.trace), args.users, args.context, args.requests)
    return _agents_at_url(args, chosen) if args.url is not None else _agents_here(args, chosen)


def _asking(args: argparse.Namespace) -> Asking:
    from penstock.bench.trace_files import Asking

    given = {field.name: getattr(args, field.name) for field in fields(Asking) if field.name != "trace"}
    return Asking(args.trace.name, **given)


def _agents_here(args: argparse.Namespace, chosen: list[RecordedConversation]) -> int:
    if args.api_key is not None or args.vocab is not None or args.hints:
        raise ConfigError("--api-key, --vocab and --hints need --url: they are for a server")
    asking = _asking(args)
    longest = asking.longest(chosen)
    if args.max_model_len is None and args.load_format == "dummy":
        args.max_model_len = longest  # random weights know no longest context
    config = config_of(args)
    from penstock.bench.agents import AgentsBench

    return _measured(args, config, AgentsBench(asking, chosen))


def _agents_at_url(args: argparse.Namespace, chosen: list[RecordedConversation]) -> int:
    plain = vars(engine_flags().parse_args([]))
    for name, default in plain.items():
        if name not in ("model", "seed", "block_tokens") and getattr(args, name) != default:
            raise ConfigError(
                f"--{name.replace('_', '-')} is for an engine in this process, and --url names a server"
            )
    from penstock.bench.agents import AgentsBench
    from penstock.bench.agents_replay import ServerAddress
    from penstock.commands.bench import run_agents_url, show

    server, bench = (
        ServerAddress(args.url, args.model, args.api_key, args.hints),
        AgentsBench(_asking(args), chosen),
    )
    server.parts()
    return show(
        lambda: run_agents_url(bench, server, args.vocab or _URL_VOCAB, args.block_tokens),
        args.json,
        args.plot,
    )


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
    parents = [engine_flags(), _measurement_flags(3)]
    parser = kinds.add_parser("restore", help="decoding beside a restore", description=about, parents=parents)
    parser.add_argument("--batch", type=counts, default="8,32", metavar="N,N", help="requests that decode")
    number(parser, "--gib", "GiB of KV that come back", 2.5, float)
    number(parser, "--tokens", "tokens that each decoding request writes", 512, positive)
    parser.set_defaults(run=_restore)


def _restore(args: argparse.Namespace) -> int:
    config = config_of(args)
    if not config.offload.enabled or not 0 < args.gib < 1024:
        raise ConfigError(
            "bench restore needs --kv-offload and a positive --gib: it brings KV back from host memory"
        )
    config = replace(config, offload=replace(config.offload, load_always=True))
    from penstock.bench.decode import RestoreBench

    return _measured(args, config, RestoreBench(args.batch, args.gib, args.tokens, args.repeat, args.seed))


def _add_deep(kinds: Any) -> None:
    about = (
        "Long sequences with all of their KV on the device, and with --kv-resident-tokens there and the "
        "rest in host memory: prefill, time per token, and the first token of a second turn, beside the "
        "rate of the link; with --kv-residency scored also a turn whose tokens attend to what is on the "
        "device alone. One request at a time."
    )
    parser = kinds.add_parser(
        "deep", help="sequences larger than device memory", description=about, parents=[engine_flags()]
    )
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--lengths", type=counts, default="32768,131072,524288", metavar="N,N", help="tokens of the prompts"
    )
    number(group, "--tokens", "tokens that each answer has", 8, positive)
    _report_flags(group)
    parser.set_defaults(run=_deep)


def _deep(args: argparse.Namespace) -> int:
    from penstock.bench.deep import DeepBench
    from penstock.commands.bench import run_deep, show

    bench = DeepBench(args.lengths, args.tokens, args.seed)
    if args.max_model_len is None and args.load_format == "dummy":
        args.max_model_len = bench.tokens_of(max(args.lengths))  # random weights know no longest context
    config = config_of(args)
    if not config.offload.enabled:
        raise ConfigError("bench deep needs --kv-offload: what is not on the device is in host memory")
    if args.tokens < 2:
        raise ConfigError("bench deep needs --tokens of at least 2: it measures the time between them")
    return show(lambda: run_deep(config, bench), args.json, args.plot)


def _add_soak(kinds: Any) -> None:
    about = (
        "Random requests from several threads, cancels, retractions, cache resets, copies that fail or "
        "stall, adapters that change; then every answer is compared with the same request alone, and every "
        "balance has to be zero. Exit code 1 where anything is wrong. Unless sizes are given, 48 KV blocks "
        "on the device and 4 MiB of host memory, so that there is always too little. A disk or store that "
        "is named fails, stalls and damages blocks as well; then 1 MiB of host memory, and 16 of disk in a "
        "temporary directory."
    )
    parser = kinds.add_parser(
        "soak", help="minutes of trouble, and a verdict", description=about, parents=[engine_flags()]
    )
    group = parser.add_argument_group("soak")
    number(group, "--seconds", "how long requests come", 60, positive)
    number(group, "--threads", "that submit requests", 4, positive)
    number(group, "--adapters", "random LoRA adapters that take turns under one name; 0: none", 3)
    group.add_argument(
        "--json", type=new_file, metavar="FILE", help="write settings, counts and violations there"
    )
    parser.set_defaults(
        run=_soak, model="tiny-qwen3", load_format="dummy", max_batch=12, prefill_chunk=64, overcommit=3.0
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
    parents = [_measurement_flags(5)]
    parser = kinds.add_parser("transfer", help="rate between tiers", description=about, parents=parents)
    group = parser.add_argument_group("blocks")
    model_flag(group)
    group.add_argument(
        "--load-format", choices=("dummy",), default="dummy", help="as elsewhere; there is no other here"
    )
    device_flag(group)
    dtype_flag(group)
    number(group, "--block-tokens", "tokens in one KV block", KvConfig().block_tokens)
    group.add_argument(
        "--blocks",
        type=counts,
        default="127,511",
        metavar="N,N",
        help="blocks moved at once, scattered over both memories",
    )
    group.add_argument(
        "--layers", type=counts, default="6,3", metavar="N,N", help="also in groups of so many layers"
    )
    number(group, "--seed", "of the bytes and of where they lie", 0)
    tiers = parser.add_argument_group("tiers behind host memory")
    ssd_dir_flag(tiers, required=False)
    remote_flags(tiers)
    parser.set_defaults(run=_transfer)


def _transfer(args: argparse.Namespace) -> int:
    if args.kv_offload_remote is None and args.kv_offload_remote_timeout_s is not None:
        raise ConfigError("--kv-offload-remote-timeout-s needs --kv-offload-remote")
    given_s = args.kv_offload_remote_timeout_s
    timeout_s = OffloadConfig().remote_timeout_s if given_s is None else given_s
    offload = OffloadConfig(
        ssd_dir=args.kv_offload_ssd_dir, remote=args.kv_offload_remote, remote_timeout_s=timeout_s
    )
    source = ModelSource(args.model, args.load_format, args.device, args.dtype, args.seed)
    config = Config(source, KvConfig(args.block_tokens), offload=offload)
    from penstock.bench.transfer import TransferBench
    from penstock.commands.bench import run_transfer, show

    bench = TransferBench(args.blocks, args.layers, args.repeat, args.seed)
    return show(lambda: run_transfer(config, bench), args.json, args.plot)


def _add_trace(kinds: Any) -> None:
    about = (
        "Replay a trace against policies of eviction: how many blocks each finds, beside the best that any "
        "could. Mooncake's form and that of recorded agents are known; blocks have 512 tokens either way. "
        "Needs no model."
    )
    parser = kinds.add_parser("trace", help="hit rates of eviction policies", description=about)
    parser.add_argument(
        "trace",
        type=Path,
        metavar="TRACE",
        help="a .jsonl or .jsonl.gz file: one request, or one conversation, per line",
    )
    parser.add_argument(
        "--policies", type=_policies, default=",".join(EVICTIONS), metavar="NAME,NAME", help="which to replay"
    )
    parser.add_argument(
        "--capacity-blocks",
        type=counts,
        metavar="N,N",
        help="blocks kept (unset: doubling up to all that the trace has)",
    )
    number(parser, "--requests", "only the first N (unset: all)", kind=positive)
    text = "conversations all begin at once, and go on by their recorded times, or take turns (unset: time)"
    parser.add_argument("--interleave", choices=("time", "turns"), help=text)
    number(
        parser,
        "--scan",
        "put N documents that never come back between the requests (unset: none)",
        kind=positive,
    )
    number(parser, "--scan-blocks", f"blocks of each (unset: {_SCAN_BLOCKS})", kind=positive)
    _report_flags(parser)
    parser.set_defaults(run=_trace)


def _trace(args: argparse.Namespace) -> int:
    """Here, and not with the others: it needs no torch."""
    if args.scan is None and args.scan_blocks is not None:
        raise ConfigError("--scan-blocks needs --scan")
    from penstock.bench.report import print_table, require_matplotlib
    from penstock.bench.trace import TraceReport, ladder, measure
    from penstock.bench.trace_files import read_any, with_scan
    from penstock.commands.progress import ProgressBar

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
