"""`penstock bench`: a measurement, with an engine where it needs one, and a report. Owns their order, and
what each kind makes of its arguments; the rest is in `penstock.bench`."""

from __future__ import annotations

import gc
import logging
import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace

from penstock.answer import load_engine
from penstock.bench.agents import AgentsBench
from penstock.bench.agents_replay import ServerAddress
from penstock.bench.collectives import CollectivesBench
from penstock.bench.decode import DecodeBench, RestoreBench
from penstock.bench.deep import DeepBench
from penstock.bench.drafts import DraftsBench
from penstock.bench.report import (
    BenchReport,
    Results,
    measured_on,
    print_table,
    require_matplotlib,
    write_json,
)
from penstock.bench.run import Bench, Driver
from penstock.bench.scratch import scratch_ssd
from penstock.bench.soak import SoakBench, Verdict
from penstock.bench.trace_files import Asking, read_conversations, select
from penstock.bench.transfer import TransferBench, dimensions_of
from penstock.bench.ttft import RestartBench, TtftBench
from penstock.bench.turns import TurnsBench
from penstock.commands.bench_arguments import URL_VOCAB
from penstock.config import MAX_DRAFTS, Config, SpeculationConfig, TraceConfig
from penstock.engine.execution.synthetic import SyntheticSampler
from penstock.engine.loop import settle_process
from penstock.errors import ConfigError, PenstockError
from penstock.flags import SETTINGS, config_of, engine_flags
from penstock.progress import ProgressBar, plain_console
from penstock.ranks.launched import launched_for

# they warn about every failure in a tier, and a soak causes failures on purpose
DISTURBED = ("penstock.kv.tiers", "penstock.engine.engine")


def run(args: Namespace, config: Config) -> int:
    """Measures, prints it, and writes the files. Returns 1 if there is no measurement or a server failed."""
    if args.plot is not None:
        require_matplotlib()
    if args.kind == "soak":
        return _soak(args)
    if launched_for(config, os.environ) is not None:
        raise ConfigError("bench starts the ranks itself, for each of its engines: run it without torchrun")
    report = KINDS[args.kind](args, config)
    results = report.results
    for skipped in results.skipped:
        plain_console(stderr=True).print(f"skipped: {skipped}")
    # files first: the reader of stdout may have left; figures are shown even if a file cannot be written
    try:
        if args.json is not None:
            report.write(args.json)
        if args.plot is not None:
            report.draw(args.plot)
    finally:
        report.show()
    return 0 if results.rows and not (report.server and results.skipped) else 1


def _with_engine(config: Config, bench: Bench) -> BenchReport:
    """The engine is driven from this thread, so that nothing but its own work is in the figures."""
    with scratch_ssd(config) as config, driven(config) as driver:
        results, name = bench.measure(driver), driver.engine.name
    return BenchReport(bench, name, config, results)


@contextmanager
def driven(config: Config, synthetic: bool = False) -> Iterator[Driver]:
    """A warm engine, driven from this thread. It is closed at the end, but not after an error: a step that
    was interrupted halfway cannot be ended in order, only with the process."""
    engine = load_engine(config, synthetic=synthetic)
    with ProgressBar() as bar:
        engine.warm(bar)
        settle_process()
        driver = Driver(engine, config, bar)
        driver.wait_ready()
        yield driver
    engine.close(timeout_s=60.0)
    del engine, driver
    gc.unfreeze()
    gc.collect()  # its memory, before another engine wants it


def _always_loading(config: Config) -> Config:
    """A tier is measured, whether or not it pays."""
    return replace(config, offload=replace(config.offload, load_always=True))


def _long_enough(args: Namespace, tokens: int) -> Config:
    """Random weights know no longest context."""
    if args.max_model_len is None and args.load_format == "dummy":
        args.max_model_len = tokens
    return config_of(args)


def _decode(args: Namespace, config: Config) -> BenchReport:
    bench = DecodeBench(args.batch, args.prompt_tokens, args.tokens, args.repeat, args.seed)
    return _with_engine(config, bench)


def _drafts(args: Namespace, config: Config) -> BenchReport:
    """An engine for each number of drafts, one after the other, and one without speculation."""
    if config.speculation.proposer is None:
        raise ConfigError("bench drafts needs --speculate: it says where drafts are made")
    if config.speculation.sampling != "coupled" or config.trace.file is not None:
        raise ConfigError("bench drafts: --speculate-sampling and --trace would change nothing")
    if (most := max(args.drafts)) > MAX_DRAFTS:
        raise ConfigError(f"--drafts {most}: a request has at most {MAX_DRAFTS}")
    bench = DraftsBench(
        *(args.batch, args.drafts, args.synthetic_acceptance, args.prompt_tokens),
        *(args.tokens, args.repeat, args.seed),
    )

    @contextmanager
    def engines(num: int) -> Iterator[tuple[Driver, Callable[[float], None]]]:
        own = replace(config.speculation, max_drafts=num) if num else SpeculationConfig()
        with driven(replace(config, speculation=own), synthetic=bool(num)) as driver:
            samplers = [getattr(one, "sampler", None) for one in driver.engine.parts.executor.passes]
            found = [one for one in samplers if isinstance(one, SyntheticSampler)]

            def set_share(share: float) -> None:
                for sampler in found:
                    sampler.share = share

            yield driver, set_share

    with scratch_ssd(config) as config:
        results = bench.measure(engines)
    return BenchReport(bench, config.source.model, config, results)


def _ttft(args: Namespace, config: Config) -> BenchReport:
    """In new processes with --restart: valid only if nothing but the disk connects the two runs."""
    if not config.kv.prefix_cache and not config.offload.enabled:
        raise ConfigError(
            "--no-prefix-cache without offload leaves bench ttft nothing to compare with: it measures how "
            "much a cached prefix saves"
        )
    config = _always_loading(config)
    if not args.restart:
        return _with_engine(config, TtftBench(args.tokens, args.repeat, args.seed))
    if not config.offload.enabled:
        raise ConfigError("--restart needs --kv-offload: nothing else outlives a process")
    if config.trace.file is not None:
        raise ConfigError("--restart: --trace writes one engine's file, and two processes would overwrite it")
    bench = RestartBench(args.tokens, args.repeat, args.seed)
    with scratch_ssd(config, needed=True) as config, ProgressBar() as bar:
        model, results = bench.measure(config, bar)
    return BenchReport(bench, model, config, results)


def _turns(args: Namespace, config: Config) -> BenchReport:
    sizes = args.conversations, args.turns, args.prompt_tokens, args.tokens
    return _with_engine(config, TurnsBench(*sizes, args.repeat, args.seed))


def _agents(args: Namespace, config: Config) -> BenchReport:
    chosen = select(read_conversations(args.recorded), args.users, args.context, args.requests)
    given = {field.name: getattr(args, field.name) for field in fields(Asking) if field.name != "trace"}
    asking = Asking(args.recorded.name, **given)
    if args.url is not None:
        return _agents_at_url(args, AgentsBench(asking, chosen))
    if args.api_key is not None or args.vocab is not None or args.hints:
        raise ConfigError("--api-key, --vocab and --hints need --url: they are for a server")
    config = _long_enough(args, asking.longest(chosen))
    return _with_engine(config, AgentsBench(asking, chosen))


def _agents_at_url(args: Namespace, bench: AgentsBench) -> BenchReport:
    """No engine: a server that runs already."""
    for name, default in vars(engine_flags().parse_args([])).items():
        if name not in ("model", "seed", "block_tokens") and getattr(args, name) != default:
            raise ConfigError(
                f"{SETTINGS[name].flag} is for an engine in this process, and --url names a server"
            )
    server = ServerAddress(args.url, args.model, args.api_key, args.hints)
    server.parts()
    with ProgressBar() as bar:
        results = bench.measure_url(server, args.vocab or URL_VOCAB, args.block_tokens, bar)
    return BenchReport(bench, server.model, Config(), results, server.url)


def _transfer(args: Namespace, config: Config) -> BenchReport:
    """No engine and no weights: the model's shape says how large a block is."""
    bench = TransferBench(args.blocks, args.layers, args.repeat, args.seed)
    settle_process()
    with scratch_ssd(config) as config, ProgressBar() as bar:
        results = bench.measure(config, bar)
    return BenchReport(bench, dimensions_of(config.source.model)[0], config, results)


def _collectives(args: Namespace, config: Config) -> BenchReport:
    bench = CollectivesBench(args.kib, args.repeat)
    with ProgressBar() as bar:
        results = bench.measure(config, bar)
    return BenchReport(bench, f"{config.ranks.size} ranks", config, results)


def _restore(args: Namespace, config: Config) -> BenchReport:
    if not config.offload.enabled or not 0 < args.gib < 1024:
        raise ConfigError(
            "bench restore needs --kv-offload and a positive --gib: it brings KV back from host memory"
        )
    bench = RestoreBench(args.batch, args.gib, args.tokens, args.repeat, args.seed)
    return _with_engine(_always_loading(config), bench)


def _deep(args: Namespace, config: Config) -> BenchReport:
    """Where it is said how much is on the device, once more with as much as fits. What was measured until
    then is kept."""
    if not config.offload.enabled:
        raise ConfigError("bench deep needs --kv-offload: what is not on the device is in host memory")
    if args.tokens < 2:
        raise ConfigError("bench deep needs --tokens of at least 2: it measures the time between them")
    bench = DeepBench(args.lengths, args.tokens, args.seed)
    config = _long_enough(args, bench.tokens_of(max(args.lengths)))
    report = _with_engine(config, bench)
    fits = (config.kv.device_blocks or 0) * config.kv.block_tokens
    lengths = tuple(length for length in bench.lengths if not fits or bench.tokens_of(length) <= fits)
    if config.kv.resident_tokens is None or not lengths:
        return report
    config = replace(config, trace=TraceConfig())  # the file is the first engine's
    kv = replace(config.kv, resident_tokens=None, residency="exact", pin_spans=())
    engine = replace(config.engine, max_model_len=bench.tokens_of(max(lengths)))
    rows, skipped = list(report.results.rows), list(report.results.skipped)
    try:
        full = _with_engine(replace(config, kv=kv, engine=engine), replace(bench, lengths=lengths)).results
        rows, skipped = rows + list(full.rows), skipped + list(full.skipped)
    except PenstockError as error:
        skipped.append(f"with all of it on the device: {error}")
    return replace(report, results=Results(rows, skipped))


KINDS: dict[str, Callable[[Namespace, Config], BenchReport]] = {
    "decode": _decode,
    "drafts": _drafts,
    "ttft": _ttft,
    "turns": _turns,
    "agents": _agents,
    "transfer": _transfer,
    "collectives": _collectives,
    "restore": _restore,
    "deep": _deep,
}


# ------------------------------------------------------------------------------------------------------- soak


def _soak(args: Namespace) -> int:
    """1 where anything was violated. Unless sizes are given, always short of memory on the device, and now
    and then in the host tier."""
    if args.adapters < 0:
        raise ConfigError(f"argument --adapters: there cannot be {args.adapters} of them")
    if args.device_kv_gib is None and args.device_kv_blocks is None:
        args.device_kv_blocks = 48
    if args.kv_offload and args.kv_offload_host_gib is None:
        colder = args.kv_offload_ssd_dir is not None or args.kv_offload_remote is not None
        args.kv_offload_host_gib = 0.001 if colder else 0.004
    if args.kv_offload_ssd_dir is not None and args.kv_offload_ssd_gib is None:
        args.kv_offload_ssd_gib = 0.016
    if args.kv_offload and args.kv_resident_tokens is None and not args.no_prefix_cache:
        args.kv_resident_tokens = 12 * args.block_tokens  # so that longer requests are paged out
    bench = SoakBench(args.seconds, args.threads, args.adapters, args.seed)
    with _quiet(), scratch_ssd(config_of(args)) as config, ProgressBar() as bar:
        verdict = bench.measure(config, bar)
    try:
        if args.json is not None:
            found = {"settings": asdict(bench), "counts": verdict.counts, "violations": verdict.violations}
            write_json(args.json, bench.name, measured_on(config.source.model, config) | found)
    finally:
        _show_verdict(config, bench, verdict)
    return 1 if verdict.violations else 0


def _show_verdict(config: Config, bench: SoakBench, verdict: Verdict) -> None:
    title = f"penstock bench soak: {config.source.model}, {bench.seconds:g} s, seed {bench.seed}"
    counts = [
        (what, "not asked for" if number is None else f"{number}") for what, number in verdict.counts.items()
    ]
    print_table(["", "number"], counts, title, left=1)
    said = plain_console()
    for violation in verdict.violations:
        said.print(f"violated: {violation}")
    said.print("nothing was violated" if not verdict.violations else f"{len(verdict.violations)} violations")


@contextmanager
def _quiet() -> Iterator[None]:
    before = {name: logging.getLogger(name).level for name in DISTURBED}
    for name in DISTURBED:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
