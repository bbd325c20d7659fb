"""A measurement for people and for later: a table, a JSON file, a picture. Owns their form; measures nothing."""

from __future__ import annotations

import datetime
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from penstock.bench.machine import describe_machine, device_of, installed_version
from penstock.bench.run import Results, Shown
from penstock.config import Config
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Report:
    """Everything needed to read the figures without the machine they came from."""

    bench: Shown
    model: str
    config: Config
    results: Results

    @property
    def title(self) -> str:
        machine = describe_machine()
        device = device_of(self.config)
        where = machine["gpus"][0]["name"] if device == "cuda" else f"{machine['cpu']}, threads: {machine['threads']}"
        return f"penstock bench {self.bench.name}: {self.model} on {where}"

    def as_dict(self) -> dict[str, Any]:
        settings = {name: getattr(self.bench, name) for name in getattr(self.bench, "__dataclass_fields__", ())}
        return {
            "bench": self.bench.name,
            "measured": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": describe_machine(),
            "model": self.model,
            "device": device_of(self.config),
            "config": asdict(self.config),
            "settings": settings,
            "results": self.results.rows,
            "skipped": self.results.skipped,
        }


def table(report: Report) -> Table:
    columns = report.bench.columns
    drawn = Table(title=report.title, title_justify="left")
    for column in columns:
        drawn.add_column(column.title, justify="right")
    for row in report.results.rows:
        drawn.add_row(*(column.cell(row) for column in columns))
    return drawn


def write_json(report: Report, path: Path) -> None:
    path.write_text(json.dumps(report.as_dict(), indent=2) + "\n")


def require_matplotlib() -> None:
    """Asked before measuring, so that minutes of work do not end in an error."""
    if installed_version("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed; run: pip install 'penstock[plots]'")


def draw(report: Report, path: Path) -> None:
    if not report.results.rows:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    report.bench.draw(axes, report.results.rows)
    axes.set_title(report.title, fontsize=9)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=150)
