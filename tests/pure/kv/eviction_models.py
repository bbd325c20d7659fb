"""Policies of eviction as one would write them on paper: lists, scans and exact counts. Owns what the real
ones are compared with."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence

TOKENS_TO_DOUBLE, GHOSTS_PER_SLOT = 8192, 4
PATIENCE, KEYS_PER_SLOT = 8, 4


class LruModel:
    def __init__(self, num_slots: int, block_tokens: int) -> None:
        self.idle: list[int] = []

    def sealed(self, slots: Sequence[int], keys: Sequence[bytes], depths: Sequence[int]) -> None: ...

    def hit(self, slots: Sequence[int]) -> None: ...

    def add(self, slots: Sequence[int]) -> None:
        self.idle += map(int, slots)

    def remove(self, slots: Sequence[int]) -> None:
        self.idle = [slot for slot in self.idle if slot not in slots]

    def pop(self, num: int) -> list[int]:
        popped, self.idle = self.idle[:num], self.idle[num:]
        return popped


class ReturningModel:
    def __init__(self, num_slots: int, block_tokens: int) -> None:
        self.clock = 0
        # when it became idle, in the queue of those that returned, place in its run
        self.idle: dict[int, tuple[int, bool, int]] = {}
        self.returned: set[int] = set()
        self.places = 1
        while self.places < KEYS_PER_SLOT * num_slots:
            self.places *= 2
        self.seen: dict[int, bytes] = {}

    def sealed(self, slots: Sequence[int], keys: Sequence[bytes], depths: Sequence[int]) -> None:
        places = [int.from_bytes(key[:8], sys.byteorder) % self.places for key in keys]
        self.returned.difference_update(slots)
        self.returned.update(
            slot
            for slot, key, place in zip(slots, keys, places, strict=True)
            if self.seen.get(place) == key[8:]
        )
        self.seen.update(zip(places, (key[8:] for key in keys), strict=True))

    def hit(self, slots: Sequence[int]) -> None:
        self.returned.update(slots)

    def add(self, slots: Sequence[int]) -> None:
        fresh = list(itertools.takewhile(lambda slot: slot not in self.returned, slots))
        fresh = fresh if len(fresh) >= len(slots) / 2 else []
        for part, returned in ((fresh, False), (slots[len(fresh) :], True)):
            self.clock += len(part)
            self.idle.update({slot: (self.clock, returned, place) for place, slot in enumerate(part)})
        self.returned.update(slots[len(fresh) :])

    def remove(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self.idle[slot]

    def pop(self, num: int) -> list[int]:
        def first(slot: int) -> tuple[int, bool, int]:
            when, returned, place = self.idle[slot]
            return -(self.clock - when + 1) * (1 if returned else PATIENCE), returned, place

        popped = sorted(self.idle, key=first)[:num]
        self.remove(popped)
        return popped


class CostModel:
    def __init__(self, num_slots: int, block_tokens: int) -> None:
        self.num_slots, self.block_tokens = num_slots, block_tokens
        self.floor, self.clock = 0.0, 0
        self.idle: dict[int, tuple[float, int, int]] = {}  # rank, class, when
        self.ghosts: dict[bytes, int] = {}
        self.key: dict[int, bytes] = {}
        self.depth: dict[int, int] = {}
        self.hits: dict[int, int] = {}
        self.least: dict[int, int] = {}

    def sealed(self, slots: Sequence[int], keys: Sequence[bytes], depths: Sequence[int]) -> None:
        for slot, key, depth in zip(slots, keys, depths, strict=True):
            self.key[slot], self.depth[slot], self.least[slot] = key, depth, 0
            self.hits[slot] = min(15, self.ghosts.pop(key, -1) + 1)

    def hit(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.hits[slot] = min(15, self.hits[slot] + 1)

    def add(self, slots: Sequence[int]) -> None:
        for place, slot in enumerate(slots):
            first = place  # walk back to where the chain begins, with its deepest
            while first and self.depth[slots[first - 1]] > self.depth[slots[first]]:
                first -= 1
            num_tokens = (self.depth[slots[first]] + 1) * self.block_tokens
            mean = 4 * math.log2((num_tokens + num_tokens**2 / 2 / TOKENS_TO_DOUBLE) / num_tokens)
            wanted = 4 * math.log2(1 + math.log2(1 + self.hits[slot]))
            cost_class = self.least[slot] = max(math.floor(mean + wanted), self.least[slot])
            self.clock += 1
            self.idle[slot] = (self.floor + 2 ** (cost_class / 4), cost_class, self.clock)

    def remove(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self.idle[slot]

    def pop(self, num: int) -> list[int]:
        popped = sorted(self.idle, key=self.idle.__getitem__)[:num]
        for slot in popped:
            self.floor, _, _ = self.idle.pop(slot)
            self.ghosts.pop(self.key[slot], None)
            self.ghosts[self.key[slot]] = self.hits[slot]
            if len(self.ghosts) > GHOSTS_PER_SLOT * self.num_slots:
                del self.ghosts[next(iter(self.ghosts))]
        return popped


MODELS = {"returning": ReturningModel, "lru": LruModel, "cost": CostModel}
