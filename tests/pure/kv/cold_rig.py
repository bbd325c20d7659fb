"""A cold tier over a store in memory and real lanes, with the few moves that its tests are made of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from penstock.kv.blocks.pool import BlockPool
from penstock.kv.tiers.calls import StoreGroup
from penstock.kv.tiers.cold import ColdLanes, ColdLimits, ColdTier, Writing
from penstock.kv.tiers.store import Outcome
from penstock.lanes.cpu import CpuLane
from penstock.lanes.lane import Lane
from penstock.sanitizer.sanitizer import Sanitizer
from penstock.testing.stores import HandClock, MemoryStore

BLOCK_BYTES = 64
LAYERS = 2
ARENA = ("host", LAYERS)
SOON_S = 20.0  # a wait that takes so long is a hang
KEYS = [bytes([number]) * 16 for number in range(1, 41)]
LIMITS = ColdLimits(group_bytes=2 * BLOCK_BYTES, queue_bytes=1 << 20, stuck_s=10.0, probe_s=1.0)


def content(key: bytes) -> bytes:
    """What a block under `key` holds."""
    return (key * BLOCK_BYTES)[:BLOCK_BYTES]


def are_over(groups: Sequence[StoreGroup]) -> bool:
    return all(group.over() for group in groups)


class Host:
    """Slots of bytes and their pool."""

    def __init__(self, num_slots: int = 32, sanitizer: Sanitizer | None = None) -> None:
        self.memory = bytearray(num_slots * BLOCK_BYTES)
        self.pool = BlockPool(num_slots, "host", sanitizer)

    def view(self, slot: int) -> memoryview:
        return memoryview(self.memory)[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES]

    def fill(self, slots: Sequence[int], keys: Sequence[bytes]) -> None:
        for slot, key in zip(slots, keys, strict=True):
            self.view(slot)[:] = content(key)

    def holds(self, slot: int, key: bytes) -> bool:
        return bytes(self.view(slot)) == content(key)


class Rig:
    """`lane` makes the lanes; the default ones are threads."""

    def __init__(
        self,
        local: bool = False,
        num_readers: int = 2,
        num_writers: int = 2,
        lane: Callable[[str], Lane] = CpuLane,
        make: type[ColdTier] = ColdTier,
        **limits: float,
    ) -> None:
        self.clock = HandClock()
        self.store = MemoryStore("ssd" if local else "remote", local)
        self.host = Host()
        self.readers = [lane(f"read-{number}") for number in range(num_readers)]
        self.writers = [lane(f"write-{number}") for number in range(num_writers)]
        self.asker = None if local else lane("ask")
        lanes = ColdLanes(self.readers, self.writers, self.asker)
        self.tier = make(self.store, lanes, self.host.view, ARENA, replace(LIMITS, **limits), self.clock)  # type: ignore[arg-type]

    # -------------------------------------------------------------------------------------------------- moves

    def submit_write(self, keys: Sequence[bytes], must: bool = False) -> Writing | None:
        """From slots of its own; a refused one gives them back."""
        slots = self.reserve(len(keys))
        self.host.fill(slots, keys)
        hold = self.host.pool.pin(slots, "write")
        writing = self.tier.try_write(keys, range(len(keys)), slots, hold, must)
        if writing is None:
            hold.end()
        return writing

    def write(self, keys: Sequence[bytes]) -> Writing:
        """Over and settled when this returns."""
        writing = self.submit_write(keys)
        assert writing is not None
        self.settle()
        assert writing.settled
        return writing

    def reserve(self, num_slots: int) -> list[int]:
        """Slots that a table has; nobody gives them back before the rig is closed."""
        reservation = self.host.pool.try_reserve(num_slots, "somebody")
        assert reservation is not None
        reservation.commit(self.host.pool.hold("somebody"))
        return list(reservation.slots)

    def settle(self) -> list[Writing]:
        """Everything submitted so far is over then."""
        self.tier.drain(SOON_S)
        given = self.tier.settle()
        for writing in given:
            if writing.handle is not None:
                writing.handle.end()  # type: ignore[attr-defined]
        return given

    def submit_read(
        self, keys: Sequence[bytes], slots: Sequence[int] | None = None
    ) -> tuple[list[StoreGroup], list[int]]:
        """As many at once as the tier says."""
        taken = self.reserve(len(keys)) if slots is None else list(slots)
        runs = [
            slice(first, first + self.tier.group_blocks)
            for first in range(0, len(keys), self.tier.group_blocks)
        ]
        return [self.tier.read(keys[run], taken[run], (), "request") for run in runs], taken

    def read(self, keys: Sequence[bytes]) -> list[Outcome]:
        """Of blocks that are over; DONE ones are what was written."""
        reading, slots = self.submit_read(keys)
        self.settle()
        assert are_over(reading)
        outcomes = [outcome for group in reading for outcome in group.take_outcomes()]
        for key, slot, outcome in zip(keys, slots, outcomes, strict=True):
            assert self.host.holds(slot, key) == (outcome is Outcome.DONE)
        return outcomes

    def find(self, keys: Sequence[bytes]) -> int:
        finding = self.tier.find(keys, patience_s=1e9)
        self.settle()
        assert finding.ready
        return finding.num

    def break_store(self) -> None:
        """The breaker is open when this returns."""
        self.store.die()
        self.tier.find(KEYS[-1:], patience_s=1e9)
        if self.asker is not None:
            self.asker.drain(SOON_S)
        assert not self.tier.usable

    def close(self) -> None:
        self.store.gate.let()
        self.settle()
        self.tier.close(SOON_S)


class Woken:
    """Counts calls of `wake`, and can be waited for."""

    def __init__(self, look: Callable[[], object] = lambda: None) -> None:
        self.seen: list[object] = []  # what `look` said each time
        self._look = look
        self._changed = threading.Condition()

    def __call__(self) -> None:
        with self._changed:
            self.seen.append(self._look())
            self._changed.notify_all()

    def wait_for(self, num: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.seen) >= num, SOON_S), (
                f"woken {len(self.seen)} times, not {num}"
            )


Make = Callable[..., Rig]


@pytest.fixture
def make() -> Iterator[Make]:
    """Rigs whose threads end with the test, whatever state it leaves them in."""
    rigs: list[Rig] = []

    def build(*args: object, **named: object) -> Rig:
        rigs.append(Rig(*args, **named))  # type: ignore[arg-type]
        return rigs[-1]

    yield build
    for rig in rigs:
        rig.store.gate.let()
        for lane in (*rig.readers, *rig.writers, *(() if rig.asker is None else (rig.asker,))):
            lane.close(SOON_S)
