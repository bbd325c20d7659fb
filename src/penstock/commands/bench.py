"""`penstock bench`: a measurement, with an engine where it needs one, and a report. Owns their order; the
rest is in `penstock.bench`."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from penstock.answer import load_engine
from penstock.bench.agents import AgentsBench
from penstock.bench.agents_replay import ServerAddress
from penstock.bench.deep import DeepBench
from penstock.bench.report import (
    BenchReport,
    Results,
    measured_on,
    print_table,
    require_matplotlib,
    write_json,
)
from penstock.bench.run import Bench, scratch_ssd
from penstock.bench.soak import SoakBench, Verdict
from penstock.bench.transfer import TransferBench, dimensions_of
from penstock.bench.ttft import RestartBench
from penstock.config import Config
from penstock.engine.loop import settle_process
from penstock.errors import PenstockError
from penstock.progress import ProgressBar

# they warn about every failure in a tier, and a soak causes failures on purpose
DISTURBED = ("penstock.kv.tiers", "penstock.engine.engine")


def run_bench(config: Config, bench: Bench) -> BenchReport:
    """The engine is driven from this thread, so that nothing but its own work is in the figures."""
    with scratch_ssd(config) as config:
        engine = load_engine(config)
        with ProgressBar() as bar:
            engine.warm(bar)
            settle_process()
            results = bench.measure(engine, config, bar)
        # not on an error: a step that was interrupted halfway cannot be ended in order, only with the process
        engine.close(timeout_s=60.0)
        name = engine.name
        del engine
        gc.unfreeze()
        gc.collect()  # its memory, before another engine wants it
    return BenchReport(bench, name, config, results)


def run_restart(config: Config, bench: RestartBench) -> BenchReport:
    """No engine in this process: the measurement is valid only if nothing but the disk connects the two
    runs."""
    with scratch_ssd(config, needed=True) as config, ProgressBar() as bar:
        model, results = bench.measure(config, bar)
    return BenchReport(bench, model, config, results)


def run_deep(config: Config, bench: DeepBench) -> BenchReport:
    """Where it is said how much is on the device, once more with as much as fits. What was measured until
    then is kept."""
    report = run_bench(config, bench)
    fits = (config.kv.device_blocks or 0) * config.kv.block_tokens
    lengths = tuple(length for length in bench.lengths if not fits or bench.tokens_of(length) <= fits)
    if config.kv.resident_tokens is None or not lengths:
        return report
    kv = replace(config.kv, resident_tokens=None, residency="exact", pin_spans=())
    engine = replace(config.engine, max_model_len=bench.tokens_of(max(lengths)))
    rows, skipped = list(report.results.rows), list(report.results.skipped)
    try:
        full = run_bench(replace(config, kv=kv, engine=engine), replace(bench, lengths=lengths)).results
        rows, skipped = rows + list(full.rows), skipped + list(full.skipped)
    except PenstockError as error:
        skipped.append(f"with all of it on the device: {error}")
    return replace(report, results=Results(rows, skipped))


def run_transfer(config: Config, bench: TransferBench) -> BenchReport:
    """No engine and no weights: the model's shape says how large a block is."""
    settle_process()
    with scratch_ssd(config) as config, ProgressBar() as bar:
        results = bench.measure(config, bar)
    return BenchReport(bench, dimensions_of(config.source.model)[0], config, results)


def run_agents_url(bench: AgentsBench, server: ServerAddress, vocab: int, block_tokens: int) -> BenchReport:
    """No engine: a server that runs already. `vocab`: ids that tokens are below; `block_tokens`: of a block
    that can be reused."""
    with ProgressBar() as bar:
        results = bench.measure_url(server, vocab, block_tokens, bar)
    return BenchReport(bench, server.model, Config(), results, server.url)


def show(measure: Callable[[], BenchReport], json_file: Path | None, plot_file: Path | None) -> int:
    """Print the measurement, and write the files. Returns 1 if there is no measurement or a server failed."""
    if plot_file is not None:
        require_matplotlib()
    report = measure()
    results = report.results
    notes = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    for skipped in results.skipped:
        notes.print(f"skipped: {skipped}")
    # files first: the reader of stdout may have left; figures are shown even if a file cannot be written
    try:
        if json_file is not None:
            report.write(json_file)
        if plot_file is not None:
            report.draw(plot_file)
    finally:
        report.show()
    return 0 if results.rows and not (report.server and results.skipped) else 1


def run_soak(config: Config, bench: SoakBench, json_file: Path | None) -> int:
    """1 where anything was violated."""
    with _quiet(), scratch_ssd(config) as config, ProgressBar() as bar:
        verdict = bench.measure(config, bar)
    try:
        if json_file is not None:
            found = {"settings": asdict(bench), "counts": verdict.counts, "violations": verdict.violations}
            write_json(json_file, bench.name, measured_on(config.source.model, config) | found)
    finally:
        _show_verdict(config, bench, verdict)
    return 1 if verdict.violations else 0


def _show_verdict(config: Config, bench: SoakBench, verdict: Verdict) -> None:
    title = f"penstock bench soak: {config.source.model}, {bench.seconds:g} s, seed {bench.seed}"
    counts = [
        (what, "not asked for" if number is None else f"{number}") for what, number in verdict.counts.items()
    ]
    print_table(["", "number"], counts, title, left=1)
    said = Console(soft_wrap=True, highlight=False, markup=False)
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
