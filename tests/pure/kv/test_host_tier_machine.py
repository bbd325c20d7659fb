"""The host tier against a reference that knows which keys must be here and who has what out, in any order of
calls."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from penstock.kv.blocks.handles import Handle, Reservation
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.tiers.host import ABSENT, Displaces, HostLease, HostTier, Taken

KEYS = [bytes([i]) * 16 for i in range(10)]
NUM_SLOTS = 6
index = st.integers(0, 1000)
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=5, unique=True)


@dataclass
class Coming:
    taken: Taken
    keys: list[bytes]


@dataclass
class Entry:
    """A lease, and what the reference knows of it."""

    lease: HostLease
    keys: list[bytes]
    here: set[int]  # places of blocks that it has, and that have not gone since
    known: set[int]  # the same when it was looked at last
    rank: float
    wants: bool = True  # neither claimed nor dropped
    claimed: set[bytes] = field(default_factory=set)

    @property
    def wanted(self) -> set[bytes]:
        return {self.keys[place] for place in self.here} if self.wants else set()


class TierMachine(RuleBasedStateMachine):
    """Which of the blocks that nobody wants is evicted is the pool's choice; all else is predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.tier = HostTier(BlockPool(NUM_SLOTS, "host"), 16, 10.0, lambda: self.now_s)
        self.coming: list[Coming] = []
        self.private: list[Reservation] = []
        self.leases: list[Entry] = []
        # by transfers: protected whatever becomes of the lease
        self.reading: list[tuple[list[Handle], set[bytes]]] = []
        self.here: set[bytes] = set()
        self.num_leased = 0

    @property
    def pinned(self) -> set[bytes]:
        return {key for entry in self.leases for key in entry.claimed} | {
            key for _, keys in self.reading for key in keys
        }

    @property
    def wanted(self) -> set[bytes]:
        return {key for entry in self.leases for key in entry.wanted} - self.pinned

    @property
    def unwanted(self) -> set[bytes]:
        return self.here - self.pinned - self.wanted

    @property
    def num_reserved(self) -> int:
        return sum(len(c.keys) for c in self.coming) + sum(len(r.slots) for r in self.private)

    @property
    def num_free(self) -> int:
        return NUM_SLOTS - self.num_reserved - len(self.here)

    def num_in(self, displaces: Displaces) -> int:
        idle = {
            Displaces.NOTHING: set(),
            Displaces.UNWANTED: self.unwanted,
            Displaces.ANYTHING: self.here - self.pinned,
        }[displaces]
        return self.num_free + len(idle)

    def expose(self, num: int) -> None:
        """So many that nobody wants are looked for: who comes last gives way first, as long as anybody wants
        what could go."""
        while len(self.unwanted) < num and self.wanted:
            max((entry for entry in self.leases if entry.wants), key=lambda entry: entry.rank).wants = False

    def evicted(self, num_new: int, num_free: int) -> None:
        """So many slots were reserved: what was free goes first, then blocks that nobody wants, of which the
        pool chooses."""
        self.expose(num_new - num_free)
        gone = {key for key in self.here if not self.tier.has_each([key])[0]}
        assert len(gone) == max(0, num_new - num_free), "as many are forgotten as room is needed for"
        assert gone <= self.unwanted, "what is claimed stays, and what is wanted goes after all else"
        self.lose(gone)

    def lose(self, gone: set[bytes]) -> None:
        self.here -= gone
        for entry in self.leases:
            entry.here = {place for place in entry.here if entry.keys[place] not in gone}

    # ------------------------------------------------------------------------------------------------- blocks

    @rule(keys=some_keys, displaces=st.sampled_from(Displaces))
    def take(self, keys: list[bytes], displaces: Displaces) -> None:
        arriving = {key for c in self.coming for key in c.keys}
        new = [place for place, key in enumerate(keys) if key not in self.here and key not in arriving]
        room, num_free = min(len(new), self.num_in(displaces)), self.num_free
        taken = self.tier.take(keys, range(len(keys)), "demote", displaces)
        assert taken.places == new[:room]
        assert (taken.reservation is None) == (room == 0)
        self.evicted(room, num_free)
        if room:
            self.coming.append(Coming(taken, [keys[place] for place in taken.places]))

    @rule(keys=some_keys)
    def fill(self, keys: list[bytes]) -> None:
        """In one move, so that there is always something to lease."""
        num_coming = len(self.coming)
        self.take(keys, Displaces.UNWANTED)
        if len(self.coming) > num_coming:
            self.arrive(num_coming, True)

    @precondition(lambda self: self.coming)
    @rule(which=index, arrives=st.booleans())
    def arrive(self, which: int, arrives: bool) -> None:
        coming = self.coming.pop(which % len(self.coming))
        (self.tier.land if arrives else self.tier.drop)(coming.taken)
        self.here |= set(coming.keys) if arrives else set()

    @rule(num=st.integers(1, 4))
    def take_private(self, num: int) -> None:
        fits, num_free = num <= self.num_in(Displaces.UNWANTED), self.num_free
        private = self.tier.take_private(num, "retract")
        assert (private is not None) == fits
        if private is not None:
            self.evicted(num, num_free)
            self.private.append(private)

    @precondition(lambda self: self.private)
    @rule(which=index)
    def give_up_private(self, which: int) -> None:
        lease = HostLease(self.tier, "request", np.empty(0, np.int64), 0)
        lease.open(0, self.private.pop(which % len(self.private)))
        lease.end()

    @rule(keys=some_keys, most=st.integers(0, 3))
    def give_way(self, keys: list[bytes], most: int) -> None:
        """Wanted or not, but nothing that a transfer needs; what is deepest in a prompt first."""
        those = [key for key in keys if key in self.here and key not in self.pinned]
        gone = set(those[max(0, len(those) - most) :])
        assert self.tier.give_way(keys, most) == len(gone)
        self.lose(gone)

    # ------------------------------------------------------------------------------------------------- leases

    @rule(keys=some_keys, first=st.integers(0, 2), is_last=st.booleans())
    def lease(self, keys: list[bytes], first: int, is_last: bool) -> None:
        covered = {place for place, key in enumerate(keys) if place >= first and key in self.here}
        lease = self.tier.lease(keys, "request", first)
        assert (lease is None) == (not covered)
        if lease is not None:
            assert [slot != ABSENT for slot in lease.slots] == [
                place in covered for place in range(len(keys))
            ]
            self.num_leased += 1
            rank = float(self.num_leased if is_last else -self.num_leased)
            lease.set_rank(rank)
            self.leases.append(Entry(lease, keys, covered, set(covered), rank))

    @precondition(lambda self: self.leases)
    @rule(which=index)
    def end(self, which: int) -> None:
        entry = self.leases.pop(which % len(self.leases))
        entry.lease.end()
        entry.lease.end()

    @precondition(lambda self: self.leases)
    @rule(which=index)
    def refresh(self, which: int) -> None:
        entry = self.leases[which % len(self.leases)]
        entry.lease.refresh()
        if entry.lease.want is not None:  # not claimed
            entry.known = set(entry.here)
        assert set(np.flatnonzero(entry.lease.slots != ABSENT).tolist()) == entry.known

    @precondition(lambda self: self.leases)
    @rule(which=index, first=st.integers(0, 3), num=st.integers(1, 4))
    def claim(self, which: int, first: int, num: int) -> None:
        entry = self.leases[which % len(self.leases)]
        wants = entry.lease.want is not None
        some = set(range(first, first + num))
        unchanged = entry.here & some == entry.known & some
        assert entry.lease.claim(first, num) == (unchanged or not wants)
        if wants:
            entry.known = set(entry.here)
            if unchanged:
                entry.claimed, entry.wants = {entry.keys[place] for place in entry.here & some}, False

    @rule(keys=some_keys, num=st.integers(1, 3), is_last=st.booleans())
    def two_wait_and_somebody_needs_room(self, keys: list[bytes], num: int, is_last: bool) -> None:
        self.fill(keys)
        self.lease(keys[:2], 0, True)
        self.lease(keys[2:], 0, is_last)
        self.fill(KEYS)
        self.take(KEYS[-num:], Displaces.ANYTHING)

    @rule(keys=some_keys, is_last=st.booleans(), most=st.integers(0, 2), first=st.integers(0, 2))
    def a_request_waits_under_pressure(self, keys: list[bytes], is_last: bool, most: int, first: int) -> None:
        """In one move, so that claims come too late often enough."""
        self.fill(keys)
        self.lease(keys, 0, is_last)
        self.give_way(keys, most)
        self.fill(KEYS[-2:])
        if self.leases:
            self.claim(len(self.leases) - 1, first, 4)

    @precondition(lambda self: self.leases)
    @rule(which=index)
    def read(self, which: int) -> None:
        entry = self.leases.pop(which % len(self.leases))
        protected = (
            {entry.keys[place] for place in entry.here} if entry.lease.want is not None else entry.claimed
        )
        kept = entry.lease.take()
        assert kept is not None
        self.reading.append((kept, protected))

    @precondition(lambda self: self.reading)
    @rule(which=index)
    def has_read(self, which: int) -> None:
        kept, _ = self.reading.pop(which % len(self.reading))
        for handle in kept:
            handle.end()

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]))
    def time_goes_by(self, seconds: float) -> None:
        self.now_s += seconds
        self.tier.expire()
        for entry in self.leases:
            assert entry.lease.expired == (entry.lease.deadline_s < self.now_s)
            if entry.lease.expired:
                assert not entry.lease.claim(0, 1) and entry.lease.take() is None
        self.leases = [entry for entry in self.leases if not entry.lease.expired]

    @rule()
    def reset(self) -> None:
        forgotten = self.here - self.pinned
        self.expose(NUM_SLOTS)
        assert self.tier.pool.evict(99) == len(forgotten)
        self.lose(forgotten)

    # ------------------------------------------------------------------------------------------------- always

    # Holds invariant 16: the states of all slots sum to the host pool's size.
    @invariant()
    def the_books_add_up(self) -> None:
        self.tier.pool.check()
        counts = self.tier.pool.counts
        pinned, idle = len(self.pinned & self.here), len(self.here - self.pinned)
        assert (counts.reserved, counts.active, counts.pinned, counts.idle) == (
            self.num_reserved,
            0,
            pinned,
            idle,
        )
        assert sum(counts) == NUM_SLOTS and len(self.tier.leases) == len(self.leases)
        assert (self.tier.pool.num_free, self.tier.pool.num_unwanted) == (
            self.num_free,
            self.num_free + len(self.unwanted),
        )
        assert self.tier.pool.num_available == self.num_in(Displaces.ANYTHING)

    @invariant()
    def what_should_be_here_is(self) -> None:
        assert {key for key in KEYS if self.tier.has_each([key])[0]} == self.here

    def teardown(self) -> None:
        for coming in self.coming:
            self.tier.drop(coming.taken)
        for entry in self.leases:
            entry.lease.end()
        for kept, _ in self.reading:
            for handle in kept:
                handle.end()
        for private in self.private:
            private.rollback()
        assert self.tier.pool.num_unwanted == NUM_SLOTS, "nobody wants anything any more"
        self.tier.close()


TierMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHostTierAgainstItsReference = TierMachine.TestCase
