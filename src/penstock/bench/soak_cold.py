"""What goes wrong with disks and stores during a soak: calls that fail, stall, or lie about what they did, and bytes that rot. Owns the
mischief; nobody but the soak asks for it."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence

from penstock.engine.engine import Engine
from penstock.errors import StoreFailed
from penstock.kv.tiers.ssd.disk import DiskIo
from penstock.kv.tiers.ssd.store import SsdStore
from penstock.kv.tiers.store import BlockStore, Outcome, StoreUsage

FAILED = 0.02  # share of the disk's calls that end with an error, and of a store's blocks
STALLED = 0.005  # share of calls that take longer than anybody waits for them
SPOILED = 0.02  # share of the disk's reads that bring a wrong bit, and of its writes that do not happen or only by half
DOWN = 0.003  # share of a store's calls for which all of it is down
EXAGGERATED = 0.05  # share of answers of a store that it has everything


class Mischief:
    """When it happens, and how often it did. For several lanes at once."""

    def __init__(self, counts: Counter[str], rng: random.Random, stall_s: float) -> None:
        self._counts = counts
        self._rng = rng
        self._stall_s = stall_s
        self._lock = threading.Lock()

    def happens(self, share: float, what: str) -> bool:
        with self._lock:
            drawn = self._rng.random() < share
            self._counts[what] += drawn
        return drawn

    def below(self, end: int) -> int:
        with self._lock:
            return self._rng.randrange(end)

    def stall(self, what: str) -> None:
        if self.happens(STALLED, what):
            time.sleep(self._stall_s)


class UnreliableDisk(DiskIo):
    """The system's calls, most of the time."""

    def __init__(self, mischief: Mischief) -> None:
        self._mischief = mischief

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._mischief.stall("disk calls stalled on purpose")
        if self._mischief.happens(FAILED, "disk calls failed on purpose"):
            raise OSError(errno.EIO, "this read was made to fail")
        num = super().preadv(fd, buffers, offset)
        if num and self._mischief.happens(SPOILED, "disk reads spoiled on purpose"):
            spoiled = buffers[self._mischief.below(len(buffers))]
            spoiled[self._mischief.below(len(spoiled))] ^= 1 << self._mischief.below(8)
        return num

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._mischief.stall("disk calls stalled on purpose")
        if self._mischief.happens(FAILED, "disk calls failed on purpose"):
            super().pwritev(fd, buffers[:1], offset)
            raise OSError(errno.EIO, "this write was made to fail halfway")
        if self._mischief.happens(SPOILED, "disk writes lost on purpose"):
            kept = buffers[: self._mischief.below(len(buffers) + 1)]
            if kept:
                super().pwritev(fd, kept, offset)
            return sum(len(buffer) for buffer in buffers)
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        if self._mischief.happens(FAILED, "disk calls failed on purpose"):
            raise OSError(errno.EIO, "this sync was made to fail")
        super().fdatasync(fd)


class UnreliableStore:
    """A `BlockStore` as `inner` is one, most of the time. What it calls done was checked by `inner`."""

    def __init__(self, inner: BlockStore, mischief: Mischief) -> None:
        self.name = inner.name
        self.local = inner.local
        self._inner = inner
        self._mischief = mischief

    def find(self, keys: Sequence[bytes]) -> int:
        self._call()
        exaggerates = self._mischief.happens(EXAGGERATED, "store answers exaggerated on purpose")
        return len(keys) if exaggerates else self._inner.find(keys)

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        self._call()
        outcomes = self._inner.read(keys, into)
        for place in self._failing(len(keys)):
            into[place][:] = bytes(len(into[place]))
            outcomes[place] = Outcome.FAILED
        return outcomes

    def write(self, keys: Sequence[bytes], depths: Sequence[int], blocks: Sequence[memoryview]) -> list[Outcome]:
        self._call()
        failing = self._failing(len(keys))
        kept = [place for place in range(len(keys)) if place not in failing]
        done = self._inner.write([keys[place] for place in kept], [depths[place] for place in kept], [blocks[place] for place in kept])
        outcomes = [Outcome.FAILED] * len(keys)
        for place, outcome in zip(kept, done, strict=True):
            outcomes[place] = outcome
        return outcomes

    def persist(self) -> None:
        self._call()
        self._inner.persist()

    def probe(self) -> None:
        self._inner.probe()

    def reset(self) -> int:
        self._call()
        return self._inner.reset()

    def usage(self) -> StoreUsage:
        return self._inner.usage()

    def close(self) -> None:
        self._inner.close()

    def _call(self) -> None:
        self._mischief.stall("store calls stalled on purpose")
        if self._mischief.happens(DOWN, "store calls failed on purpose"):
            raise StoreFailed("the store was made to be down")

    def _failing(self, num: int) -> set[int]:
        return {place for place in range(num) if self._mischief.happens(FAILED, "blocks of a store failed on purpose")}


def make_cold_unreliable(engine: Engine, rng: random.Random, stall_s: float) -> Counter[str]:
    """Before the engine's first step. Returns what is counted from then on."""
    counts: Counter[str] = Counter()
    for tier in engine.cache.cold_tiers.values():
        mischief = Mischief(counts, random.Random(rng.random()), stall_s)
        store = tier.exchanges.store
        if isinstance(store, SsdStore):
            store.files.io = UnreliableDisk(mischief)
        else:
            tier.exchanges.store = UnreliableStore(store, mischief)
    return counts
