"""The last accesses to one slot. Owns who touched which layers last, and forgets what later accesses cover."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.sanitizer.clock import Clock
from penstock.sanitizer.report import Deed

_NONE: tuple[Deed, ...] = ()


class SlotHistory:
    """Accesses to one slot that a later one could still race with."""

    __slots__ = ("deeds",)

    def __init__(self) -> None:
        self.deeds: list[Deed] = []

    def take(self, deed: Deed, clock: Clock) -> Sequence[Deed]:
        """Add `deed`, which happens after `clock`; returns earlier accesses that it races with.

        What happens before `deed` and lies within its layers can be forgotten where `deed` conflicts with everything that it
        conflicted with: a write covers all, a read covers reads of its own lane.
        """
        if not self.deeds:
            self.deeds.append(deed)
            return _NONE
        races: list[Deed] = []
        kept: list[Deed] = []
        lane, writes, (low, high) = deed.lane, deed.writes, deed.layers
        for earlier in self.deeds:
            ordered = earlier.lane == lane or clock.get(earlier.lane, 0) >= earlier.number
            first, end = earlier.layers
            if not ordered and (writes or earlier.writes) and first < high and low < end:
                races.append(earlier)
            covered = ordered and (writes or (not earlier.writes and earlier.lane == lane))
            if not (covered and low <= first and end <= high):
                kept.append(earlier)
        kept.append(deed)
        self.deeds = kept
        return races
