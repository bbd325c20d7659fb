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


def save_picture(path: Path, title: str, draw: Callable[[Any], None], panels: int = 1) -> None:
    """`draw` gets matplotlib's axes; a list of them, one above the other with the same x axis, where there are several."""
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
