"""Reads a file in Chrome's trace format as its viewers do, and checks that its events belong together."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

_SLACK_US = 0.01  # times are rounded to nanoseconds


@dataclass
class Slice:
    """Of a track, or a pair of begin and end events; `args` of both."""

    name: str
    start_us: float
    end_us: float
    args: dict[str, Any]


@dataclass
class ReadTrace:
    events: list[dict[str, Any]]
    tracks: dict[str, list[Slice]] = field(default_factory=lambda: defaultdict(list))
    # by category and id: ended slices, in the order of their ends
    spans: dict[tuple[str, str], list[Slice]] = field(default_factory=lambda: defaultdict(list))
    open: dict[tuple[str, str], list[str]] = field(default_factory=lambda: defaultdict(list))
    num_arrows: int = 0

    def of(self, category: str) -> dict[str, list[Slice]]:
        return {name: found for (one, name), found in self.spans.items() if one == category}

    def marks(self, ident: str, name: str) -> list[dict[str, Any]]:
        """The arguments of the instants of a request."""
        return [
            event["args"]
            for event in self.events
            if (event["ph"], event["name"], event.get("id")) == ("n", name, ident)
        ]


def read_trace(path: Path) -> ReadTrace:
    """Of a whole file, or of one whose process was killed."""
    text = path.read_text()
    if not text.endswith("]\n"):
        assert text.endswith(",\n"), "the last line is whole"
        text = text[:-2] + "]"
    events = json.loads(text)
    assert all({"ph", "name", "pid", "tid"} <= event.keys() for event in events)
    trace = ReadTrace(events)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    for event in events:
        if event["ph"] == "X":
            start, end = event["ts"], event["ts"] + event["dur"]
            trace.tracks[names[event["tid"]]].append(Slice(event["name"], start, end, event.get("args", {})))
    for slices in trace.tracks.values():
        _check_nested(slices)
    _pair(trace)
    _check_arrows(trace, names)
    return trace


def _check_nested(slices: list[Slice]) -> None:
    """Any two of a track are apart, or one is inside the other."""
    slices.sort(key=lambda one: (one.start_us, -one.end_us))
    outer: list[Slice] = []
    for one in slices:
        assert one.end_us >= one.start_us
        while outer and outer[-1].end_us <= one.start_us + _SLACK_US:
            outer.pop()
        assert not outer or one.end_us <= outer[-1].end_us + _SLACK_US, f"{one} overlaps {outer[-1]}"
        outer.append(one)


def _pair(trace: ReadTrace) -> None:
    """Begin and end events of a category and an id: in the order of time, and properly nested."""
    begun: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    latest: dict[tuple[str, str], float] = defaultdict(float)
    for event in trace.events:
        if event["ph"] not in "ben":
            continue
        ident = event["cat"], event["id"]
        assert event["ts"] >= latest[ident] - _SLACK_US, f"{event} is out of order"
        latest[ident] = event["ts"]
        if event["ph"] == "b":
            begun[ident].append(event)
        elif event["ph"] == "e":
            first = begun[ident].pop()
            assert first["name"] == event["name"]
            args = {**first.get("args", {}), **event.get("args", {})}
            trace.spans[ident].append(Slice(event["name"], first["ts"], event["ts"], args))
        else:
            assert begun[ident], f"{event} is outside of everything"
    trace.open = {ident: [one["name"] for one in left] for ident, left in begun.items() if left}  # type: ignore[assignment]


def _check_arrows(trace: ReadTrace, names: dict[int, str]) -> None:
    """Each begins and ends inside a slice, and ends no earlier than it begins."""
    ends: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in trace.events:
        if event["ph"] in "sf":
            ends[event["id"]].append(event)
            at = event["ts"]
            inside = any(
                one.start_us <= at + _SLACK_US and at - _SLACK_US <= one.end_us
                for one in trace.tracks[names[event["tid"]]]
            )
            assert inside, f"{event} is at no slice"
    for pair in ends.values():
        assert [event["ph"] for event in pair] == ["s", "f"]
        assert all(before["ts"] <= after["ts"] for before, after in pairwise(pair))
    trace.num_arrows = len(ends)
