"""A measurement for people and for later: a table, a JSON file, a picture. Owns their form; measures nothing."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from penstock.bench.machine import describe_machine, device_of
from penstock.bench.picture import save_picture
from penstock.bench.run import Results, Shown
from penstock.config import Config

MOST_COLUMNS = 9


@dataclass(frozen=True, slots=True)
class Report:
    """Everything needed to read the figures without the machine they came from."""

    bench: Shown
    model: str
    config: Config
    results: Results
    server: str | None = None  # where a server elsewhere was measured: neither this machine nor `config` says what it is

    @property
    def title(self) -> str:
        if self.server is not None:
            return f"penstock bench {self.bench.name}: {self.model} at {self.server}"
        machine = describe_machine()
        device = device_of(self.config)
        where = machine["gpus"][0]["name"] if device == "cuda" else f"{machine['cpu']}, threads: {machine['threads']}"
        return f"penstock bench {self.bench.name}: {self.model} on {where}"

    def as_dict(self) -> dict[str, Any]:
        of = getattr(self.bench, "settings", self.bench)
        settings = {name: getattr(of, name) for name in getattr(of, "__dataclass_fields__", ())}
        measured = {"device": device_of(self.config), "config": self.config.shown()}
        return {
            "bench": self.bench.name,
            "measured": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": describe_machine(),
            "model": self.model,
            **(measured if self.server is None else {"server": self.server}),
            "settings": settings,
            "results": self.results.rows,
            "skipped": self.results.skipped,
        }


def table(report: Report) -> Table:
    """Without columns that have nothing in them; turned on its side where the others are too many for a terminal."""
    rows = report.results.rows
    columns = [column for column in report.bench.columns if any(column.cell(row) != "-" for row in rows)]
    lines = [[column.title for column in columns], *([column.cell(row) for column in columns] for row in rows)]
    if len(columns) > MOST_COLUMNS:
        lines = [list(line) for line in zip(*lines, strict=True)]
    drawn = Table(title=report.title, title_justify="left")
    for title in lines[0]:
        drawn.add_column(title, justify="right")
    for line in lines[1:]:
        drawn.add_row(*line)
    return drawn


def write_json(report: Report, path: Path) -> None:
    path.write_text(json.dumps(report.as_dict(), indent=2) + "\n")


def draw(report: Report, path: Path) -> None:
    if report.results.rows:
        panels: int = getattr(report.bench, "panels", 1)
        save_picture(path, report.title, lambda axes: report.bench.draw(axes, report.results.rows), panels)
