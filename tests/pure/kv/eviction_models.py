"""Policies of eviction as one would write them on paper: lists, scans and exact counts. Owns what the real ones are compared with."""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Sequence

SMALL_SHARE, WINDOW_SHARE, WINDOW_LIMIT, PROTECTED_SHARE = 1 / 4, 0.5, 0.6, 0.8
TOKENS_TO_DOUBLE, GHOSTS_PER_SLOT = 8192, 4
PATIENCE, KEYS_PER_SLOT = 8, 4


class LruModel:
    def __init__(self, num_slots: int, block_tokens: int) -> None:
        self.idle: list[int] = []

    def sealed(self, slots: Sequence[int], keys: Sequence[bytes], depths: Sequence[int]) -> None: ...

    def hit(self, slots: Sequence[int]) -> None: ...

    def add(self, slots: Sequence[int]) -> None:
        self.idle += slots

    def remove(self, slots: Sequence[int]) -> None:
        self.idle = [slot for slot in self.idle if slot not in slots]

    def pop(self, num: int) -> list[int]:
        popped, self.idle = self.idle[:num], self.idle[num:]
        return popped


class ReturningModel:
    def __init__(self, num_slots: int, block_tokens: int) -> None:
        self.clock = 0
        self.idle: dict[int, tuple[int, bool, int]] = {}  # when it became idle, in the queue of those that returned, place in its run
        self.returned: set[int] = set()
        self.places = 1
        while self.places < KEYS_PER_SLOT * num_slots:
            self.places *= 2
        self.seen: dict[int, bytes] = {}

    def sealed(self, slots: Sequence[int], keys: Sequence[bytes], depths: Sequence[int]) -> None:
        places = [int.from_bytes(key[:8], sys.byteorder) % self.places for key in keys]
        self.returned.difference_update(slots)
        self.returned.update(slot for slot, key, place in zip(slots, keys, places, strict=True) if self.seen.get(place) == key[8:])
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


class S3FifoModel:
    def __init__(self, num_slots: int, block_tokens: int) -> None:
        self.num_slots = num_slots
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghosts: list[bytes] = []
        self.key: dict[int, bytes] = {}
        self.proven: set[int] = set()
        self.marked: set[int] = set()

    def sealed(self, slots: Sequence[int], keys: Sequence[bytes], depths: Sequence[int]) -> None:
        for slot, key in zip(slots, keys, strict=True):
            self.key[slot] = key
            self.marked.discard(slot)
            self.proven.discard(slot)
            if key in self.ghosts:
                self.ghosts.remove(key)
                self.proven.add(slot)

    def hit(self, slots: Sequence[int]) -> None:
        self.marked.update(slots)

    def add(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if slot not in self.proven and slot in self.marked:
                self.proven.add(slot)
                self.marked.remove(slot)
            (self.main if slot in self.proven else self.small).append(slot)

    def remove(self, slots: Sequence[int]) -> None:
        for slot in slots:
            (self.main if slot in self.main else self.small).remove(slot)

    def pop(self, num: int) -> list[int]:
        popped: list[int] = []
        patience = 4 * num
        while len(popped) < num and self.small + self.main:
            crowded = len(self.small) > SMALL_SHARE * len(self.small + self.main)
            queue = self.small if self.small and (crowded or not self.main) else self.main
            slot = queue.pop(0)
            if slot in self.marked and patience:
                patience -= 1
                self.marked.remove(slot)
                self.proven.add(slot)
                self.main.append(slot)
                continue
            if queue is self.small:
                self.ghosts = [*self.ghosts, self.key[slot]][-GHOSTS_PER_SLOT * self.num_slots :]
            popped.append(slot)
        return popped


class TinyLfuModel:
    def __init__(self, num_slots: int, block_tokens: int) -> None:
        self.queues: dict[str, list[int]] = {"window": [], "probation": [], "protected": []}
        self.home: dict[int, str] = {}
        self.key: dict[int, bytes] = {}
        self.marked: set[int] = set()
        self.uses: Counter[bytes] = Counter()
        self.num_uses, self.period = 0, 10 * num_slots

    def count(self, key: bytes) -> None:
        self.uses[key] = min(15, self.uses[key] + 1)
        self.num_uses += 1
        if self.num_uses == self.period:
            self.uses = Counter({key: num // 2 for key, num in self.uses.items()})
            self.num_uses //= 2

    def num_idle(self) -> int:
        return sum(map(len, self.queues.values()))

    def sealed(self, slots: Sequence[int], keys: Sequence[bytes], depths: Sequence[int]) -> None:
        for slot, key in zip(slots, keys, strict=True):
            self.key[slot], self.home[slot] = key, "window"
            self.marked.discard(slot)
            self.count(key)

    def hit(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.marked.add(slot)
            self.count(self.key[slot])

    def add(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if self.home[slot] == "probation" and slot in self.marked:
                self.home[slot] = "protected"
            self.marked.discard(slot)
            self.queues[self.home[slot]].append(slot)
        moves = 2 * len(slots)
        while moves and len(self.queues["window"]) > WINDOW_LIMIT * self.num_idle():
            moves -= 1
            self.to_probation("window")
        while moves and len(self.queues["protected"]) > PROTECTED_SHARE * (self.num_idle() - len(self.queues["window"])):
            moves -= 1
            self.to_probation("protected")

    def to_probation(self, queue: str) -> None:
        slot = self.queues[queue].pop(0)
        self.home[slot] = "probation"
        self.queues["probation"].append(slot)

    def remove(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.queues[self.home[slot]].remove(slot)

    def pop(self, num: int) -> list[int]:
        return [self.pop_one() for _ in range(min(num, self.num_idle()))]

    def pop_one(self) -> int:
        window = self.queues["window"]
        main = self.queues["probation"] or self.queues["protected"]
        if not main:
            return window.pop(0)
        if len(window) <= WINDOW_SHARE * self.num_idle():
            return main.pop(0)
        if self.uses[self.key[window[0]]] < self.uses[self.key[main[0]]]:
            return window.pop(0)
        loser = main.pop(0)
        self.to_probation("window")
        return loser


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


MODELS = {"returning": ReturningModel, "lru": LruModel, "s3fifo": S3FifoModel, "tinylfu": TinyLfuModel, "cost": CostModel}
