"""Hit rates of rules for which experts stay on the device, on recorded routing, and the best that any could
have. Owns the replay and the report; needs no model, no engine and no torch.

A step passes the layers in order. Of each layer it holds the experts that its tokens hit, brings in what is
missing, and gives them back: the calls that the engine makes, on the same books, without guesses. The optimum
is Belady's rule, an upper bound, as in `bench.trace`.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock import __version__
from penstock.bench.report import Row, save_picture, write_json
from penstock.bench.trace import BOUND, OPTIMUM, best_hits, following_uses
from penstock.experts.order import ORDERS, is_bulk
from penstock.experts.routing import RoutedStep, RoutingTrace
from penstock.experts.slots import ExpertSlots
from penstock.models.progress import Progress

_REPORT_EVERY = 64  # steps


def measure(
    trace: RoutingTrace, orders: Sequence[str], shares: Sequence[float], progress: Progress
) -> list[Row]:
    """A row per order and share; those of the optimum come last. A pool holds the experts of one token of a
    layer at least."""
    rows: list[Row] = []
    total = sum(len(own) for step in trace.steps for own in step.experts)
    uses = following_uses([key for step in trace.steps for key in _keys(trace, step)])
    for order in (*orders, OPTIMUM):
        for share in shares:
            num_slots = max(trace.top_k, round(trace.num_all * share / 100))
            if order == OPTIMUM:
                hits = best_hits(uses, num_slots, progress).blocks
            else:
                hits = replay(trace, order, num_slots, progress)
            rows.append({"order": order, "share": share, "slots": num_slots, "hit_rate": hits / total})
    return rows


def replay(trace: RoutingTrace, order: str, num_slots: int, progress: Progress) -> int:
    """Experts that were on the device when a step wanted them."""
    rule = ORDERS[order](trace.num_all)
    slots = ExpertSlots(num_slots, len(trace.layers), trace.num_experts, rule)
    num_hits, stage = 0, f"{order}, {num_slots} experts"
    for number, step in enumerate(trace.steps):
        if number % _REPORT_EVERY == 0:
            progress(stage, number, len(trace.steps))
        rule.begin()
        bulk = is_bulk(step.num_tokens, trace.top_k, trace.num_experts)
        for layer, wanted in enumerate(step.experts):
            if not bulk:
                rule.used(layer * trace.num_experts + wanted)
            while len(wanted):
                wave = slots.bring(layer, wanted)
                num_hits += len(wave.experts) - len(wave.moves)
                slots.give_back(wave.slots, None)
                wanted = np.setdiff1d(wanted, wave.experts, assume_unique=True)
    slots.check()
    progress(stage, len(trace.steps), len(trace.steps))
    return num_hits


def repeated(trace: RoutingTrace) -> float | None:
    """Of the experts that a step hits, the share that the step before hit, too: what a guess by recent tokens
    would find. None: there is one step."""
    found = total = 0
    for before, step in zip(trace.steps, trace.steps[1:], strict=False):
        for old, new in zip(before.experts, step.experts, strict=True):
            found += len(np.intersect1d(old, new, assume_unique=True))
            total += len(new)
    return found / total if total else None


def _keys(trace: RoutingTrace, step: RoutedStep) -> list[int]:
    return [
        layer * trace.num_experts + expert
        for layer, own in enumerate(step.experts)
        for expert in own.tolist()
    ]


@dataclass(frozen=True, slots=True)
class RoutingReport:
    """The rows of `measure`, and their setting."""

    trace: RoutingTrace
    rows: list[Row]

    @property
    def title(self) -> str:
        trace = self.trace
        tokens = sum(step.num_tokens for step in trace.steps)
        return (
            f"penstock bench routing: {trace.name}, {trace.model}, {len(trace.steps)} steps of {tokens} "
            f"tokens, {len(trace.layers)} layers of {trace.num_experts} experts"
        )

    def percents(self) -> dict[str, dict[float, float]]:
        """By order, as measured, and share. The optimum is the last."""
        lines: dict[str, dict[float, float]] = {}
        for row in self.rows:
            lines.setdefault(row["order"], {})[row["share"]] = 100 * row["hit_rate"]
        return lines

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Titles and lines."""
        lines = self.percents()
        return ["on the device, %", *lines], [
            [f"{share:g}", *(f"{line[share]:.1f}" for line in lines.values())]
            for share in next(iter(lines.values()))
        ]

    def notes(self) -> list[str]:
        share = repeated(self.trace)
        said = [] if share is None else [f"hit in the step before, too: {100 * share:.1f} %"]
        return [f"experts found, % ({BOUND})", *said]

    def write(self, path: Path) -> None:
        trace = self.trace
        of = {
            "file": trace.name,
            "model": trace.model,
            "steps": len(trace.steps),
            "tokens": sum(step.num_tokens for step in trace.steps),
            "layers": len(trace.layers),
            "experts": trace.num_experts,
            "top_k": trace.top_k,
            "repeated": repeated(trace),
        }
        write_json(
            path,
            "routing",
            {"penstock": __version__, "python": platform.python_version(), "trace": of, "results": self.rows},
        )

    def draw(self, path: Path) -> None:
        save_picture(path, self.title, self._draw_lines)

    def _draw_lines(self, axes: Any) -> None:
        for order, line in self.percents().items():
            style: Row = {"marker": "o", "label": order}
            if order == OPTIMUM:
                style = {"linestyle": "--", "color": "black", "label": BOUND}
            axes.plot(*zip(*sorted(line.items()), strict=True), markersize=4, **style)
        axes.set_ylim(bottom=0, top=100)
        axes.set_xlabel("experts on the device, %")
        axes.set_ylabel("experts found, %")
        axes.legend(fontsize=8)
