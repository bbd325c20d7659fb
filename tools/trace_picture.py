"""Where the time to a first token goes: a table, and docs/pictures/first-token.svg. Owns the form of both;
the figures are those of a file that `--trace` wrote.

penstock bench ttft --tokens 2048 --trace TRACE.json
python tools/trace_picture.py TRACE.json PICTURE.svg
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

TITLES = {"computed": "nothing cached", "host": "2,047 of its tokens in host memory"}
STAGES = ("look-up", "queue", "load", "step", "sample", "event")
TRACKS = ("request", "engine", "load", "compute")
COLORS = dict(
    zip(STAGES, ("tab:purple", "tab:gray", "tab:green", "tab:blue", "tab:orange", "tab:red"), strict=True)
)
_QUIET = ("turn", "settle", "plan")  # of the engine thread: most of them are polls


@dataclass
class Life:
    """One request up to its first token. Times are in milliseconds after its arrival."""

    start_us: float
    num_tokens: int
    source: dict[str, int] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)  # of its states, and its first token

    def at(self, microseconds: float) -> float:
        return (microseconds - self.start_us) / 1e3

    @property
    def tier(self) -> str:
        """Where nearly all of its prompt's KV came from."""
        return max(self.source, key=lambda tier: self.source[tier])


class Trace:
    def __init__(self, path: Path) -> None:
        text = path.read_text()
        self.events: list[dict[str, Any]] = json.loads(text if text.endswith("]\n") else text[:-2] + "]")
        names = {one["tid"]: one["args"]["name"] for one in self.events if one["name"] == "thread_name"}
        self.slices: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for one in self.events:
            if one["ph"] == "X":
                self.slices[names[one["tid"]]].append(one)

    def lives(self) -> dict[str, Life]:
        found: dict[str, Life] = {}
        for one in self.events:
            if one.get("cat") != "request":
                continue
            if one["ph"] == "b" and one["name"] == "request":
                found[one["id"]] = Life(one["ts"], one["args"]["prompt tokens"])
            elif one["name"] == "first token":
                found[one["id"]].source = one["args"]["prompt tokens from"]
                found[one["id"]].ends["event"] = found[one["id"]].at(one["ts"])
            elif one["ph"] == "e":
                found[one["id"]].ends.setdefault(one["name"], found[one["id"]].at(one["ts"]))
        return found

    def within(self, life: Life, track: str) -> list[tuple[str, float, float]]:
        """Names, begins and ends of the slices of `track` up to the first token."""
        ended = [
            (one["name"], life.at(one["ts"]), life.at(one["ts"] + one["dur"])) for one in self.slices[track]
        ]
        return sorted(
            (one for one in ended if one[1] > 0 and one[2] <= life.ends["event"]), key=lambda one: one[1]
        )

    def stages(self, life: Life) -> dict[str, float]:
        """Ends of the stages, one after the other."""
        load_end = max((end for _, _, end in self.within(life, "load")), default=0.0)
        sampling = self.within(life, "compute")
        first = len(sampling)
        while "sampl" in sampling[first - 1][0].lower():
            first -= 1
        queue_end = life.ends["waiting"]
        return {
            "look-up": life.ends["look-up"],
            "queue": queue_end,
            "load": max(queue_end, load_end),
            "step": sampling[first][1],
            "sample": sampling[-1][2],
            "event": life.ends["event"],
        }


def chosen(trace: Trace) -> list[Life]:
    """Of each kind the fastest: what other processes do shows least in it."""
    kinds: dict[str, list[Life]] = {tier: [] for tier in TITLES}
    size = min(life.num_tokens for life in trace.lives().values())
    for life in trace.lives().values():
        if life.num_tokens == size and life.source and life.tier in kinds:
            kinds[life.tier].append(life)
    return [min(some, key=lambda life: life.ends["event"]) for some in kinds.values()]


def print_table(trace: Trace, lives: list[Life]) -> None:
    print(f"| | {' | '.join(TITLES[life.tier] for life in lives)} |\n|---|{'---|' * len(lives)}")
    ends = [trace.stages(life) for life in lives]
    before = [0.0] * len(lives)
    for stage in STAGES:
        took = [end[stage] - start for end, start in zip(ends, before, strict=True)]
        shares = (f"{ms:,.2f} ms, {ms / end['event']:.1%}" for ms, end in zip(took, ends, strict=True))
        print(f"| {stage} | {' | '.join(shares)} |")
        before = [end[stage] for end in ends]
    totals = (f"{end['event']:,.1f} ms" for end in ends)
    print(f"| in all | {' | '.join(totals)} |")


def _color(track: str, name: str) -> str:
    if name.startswith("wait for"):
        return "lightgray"
    if "sampl" in name.lower():
        return COLORS["sample"]
    return {"engine": "dimgray", "load": COLORS["load"]}.get(track, COLORS["step"])


def draw(trace: Trace, lives: list[Life], picture: Path) -> None:
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, life in zip(figure.subplots(len(lives), squeeze=False)[:, 0], lives, strict=True):
        start, ends = 0.0, trace.stages(life)
        for stage, end in ends.items():
            axes.barh(0, end - start, left=start, color=COLORS[stage], label=stage)
            start = end
        for row, track in enumerate(TRACKS[1:], 1):
            some = [one for one in trace.within(life, track) if one[0] not in _QUIET]
            colors = [_color(track, name) for name, _, _ in some]
            widths, lefts = [end - begin for _, begin, end in some], [begin for _, begin, _ in some]
            axes.barh([row] * len(some), widths, left=lefts, color=colors, edgecolor="white", linewidth=0.3)
        axes.set_yticks(range(len(TRACKS)), TRACKS, fontsize=8)
        axes.invert_yaxis()
        axes.set_title(f"{TITLES[life.tier]}: first token after {life.ends['event']:,.1f} ms", fontsize=9)
        axes.grid(axis="x", alpha=0.3)
        axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel("ms after the arrival", fontsize=8)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None, dpi=150)


def main(file: Path, picture: Path) -> None:
    trace = Trace(file)
    lives = chosen(trace)
    print_table(trace, lives)
    draw(trace, lives, picture)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
