"""The host tier against a reference that knows which keys must be here and who has what out, in any order of calls; and faults that this
must notice."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from penstock.errors import PenstockError
from penstock.kv.blocks.handles import Handle, Reservation
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.tiers.host import ABSENT, HostLease, HostTier, Taken

KEYS = [bytes([i]) * 16 for i in range(10)]
NUM_SLOTS = 6
index = st.integers(0, 1000)
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=5, unique=True)


@dataclass
class Coming:
    taken: Taken
    keys: list[bytes]


class TierMachine(RuleBasedStateMachine):
    """The order of eviction is the pool's; all else is predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.tier = HostTier(BlockPool(NUM_SLOTS, "host"), 16, 10.0, lambda: self.now_s)
        self.coming: list[Coming] = []
        self.private: list[Reservation] = []
        self.leases: list[tuple[HostLease, list[bytes]]] = []
        self.reading: list[tuple[list[Handle], list[bytes]]] = []  # by transfers: protected whatever becomes of the lease
        self.here: set[bytes] = set()

    @property
    def protected(self) -> set[bytes]:
        return {key for _, keys in [*self.leases, *self.reading] for key in keys}

    @property
    def num_reserved(self) -> int:
        return sum(len(c.keys) for c in self.coming) + sum(len(r.slots) for r in self.private)

    @property
    def num_available(self) -> int:
        return NUM_SLOTS - self.num_reserved - len(self.protected)

    def evicted(self, num_new: int) -> None:
        """So many slots were reserved: what was free goes first, then idle blocks, of which the pool chooses."""
        idle = self.here - self.protected
        gone = {key for key in idle if not self.tier.has(key)}
        num_free = NUM_SLOTS - self.num_reserved - len(self.here)
        assert len(gone) == max(0, num_new - num_free), "as many are forgotten as room is needed for"
        self.here -= gone

    @rule(keys=some_keys)
    def take(self, keys: list[bytes]) -> None:
        arriving = {key for c in self.coming for key in c.keys}
        new = [place for place, key in enumerate(keys) if key not in self.here and key not in arriving]
        room = min(len(new), self.num_available)
        taken = self.tier.take(keys, range(len(keys)), "demote")
        assert taken.places == new[:room]
        assert (taken.reservation is None) == (room == 0)
        self.evicted(room)
        if room:
            self.coming.append(Coming(taken, [keys[place] for place in taken.places]))

    @rule(keys=some_keys)
    def fill(self, keys: list[bytes]) -> None:
        """In one move, so that there is always something to lease."""
        num_coming = len(self.coming)
        self.take(keys)
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
        fits = num <= self.num_available
        private = self.tier.take_private(num, "retract")
        assert (private is not None) == fits
        if private is not None:
            self.evicted(num)
            self.private.append(private)

    @precondition(lambda self: self.private)
    @rule(which=index)
    def give_up_private(self, which: int) -> None:
        lease = HostLease(self.tier, "request", [], 0)
        self.tier.keep(lease, self.private.pop(which % len(self.private)))
        lease.end()

    @rule(keys=some_keys, first=st.integers(0, 2))
    def lease(self, keys: list[bytes], first: int) -> None:
        covered = [key for key in keys[first:] if key in self.here]
        lease = self.tier.lease(keys, "request", first)
        assert (lease is None) == (not covered)
        if lease is not None:
            assert [slot != ABSENT for slot in lease.slots] == [at >= first and key in self.here for at, key in enumerate(keys)]
            self.leases.append((lease, covered))

    @precondition(lambda self: self.leases)
    @rule(which=index)
    def end(self, which: int) -> None:
        lease, _ = self.leases.pop(which % len(self.leases))
        lease.end()
        lease.end()

    @precondition(lambda self: self.leases)
    @rule(which=index)
    def read(self, which: int) -> None:
        lease, keys = self.leases.pop(which % len(self.leases))
        kept = self.tier.take_lease(lease)
        assert kept is not None
        self.reading.append((kept, keys))

    @precondition(lambda self: self.reading)
    @rule(which=index)
    def has_read(self, which: int) -> None:
        kept, _ = self.reading.pop(which % len(self.reading))
        self.tier.end_handles(kept)

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]))
    def time_goes_by(self, seconds: float) -> None:
        self.now_s += seconds
        self.tier.expire()
        for lease, _ in self.leases:
            assert lease.expired == (lease.deadline_s < self.now_s)
        self.leases = [entry for entry in self.leases if not entry[0].expired]

    @rule()
    def reset(self) -> None:
        forgotten = self.here - self.protected
        assert self.tier.reset() == len(forgotten)
        self.here -= forgotten

    @invariant()
    def the_books_add_up(self) -> None:
        self.tier.check()
        idle = len(self.here - self.protected)
        counts = self.tier.slots
        assert (counts.reserved, counts.active, counts.pinned, counts.idle) == (self.num_reserved, 0, len(self.protected), idle)
        assert sum(counts) == NUM_SLOTS and self.tier.num_leases == len(self.leases)

    @invariant()
    def what_should_be_here_is(self) -> None:
        assert {key for key in KEYS if self.tier.has(key)} == self.here

    def teardown(self) -> None:
        for coming in self.coming:
            self.tier.drop(coming.taken)
        for lease, _ in self.leases:
            lease.end()
        for kept, _ in self.reading:
            self.tier.end_handles(kept)
        for private in self.private:
            private.rollback()
        self.tier.close()


TierMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHostTierAgainstItsReference = TierMachine.TestCase


# -------------------------------------------------------------------------------------------------------------- faults


def evicts_what_is_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    lease = HostTier.lease

    def faulty(self: HostTier, *args):
        given = lease(self, *args)
        if given is not None:
            self._end_handles(self._leases[given])
            self._leases[given] = []
        return given

    monkeypatch.setattr(HostTier, "lease", faulty)


def takes_what_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    take = HostTier.take

    def faulty(self: HostTier, *args):
        self._arriving.clear()
        return take(self, *args)

    monkeypatch.setattr(HostTier, "take", faulty)


def publishes_what_did_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostTier, "drop", HostTier.land)


def remembers_for_ever_what_was_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    drop = HostTier.drop

    def faulty(self: HostTier, taken):
        drop(self, taken)
        self._arriving.update(taken.keys)

    monkeypatch.setattr(HostTier, "drop", faulty)


def takes_the_last_blocks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    take = HostTier.take

    def faulty(self: HostTier, keys, depths, owner):
        taken = take(self, keys[::-1], list(depths)[::-1], owner)
        taken.places = sorted(len(keys) - 1 - place for place in taken.places)
        return taken

    monkeypatch.setattr(HostTier, "take", faulty)


def lets_a_transfer_go_with_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    take_lease = HostTier.take_lease

    def faulty(self: HostTier, lease):
        kept = take_lease(self, lease)
        self.keep(lease, *(kept or ()))
        return kept

    monkeypatch.setattr(HostTier, "take_lease", faulty)


def never_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostTier, "expire", lambda self: None)


def loses_private_room(monkeypatch: pytest.MonkeyPatch) -> None:
    end_handles = HostTier._end_handles
    kept = staticmethod(lambda handles: end_handles([handle for handle in handles if not isinstance(handle, Reservation)]))
    monkeypatch.setattr(HostTier, "_end_handles", kept)


FAULTS = [
    evicts_what_is_leased,
    takes_what_is_on_its_way,
    publishes_what_did_not_arrive,
    remembers_for_ever_what_was_on_its_way,
    takes_the_last_blocks_first,
    lets_a_transfer_go_with_its_lease,
    never_expires,
    loses_private_room,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_reference_notices_a_tier_that(fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    quick = settings(
        max_examples=200,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, PenstockError)):
        run_state_machine_as_test(TierMachine, settings=quick)
