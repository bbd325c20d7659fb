"""The last accesses to each slot of an arena. Owns who touched which layers last, and forgets what later accesses cover.

A history is a value that slots share: those that were touched by the same work have the same one. So an access is judged once per
distinct history, not once per slot, and a step over hundreds of blocks of one prompt costs little more than over one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from penstock.sanitizer.clock import Known
from penstock.sanitizer.report import Deed


class History:
    """Accesses to a slot that a later one could still race with. Never changes; equal only to itself."""

    __slots__ = ("deeds",)

    def __init__(self, deeds: tuple[Deed, ...]) -> None:
        self.deeds = deeds

    def unseen(self, *clocks: Known) -> Iterator[Deed]:
        """Accesses that none of `clocks` knows to be over."""
        for deed in self.deeds:
            if all(clock.get(deed.lane, 0) < deed.number for clock in clocks):
                yield deed


EMPTY = History(())


class Race(NamedTuple):
    earlier: Deed
    slots: tuple[int, ...]


class Histories:
    """The histories of one arena's slots."""

    def __init__(self) -> None:
        self._by_slot: dict[int, History] = {}

    def __len__(self) -> int:
        return len(self._by_slot)

    def of(self, slot: int) -> History:
        return self._by_slot.get(slot, EMPTY)

    def each(self, slots: Iterable[int]) -> list[History]:
        return [EMPTY if found is None else found for found in map(self._by_slot.get, slots)]

    def take(self, deed: Deed, slots: Collection[int], clock: Known) -> list[Race]:
        """Add `deed`, which happens after `clock`; returns earlier accesses that it races with, one of each lane and label."""
        olds = self.each(slots)
        distinct = set(olds)
        news: dict[History, History] = {}
        made: dict[tuple[Deed, ...], History] = {}
        races: list[tuple[History, Deed]] = []
        for old in distinct:
            kept, raced = _after(old, deed, clock)
            news[old] = made.setdefault(kept, History(kept))
            races += ((old, earlier) for earlier in raced)
        if len(made) == 1:
            self._by_slot.update(dict.fromkeys(slots, made.popitem()[1]))
        else:
            self._by_slot.update(zip(slots, map(news.__getitem__, olds), strict=True))
        return _gathered(races, olds, slots) if races else []


def _after(history: History, deed: Deed, clock: Known) -> tuple[tuple[Deed, ...], list[Deed]]:
    """What is left of `history` once `deed` is added, and whom `deed` races with.

    What happens before `deed` and lies within its layers can be forgotten where `deed` conflicts with everything that it conflicted
    with: a write covers all, a read covers reads of its own lane.
    """
    races: list[Deed] = []
    kept: list[Deed] = []
    lane, writes, (low, high) = deed.lane, deed.writes, deed.layers
    for earlier in history.deeds:
        ordered = earlier.lane == lane or clock.get(earlier.lane, 0) >= earlier.number
        first, end = earlier.layers
        if not ordered and (writes or earlier.writes) and first < high and low < end:
            races.append(earlier)
        covered = ordered and (writes or (not earlier.writes and earlier.lane == lane))
        if not (covered and low <= first and end <= high):
            kept.append(earlier)
    kept.append(deed)
    return tuple(kept), races


def _gathered(races: list[tuple[History, Deed]], olds: list[History], slots: Collection[int]) -> list[Race]:
    by_kind: dict[tuple[str, str, bool], tuple[Deed, set[History]]] = {}
    for history, earlier in races:
        _, histories = by_kind.setdefault((earlier.lane, earlier.label, earlier.writes), (earlier, set()))
        histories.add(history)
    return [
        Race(earlier, tuple(sorted(slot for slot, old in zip(slots, olds, strict=True) if old in histories)))
        for earlier, histories in by_kind.values()
    ]
