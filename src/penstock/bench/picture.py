"""Pictures by matplotlib, which is optional. Owns their size and frame; who measured something draws it onto the axes."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError


def require_matplotlib() -> None:
    """Asked before measuring, so that minutes of work do not end in an error."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed; run: pip install 'penstock[plots]'")


def save_picture(path: Path, title: str, draw: Callable[[Any], None]) -> None:
    """`draw` gets matplotlib's axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw(axes)
    axes.set_title(title, fontsize=9)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=150)
