"""Hit rates for people and for later: tables, a JSON file, a picture. Owns their form; replays nothing."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from penstock import __version__
from penstock.bench.mooncake import BLOCK_TOKENS, Trace
from penstock.bench.picture import save_picture
from penstock.bench.trace import OPTIMUM

BOUND = f"{OPTIMUM}: Belady, an upper bound"


@dataclass(frozen=True, slots=True)
class TraceReport:
    """The rows of `bench.trace.measure`, and what they were measured on."""

    trace: Trace
    rows: list[dict[str, Any]]

    @property
    def title(self) -> str:
        trace = self.trace
        scan = f" and {trace.num_scans} one-off documents of {trace.scan_blocks} blocks" if trace.num_scans else ""
        return f"penstock bench trace: {trace.name}, {trace.num_requests} requests{scan}, blocks of {BLOCK_TOKENS} tokens"

    @property
    def policies(self) -> list[str]:
        """In the order measured; the optimum is the last."""
        return list(dict.fromkeys(row["policy"] for row in self.rows))

    def line(self, policy: str, figure: str) -> dict[int, float | None]:
        """By capacity."""
        return {row["capacity_blocks"]: row[figure] for row in self.rows if row["policy"] == policy}

    def as_dict(self) -> dict[str, Any]:
        trace = self.trace
        return {
            "bench": "trace",
            "measured": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "penstock": __version__,
            "python": platform.python_version(),
            "trace": {
                "file": trace.name,
                "requests": trace.num_requests,
                "tokens": trace.num_tokens,
                "block_tokens": BLOCK_TOKENS,
                "blocks": trace.num_blocks,
                "distinct_blocks": trace.num_distinct,
                **({"interleave": trace.interleave} if trace.interleave is not None else {}),
                **({"scans": trace.num_scans, "scan_blocks": trace.scan_blocks} if trace.num_scans else {}),
            },
            "results": self.rows,
        }


def tables(report: TraceReport) -> dict[str, Table]:
    """By heading: blocks found, and work saved, for which no bound is known."""
    policies = report.policies
    return {
        f"{report.title}\nblocks found, % ({BOUND})": _table(report, policies, "hit_rate"),
        "prefill work saved, %": _table(report, policies[:-1], "prefill_saved"),
    }


def _table(report: TraceReport, policies: list[str], figure: str) -> Table:
    drawn = Table()
    for heading in ("capacity, blocks", *policies):
        drawn.add_column(heading, justify="right")
    lines = [report.line(policy, figure) for policy in policies]
    for capacity in lines[0]:
        drawn.add_row(str(capacity), *(_percent(line[capacity]) for line in lines))
    return drawn


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def write_json(report: TraceReport, path: Path) -> None:
    path.write_text(json.dumps(report.as_dict(), indent=2) + "\n")


def draw(report: TraceReport, path: Path) -> None:
    save_picture(path, report.title, _lines(report))


def _lines(report: TraceReport) -> Callable[[Any], None]:
    def onto(axes: Any) -> None:
        for policy in report.policies:
            line = sorted(report.line(policy, "hit_rate").items())
            style = {"linestyle": "--", "color": "black", "label": BOUND} if policy == OPTIMUM else {"marker": "o", "label": policy}
            axes.plot([capacity for capacity, _ in line], [100 * (share or 0.0) for _, share in line], markersize=4, **style)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_xticks([capacity for capacity, _ in line])
        axes.minorticks_off()
        axes.tick_params(axis="x", labelsize=8)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(f"capacity in blocks of {BLOCK_TOKENS} tokens")
        axes.set_ylabel("blocks found, %")
        axes.legend(fontsize=8)

    return onto
