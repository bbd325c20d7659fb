"""Tiers under the memory of an engine that is not there: stores in memory, real lanes, and the moves that the
tests are made of. Owns the slots; a test owns its jobs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from penstock.kv.tiers.cold import ColdLimits, ColdTier, cpu_lanes
from penstock.plugins.matches import Matches
from penstock.plugins.tiers import Finished, HostedTiers, key_of
from penstock.testing.stores import MemoryStore

BLOCK_BYTES = 64
NUM_SLOTS = 64
SOON_S = 20.0  # a wait that takes so long is a hang
KEYS = [key_of(b"block %d" % number) for number in range(40)]


def content(key: bytes) -> bytes:
    """What a block under `key` holds."""
    return (key * BLOCK_BYTES)[:BLOCK_BYTES]


class LocalStore(MemoryStore):
    """A disk, which says of each block whether it is there."""

    def __init__(self) -> None:
        super().__init__("ssd", local=True)

    def has_each(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.blocks for key in keys]

    def pin_keys(self, id: str, keys: Sequence[bytes]) -> None:
        raise AssertionError("nothing pins here")

    def unpin_keys(self, id: str) -> None:
        raise AssertionError("nothing pins here")

    def num_leading(self, keys: Sequence[bytes]) -> int:
        return [*self.has_each(keys), False].index(False)


class Rig:
    """Jobs take slots of their own, which are given back never."""

    def __init__(
        self, *stores: MemoryStore, patience_s: float = SOON_S, persist_s: float = 1e9, **limits: float
    ) -> None:
        self.memory = bytearray(NUM_SLOTS * BLOCK_BYTES)
        self.stores = stores
        limit = ColdLimits(group_bytes=2 * BLOCK_BYTES, **limits)  # type: ignore[arg-type]
        self.tiers = HostedTiers(
            [ColdTier(store, cpu_lanes(store), self.view, ("host", 1), limit) for store in stores], persist_s
        )
        self.matches = Matches(self.tiers.tiers, patience_s)
        self._jobs = itertools.count()
        self._slots = itertools.count()

    def view(self, slot: int) -> memoryview:
        return memoryview(self.memory)[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES]

    def submit_write(self, keys: Sequence[bytes]) -> int:
        slots = self._take(len(keys))
        for slot, key in zip(slots, keys, strict=True):
            self.view(slot)[:] = content(key)
        job = next(self._jobs)
        self.tiers.write(job, keys, slots)
        return job

    def submit_read(self, keys: Sequence[bytes]) -> tuple[int, list[int]]:
        slots, job = self._take(len(keys)), next(self._jobs)
        self.tiers.read(job, keys, slots)
        return job, slots

    def write(self, keys: Sequence[bytes]) -> Finished:
        return self.tiers.wait_finished(self.submit_write(keys), SOON_S)

    def read(self, keys: Sequence[bytes]) -> list[bool]:
        """What is done is also byte for byte what was written."""
        job, slots = self.submit_read(keys)
        finished = self.tiers.wait_finished(job, SOON_S)
        for key, slot, done in zip(keys, slots, finished.done, strict=True):
            assert not done or self.view(slot) == content(key), "wrong bytes served"
        return list(finished.done)

    def find(
        self, keys: Sequence[bytes], owner: str = "request", chain: str | None = None
    ) -> list[bool | None]:
        """As an engine does that looks once in each step, until nothing is pending."""
        until = time.monotonic() + SOON_S
        while True:
            self.matches.take_in()
            found = [self.matches.find(key, owner, chain or key) for key in keys]
            if None not in found:
                return found
            assert time.monotonic() < until, "the question was never answered"
            self.matches.ask()
            self.tiers.settle()

    def _take(self, num: int) -> list[int]:
        return [next(self._slots) % NUM_SLOTS for _ in range(num)]

    def close(self) -> None:
        for store in self.stores:
            store.gate.let()
        self.tiers.close(SOON_S)


Make = Callable[..., Rig]


@pytest.fixture
def make() -> Iterator[Make]:
    rigs: list[Rig] = []

    def build(*stores: MemoryStore, **named: float) -> Rig:
        rigs.append(Rig(*stores, **named))  # type: ignore[arg-type]
        return rigs[-1]

    yield build
    for rig in rigs:
        rig.close()
