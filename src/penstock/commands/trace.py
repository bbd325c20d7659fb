"""`penstock bench trace`: a trace, a replay per policy and capacity, a report. Owns their order; imports nothing that needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from penstock.bench.picture import require_matplotlib
from penstock.bench.trace import ladder, measure
from penstock.bench.trace_input import read_any, with_scan
from penstock.bench.trace_report import TraceReport, draw, tables, write_json
from penstock.commands.progress import ProgressBar


@dataclass(frozen=True, slots=True)
class Replays:
    """What is replayed against what."""

    trace: Path
    policies: Sequence[str]
    capacities: Sequence[int] | None = None  # in blocks; None: a ladder up to all of the trace's blocks
    num_requests: int | None = None  # None: all
    interleave: str | None = None  # how conversations take turns; None: by their recorded times
    num_scans: int = 0  # one-off documents among the requests
    scan_blocks: int = 0  # of each


def bench_trace(replays: Replays, json_file: Path | None, plot_file: Path | None) -> int:
    if plot_file is not None:
        require_matplotlib()
    trace = read_any(replays.trace, replays.num_requests, replays.interleave)
    if replays.num_scans:
        trace = with_scan(trace, replays.num_scans, replays.scan_blocks)
    with ProgressBar() as bar:
        rows = measure(trace, replays.policies, replays.capacities or ladder(trace), bar)
    report = TraceReport(trace, rows)
    console = Console()
    for heading, table in tables(report).items():
        console.print(heading, soft_wrap=True, highlight=False, markup=False)
        console.print(table)
    if json_file is not None:
        write_json(report, json_file)
    if plot_file is not None:
        draw(report, plot_file)
    return 0
