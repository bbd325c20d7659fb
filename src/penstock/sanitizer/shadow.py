"""What the sanitizer itself knows of a pool's slots: state, owner, key, and what was known when each changed hands. Owns the shadow of
the pool's books, kept from what the pool reports; the pool's own are never looked at.

Slots that changed hands together share one standing, so that a run of them costs about as much as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from penstock.sanitizer.clock import Actor, Clock, Known, join

FREE = "free"
UNHELD = frozenset({FREE, "idle"})  # states in which a slot is nobody's to touch
_NOTHING: Known = {}


class Standing:
    """How slots stand that changed hands together. Never changes; equal only to itself."""

    __slots__ = ("fenced", "known", "owner", "state")

    def __init__(self, state: str, owner: str, known: Known, fenced: Known) -> None:
        self.state = state
        self.owner = owner
        self.known = known  # to whoever changed it last: the next one comes after that
        self.fenced = fenced  # what is over once the fences have passed that were given back with the slots


class PoolShadow:
    """One pool. Slots behind its last, such as the padding block, are not its business."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.is_closed = False
        self.counts: Counter[str] = Counter({FREE: num_slots})
        self.key_of: dict[int, bytes] = {}  # of sealed slots
        untouched = Standing(FREE, "", _NOTHING, _NOTHING)
        self._standing = dict.fromkeys(range(num_slots), untouched)

    def standings(self, slots: Iterable[int]) -> set[Standing]:
        found: set[Standing | None] = set(map(self._standing.get, slots))
        found.discard(None)
        return found  # type: ignore[return-value]

    def each(self, slots: Iterable[int]) -> list[Standing]:
        """In order; all of them the pool's."""
        return list(map(self._standing.__getitem__, slots))

    def unheld(self, slots: Collection[int]) -> list[int]:
        states = ((slot, self._standing.get(slot)) for slot in slots)
        return sorted(slot for slot, standing in states if standing is not None and standing.state in UNHELD)

    def sealed(self, slots: Collection[int]) -> list[int]:
        key_of = self.key_of
        return [] if key_of.keys().isdisjoint(slots) else sorted(slot for slot in slots if slot in key_of)

    def move(self, actor: Actor, slots: Sequence[int], states: tuple[str, str], owner: str) -> list[tuple[int, str]]:
        """`slots` go from one of `states` to the other. Returns those that were in another state than the first, with that."""
        old, new = states
        wrong = []
        if any(standing.state != old for standing in self.standings(slots)):
            wrong = [(slot, standing.state) for slot, standing in zip(slots, self.each(slots), strict=True) if standing.state != old]
        self.counts[old] -= len(slots) - len(wrong)
        self.counts.subtract(state for _, state in wrong)
        self.counts[new] += len(slots)
        self._change(actor, slots, lambda was, known: Standing(new, owner, known, was.fenced))
        if new == FREE:
            for slot in self.sealed(slots):
                del self.key_of[slot]
        return wrong

    def hand_over(self, actor: Actor, slots: Sequence[int], fenced: Known = _NOTHING) -> None:
        """A handle over `slots` begins or ends on `actor`, its fence, where there is one, covering `fenced`; states change by `move`."""
        self._change(actor, slots, lambda was, known: Standing(was.state, was.owner, known, _joined(was.fenced, fenced)))

    def _change(self, actor: Actor, slots: Sequence[int], change: Callable[[Standing, Known], Standing]) -> None:
        """The pool's calls come one after the other, so `actor` comes after whoever changed these slots before, and the next after it."""
        olds = self.standings(slots)
        for old in olds:
            actor.learn(old.known)
        known = actor.shown()
        news = {old: change(old, known) for old in olds}
        if len(news) == 1:
            self._standing.update(dict.fromkeys(slots, news.popitem()[1]))
        else:
            self._standing.update(zip(slots, map(news.__getitem__, self.each(slots)), strict=True))


def _joined(known: Known, more: Known) -> Known:
    """One of the two where it covers the other, so that standings share what they can."""
    if not known:
        return more
    both: Clock = dict(known)
    return both if join(both, more) else known
