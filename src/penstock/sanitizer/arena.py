"""One arena under watch: every access to it and every change of its pool is judged here. Owns the rules for
slots, and a shadow of the pool's books, kept from what the pool reports: state, owner, key, and what was
known when a slot changed hands. What happens before what is the clocks' business.

The rules: work touches only slots that are held; no work writes a slot that has a key; a slot gets its key
when the thread that gives it has seen all its writes to be over; a slot is given back when all work on it has
been seen to be over or is covered by a fence that travels with it; every change of state follows from the
last; nothing happens in a pool that is closed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.sanitizer.clock import Actor, Clock, Known, join
from penstock.sanitizer.history import Histories, History, Race
from penstock.sanitizer.report import Deed, Findings, Kind, Report, slots_told

FREE = "free"
UNHELD = frozenset({FREE, "idle"})  # states in which no work may touch a slot
_NOTHING: Known = {}


@dataclass(slots=True, eq=False)
class Standing:
    """The state of slots that changed hands together. Not changed once it is made; equal only to itself."""

    state: str
    owner: str
    known: Known  # to the actor of the last change; the next change happens after that
    fenced: Known  # all that is over once the fences given back with the slots have passed


class PoolShadow:
    """One pool. Slots after its last, such as the padding block, are ignored."""

    def __init__(self, num_slots: int) -> None:
        self.is_closed = False
        self.counts: Counter[str] = Counter({FREE: num_slots})
        self.key_of: dict[int, bytes] = {}  # of sealed slots
        untouched = Standing(FREE, "", _NOTHING, _NOTHING)
        self._standing = dict.fromkeys(range(num_slots), untouched)

    def standings(self, slots: Iterable[int]) -> set[Standing]:
        return {standing for standing in map(self._standing.get, slots) if standing is not None}

    def each(self, slots: Iterable[int]) -> list[Standing]:
        """In order; all slots must belong to the pool."""
        return list(map(self._standing.__getitem__, slots))

    def unheld(self, slots: Collection[int]) -> list[int]:
        known = self._standing
        return sorted(slot for slot in slots if slot in known and known[slot].state in UNHELD)

    def sealed(self, slots: Collection[int]) -> list[int]:
        key_of = self.key_of
        return [] if key_of.keys().isdisjoint(slots) else sorted(slot for slot in slots if slot in key_of)

    def move(
        self, actor: Actor, slots: Sequence[int], states: tuple[str, str], owner: str
    ) -> list[tuple[int, str]]:
        """Move `slots` from one of `states` to the other. Returns (slot, state) for slots in an unexpected
        state."""
        old, new = states
        wrong = [
            (slot, standing.state)
            for slot, standing in zip(slots, self.each(slots), strict=True)
            if standing.state != old
        ]
        self.counts[old] -= len(slots) - len(wrong)
        self.counts.subtract(state for _, state in wrong)
        self.counts[new] += len(slots)
        self._change(actor, slots, lambda was, known: Standing(new, owner, known, was.fenced))
        if new == FREE:
            for slot in self.sealed(slots):
                del self.key_of[slot]
        return wrong

    def hand_over(self, actor: Actor, slots: Sequence[int], fenced: Known = _NOTHING) -> None:
        """A handle over `slots` begins or ends on `actor`. Its fence, if any, covers `fenced`. States change
        by `move`."""
        self._change(
            actor,
            slots,
            lambda was, known: Standing(was.state, was.owner, known, _joined(was.fenced, fenced)),
        )

    def _change(
        self, actor: Actor, slots: Sequence[int], change: Callable[[Standing, Known], Standing]
    ) -> None:
        """The pool's calls are serialized, so `actor` comes after the last actor that changed these slots,
        and before the next."""
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
    """The first if it covers the other, so that standings share values."""
    both: Clock = dict(known)
    return both if join(both, more) else known


_Place = tuple[History, History, Standing]  # writes and reads of a slot, and its standing


class ArenaWatch:
    """Accesses to one arena, and to its pool if it has one."""

    def __init__(self, name: str, findings: Findings) -> None:
        self.name = name
        self.histories = Histories()
        self.pool: PoolShadow | None = None  # None: this arena has no pool
        self._findings = findings

    # ----------------------------------------------------------------------------------------------- accesses

    def touch(self, deed: Deed, slots: set[int], clock: Known) -> None:
        """Work that touches `slots` is submitted; it happens after `clock`."""
        races = self.histories.take(deed, slots, clock)
        if self.pool is not None:
            standings = self.pool.standings(slots)
            deed.owners = tuple({standing.owner for standing in standings})
            self._check_held(self.pool, deed, slots, standings)
        for race in races:
            self._race(deed, race)

    def _check_held(self, pool: PoolShadow, deed: Deed, slots: set[int], standings: set[Standing]) -> None:
        if pool.is_closed:
            self._misuse(deed, slots, f"touches {self.name}, whose pool is closed")
        elif any(standing.state in UNHELD for standing in standings):
            found = pool.unheld(slots)
            self._misuse(deed, found, f"touches {slots_told(found)} of {self.name}, which no handle covers")
        if deed.writes and (found := pool.sealed(slots)):
            self._misuse(
                deed, found, f"changes {slots_told(found)} of {self.name}, which others may find under a key"
            )

    def _misuse(self, deed: Deed, slots: Iterable[int], what: str) -> None:
        report = Report(Kind.LIFETIME, self.name, tuple(sorted(slots)), f"{deed.told()} {what}", (deed,))
        self._findings.tell(report, self.name, what.rpartition(" ")[2], deed.lane, deed.work)

    def _race(self, deed: Deed, race: Race) -> None:
        earlier = race.earlier
        sentence = (
            f"{deed.told()} is not ordered after {earlier.told()} in {slots_told(race.slots)} "
            f"of {self.name}: nothing on lane {deed.lane}, and "
            f"nothing that its submitter saw, waits for {earlier.place}"
        )
        key = (self.name, deed.lane, deed.work, deed.writes, earlier.lane, earlier.work, earlier.writes)
        self._findings.tell(Report(Kind.RACE, self.name, race.slots, sentence, (earlier, deed)), *key)

    # --------------------------------------------------------------------------------------------------- pool

    def open(self, num_slots: int) -> None:
        self.pool = PoolShadow(num_slots)
        self.histories = Histories()

    def move(self, actor: Actor, slots: Sequence[int], states: tuple[str, str], owner: str) -> None:
        pool = self._open_pool(owner)
        if pool is None:
            return
        wrong = pool.move(actor, slots, states, owner)
        if wrong:
            slot, state = wrong[0]
            sentence = (
                f"slot {slot} of {self.name} went from {states[0]} to {states[1]} for {owner!r}, but it was "
                f"{state}"
            )
            self._tell(Kind.ACCOUNTING, sentence, [slot for slot, _ in wrong], (), states)
        if states[1] in UNHELD and states[0] not in UNHELD:
            self._check_over(pool, actor, slots, owner)

    def hand_over(self, actor: Actor, slots: Sequence[int], owner: str, fenced: Known | None = None) -> None:
        pool = self._open_pool(owner)
        if pool is not None:
            pool.hand_over(actor, slots, fenced or {})

    def seal(self, actor: Actor, slot: int, key: bytes) -> None:
        pool = self._open_pool("a new key")
        if pool is None:
            return
        pool.hand_over(actor, (slot,))
        if slot in pool.key_of:
            sentence = (
                f"slot {slot} of {self.name} gets a key, and it has one already: two keys name the same bytes"
            )
            self._tell(Kind.LIFETIME, sentence, (slot,), (), "keys")
        pool.key_of[slot] = key
        unseen = tuple(self.histories.writes.each((slot,))[0].unseen(actor.clock))
        if unseen:
            first = unseen[0]
            sentence = (
                f"slot {slot} of {self.name} gets its key, and {first.told()} may not have landed: "
                f"the thread that gives the key has not seen {first.place} to be over"
            )
            self._tell(Kind.LIFETIME, sentence, (slot,), unseen, "landed", first.lane, first.work)

    def evict(self, slot: int) -> None:
        if self.pool is not None:
            self.pool.key_of.pop(slot, None)

    def close(self, left: Sequence[str]) -> None:
        if self.pool is None:
            return
        self.pool.is_closed = not left
        for handle in left:
            sentence = (
                f"the pool of {self.name} is closed, and the {handle} has not ended: it outlives its owner"
            )
            self._tell(Kind.LIFETIME, sentence, (), (), "left", handle)

    def balance(self, counts: Mapping[str, int]) -> None:
        """The pool reports the number of its slots in each state."""
        pool = self.pool
        if pool is None:
            return
        told = {state: num for state, num in counts.items() if num}
        booked = {state: num for state, num in pool.counts.items() if num}
        if told != booked:
            sentence = (
                f"the pool of {self.name} says that it has {told} at a step boundary, and its changes add "
                f"up to {booked}"
            )
            self._tell(Kind.ACCOUNTING, sentence, (), (), "balance")

    # ----------------------------------------------------------------------------------------------- findings

    def _open_pool(self, who: str) -> PoolShadow | None:
        if self.pool is not None and self.pool.is_closed:
            self._tell(
                Kind.LIFETIME,
                f"the pool of {self.name} is closed, and something changes in it for {who!r}",
                (),
                (),
                "after close",
            )
        return self.pool

    def _check_over(self, pool: PoolShadow, actor: Actor, slots: Sequence[int], owner: str) -> None:
        """`slots` are no longer held: is all work on them known by their former holders to be over, or
        fenced?"""
        places = list(
            zip(
                self.histories.writes.each(slots),
                self.histories.reads.each(slots),
                pool.each(slots),
                strict=True,
            )
        )
        late: dict[_Place, Deed] = {}
        for place in set(places):
            writes, reads, standing = place
            unseen = writes.unseen(actor.clock, standing.fenced) or reads.unseen(actor.clock, standing.fenced)
            if unseen:
                late[place] = unseen[0]
        if not late:
            return
        found = sorted(slot for slot, place in zip(slots, places, strict=True) if place in late)
        first = min(late.values(), key=lambda deed: (deed.lane, deed.number))
        sentence = (
            f"{slots_told(found)} of {self.name} {'are' if len(found) > 1 else 'is'} given back "
            f"for {owner!r} while {first.told()} may still be under way: "
            f"no holder has seen {first.place} to be over, and no fence behind that travels with it"
        )
        self._tell(Kind.LIFETIME, sentence, found, (first,), "given back", first.lane, first.work)

    def _tell(
        self, kind: Kind, sentence: str, slots: Sequence[int], deeds: tuple[Deed, ...], *key: object
    ) -> None:
        """A finding about the present state, independent of earlier submissions."""
        report = Report(kind, self.name, tuple(slots), sentence, deeds, self._findings.stacks.here())
        self._findings.tell(report, self.name, *key)


class Arenas(dict[str, ArenaWatch]):
    """All arenas by name; an unknown one is added."""

    def __init__(self, findings: Findings) -> None:
        super().__init__()
        self._findings = findings

    def __missing__(self, name: str) -> ArenaWatch:
        found = self[name] = ArenaWatch(name, self._findings)
        return found
