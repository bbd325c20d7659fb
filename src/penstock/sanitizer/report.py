"""What the sanitizer has to say: one finding, for people and as plain data. Owns the words."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


class Kind(enum.StrEnum):
    RACE = "race"  # two accesses to the same bytes, one a write, in no order
    LIFETIME = "lifetime"  # an access to a slot that nobody owns
    ACCOUNTING = "accounting"  # a pool that does not balance


class Frame(NamedTuple):
    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class Deed:
    """One piece of submitted work, as far as it concerns a finding."""

    lane: str
    number: int
    label: str
    writes: bool
    layers: tuple[int, int]
    stack: tuple[Frame, ...]  # innermost first

    def told(self) -> str:
        first, end = self.layers
        layers = f"layer {first}" if end == first + 1 else f"layers {first} to {end - 1}"
        return f"{'write' if self.writes else 'read'} of {layers} by {self.label!r} on lane {self.lane}"


@dataclass(frozen=True, slots=True)
class Report:
    """One finding. `sentence` says what is wrong and which edge is missing."""

    kind: Kind
    arena: str
    slots: tuple[int, ...]
    sentence: str
    deeds: tuple[Deed, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.kind}: {self.sentence}"]
        for deed in self.deeds:
            lines.append(f"  {deed.told()}, item {deed.number}, submitted at")
            lines += [f"    {frame.file}:{frame.line} in {frame.function}" for frame in deed.stack]
        return "\n".join(lines)
