"""What the sanitizer has to say: one finding, for people and as plain data. Owns the words."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock.sanitizer.stack import Frame

_MAX_NAMED = 8  # slots or owners that a sentence lists


class Kind(enum.StrEnum):
    RACE = "race"  # two accesses to the same bytes, one a write, in no order
    LIFETIME = "lifetime"  # bytes that are touched, given back or published by somebody who may not, or too early
    ACCOUNTING = "accounting"  # a pool that does not balance
    STALL = "stall"  # the engine thread blocked where it must not


@dataclass(slots=True, eq=False)  # not frozen: that would triple the time to make one, and there are many
class Deed:
    """One piece of submitted work, as far as it concerns a finding. Not changed once it is kept; equal only to itself."""

    lane: str
    number: int
    label: str
    writes: bool
    layers: tuple[int, int]
    stack: tuple[Frame, ...]  # innermost first
    owners: tuple[str, ...] = ()  # on whose behalf the slots were held when it was submitted, where anybody keeps book of them

    def told(self) -> str:
        first, end = self.layers
        layers = f"layer {first}" if end == first + 1 else f"layers {first} to {end - 1}"
        return f"{'write' if self.writes else 'read'} of {layers} by {self.label!r} on lane {self.lane}"

    @property
    def work(self) -> str:
        """What kind of work it was, whoever it was for: 'promote' of 'promote of r1'."""
        return self.label.partition(" of ")[0]

    @property
    def place(self) -> str:
        return f"item {self.number} of lane {self.lane}"


@dataclass(frozen=True, slots=True)
class Report:
    """One finding. `sentence` says what is wrong and which edge is missing."""

    kind: Kind
    arena: str
    slots: tuple[int, ...]
    sentence: str
    deeds: tuple[Deed, ...] = ()
    stack: tuple[Frame, ...] = ()  # where it was found, unless that is where a deed was submitted

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
