"""The sanitizer's findings: each with its stack, for people and as plain data; kept, counted, logged, written
to a file. Owns the wording and the output; finds nothing itself."""

from __future__ import annotations

import enum
import json
import logging
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from penstock.errors import ConfigError, SanitizerStop

_DEPTH = 12  # frames that a report shows
_MAX_KEPT = 4096  # distinct shared stacks; a program with more starts over
_OWN = ("penstock/sanitizer/", "penstock/lanes/", "penstock/testing/sequenc")


class Frame(NamedTuple):
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class Stacks:
    """Call stacks, shared: there are few submitting lines, and millions of deeds."""

    def __init__(self) -> None:
        self._is_own: dict[str, bool] = {}  # by file
        self._known: dict[tuple[tuple[str, int, str], ...], tuple[Frame, ...]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def here(self) -> tuple[Frame, ...]:
        """The caller's stack, innermost frame first, without frames of the lane and the sanitizer."""
        places: list[tuple[str, int, str]] = []
        frame: FrameType | None = sys._getframe(1)
        is_own = self._is_own
        while frame is not None and len(places) < _DEPTH:
            code = frame.f_code
            own = is_own.get(code.co_filename)
            if own is None:
                own = is_own[code.co_filename] = any(part in code.co_filename for part in _OWN)
            if not own:
                places.append((code.co_filename, frame.f_lineno, code.co_qualname))
            frame = frame.f_back
        key = tuple(places)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MAX_KEPT:
                self._known.clear()
            found = self._known[key] = tuple(Frame(*place) for place in places)
        return found


_MAX_NAMED = 8  # slots or owners that a sentence lists


class Kind(enum.StrEnum):
    RACE = "race"  # two accesses to the same bytes, one a write, in no order
    # bytes touched, given back or published without the right to, or too early
    LIFETIME = "lifetime"
    ACCOUNTING = "accounting"  # a pool that does not balance
    STALL = "stall"  # the engine thread blocked where it must not


@dataclass(slots=True, eq=False)  # not frozen: that would triple the time to make one, and there are many
class Deed:
    """One piece of submitted work, as a finding needs it. Not changed once it is kept; equal only to
    itself."""

    lane: str
    number: int
    label: str
    writes: bool
    layers: tuple[int, int]
    stack: tuple[Frame, ...]  # innermost first
    # owners of the slots at submission, if a pool reports them
    owners: tuple[str, ...] = ()

    def told(self) -> str:
        first, end = self.layers
        layers = f"layer {first}" if end == first + 1 else f"layers {first} to {end - 1}"
        return f"{'write' if self.writes else 'read'} of {layers} by {self.label!r} on lane {self.lane}"

    @property
    def work(self) -> str:
        """The kind of work, without its request: 'promote' of 'promote of r1'."""
        return self.label.partition(" of ")[0]

    @property
    def place(self) -> str:
        return f"item {self.number} of lane {self.lane}"


@dataclass(frozen=True, slots=True)
class Report:
    """One finding. `sentence` names the fault and the missing edge."""

    kind: Kind
    arena: str
    slots: tuple[int, ...]
    sentence: str
    deeds: tuple[Deed, ...] = ()
    stack: tuple[Frame, ...] = ()  # where it was found, unless a deed was submitted there

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.kind}: {self.sentence}"]
        for deed in self.deeds:
            owners = f", for {listed(sorted(deed.owners))}" if deed.owners else ""
            lines.append(f"  {deed.told()}, item {deed.number}{owners}, submitted at")
            lines += [f"    {frame}" for frame in deed.stack]
        if self.stack:
            lines += ["  found at", *(f"    {frame}" for frame in self.stack)]
        return "\n".join(lines)


def listed(names: Sequence[object]) -> str:
    named = ", ".join(map(str, names[:_MAX_NAMED]))
    return f"{named} and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else named


def slots_told(slots: Sequence[int]) -> str:
    return f"slot{'s' if len(slots) > 1 else ''} {listed(slots)}"


log = logging.getLogger(__name__)

MAX_REPORTS = 1000  # kept in full; further ones are only counted


class Findings:
    """Reports in the order of discovery. `lock` is held while judging, on any thread."""

    def __init__(self, strict: bool, json_file: Path | None) -> None:
        self.reports: list[Report] = []
        self.num_by_kind: dict[Kind, int] = dict.fromkeys(Kind, 0)
        self.lock = threading.RLock()
        self.stacks = Stacks()
        self._strict = strict
        self._json_file = json_file
        self._told: set[tuple[object, ...]] = set()
        self._write_json()

    def tell(self, report: Report, *key: object) -> None:
        """Count `report`, and keep it unless one of its kind and `key` is kept already. In strict mode,
        raises SanitizerStop."""
        self.num_by_kind[report.kind] += 1
        if (report.kind, *key) in self._told or len(self.reports) >= MAX_REPORTS:
            return
        self._told.add((report.kind, *key))
        self.reports.append(report)
        log.error("%s", report)
        self._write_json()
        if self._strict:
            raise SanitizerStop(f"{report.kind}: {report.sentence}")

    def _write_json(self) -> None:
        if self._json_file is None:
            return
        try:
            self._json_file.write_text(
                json.dumps([report.as_dict() for report in self.reports], indent=1) + "\n"
            )
        except OSError as error:
            raise ConfigError(f"--sanitize-json {self._json_file}: {error.strerror or error}") from None
