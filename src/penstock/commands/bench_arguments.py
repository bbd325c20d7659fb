"""The arguments of `penstock bench`: one row of a table for each kind of measurement, and its flags. Owns no
measurement; `penstock.commands.bench` has a function for each.

They are imported when they run, so that `--help` and argument errors need no torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from penstock.config import EVICTIONS, EXPERT_ORDERS
from penstock.errors import ConfigError
from penstock.flags import (
    add_flags,
    counts,
    engine_flags,
    new_file,
    number,
    picture,
    positive,
    refused,
)

URL_VOCAB = 32000  # ids that most models have
_SCAN_BLOCKS = 128  # 65,536 tokens


class BenchKind(NamedTuple):
    """One kind of measurement, and its flags."""

    help: str
    about: str
    flags: tuple[tuple[Any, ...], ...]  # for `number`
    title: str = ""  # of their group; empty: they have none
    repeat: int = 0  # runs unless another number is given; 0: nothing is repeated
    engine: bool = True  # whether it has all flags of an engine
    add_more: Callable[[Any, Any], None] = lambda parser, group: None  # other flags


def add_bench(commands: Any, run: Callable[[argparse.Namespace], int]) -> None:
    about = "Measure speed on this machine, without a server."
    parser = commands.add_parser("bench", help="measure speed", description=about)
    kinds = parser.add_subparsers(title="what to measure", metavar="WHAT")
    parser.set_defaults(run=parser.show_help)
    for name, kind in KINDS.items():
        parents = [engine_flags()] if kind.engine else []
        one = kinds.add_parser(name, help=kind.help, description=kind.about, parents=parents)
        one.set_defaults(run=run, command="bench", kind=name)
        group = one.add_argument_group(kind.title) if kind.title else one
        for flag in kind.flags:
            number(group, *flag)
        kind.add_more(one, group)
        if kind.repeat:
            group = one.add_argument_group("measurement")
            number(group, "--repeat", "measured runs, after one that only warms up", kind.repeat, positive)
        if name != "soak":
            _add_file(group, "--json", "write settings and results there")
            _add_file(group, "--plot", "draw a picture: .png, .svg or .pdf; needs matplotlib", picture)


def _add_file(group: Any, flag: str, help: str, kind: Callable[[str], Path] = new_file) -> None:
    group.add_argument(flag, type=kind, metavar="FILE", help=help)


def _not_negative(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    return number if 0 <= number < float("inf") else refused(f"{text!r} is not a number of at least 0")


def _acceptance(text: str) -> tuple[float, ...]:
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        shares = ()
    good = shares and all(0 <= share <= 1 for share in shares)
    return tuple(dict.fromkeys(shares)) if good else refused(f"{text!r} is no list of shares from 0 to 1")


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in EVICTIONS]:
        refused(f"there is no policy {unknown[0]!r}, only {', '.join(EVICTIONS)}")
    return names


# ------------------------------------------------------------------------------- flags that take no numbers


def _add_restart(parser: Any, group: Any) -> None:
    text = "from the disk in a new process, beside nothing cached; the directory is a temporary one"
    group.add_argument("--restart", action="store_true", help=text)


def _add_acceptance(parser: Any, group: Any) -> None:
    text = "share of drafts that are kept, each behind kept ones"
    options = {"type": _acceptance, "default": "0.5,0.7,0.9", "metavar": "A,B"}
    parser.add_argument("--synthetic-acceptance", help=text, **options)


def _add_agents(parser: Any, group: Any) -> None:
    text = "a .jsonl or .jsonl.gz file with one conversation per line"
    parser.add_argument("recorded", type=Path, metavar="TRACE", help=text)
    text = "whether they share the tokens that they shared with their parents"
    group.add_argument("--subagents", choices=("apart", "shared"), default="apart", help=text)
    text = "An OpenAI-compatible one, instead of an engine in this process."
    server = parser.add_argument_group("server", text)
    server.add_argument("--url", metavar="URL", help="such as http://host:port/v1; --model names its model")
    server.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    number(server, "--vocab", f"token ids are below this (unset: {URL_VOCAB})", kind=positive)
    text = "send the conversation as prompt_cache_key and session_id"
    server.add_argument("--hints", action="store_true", help=text)


def _add_soak(parser: Any, group: Any) -> None:
    _add_file(group, "--json", "write settings, counts and violations there")
    parser.set_defaults(
        model="tiny-qwen3", load_format="dummy", max_batch=12, prefill_chunk=64, overcommit=3.0, plot=None
    )


def _add_transfer(parser: Any, group: Any) -> None:
    """Only the shape of a block counts: most flags of an engine would change nothing."""
    add_flags(group, "model", "device", "dtype", "block_tokens")
    text = "as elsewhere; there is no other here"
    group.add_argument("--load-format", choices=("dummy",), default="dummy", help=text)
    tiers = parser.add_argument_group("tiers behind host memory")
    add_flags(tiers, "kv_offload_ssd_dir", "kv_offload_remote", "kv_offload_remote_timeout_s")


def _add_collectives(parser: Any, group: Any) -> None:
    add_flags(group, "device", "tensor_parallel")


def _add_trace(parser: Any, group: Any) -> None:
    text = "a .jsonl or .jsonl.gz file: one request, or one conversation, per line"
    parser.add_argument("trace", type=Path, metavar="TRACE", help=text)
    options = {"type": _policies, "default": ",".join(EVICTIONS), "metavar": "NAME,NAME"}
    parser.add_argument("--policies", help="which to replay", **options)
    text = "conversations all begin at once, and go on by their recorded times, or take turns (unset: time)"
    parser.add_argument("--interleave", choices=("time", "turns"), help=text)
    parser.set_defaults(run=_trace)


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


def _orders(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in EXPERT_ORDERS]:
        refused(f"there is no rule {unknown[0]!r}, only {', '.join(EXPERT_ORDERS)}")
    return names


def _shares(text: str) -> tuple[float, ...]:
    try:
        shares = tuple(float(one) for one in text.split(","))
    except ValueError:
        shares = ()
    if not shares or not all(0 < share <= 100 for share in shares):
        refused(f"{text!r} is not a list of percentages above 0 and at most 100")
    return tuple(dict.fromkeys(shares))


def _add_routing(parser: Any, group: Any) -> None:
    text = "a file of --record-routing"
    parser.add_argument("trace", type=Path, metavar="TRACE", help=text)
    options = {"type": _orders, "default": ",".join(EXPERT_ORDERS), "metavar": "NAME,NAME"}
    parser.add_argument("--policies", help="which experts stay: the rules to replay", **options)
    text = "percentages of all experts that the device has room for"
    parser.add_argument("--shares", type=_shares, default="12.5,25,50,75", metavar="X,X", help=text)
    parser.set_defaults(run=_routing)


def _routing(args: argparse.Namespace) -> int:
    """Here, as `_trace` is."""
    from penstock.bench.report import print_table, require_matplotlib
    from penstock.bench.routing import RoutingReport, measure
    from penstock.experts.routing import read_routing
    from penstock.progress import ProgressBar

    if args.plot is not None:
        require_matplotlib()
    trace = read_routing(args.trace, args.steps)
    with ProgressBar() as bar:
        report = RoutingReport(trace, measure(trace, args.policies, args.shares, bar))
    print(report.title)
    for note in report.notes():
        print(note)
    print_table(*report.table())
    if args.json is not None:
        report.write(args.json)
    if args.plot is not None:
        report.draw(args.plot)
    return 0


# -------------------------------------------------------------------------------------------------- the kinds

KINDS = {
    "decode": BenchKind(
        "time per decode step",
        "Time of one decode step while so many requests run, prompts done and none finished.",
        (
            ("--batch", "requests at once", "1,8,32,128,256", counts),
            ("--prompt-tokens", "tokens of each prompt", 128, positive),
            ("--tokens", "tokens that each request writes", 128, positive),
        ),
        repeat=3,
    ),
    "drafts": BenchKind(
        "what drafts can reach, with synthetic acceptance",
        "Tokens per second with drafts of which a given share is kept, beside plain decoding. Which ones are "
        "kept is made up: this measures steps, not a proposer. Needs --speculate.",
        (
            ("--batch", "requests at once", "1,8,32", counts),
            ("--drafts", "drafts of each request in a step", "1,2,3,4", counts),
            ("--prompt-tokens", "tokens of each prompt", 128, positive),
            ("--tokens", "tokens that each request writes", 256, positive),
        ),
        repeat=3,
        add_more=_add_acceptance,
    ),
    "ttft": BenchKind(
        "time to first token",
        "Time from submit to first token of one request: nothing cached, and its prefix in each tier alone.",
        (("--tokens", "prompt lengths", "2048,8192,32768", counts),),
        repeat=5,
        add_more=_add_restart,
    ),
    "turns": BenchKind(
        "time per turn of many conversations",
        "Many conversations at once, turn after turn: how long each turn takes, and where the KV of what "
        "was said before comes from.",
        (
            ("--conversations", "conversations, all asking at once", 64, positive),
            ("--turns", "turns of each", 5, positive),
            ("--prompt-tokens", "new tokens that each turn brings", 1024, positive),
            ("--tokens", "tokens that each answer has", 128, positive),
        ),
        repeat=1,
    ),
    "agents": BenchKind(
        "recorded agents, many users",
        "Replay recorded conversations of coding agents, many users at once: when each request is "
        "answered, and where its KV comes from. In this process, or with --url against a server. Lengths "
        "are in tokens of the trace.",
        (
            ("--users", "conversations, each with requests that fit --context", 20, positive),
            ("--context", "requests with longer prompts are left out", 65536, positive),
            ("--requests", "requests of each conversation at most", 16, positive),
            ("--tokens", "tokens that each answer has at most", 200, positive),
            ("--think", "factor of the recorded pauses before requests", 0.0, _not_negative),
            ("--max-think-s", "no pause is longer; some that were recorded take hours", None, _not_negative),
            (
                "--limit-s",
                "stop after so long, and report what was done (unset: at the end)",
                None,
                _not_negative,
            ),
            ("--scale", "divide all lengths, blocks included, by this", 1, positive),
        ),
        "replay",
        add_more=_add_agents,
    ),
    "transfer": BenchKind(
        "rate between tiers",
        "Rate of KV blocks between device and host memory, beside one plain copy of as many bytes; also to "
        "and from a disk, beside raw O_DIRECT, and a shared store, where they are named. No weights are "
        "read.",
        (
            ("--blocks", "blocks moved at once, scattered over both memories", "127,511", counts),
            ("--layers", "also in groups of so many layers", "6,3", counts),
            ("--seed", "of the bytes and of where they lie", 0),
        ),
        "blocks",
        repeat=5,
        engine=False,
        add_more=_add_transfer,
    ),
    "trace": BenchKind(
        "hit rates of eviction policies",
        "Replay a trace against policies of eviction: how many blocks each finds, beside the best that any "
        "could. Mooncake's form and that of recorded agents are known; blocks have 512 tokens either way. "
        "Needs no model.",
        (
            ("--capacity-blocks", "blocks kept (unset: doubling up to all that the trace has)", None, counts),
            ("--requests", "only the first N (unset: all)", None, positive),
            (
                "--scan",
                "put N documents that never come back between the requests (unset: none)",
                None,
                positive,
            ),
            ("--scan-blocks", f"blocks of each (unset: {_SCAN_BLOCKS})", None, positive),
        ),
        engine=False,
        add_more=_add_trace,
    ),
    "routing": BenchKind(
        "hit rates of rules for experts",
        "Replay recorded routing against rules for which experts stay on the device: how many of those that "
        "tokens hit each rule finds there, beside the best that any could. Needs no model.",
        (("--steps", "only the first N (unset: all)", None, positive),),
        engine=False,
        add_more=_add_routing,
    ),
    "restore": BenchKind(
        "decoding beside a restore",
        "Time between tokens of running requests while prefixes come back from host memory, beside the "
        "same without.",
        (
            ("--batch", "requests that decode", "8,32", counts),
            ("--gib", "GiB of KV that come back", 2.5, float),
            ("--tokens", "tokens that each decoding request writes", 512, positive),
        ),
        repeat=3,
    ),
    "deep": BenchKind(
        "sequences larger than device memory",
        "Long sequences with all of their KV on the device, and with --kv-resident-tokens there and the "
        "rest in host memory: prefill, time per token, and the first token of a second turn, beside the "
        "rate of the link; with --kv-residency scored also a turn whose tokens attend to what is on the "
        "device alone. One request at a time.",
        (
            ("--lengths", "tokens of the prompts", "32768,131072,524288", counts),
            ("--tokens", "tokens that each answer has", 8, positive),
        ),
        "measurement",
    ),
    "collectives": BenchKind(
        "sums over ranks",
        "Time of one sum over the processes of --tensor-parallel, by size. Each layer of a divided model "
        "needs two of them per step. Needs no model.",
        (("--kib", "sizes in KiB", "4,64,1024,16384", counts),),
        "size",
        repeat=50,
        engine=False,
        add_more=_add_collectives,
    ),
    "soak": BenchKind(
        "minutes of trouble, and a verdict",
        "Random requests from several threads, cancels, retractions, cache resets, copies that fail or "
        "stall, adapters that change; then every answer is compared with the same request alone, and every "
        "balance has to be zero. Exit code 1 where anything is wrong. Unless sizes are given, 48 KV blocks "
        "on the device and 4 MiB of host memory, so that there is always too little. A disk or store that "
        "is named fails, stalls and damages blocks as well; then 1 MiB of host memory, and 16 of disk in a "
        "temporary directory.",
        (
            ("--seconds", "how long requests come", 60, positive),
            ("--threads", "that submit requests", 4, positive),
            ("--adapters", "random LoRA adapters that take turns under one name; 0: none", 3),
        ),
        "soak",
        add_more=_add_soak,
    ),
}
