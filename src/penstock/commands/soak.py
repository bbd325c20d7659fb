"""`penstock bench soak`: a soak, its counts and its verdict. Owns how they are shown; what is wrong is decided in `penstock.bench`."""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.bench.machine import describe_machine, device_of
from penstock.bench.scratch import scratch_ssd
from penstock.bench.soak import SoakBench, Verdict
from penstock.commands.progress import ProgressBar
from penstock.config import Config

DISTURBED = ("penstock.kv.tiers", "penstock.engine.engine")  # they warn of whatever fails in a tier, and here that is on purpose


def bench_soak(config: Config, bench: SoakBench, json_file: Path | None) -> int:
    """1 where anything was violated."""
    with _quiet(), scratch_ssd(config) as config, ProgressBar() as bar:
        verdict = bench.measure(config, bar)
    Console().print(_table(verdict, config, bench))
    said = Console(soft_wrap=True, highlight=False, markup=False)
    for violation in verdict.violations:
        said.print(f"violated: {violation}")
    said.print("nothing was violated" if not verdict.violations else f"{len(verdict.violations)} violations")
    if json_file is not None:
        json_file.write_text(json.dumps(_report(verdict, config, bench), indent=2) + "\n")
    return 1 if verdict.violations else 0


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


def _table(verdict: Verdict, config: Config, bench: SoakBench) -> Table:
    drawn = Table(title=f"penstock bench soak: {config.source.model}, {bench.seconds:g} s, seed {bench.seed}", title_justify="left")
    drawn.add_column("")
    drawn.add_column("number", justify="right")
    for what, number in verdict.counts.items():
        drawn.add_row(what, "not asked for" if number is None else f"{number}")
    return drawn


def _report(verdict: Verdict, config: Config, bench: SoakBench) -> dict[str, Any]:
    return {
        "bench": "soak",
        "measured": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "model": config.source.model,
        "device": device_of(config),
        "config": config.shown(),
        "settings": asdict(bench),
        "counts": verdict.counts,
        "violations": verdict.violations,
    }
