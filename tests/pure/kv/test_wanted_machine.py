"""What is wanted is forgotten last, over every policy: against a model in lists and sets, in any order of
legal calls."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from penstock.config import EVICTIONS
from penstock.kv.blocks.eviction import PoolWant, WantedLast, make_order
from penstock.kv.blocks.slots import as_run
from tests.pure.kv.eviction_models import MODELS
from tests.pure.kv.test_eviction_machine import BLOCK_TOKENS, NUM_SLOTS, OrderMachine, picks


@dataclass
class WantModel:
    slots: list[int]
    rank: float
    gone: set[int] = field(default_factory=set)

    @property
    def left(self) -> list[int]:
        return [slot for slot in self.slots if slot not in self.gone]


class WantedModel:
    """An order over another model's, which has what nobody wants."""

    def __init__(self, policy: str) -> None:
        self.others = MODELS[policy](NUM_SLOTS, BLOCK_TOKENS)
        self.rest: set[int] = set()  # idle, wanted by nobody
        self.aside: set[int] = set()  # idle, wanted
        self.wants: list[WantModel] = []

    def is_wanted(self, slot: int) -> bool:
        return any(slot in want.left for want in self.wants)

    def sealed(self, slots: Sequence[int], keys: Sequence[bytes], depths: Sequence[int]) -> None:
        self.others.sealed(slots, keys, depths)

    def hit(self, slots: Sequence[int]) -> None:
        self.others.hit(slots)

    def add(self, slots: Sequence[int]) -> None:
        self.aside.update(slot for slot in slots if self.is_wanted(slot))
        self.rest_again([slot for slot in slots if not self.is_wanted(slot)])

    def rest_again(self, slots: list[int]) -> None:
        if slots:
            self.others.add(slots)
            self.rest.update(slots)

    def take_out(self, slots: list[int]) -> None:
        if slots:
            self.others.remove(slots)
            self.rest.difference_update(slots)

    def remove(self, slots: Sequence[int]) -> None:
        self.take_out([slot for slot in slots if slot not in self.aside])
        self.aside.difference_update(slots)

    def want(self, slots: list[int], rank: float) -> WantModel:
        want = WantModel(slots, rank)
        self.wants.append(want)
        resting = [slot for slot in slots if slot in self.rest]
        self.take_out(resting)
        self.aside.update(resting)
        return want

    def end(self, want: WantModel) -> None:
        if any(one is want for one in self.wants):
            self.wants = [one for one in self.wants if one is not want]
            resting = [slot for slot in want.left if slot in self.aside and not self.is_wanted(slot)]
            self.aside.difference_update(resting)
            self.rest_again(resting[::-1])

    def pop(self, num: int) -> list[int]:
        while len(self.rest) < num and self.aside:
            self.end(max(self.wants, key=lambda want: want.rank))
        popped = self.others.pop(num)
        self.rest.difference_update(popped)
        self.lost(popped)
        return popped

    def lost(self, slots: Sequence[int]) -> None:
        for want in self.wants:
            want.gone.update(slot for slot in slots if slot in want.slots)


class Told(WantedLast):
    """With the order below it, which a pool tells itself."""

    def sealed(self, slots: Sequence[int], keys: Sequence[bytes], depths: Sequence[int]) -> None:
        self.others.sealed(slots, keys, depths)

    def hit(self, slots: list[int]) -> None:
        self.others.hit(slots)


class WantedMachine(OrderMachine):
    """Waiting requests want blocks, whether somebody uses them or not; they lose them, give up, are dropped,
    and come again."""

    def __init__(self) -> None:
        super().__init__()
        self.order: Told = Told(
            make_order(self.policy, NUM_SLOTS, BLOCK_TOKENS), NUM_SLOTS, threading.RLock()
        )
        self.model: WantedModel = WantedModel(self.policy)
        self.wants: list[tuple[PoolWant, WantModel]] = []
        self.num_ranks = 0

    @precondition(lambda self: self.key)
    @rule(places=picks, is_last=st.booleans())
    def want(self, places: list[int], is_last: bool) -> None:
        sealed = sorted(self.key)
        slots = [sealed[place] for place in places if place < len(sealed)]
        self.num_ranks += 1
        rank = float(self.num_ranks if is_last else -self.num_ranks)
        idle = [slot for slot in slots if slot in self.idle]
        self.wants.append(
            (
                self.order.want(as_run(slots), as_run(idle), rank),
                self.model.want(slots, rank),
            )
        )

    @precondition(lambda self: self.wants)
    @rule(which=st.integers(0, 1000))
    def end(self, which: int) -> None:
        want, model = self.wants[which % len(self.wants)]
        self.order.end(want)
        self.model.end(model)

    @precondition(lambda self: self.wants)
    @rule(which=st.integers(0, 1000), is_last=st.booleans())
    def change_rank(self, which: int, is_last: bool) -> None:
        want, model = self.wants[which % len(self.wants)]
        self.num_ranks += 1
        want.rank = model.rank = float(self.num_ranks if is_last else -self.num_ranks)

    @precondition(lambda self: self.idle)
    @rule(places=picks)
    def forget(self, places: list[int]) -> None:
        """Some in particular, wanted or not: their slots are free for others."""
        idle = sorted(self.idle)
        slots = [idle[place] for place in places if place < len(idle)]
        for order in (self.order, self.model):
            order.remove(as_run(slots))
            order.lost(slots)
        self.idle.difference_update(slots)
        self.free += slots
        for slot in slots:
            del self.key[slot]

    @invariant()
    def it_knows_who_wants_what(self) -> None:
        order, model = self.order, self.model
        assert (len(order.others), len(order.wants)) == (len(model.rest), len(model.wants))
        assert list(order)[len(model.rest) :] == sorted(model.aside), "those that nobody wants come first"
        for want, expected in self.wants:
            assert (want in order.wants) == any(one is expected for one in model.wants)
            if want in order.wants:
                assert want.gone.tolist() == [slot in expected.gone for slot in expected.slots]

    def teardown(self) -> None:
        for want, model in self.wants[::2]:
            self.order.end(want)
            self.model.end(model)
        super().teardown()
        assert not self.order._num_wants[
            [slot for slot in range(NUM_SLOTS) if not self.model.is_wanted(slot)]
        ].any()


def machine_of(name: str) -> type[WantedMachine]:
    return type(f"wanted_{name}_machine", (WantedMachine,), {"policy": name})


@pytest.mark.parametrize("name", EVICTIONS)
def test_what_is_wanted_goes_last_over(name: str) -> None:
    run_state_machine_as_test(
        machine_of(name), settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )
