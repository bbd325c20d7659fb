"""The last accesses to every slot of one arena. Owns who touched which layers last, and forgets what later accesses cover."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.sanitizer.clock import Clock
from penstock.sanitizer.report import Deed


@dataclass(frozen=True, slots=True)
class _Touch:
    deed: Deed

    def before(self, lane: str, clock: Clock) -> bool:
        """Whether it happens before work on `lane` that happens after `clock`."""
        return self.deed.lane == lane or clock.get(self.deed.lane, 0) >= self.deed.number

    def overlaps(self, layers: tuple[int, int]) -> bool:
        return self.deed.layers[0] < layers[1] and layers[0] < self.deed.layers[1]

    def within(self, layers: tuple[int, int]) -> bool:
        return layers[0] <= self.deed.layers[0] and self.deed.layers[1] <= layers[1]


class SlotHistory:
    """Accesses to one slot that a later one could still race with."""

    __slots__ = ("_touches",)

    def __init__(self) -> None:
        self._touches: list[_Touch] = []

    def take(self, deed: Deed, clock: Clock) -> Iterator[Deed]:
        """Add `deed`, which happens after `clock`; yields earlier accesses that it races with.

        What happens before `deed` and lies within its layers can be forgotten where `deed` conflicts with everything that it
        conflicted with: a write covers all, a read covers reads of its own lane.
        """
        kept: list[_Touch] = []
        writes = deed.mode == "write"
        for touch in self._touches:
            ordered = touch.before(deed.lane, clock)
            if not ordered and (writes or touch.deed.mode == "write") and touch.overlaps(deed.layers):
                yield touch.deed
            covered = writes or (touch.deed.mode == "read" and touch.deed.lane == deed.lane)
            if not (ordered and covered and touch.within(deed.layers)):
                kept.append(touch)
        kept.append(_Touch(deed))
        self._touches = kept
