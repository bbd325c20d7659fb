"""A measurement for people and for later: a table, a JSON file, a picture, and what machine it was made on.
Owns their form; measures nothing.

Needs no torch until it is asked for the machine, and matplotlib, which is optional, only for pictures.
"""

from __future__ import annotations

import datetime
import json
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psutil
from rich.console import Console
from rich.control import strip_control_codes
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from penstock import __version__
from penstock.config import GIB, Config
from penstock.errors import ConfigError

MOST_COLUMNS = 9

Row = dict[str, Any]


class Results(NamedTuple):
    """One row per size measured, and a sentence for each one that could not be."""

    rows: list[Row]
    skipped: list[str]


class Column(NamedTuple):
    title: str
    cell: Callable[[Row], str]


def figure(title: str, path: str, digits: int = 0, factor: float = 1.0) -> Column:
    """A column with the number at `path` of a row, such as `step_ms.median`; "-" if there is none."""

    def cell(row: Row) -> str:
        found: Any = row
        for name in path.split("."):
            found = None if found is None else found.get(name)
        return "-" if found is None else f"{factor * found:.{digits}f}"

    return Column(title, cell)


class Shown(Protocol):
    """How the rows of one kind of measurement are shown."""

    @property
    def name(self) -> str: ...

    @property
    def columns(self) -> tuple[Column, ...]: ...

    def draw(self, axes: Any, rows: list[Row]) -> None:
        """Onto matplotlib's axes."""


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Everything needed to read the figures without the machine they came from."""

    bench: Shown
    model: str
    config: Config
    results: Results
    # set if a remote server was measured: then this machine and `config` do not describe it
    server: str | None = None

    @property
    def title(self) -> str:
        if self.server is not None:
            return f"penstock bench {self.bench.name}: {self.model} at {self.server}"
        machine = describe_machine()
        where = (
            machine["gpus"][0]["name"]
            if device_of(self.config) == "cuda"
            else (f"{machine['cpu']}, threads: {machine['threads']}")
        )
        return f"penstock bench {self.bench.name}: {self.model} on {where}"

    def show(self) -> None:
        """Without columns that have nothing in them; turned on its side where the others are too many for a
        terminal."""
        rows = self.results.rows
        columns = [column for column in self.bench.columns if any(column.cell(row) != "-" for row in rows)]
        lines = [
            [column.title for column in columns],
            *([column.cell(row) for column in columns] for row in rows),
        ]
        if len(columns) > MOST_COLUMNS:
            lines = [list(line) for line in zip(*lines, strict=True)]
        print_table(lines[0], lines[1:], self.title)

    def write(self, path: Path) -> None:
        of = getattr(self.bench, "settings", self.bench)
        settings = {name: getattr(of, name) for name in getattr(of, "__dataclass_fields__", ())}
        figures = {"settings": settings, "results": self.results.rows, "skipped": self.results.skipped}
        write_json(path, self.bench.name, measured_on(self.model, self.config, self.server) | figures)

    def draw(self, path: Path) -> None:
        if self.results.rows:
            panels: int = getattr(self.bench, "panels", 1)
            save_picture(path, self.title, lambda axes: self.bench.draw(axes, self.results.rows), panels)


def measured_on(model: str, config: Config, server: str | None = None) -> dict[str, Any]:
    where = {"device": device_of(config), "config": config.shown()} if server is None else {"server": server}
    return {"machine": describe_machine(), "model": model, **where}


def write_json(path: Path, bench: str, fields: Mapping[str, Any]) -> None:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    path.write_text(json.dumps({"bench": bench, "measured": now, **fields}, indent=2) + "\n")


def print_table(
    titles: Sequence[str], lines: Sequence[Sequence[str]], title: str | None = None, left: int = 0
) -> None:
    """On stdout: figures to the right, the first `left` columns to the left. No figure is ever cut. If the
    terminal is too narrow, or stdout is no terminal, this is plain text as wide as it has to be."""
    console = Console()
    # a model's name is no markup
    table = Table(title=None if title is None else Text(strip_control_codes(title)), title_justify="left")
    for number, name in enumerate(titles):
        table.add_column(name, justify="left" if number < left else "right", no_wrap=True)
    for line in lines:
        table.add_row(*(Text(strip_control_codes(cell)) for cell in line))
    wide = console.options.update(max_width=1 << 16)
    if console.is_terminal and Measurement.get(console, wide, table).maximum <= console.width:
        console.print(table)
        return
    if title is not None:
        print(strip_control_codes(title))
    table.title, table.box, table.pad_edge, table.padding = None, None, False, (0, 2, 0, 0)
    plain = Console(width=1 << 16, color_system=None, force_terminal=False)
    with plain.capture() as drawn:
        plain.print(table)
    print("\n".join(line.rstrip() for line in drawn.get().splitlines()))


# --------------------------------------------------------------------------------------------------- pictures


def require_matplotlib() -> None:
    """Asked before measuring, so that minutes of work do not end in an error."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed; run: pip install 'penstock[plots]'"
        )


def save_picture(path: Path, title: str, draw: Callable[[Any], None], panels: int = 1) -> None:
    """`draw` gets matplotlib's axes: a list of them, stacked with the same x axis, if `panels` is over 1."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5 if panels == 1 else 2.5 * panels), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(panels, sharex=True, squeeze=False)[:, 0])
    draw(axes[0] if panels == 1 else axes)
    axes[0].set_title(title, fontsize=9)
    for one in axes:
        one.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=150)


def draw_bars(
    axes: Any,
    groups: Sequence[str],
    bars: Mapping[str, Sequence[float | None]],
    form: str = "%.1f",
    size: int = 7,
) -> None:
    """`bars`: by their name, one for each group; None: it has none. With figures on top, and a legend."""
    width = 0.85 / len(bars)
    for i, (name, heights) in enumerate(bars.items()):
        places = [
            at + (i - (len(bars) - 1) / 2) * width for at, height in enumerate(heights) if height is not None
        ]
        drawn = axes.bar(places, [height for height in heights if height is not None], width, label=name)
        axes.bar_label(drawn, fmt=form, fontsize=size)
    axes.set_xticks(range(len(groups)), groups)
    axes.legend(fontsize=8)


def draw_points(
    axes: Any,
    points: Iterable[tuple[str, object, float | None]],
    xlabel: str,
    ylabel: str,
    log: bool = False,
    size: int = 7,
) -> None:
    """Bars for (series, group, height), in order of appearance."""
    bars: dict[str, dict[object, float | None]] = {}
    for series, group, height in points:
        bars.setdefault(series, {})[group] = height
    groups = list(dict.fromkeys(group for known in bars.values() for group in known))
    heights = {series: [known.get(group) for group in groups] for series, known in bars.items()}
    draw_bars(axes, [str(group) for group in groups], heights, size=size)
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter("")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)


# ------------------------------------------------------------------------------------------------ the machine


def describe_machine() -> dict[str, Any]:
    import torch

    from penstock.lanes import cuda
    from penstock.models.form_choice import cpu_name

    gpus = cuda.describe_gpus()
    name = gpus[0]["name"] if gpus else cpu_name()
    return {
        "slug": re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-"),
        "cpu": cpu_name(),
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "gpus": gpus,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "triton": installed_version("triton"),
        "penstock": __version__,
    }


def installed_version(package: str) -> str | None:
    """None: it cannot be imported."""
    if find_spec(package) is None:
        return None
    try:
        return metadata.version(package.replace("_", "-"))
    except metadata.PackageNotFoundError:
        return "unknown"


def device_of(config: Config) -> str:
    """What `--device` comes to here."""
    from penstock.lanes import cuda

    if config.source.device != "auto":
        return config.source.device
    return "cuda" if cuda.is_usable() else "cpu"
