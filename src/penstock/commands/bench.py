"""`penstock bench`: a measurement, with an engine where it needs one, and a report. Owns their order; the rest is in `penstock.bench`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from penstock.bench.agents import AgentsBench
from penstock.bench.agents_client import Server
from penstock.bench.picture import require_matplotlib
from penstock.bench.report import Report, draw, table, write_json
from penstock.bench.restart import RestartBench
from penstock.bench.run import Bench
from penstock.bench.scratch import scratch_ssd
from penstock.bench.transfer import TransferBench, dimensions_of
from penstock.commands.progress import ProgressBar
from penstock.commands.session import load_engine
from penstock.config import Config
from penstock.engine.loop import settle_process


def run_bench(config: Config, bench: Bench, json_file: Path | None, plot_file: Path | None) -> int:
    """The engine is driven from this thread, so that nothing but its own work is in the figures."""
    if plot_file is not None:
        require_matplotlib()
    with scratch_ssd(config) as config:
        engine = load_engine(config)
        with ProgressBar() as bar:
            engine.warm(bar)
            settle_process()
            results = bench.measure(engine, config, bar)
        engine.close(timeout_s=60.0)  # not on an error: a step that was interrupted halfway cannot be ended in order, only with the process
    return _show(Report(bench, engine.name, config, results), json_file, plot_file)


def run_restart(config: Config, bench: RestartBench, json_file: Path | None, plot_file: Path | None) -> int:
    """No engine in this process: what is measured is that nothing but the disk connects one with the next."""
    if plot_file is not None:
        require_matplotlib()
    with scratch_ssd(config, needed=True) as config, ProgressBar() as bar:
        model, results = bench.measure(config, bar)
    return _show(Report(bench, model, config, results), json_file, plot_file)


def run_transfer(config: Config, bench: TransferBench, json_file: Path | None, plot_file: Path | None) -> int:
    """No engine and no weights: the model's shape says how large a block is."""
    if plot_file is not None:
        require_matplotlib()
    settle_process()
    with scratch_ssd(config) as config, ProgressBar() as bar:
        results = bench.measure(config, bar)
    return _show(Report(bench, dimensions_of(config.source.model)[0], config, results), json_file, plot_file)


def run_agents_url(bench: AgentsBench, server: Server, made_of: tuple[int, int], json_file: Path | None, plot_file: Path | None) -> int:
    """No engine: a server that runs already. `made_of`: ids that tokens are below, and tokens of a block that can be reused."""
    if plot_file is not None:
        require_matplotlib()
    with ProgressBar() as bar:
        results = bench.measure_url(server, *made_of, bar)
    return _show(Report(bench, server.model, Config(), results, server.url), json_file, plot_file) or int(bool(results.skipped))


def _show(report: Report, json_file: Path | None, plot_file: Path | None) -> int:
    results = report.results
    notes = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    for skipped in results.skipped:
        notes.print(f"skipped: {skipped}")
    Console().print(table(report))
    if json_file is not None:
        write_json(report, json_file)
    if plot_file is not None:
        draw(report, plot_file)
    return 0 if results.rows else 1
