"""The last accesses to each slot of an arena. Owns which work touched which layers last, and forgets accesses
that later ones cover.

A history is a value that slots share: slots that were read, or written, by the same work have the same one.
So an access is judged once per distinct history, not once per slot; and not at all if it happens after all
earlier work on the arena.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, TypeVar

from penstock.sanitizer.clock import Known
from penstock.sanitizer.report import Deed

Layers = tuple[int, int]
_Old = TypeVar("_Old")  # a history, or None


class History:
    """Reads, or writes, of a slot that a later access could still race with. Immutable; equal only to
    itself."""

    __slots__ = ("narrow", "newest", "wide")

    def __init__(self, wide: tuple[Deed, ...], narrow: dict[int, tuple[Deed, ...]], newest: Known) -> None:
        self.wide = wide  # deeds that touch several layers
        self.narrow = narrow  # the others, by their layer
        self.newest = newest  # by lane: number of the newest deed in here

    @property
    def deeds(self) -> list[Deed]:
        return [*self.wide, *(deed for deeds in self.narrow.values() for deed in deeds)]

    def unseen(self, *clocks: Known) -> list[Deed]:
        """Deeds that none of `clocks` knows to be over."""
        if all(any(clock.get(lane, 0) >= number for clock in clocks) for lane, number in self.newest.items()):
            return []
        return [deed for deed in self.deeds if all(clock.get(deed.lane, 0) < deed.number for clock in clocks)]

    def touching(self, layers: Layers) -> list[Deed]:
        """Deeds that touch some of `layers`."""
        low, high = layers
        found = [deed for deed in self.wide if deed.layers[0] < high and low < deed.layers[1]]
        if high == low + 1:
            found += self.narrow.get(low, ())
        else:
            found += (deed for layer, deeds in self.narrow.items() if low <= layer < high for deed in deeds)
        return found

    def changed(self, layers: Layers, covered: Callable[[Deed], bool], new: Deed | None) -> History:
        """Without the deeds that touch only `layers` and are `covered`, and with `new`, which touches
        `layers`."""
        low, high = layers
        wide, narrow = self.wide, self.narrow
        if wide:
            wide = tuple(
                [
                    deed
                    for deed in wide
                    if not (low <= deed.layers[0] and deed.layers[1] <= high and covered(deed))
                ]
            )
        if high == low + 1:
            kept = tuple([deed for deed in narrow.get(low, ()) if not covered(deed)])
            narrow = {**narrow, low: kept if new is None else (*kept, new)}
            if not narrow[low]:
                del narrow[low]
        else:
            if narrow:
                narrow = {
                    layer: kept
                    for layer, deeds in narrow.items()
                    if (
                        kept := tuple([deed for deed in deeds if not (low <= layer < high and covered(deed))])
                    )
                }
            wide = wide if new is None else (*wide, new)
        return History(wide, narrow, self.newest if new is None else {**self.newest, new.lane: new.number})


_EMPTY = History((), {}, {})


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
        return [_EMPTY if found is None else found for found in map(self._by_slot.get, slots)]

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

    def add(self, deed: Deed, slots: Collection[int], covered: Callable[[Deed], bool]) -> None:
        """Add `deed` to each of `slots`, and remove the `covered` deeds within its layers."""
        olds = list(map(self._by_slot.get, slots))
        news = _merged({old: (old or _EMPTY).changed(deed.layers, covered, deed) for old in set(olds)})
        if len(news) == 1:
            self._by_slot.update(dict.fromkeys(slots, news.popitem()[1]))
        else:
            self._by_slot.update(zip(slots, map(news.__getitem__, olds), strict=True))
        self._newest[deed.lane] = max(deed.number, self._newest.get(deed.lane, 0))

    def drop(self, layers: Layers, slots: Collection[int], covered: Callable[[Deed], bool]) -> None:
        """Remove the `covered` deeds within `layers`."""
        by_slot = self._by_slot
        known = [slot for slot in slots if slot in by_slot]
        olds = list(map(by_slot.__getitem__, known))
        news = _merged({old: old.changed(layers, covered, None) for old in set(olds)})
        for slot, old in zip(known, olds, strict=True):
            new = news[old]
            if new.wide or new.narrow:
                by_slot[slot] = new
            else:
                del by_slot[slot]


def _merged(news: dict[_Old, History]) -> dict[_Old, History]:
    """Merge histories that became equal in different ways."""
    if len(news) < 3:
        return news
    made: dict[tuple[object, ...], History] = {}
    return {old: made.setdefault((new.wide, *new.narrow.items()), new) for old, new in news.items()}


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
            self.reads.drop(layers, slots, lambda earlier: _ordered(earlier, lane, clock))
            self.writes.add(deed, slots, lambda earlier: _ordered(earlier, lane, clock))
        else:
            self.reads.add(deed, slots, lambda earlier: earlier.lane == lane)
        return races


def _ordered(earlier: Deed, lane: str, clock: Known) -> bool:
    return earlier.lane == lane or clock.get(earlier.lane, 0) >= earlier.number


def _all_ordered(newest: Known, lane: str, clock: Known) -> bool:
    return all(other == lane or clock.get(other, 0) >= number for other, number in newest.items())
