"""The last accesses to each slot of an arena. Owns who touched which layers last, and forgets what later accesses cover.

A history is a value that slots share: those that were touched by the same work have the same one. So an access is judged once per
distinct history, not once per slot, and a step over hundreds of blocks of one prompt costs little more than over one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from penstock.sanitizer.clock import Known
from penstock.sanitizer.report import Deed

Layers = tuple[int, int]


class Layered(NamedTuple):
    """Accesses by the layers they touch: most touch one, or all."""

    wide: tuple[Deed, ...] = ()
    narrow: dict[int, tuple[Deed, ...]] = {}  # noqa: RUF012  never changed  # by the one layer that each touches

    def __iter__(self) -> Iterator[Deed]:  # type: ignore[override]
        return chain(self.wide, *self.narrow.values())

    def within(self, layers: Layers) -> Iterator[Deed]:
        """Those that touch some of `layers`."""
        low, high = layers
        yield from (deed for deed in self.wide if deed.layers[0] < high and low < deed.layers[1])
        if high == low + 1:
            yield from self.narrow.get(low, ())
        else:
            yield from (deed for layer, deeds in self.narrow.items() if low <= layer < high for deed in deeds)

    def without(self, layers: Layers, covered: Callable[[Deed], bool]) -> Layered:
        """Less those that touch only `layers` and are `covered`."""
        low, high = layers
        wide = tuple(deed for deed in self.wide if not (low <= deed.layers[0] and deed.layers[1] <= high and covered(deed)))
        narrow = self.narrow
        touched = narrow.keys() & {low} if high == low + 1 else [layer for layer in narrow if low <= layer < high]
        if touched:
            narrow = dict(narrow)
            for layer in touched:
                if kept := tuple(deed for deed in narrow[layer] if not covered(deed)):
                    narrow[layer] = kept
                else:
                    del narrow[layer]
        return Layered(wide, narrow)

    def plus(self, deed: Deed) -> Layered:
        low, high = deed.layers
        if high != low + 1:
            return Layered((*self.wide, deed), self.narrow)
        return Layered(self.wide, {**self.narrow, low: (*self.narrow.get(low, ()), deed)})


_NONE = Layered()


class History:
    """Accesses to a slot that a later one could still race with. Never changes; equal only to itself."""

    __slots__ = ("newest", "reads", "writes")

    def __init__(self, writes: Layered, reads: Layered, newest: Known) -> None:
        self.writes = writes
        self.reads = reads
        self.newest = newest  # by lane: no access in here is newer

    def unseen(self, *clocks: Known) -> list[Deed]:
        """Accesses that none of `clocks` knows to be over."""
        if all(any(clock.get(lane, 0) >= number for clock in clocks) for lane, number in self.newest.items()):
            return []
        return [deed for deed in chain(self.writes, self.reads) if all(clock.get(deed.lane, 0) < deed.number for clock in clocks)]

    def after(self, deed: Deed, clock: Known) -> tuple[History, list[Deed]]:
        """This with `deed`, which happens after `clock`, and those that it races with.

        What happens before `deed` and lies within its layers can be forgotten where `deed` conflicts with everything that it conflicted
        with: a write covers all, a read covers reads of its own lane.
        """
        lane, layers = deed.lane, deed.layers

        def ordered(earlier: Deed) -> bool:
            return earlier.lane == lane or clock.get(earlier.lane, 0) >= earlier.number

        races: list[Deed] = []
        if not all(other == lane or clock.get(other, 0) >= number for other, number in self.newest.items()):
            conflicting = chain(self.writes.within(layers), self.reads.within(layers) if deed.writes else ())
            races = [earlier for earlier in conflicting if not ordered(earlier)]
        if deed.writes:
            writes, reads = self.writes.without(layers, ordered).plus(deed), self.reads.without(layers, ordered)
        else:
            writes, reads = self.writes, self.reads.without(layers, lambda earlier: earlier.lane == lane).plus(deed)
        return History(writes, reads, {**self.newest, lane: deed.number}), races


EMPTY = History(_NONE, _NONE, {})


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
        news: dict[History, History] = {}
        races: list[tuple[History, Deed]] = []
        for old in set(olds):
            news[old], raced = old.after(deed, clock)
            races += ((old, earlier) for earlier in raced)
        if len(news) == 1:
            self._by_slot.update(dict.fromkeys(slots, news.popitem()[1]))
        else:
            self._by_slot.update(zip(slots, map(news.__getitem__, olds), strict=True))
        return _gathered(races, olds, slots) if races else []


def _gathered(races: list[tuple[History, Deed]], olds: list[History], slots: Collection[int]) -> list[Race]:
    by_kind: dict[tuple[str, str, bool], tuple[Deed, set[History]]] = {}
    for history, earlier in races:
        _, histories = by_kind.setdefault((earlier.lane, earlier.label, earlier.writes), (earlier, set()))
        histories.add(history)
    return [
        Race(earlier, tuple(sorted(slot for slot, old in zip(slots, olds, strict=True) if old in histories)))
        for earlier, histories in by_kind.values()
    ]
