"""The pool against a naive model, in any order of calls.

The model keeps per slot the sets of those who hold and pin it, and predicts every slot that is handed out, so
the orders of free and idle slots are checked as well: of the free, those that were used before come first,
the longest unused of them first, and those that never were come last.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.config import EVICTIONS
from penstock.errors import HandleEnded, IllegalTransition
from penstock.kv.blocks.eviction import make_order
from penstock.kv.blocks.handles import Handle, Hold, Pin, Reservation
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.blocks.slots import SlotCounts, SlotState
from tests.pure.kv.kv_fakes import FakeFence, FakeLane, Heard

NUM_SLOTS = 6
KEYS = [bytes([i]) * 16 for i in range(10)]
LANES = ["compute", "demote"]

index = st.integers(0, 1000)
choice = st.lists(st.integers(0, NUM_SLOTS - 1), max_size=4, unique=True)
# a lane and how many fences ago; None: no fence
when = st.tuples(st.sampled_from([*LANES, None]), st.integers(0, 3))


@dataclass
class Naive:
    """One slot as the model sees it."""

    holders: list[Handle] = field(default_factory=list)
    pins: list[Handle] = field(default_factory=list)
    key: bytes | None = None
    fences: list[FakeFence] = field(default_factory=list)

    @property
    def state(self) -> SlotState:
        if any(isinstance(holder, Reservation) for holder in self.holders):
            return SlotState.RESERVED
        if self.holders:
            return SlotState.ACTIVE
        if self.pins:
            return SlotState.PINNED
        return SlotState.FREE if self.key is None else SlotState.IDLE


class PoolMachine(RuleBasedStateMachine):
    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.heard = Heard()
        self.pool = BlockPool(NUM_SLOTS, "device", self.heard, make_order(self.policy, NUM_SLOTS))
        self.slots = [Naive() for _ in range(NUM_SLOTS)]
        self.free = list(range(NUM_SLOTS))  # in the order in which they came to be free
        self.used: set[int] = set()  # slots that were handed out once
        self.idle: list[int] = []
        self.lanes = {name: FakeLane(name) for name in LANES}
        self.fences: dict[str, list[FakeFence]] = {name: [lane.record()] for name, lane in self.lanes.items()}
        self.reservations: list[Reservation] = []
        self.holds: list[Hold] = []
        self.pins: list[Pin] = []
        self.num_evicted = 0
        self.num_forgotten = 0  # otherwise than by eviction
        self.num_duplicates = 0

    # ---------------------------------------------------------------------------------------------- the model

    def slot_of(self, key: bytes) -> int | None:
        found = [slot for slot, naive in enumerate(self.slots) if naive.key == key]
        assert len(found) <= 1
        return found[0] if found else None

    def model_evict(self, num: int) -> None:
        for slot in self.victims(num):
            self.idle.remove(slot)
            self.slots[slot].key = None
            self.free.append(slot)
            self.num_evicted += 1

    def victims(self, num: int) -> list[int]:
        return self.idle[:num]

    def next_free(self) -> list[int]:
        # keeps the order among those of a kind
        return sorted(self.free, key=lambda slot: slot not in self.used)

    def model_end(self, handle: Handle, slots: list[int], fence: FakeFence | None) -> None:
        for slot in slots:
            naive = self.slots[slot]
            (naive.pins if isinstance(handle, Pin) else naive.holders).remove(handle)
            naive.fences += [fence] if fence is not None else []
        self.free += [slot for slot in slots if self.slots[slot].state is SlotState.FREE]
        self.idle += [slot for slot in reversed(slots) if self.slots[slot].state is SlotState.IDLE]

    def fence(self, at: tuple[str | None, int]) -> FakeFence | None:
        lane, ago = at
        return None if lane is None else self.fences[lane][max(0, len(self.fences[lane]) - 1 - ago)]

    # -------------------------------------------------------------------------------------------------- rules

    @rule(num=st.integers(0, NUM_SLOTS + 1))
    def reserve(self, num: int) -> None:
        reservation = self.pool.try_reserve(num, "reserver")
        if num > len(self.free) + len(self.idle):
            assert reservation is None
            return
        assert reservation is not None
        self.model_evict(max(0, num - len(self.free)))
        expected = sorted(self.next_free()[:num])
        self.free = [slot for slot in self.free if slot not in expected]
        self.used.update(expected)
        assert list(reservation.slots) == expected
        self.check_fences(reservation)
        for slot in expected:
            self.slots[slot].holders.append(reservation)
        self.reservations.append(reservation)

    def check_fences(self, reservation: Reservation) -> None:
        assert not any(fence.passed() for fence in reservation.after)
        for slot in reservation.slots:
            for fence in self.slots[slot].fences:
                covered = any(
                    given.lane == fence.lane and given.number >= fence.number for given in reservation.after
                )
                assert fence.passed() or covered, f"slot {slot} was given without {fence}"

    @precondition(lambda self: self.free)
    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True), at=when)
    def come_and_go(self, keys: list[bytes], at: tuple[str | None, int]) -> None:
        """A request that leaves sealed blocks behind, in one move, so that idle blocks are never rare."""
        num = min(len(keys), len(self.free))
        self.reserve(num)
        self.commit(len(self.reservations) - 1, 0)
        hold = self.holds[0]
        self.check_seal(list(hold.slots[-num:]), keys[:num])
        self.end(self.holds.pop(0), at)

    @precondition(lambda self: self.reservations)
    @rule(which=index, into=index)
    def commit(self, which: int, into: int) -> None:
        reservation = self.reservations.pop(which % len(self.reservations))
        if not self.holds or into % 3 == 0:
            self.holds.append(self.pool.hold("holder"))
        hold = self.holds[into % len(self.holds)]
        before = list(hold.slots)
        reservation.commit(hold)
        assert list(hold.slots) == [*before, *reservation.slots]
        for slot in reservation.slots:
            self.slots[slot].holders = [hold]

    @precondition(lambda self: self.reservations)
    @rule(which=index, at=when)
    def rollback(self, which: int, at: tuple[str | None, int]) -> None:
        reservation = self.reservations.pop(which % len(self.reservations))
        reservation.rollback(self.fence(at))
        self.model_end(reservation, list(reservation.slots), self.fence(at))

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4, unique=True))
    def share(self, keys: list[bytes]) -> None:
        expected = []
        for key in keys:
            slot = self.slot_of(key)
            if slot is None:
                break
            expected.append(slot)
        found = self.pool.find(keys)
        assert list(found) == expected
        assert len(self.pool.book.those_in(SlotState.IDLE, found)) == len(
            [s for s in expected if s in self.idle]
        )
        hold = self.pool.hold("sharer", found)
        for slot in expected:
            self.slots[slot].holders.append(hold)
            self.idle = [other for other in self.idle if other != slot]
        self.holds.append(hold)

    @precondition(lambda self: self.holds)
    @rule(which=index, keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4))
    def seal(self, which: int, keys: list[bytes]) -> None:
        hold = self.holds[which % len(self.holds)]
        slots = [slot for slot in hold.slots if self.slots[slot].key is None][: len(keys)]
        self.check_seal(slots, keys[: len(slots)])

    @precondition(lambda self: self.pins)
    @rule(which=index, key=st.sampled_from(KEYS))
    def seal_what_landed(self, which: int, key: bytes) -> None:
        pin = self.pins[which % len(self.pins)]
        landed = [
            slot
            for slot in pin.slots
            if self.slots[slot].state is SlotState.PINNED and self.slots[slot].key is None
        ]
        self.check_seal(landed[:1], [key][: len(landed)])

    def check_seal(self, slots: list[int], keys: list[bytes]) -> None:
        num_sealed = 0
        for slot, key in zip(slots, keys, strict=True):
            if self.slot_of(key) is None:
                self.slots[slot].key = key
                num_sealed += 1
        self.num_duplicates += len(slots) - num_sealed
        assert self.pool.seal(slots, keys) == num_sealed

    @precondition(lambda self: len(self.free) < NUM_SLOTS)
    @rule(places=choice)
    def pin(self, places: list[int]) -> None:
        used = [slot for slot in range(NUM_SLOTS) if slot not in self.free]
        slots = [used[place] for place in places if place < len(used)]
        pin = self.pool.pin(slots, "pinner")
        for slot in slots:
            self.slots[slot].pins.append(pin)
        self.idle = [slot for slot in self.idle if slot not in slots]
        self.pins.append(pin)

    @precondition(lambda self: self.free)
    @rule(which=index, others=choice)
    def pin_a_free_slot(self, which: int, others: list[int]) -> None:
        free = self.free[which % len(self.free)]
        with pytest.raises(IllegalTransition):
            self.pool.pin([*(slot for slot in others if slot != free), free], "pinner")

    @precondition(lambda self: any(len(hold.slots) for hold in self.holds))
    @rule(which=index, num=st.integers(0, 3), at=when)
    def drop_first(self, which: int, num: int, at: tuple[str | None, int]) -> None:
        some = [hold for hold in self.holds if len(hold.slots)]
        hold = some[which % len(some)]
        slots = list(hold.slots)[:num]
        hold.drop_first(len(slots), self.fence(at))
        self.model_end(hold, slots, self.fence(at))

    @precondition(lambda self: self.pins)
    @rule(which=index, at=when)
    def unpin(self, which: int, at: tuple[str | None, int]) -> None:
        self.end(self.pins.pop(which % len(self.pins)), at)

    @precondition(lambda self: self.holds)
    @rule(which=index, at=when)
    def release(self, which: int, at: tuple[str | None, int]) -> None:
        self.end(self.holds.pop(which % len(self.holds)), at)

    def end(self, handle: Pin | Hold, at: tuple[str | None, int]) -> None:
        slots = list(handle.slots)
        handle.end(self.fence(at))
        self.model_end(handle, slots, self.fence(at))
        with pytest.raises(HandleEnded):
            handle.end()

    @rule(num=st.integers(0, 3))
    def evict(self, num: int) -> None:
        expected = min(num, len(self.idle))
        assert self.pool.evict(num) == expected
        self.model_evict(expected)

    @rule(slots=choice)
    def forget(self, slots: list[int]) -> None:
        """Whoever holds or pins one goes on with it; nobody else finds it."""
        sealed = [slot for slot in slots if self.slots[slot].key is not None]
        assert self.pool.forget(slots) == len(sealed)
        self.num_forgotten += len(sealed)
        for slot in sealed:
            self.slots[slot].key = None
            if slot in self.idle:
                self.idle.remove(slot)
                self.free.append(slot)

    @rule(lane=st.sampled_from(LANES), num_recorded=st.integers(0, 3), num_passed=st.integers(0, 2))
    def advance(self, lane: str, num_recorded: int, num_passed: int) -> None:
        self.fences[lane] += [self.lanes[lane].record() for _ in range(num_recorded)]
        self.lanes[lane].num_passed = min(
            self.lanes[lane].num_passed + num_passed, self.lanes[lane].num_recorded
        )

    # --------------------------------------------------------------------------------------------- invariants

    # Holds invariant 16: the states of all slots sum to the pool's size.
    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        states = [naive.state for naive in self.slots]
        assert self.pool.counts == SlotCounts(*(states.count(state) for state in SlotState))
        assert sum(self.pool.counts) == NUM_SLOTS
        assert self.pool.num_available == len(self.free) + len(self.idle)
        assert (self.pool.num_evicted, self.pool.num_duplicates) == (self.num_evicted, self.num_duplicates)

    @invariant()
    def the_books_agree_with_the_model(self) -> None:
        self.pool.check()
        assert self.pool.book.state.tolist() == [naive.state for naive in self.slots]
        assert self.pool.book.holds.tolist() == [len(naive.holders) for naive in self.slots]
        assert self.pool.book.pins.tolist() == [len(naive.pins) for naive in self.slots]

    @invariant()
    def keys_are_where_the_model_has_them(self) -> None:
        keys = [naive.key for naive in self.slots if naive.key is not None]
        assert len(set(keys)) == len(keys) == self.pool.num_keys
        assert self.pool.keys() == keys
        assert set(self.pool.coldest(NUM_SLOTS)) == set(self.idle)
        for key in KEYS:
            slot = self.slot_of(key)
            assert list(self.pool.find([key])) == ([] if slot is None else [slot])

    def teardown(self) -> None:
        for handle in [*self.holds, *self.pins]:
            handle.end()
        for reservation in self.reservations:
            reservation.rollback()
        self.pool.check()
        assert self.pool.num_available == NUM_SLOTS
        self.pool.close()


class AnyOrderMachine(PoolMachine):
    """Which idle block goes is the policy's own matter; that it was idle, and how many go, is not."""

    def victims(self, num: int) -> list[int]:
        evicted = [slot for event, slot, *_ in self.heard.events if event == "evicted"][
            self.num_evicted + self.num_forgotten :
        ]
        assert len(evicted) == len(set(evicted)) == num and set(evicted) <= set(self.idle)
        return evicted


@pytest.mark.parametrize("name", [name for name in EVICTIONS if name != "lru"])
def test_the_pool_is_right_whatever_its_policy_of_eviction(name):
    machine = type(f"{name}_machine", (AnyOrderMachine,), {"policy": name})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=40, stateful_step_count=40, deadline=None)
    )


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPoolAgainstItsModel = PoolMachine.TestCase
