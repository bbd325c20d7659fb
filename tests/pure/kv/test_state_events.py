"""What routers are told of a hybrid model's blocks: those with which a usable prefix begins."""

from __future__ import annotations

import itertools
import random

import pytest

from penstock.figures import STATES
from penstock.kv.state_events import KvEventsUpToStates, StateReports
from penstock.kv.states import KEPT_STATES
from penstock.server.kv_events import block_hash
from tests.pure.kv.test_kv_events import MEDIA, Hearing

TIERS = ("device", "host", "ssd")
STATE_TIERS = (KEPT_STATES, f"ssd {STATES}")
NUM_KEYS = 40


class World:
    """Sequences that part, and which tiers have their blocks and states."""

    def __init__(self, seed: int = 0, **limits: int) -> None:
        self.told = Hearing(1, **limits)
        self.reports = self.told.reports
        self.told.events = KvEventsUpToStates(self.reports, 1)
        self.reports.make_public(b"s")
        self.r = random.Random(seed)
        keys = [number.to_bytes(8, "big") * 2 for number in range(1, NUM_KEYS + 1)]
        self.parents = {key: self.r.choice([None, *keys[max(0, i - 3) : i]]) for i, key in enumerate(keys)}
        self.slots: dict[str, list[bytes | None]] = {}
        self.known: set[bytes] = set()
        on_disk = StateReports(self.reports)
        self.observers = dict.fromkeys((*TIERS, KEPT_STATES), self.reports) | {STATE_TIERS[1]: on_disk}
        for tier in self.observers:
            self.open(tier)

    def _name(self, tier: str) -> str:
        return "ssd" if tier == STATE_TIERS[1] else tier

    def open(self, tier: str) -> None:
        self.slots[tier] = [None] * NUM_KEYS
        self.observers[tier].opened(self._name(tier), NUM_KEYS)

    def put(self, tier: str, number: int) -> None:
        key = number.to_bytes(8, "big") * 2
        if key not in self.known:
            self.reports.tell(b"s", self.parents[key], [key], number.to_bytes(4, "little"))
            self.known.add(key)
        if self.slots[tier][number - 1] is None:
            self.slots[tier][number - 1] = key
            self.observers[tier].sealed(self._name(tier), number - 1, key)

    def drop(self, tier: str, number: int) -> None:
        if (key := self.slots[tier][number - 1]) is not None:
            self.slots[tier][number - 1] = None
            self.observers[tier].evicted(self._name(tier), number - 1, key)

    def usable(self) -> set[bytes]:
        """Before each boundary that has a state: blocks in some tier, from the last one on."""
        here = {key for tier in TIERS for key in self.slots[tier]}
        found: set[bytes] = set()
        for end in {key for tier in STATE_TIERS for key in self.slots[tier] if key is not None}:
            chain, key = [], end
            while key is not None:
                chain.append(key)
                key = self.parents[key]  # type: ignore[assignment]
            found |= set(itertools.takewhile(here.__contains__, chain))
        return found

    def check(self, lost: bool = False) -> None:
        self.told.hear()
        usable = self.usable()
        for tier in TIERS:
            there = {block_hash(key) for key in self.slots[tier] if key is not None and key in usable}
            held = self.told.router.held(MEDIA[tier])
            assert held <= there if lost else held == there


@pytest.mark.parametrize("seed", range(30))
def test_a_block_is_named_while_it_leads_to_a_state(seed: int) -> None:
    """Blocks, states and tiers come and go in random turns; few that are told fit in the queue, for some."""
    loses = seed % 3 == 0
    world = World(seed, **({"most_waiting": 12} if loses else {}))
    for _ in range(400):
        tier = world.r.choice([*TIERS, *TIERS, *STATE_TIERS])
        if world.r.random() < 0.003:
            world.open(tier)
        elif world.r.random() < 0.7:
            world.put(tier, world.r.randint(1, NUM_KEYS))
        else:
            world.drop(tier, world.r.randint(1, NUM_KEYS))
        if world.r.random() < 0.1:
            world.check(loses)
    assert world.reports.num_dropped > 0 if loses else world.reports.num_dropped == 0
    assert {"BlockStored", "BlockRemoved"} <= set(world.told.router.kinds)
