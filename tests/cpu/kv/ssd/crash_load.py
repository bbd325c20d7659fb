"""Load on an SSD store that is too small for it, and what must be there after it was cut short. Owns the
promise: blocks that were persisted and that the rules of eviction keep. How it is cut short is the tests'
business.

Fillers write blocks under random keys, far more than fit, so that slots are written over all the time. A
keeper writes a few blocks of each generation, persists them and says so. Under `lru` they stay: it reads all
of them again before fillers get leave for the next blocks, and leaves are so few that those of two turns and
the kept blocks fit into the store together.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from penstock.kv.tiers.ssd.store import SsdStore
from penstock.kv.tiers.store import Outcome
from tests.cpu.kv.ssd.ssd_rig import WAIT_S

KEPT = 16  # blocks of a generation
LEAVE = 8  # blocks that fillers may write in a turn
NUM_SLOTS = KEPT + 3 * LEAVE + 8
NUM_FILLERS = 3
BATCH = 4  # blocks of one call

Tell = Callable[[int, int], None]  # generation, and how many of its blocks are safe


class WrongBytes(AssertionError):
    """A store has served what its key does not stand for."""


def payload_of(key: bytes, num_bytes: int) -> memoryview:
    """Follows from the key; no two places of a block and no two blocks are alike."""
    seed, step = np.frombuffer(key, np.uint64)
    words = np.arange(-(-num_bytes // 8), dtype=np.uint64) * (step | np.uint64(1)) + seed
    return memoryview(words.view(np.uint8)[:num_bytes].data)


def kept_key(generation: int, number: int) -> bytes:
    return random.Random(f"{generation} {number}").randbytes(16)


def read_checked(store: SsdStore, keys: Sequence[bytes], num_bytes: int) -> list[Outcome]:
    into = [memoryview(bytearray(num_bytes)) for _ in keys]
    outcomes = store.read(keys, into)
    for key, outcome, view in zip(keys, outcomes, into, strict=True):
        if outcome is Outcome.DONE and view != payload_of(key, num_bytes):
            raise WrongBytes(f"block {key.hex()}")
    return outcomes


def write_some(store: SsdStore, keys: Sequence[bytes], num_bytes: int) -> list[Outcome]:
    return store.write(keys, [0] * len(keys), [payload_of(key, num_bytes) for key in keys])


class Load:
    """Runs until something raises, in this process or by its end. `failure` is what that was."""

    def __init__(self, store: SsdStore, num_bytes: int, seed: int, tell: Tell) -> None:
        self.failure: BaseException | None = None
        self._store = store
        self._num_bytes = num_bytes
        self._rng = random.Random(seed)
        self._tell = tell
        self._leave = threading.Condition()
        self._num_left = LEAVE
        self._stop = threading.Event()

    def run(self) -> None:
        """In this thread; returns when all of its threads have ended."""
        fillers = [
            threading.Thread(target=self._guard, args=(self._fill, self._rng.random()), daemon=True)
            for _ in range(NUM_FILLERS)
        ]
        for thread in fillers:
            thread.start()
        self._guard(self._keep, self._rng.getrandbits(31))
        for thread in fillers:
            thread.join()

    def _guard(self, work: Callable[[float], None], seed: float) -> None:
        try:
            work(seed)
        except BaseException as error:
            self.failure = self.failure or error
        finally:
            self._stop.set()
            with self._leave:
                self._leave.notify_all()

    def _fill(self, seed: float) -> None:
        rng = random.Random(seed)
        while not self._stop.is_set():
            with self._leave:
                while not self._num_left and not self._stop.is_set():
                    self._leave.wait()
                num = min(self._num_left, rng.randrange(1, BATCH + 1))
                self._num_left -= num
            keys = [rng.randbytes(16) for _ in range(num)]
            write_some(self._store, keys, self._num_bytes)
            read_checked(self._store, keys, self._num_bytes)

    def _keep(self, first: float) -> None:
        """Promises nothing while the store still looks for what an earlier life has left: until then fewer
        slots are in use."""
        while not self._store.wait_scanned(0.001) and not self._stop.is_set():
            self._allow()
        generation = int(first)
        while not self._stop.is_set():
            generation += 1
            self._tell(generation, 0)  # those before it are not read any more
            num_safe = 0
            while num_safe < KEPT and not self._stop.is_set():
                keys = [kept_key(generation, number) for number in range(min(KEPT, num_safe + BATCH))]
                outcomes = write_some(self._store, keys[num_safe:], self._num_bytes)
                if set(outcomes) != {Outcome.DONE} or set(
                    read_checked(self._store, keys, self._num_bytes)
                ) != {Outcome.DONE}:
                    raise AssertionError("a block that was just used is not there")
                self._allow()
                self._store.persist()
                num_safe = len(keys)
                self._tell(generation, num_safe)

    def _allow(self) -> None:
        with self._leave:
            self._num_left = LEAVE
            self._leave.notify_all()


class Heard:
    """What a load has told, and what must therefore be there."""

    def __init__(self) -> None:
        self._generation = self.num_safe = 0

    def hear(self, generation: int, num_safe: int) -> None:
        self._generation, self.num_safe = generation, num_safe

    @property
    def required(self) -> list[bytes]:
        return [kept_key(self._generation, number) for number in range(self.num_safe)]


class Found:
    """What a store has after a crash."""

    def __init__(self, store: SsdStore, num_bytes: int) -> None:
        assert store.wait_scanned(WAIT_S)
        keys = store._now.index._pool.keys()
        self.outcomes: dict[bytes, Outcome] = {}
        for first in range(0, len(keys), BATCH):
            batch = keys[first : first + BATCH]
            self.outcomes.update(zip(batch, read_checked(store, batch, num_bytes), strict=True))
        self.num_good = sum(outcome is Outcome.DONE for outcome in self.outcomes.values())
        self.num_torn = len(self.outcomes) - self.num_good
        self.is_full = len(keys) == store.usage().num_slots

    def lost(self, required: Iterable[bytes]) -> list[str]:
        return [key.hex() for key in required if self.outcomes.get(key) is not Outcome.DONE]
