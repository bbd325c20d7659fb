"""The last accesses to each slot of an arena. Owns which work touched which layers last, and forgets accesses
that later ones cover.

A history is a value that slots share: slots that were read, or written, by the same work have the same one.
So an access is judged once per distinct history, not once per slot; and not at all if it happens after all
earlier work on the arena.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from penstock.sanitizer.clock import Known
from penstock.sanitizer.report import Deed

Layers = tuple[int, int]


@dataclass(slots=True, eq=False)
class History:
    """Reads, or writes, of a slot that a later access could still race with. Not changed once it is made;
    equal only to itself."""

    deeds: tuple[Deed, ...]
    newest: Known  # by lane: number of the newest deed in here

    def unseen(self, *clocks: Known) -> list[Deed]:
        """Deeds that none of `clocks` knows to be over."""
        if all(any(clock.get(lane, 0) >= number for clock in clocks) for lane, number in self.newest.items()):
            return []
        return [deed for deed in self.deeds if all(clock.get(deed.lane, 0) < deed.number for clock in clocks)]

    def touching(self, layers: Layers) -> list[Deed]:
        """Deeds that touch some of `layers`."""
        low, high = layers
        return [deed for deed in self.deeds if deed.layers[0] < high and low < deed.layers[1]]

    def changed(self, layers: Layers, covered: Callable[[Deed], bool], new: Deed | None) -> History:
        """Without the deeds that touch only `layers` and are `covered`, and with `new`, which touches
        `layers`."""
        low, high = layers
        kept = tuple(
            [
                deed
                for deed in self.deeds
                if not (low <= deed.layers[0] and deed.layers[1] <= high and covered(deed))
            ]
        )
        if new is not None:
            return History((*kept, new), {**self.newest, new.lane: new.number})
        return self if len(kept) == len(self.deeds) else History(kept, self.newest) if kept else _EMPTY


_EMPTY = History((), {})


class Race(NamedTuple):
    earlier: Deed
    slots: tuple[int, ...]


class _Side:
    """The reads, or the writes, of all slots of an arena."""

    def __init__(self) -> None:
        self._by_slot: dict[int, History] = {}
        self._newest: dict[str, int] = {}  # by lane, over all slots

    def __len__(self) -> int:
        return len(self._by_slot)

    def each(self, slots: Iterable[int]) -> list[History]:
        by_slot = self._by_slot
        return [by_slot.get(slot, _EMPTY) for slot in slots]

    def races(self, deed: Deed, slots: Collection[int], clock: Known) -> list[Race]:
        """Deeds that conflict with `deed` and do not happen before it, one per lane and label."""
        lane, layers = deed.lane, deed.layers
        if _all_ordered(self._newest, lane, clock):
            return []
        olds = self.each(slots)
        found: dict[tuple[str, str], tuple[Deed, set[History]]] = {}
        for old in set(olds):
            if not _all_ordered(old.newest, lane, clock):
                for earlier in old.touching(layers):
                    if not _ordered(earlier, lane, clock):
                        found.setdefault((earlier.lane, earlier.label), (earlier, set()))[1].add(old)
        places = list(zip(slots, olds, strict=True)) if found else []
        return [
            Race(earlier, tuple(sorted(slot for slot, old in places if old in among)))
            for earlier, among in found.values()
        ]

    def change(
        self, layers: Layers, slots: Collection[int], covered: Callable[[Deed], bool], new: Deed | None
    ) -> None:
        """Add `new`, if any, to each of `slots`, and remove the `covered` deeds within `layers`."""
        olds = self.each(slots)
        news = _merged({old: old.changed(layers, covered, new) for old in set(olds)})
        if len(news) == 1:
            self._by_slot.update(dict.fromkeys(slots, news.popitem()[1]))
        else:
            self._by_slot.update(zip(slots, map(news.__getitem__, olds), strict=True))
        if new is not None:
            self._newest[new.lane] = max(new.number, self._newest.get(new.lane, 0))


def _merged(news: dict[History, History]) -> dict[History, History]:
    """Merge histories that became equal in different ways."""
    if len(news) < 3:
        return news
    made: dict[tuple[Deed, ...], History] = {}
    return {old: made.setdefault(new.deeds, new) for old, new in news.items()}


class Histories:
    """The histories of one arena's slots."""

    def __init__(self) -> None:
        self.writes = _Side()
        self.reads = _Side()

    def take(self, deed: Deed, slots: Collection[int], clock: Known) -> list[Race]:
        """Add `deed`, which happens after `clock`; returns earlier accesses that it races with.

        An earlier access within the layers of `deed` can be forgotten if it happens before `deed`, and `deed`
        conflicts with everything that it conflicted with: a write covers all, a read covers reads of its own
        lane.
        """
        lane, layers = deed.lane, deed.layers
        races = self.writes.races(deed, slots, clock)
        if deed.writes:
            races += self.reads.races(deed, slots, clock)
            for side, new in ((self.reads, None), (self.writes, deed)):
                side.change(layers, slots, lambda earlier: _ordered(earlier, lane, clock), new)
        else:
            self.reads.change(layers, slots, lambda earlier: earlier.lane == lane, deed)
        return races


def _ordered(earlier: Deed, lane: str, clock: Known) -> bool:
    return earlier.lane == lane or clock.get(earlier.lane, 0) >= earlier.number


def _all_ordered(newest: Known, lane: str, clock: Known) -> bool:
    return all(other == lane or clock.get(other, 0) >= number for other, number in newest.items())
