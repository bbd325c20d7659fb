"""The arguments of `penstock bench`, and what each kind of measurement is made of. Owns no measurement.

Measurements are imported when they run, so that `--help` and argument errors need no torch.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.commands.arguments import Parser, config_of, counts, device_flag, engine_flags, model_flag, new_file, picture, positive
from penstock.config import EVICTIONS, Config, KvConfig, ModelSource
from penstock.errors import ConfigError


def add_bench(commands: Any) -> None:
    parser = commands.add_parser("bench", help="measure speed", description="Measure speed on this machine, without a server.")
    kinds = parser.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    about = "Time of one decode step while so many requests run, prompts done and none finished."
    decode = kinds.add_parser("decode", help="time per decode step", description=about, parents=[engine_flags(), _bench_flags(3)])
    decode.add_argument("--batch", type=counts, default="1,8,32,128,256", metavar="N,N", help="requests at once")
    decode.add_argument("--prompt-tokens", type=positive, default=128, metavar="N", help="tokens of each prompt")
    decode.add_argument("--tokens", type=positive, default=128, metavar="N", help="tokens that each request writes")
    decode.set_defaults(run=_bench_decode)
    about = "Time from submit to first token of one request: nothing cached, and its prefix in device or host memory."
    ttft = kinds.add_parser("ttft", help="time to first token", description=about, parents=[engine_flags(), _bench_flags(5)])
    ttft.add_argument("--tokens", type=counts, default="2048,8192,32768", metavar="N,N", help="prompt lengths")
    ttft.set_defaults(run=_bench_ttft)
    about = "Time between tokens of running requests while prefixes come back from host memory, beside the same without."
    restore = kinds.add_parser("restore", help="decoding beside a restore", description=about, parents=[engine_flags(), _bench_flags(3)])
    restore.add_argument("--batch", type=counts, default="8,32", metavar="N,N", help="requests that decode")
    restore.add_argument("--gib", type=float, default=2.5, metavar="X", help="GiB of KV that come back")
    restore.add_argument("--tokens", type=positive, default=192, metavar="N", help="tokens that each decoding request writes")
    restore.set_defaults(run=_bench_restore)
    about = "Rate of KV blocks between device and host memory, beside one plain copy of as many bytes. No weights are read."
    transfer = kinds.add_parser("transfer", help="rate between device and host memory", description=about, parents=[_bench_flags(5)])
    _transfer_flags(transfer)
    transfer.set_defaults(run=_bench_transfer)
    about = (
        "Replay a Mooncake trace against policies of eviction: how many blocks each finds, beside the best that any could. Needs no model."
    )
    trace = kinds.add_parser("trace", help="hit rates of eviction policies", description=about)
    trace.add_argument("trace", type=Path, metavar="TRACE", help="a .jsonl file: input_length and hash_ids of one request per line")
    trace.add_argument("--policies", type=policies, default=",".join(EVICTIONS), metavar="NAME,NAME", help="which to replay")
    trace.add_argument("--capacity-blocks", type=counts, metavar="N,N", help="blocks kept (unset: doubling up to all that the trace has)")
    trace.add_argument("--requests", type=positive, metavar="N", help="only the first N (unset: all)")
    _report_flags(trace)
    trace.set_defaults(run=_bench_trace)


def _transfer_flags(parser: argparse.ArgumentParser) -> None:
    """Only the shape of a block counts: most flags of an engine would change nothing."""
    source = ModelSource()
    group = parser.add_argument_group("blocks")
    model_flag(group)
    group.add_argument("--load-format", choices=("dummy",), default="dummy", help="as elsewhere; there is no other here")
    device_flag(group)
    group.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default=source.dtype, help="auto: float32 on the CPU, bfloat16 on CUDA"
    )
    group.add_argument("--block-tokens", type=int, default=KvConfig().block_tokens, metavar="N", help="tokens in one KV block")
    group.add_argument("--blocks", type=counts, default="127,511", metavar="N,N", help="blocks moved at once, scattered over both memories")
    group.add_argument("--layers", type=counts, default="6,3", metavar="N,N", help="also in groups of so many layers")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the bytes and of where they lie")


def _bench_flags(repeat: int) -> argparse.ArgumentParser:
    parent = Parser(add_help=False)
    group = parent.add_argument_group("measurement")
    group.add_argument("--repeat", type=positive, default=repeat, metavar="N", help="measured runs, after one that only warms up")
    _report_flags(group)
    return parent


def _report_flags(group: Any) -> None:
    group.add_argument("--json", type=new_file, metavar="FILE", help="write settings and results there")
    group.add_argument("--plot", type=picture, metavar="FILE", help="draw a picture: .png, .svg or .pdf; needs matplotlib")


def _bench_decode(args: argparse.Namespace) -> int:
    config = config_of(args)
    from penstock.bench.decode import DecodeBench
    from penstock.commands.bench import run_bench

    bench = DecodeBench(args.batch, args.prompt_tokens, args.tokens, args.repeat, args.seed)
    return run_bench(config, bench, args.json, args.plot)


def _bench_ttft(args: argparse.Namespace) -> int:
    config = config_of(args)
    if not config.kv.prefix_cache and not config.offload.enabled:
        raise ConfigError(
            "--no-prefix-cache without offload leaves bench ttft nothing to compare with: it measures how much a cached prefix saves"
        )
    config = replace(config, offload=replace(config.offload, load_always=True))  # a tier is measured, whether or not it pays
    from penstock.bench.ttft import TtftBench
    from penstock.commands.bench import run_bench

    return run_bench(config, TtftBench(args.tokens, args.repeat, args.seed), args.json, args.plot)


def _bench_restore(args: argparse.Namespace) -> int:
    config = config_of(args)
    if not config.offload.enabled or not 0 < args.gib < 1024:
        raise ConfigError("bench restore needs --kv-offload and a positive --gib: it brings KV back from host memory")
    config = replace(config, offload=replace(config.offload, load_always=True))
    from penstock.bench.restore import RestoreBench
    from penstock.commands.bench import run_bench

    bench = RestoreBench(args.batch, args.gib, args.tokens, args.repeat, args.seed)
    return run_bench(config, bench, args.json, args.plot)


def _bench_transfer(args: argparse.Namespace) -> int:
    config = Config(ModelSource(args.model, args.load_format, args.device, args.dtype, args.seed), KvConfig(args.block_tokens))
    from penstock.bench.transfer import TransferBench
    from penstock.commands.bench import run_transfer

    return run_transfer(config, TransferBench(args.blocks, args.layers, args.repeat, args.seed), args.json, args.plot)


def _bench_trace(args: argparse.Namespace) -> int:
    from penstock.commands.trace import Replays, bench_trace

    return bench_trace(Replays(args.trace, args.policies, args.capacity_blocks, args.requests), args.json, args.plot)


def policies(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in EVICTIONS]:
        raise argparse.ArgumentTypeError(f"there is no policy {unknown[0]!r}, only {', '.join(EVICTIONS)}")
    return names
