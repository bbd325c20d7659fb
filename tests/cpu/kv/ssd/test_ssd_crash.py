"""Power that goes: what comes back is right, and what was persisted comes back.

PENSTOCK_CRASHES sets how often; hundreds are for a night, not for every change.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from penstock.kv.tiers.ssd.store import SsdStore
from penstock.kv.tiers.store import Outcome
from tests.cpu.kv.ssd.ssd_rig import (
    Crashed,
    CrashingDisk,
    QuickDisk,
    abandon,
    key_of,
    open_at,
    read,
    those_in,
    write,
)

DONE = Outcome.DONE
NUM_SLOTS = 24
BLOCKS = range(60)
NUM_CRASHES = int(os.environ.get("PENSTOCK_CRASHES", "60"))  # of the machine, over all seeds
SEEDS = 3


class _Life:
    """One life of a store on a disk that will crash."""

    def __init__(self, path: Path, rng: random.Random) -> None:
        self.disk = CrashingDisk(path, rng)
        self.store = open_at(path, NUM_SLOTS, io=self.disk)
        self.done: set[int] = set()  # blocks whose write said so
        self.safe: set[int] = set()  # those that were persisted since
        self._rng = rng

    def go_on_until_it_crashes(self) -> None:
        self.disk.writes_left = self._rng.randrange(1, 25) if self._rng.random() < 0.8 else None
        try:
            for _ in range(self._rng.randrange(40)):
                self._act()
        except Crashed:
            pass
        self.safe &= those_in(self.store, BLOCKS)
        abandon(self.store)
        self.disk.crash()

    def _act(self) -> None:
        chance = self._rng.random()
        numbers = self._rng.sample(BLOCKS, self._rng.randrange(1, 6))
        if chance < 0.6:
            outcomes = write(self.store, *numbers)
            self.done.update(
                number for number, outcome in zip(numbers, outcomes, strict=True) if outcome is DONE
            )
            self.done &= those_in(self.store, BLOCKS)
            self.safe &= self.done  # what is evicted and written again is not safe before the next persist
        elif chance < 0.75:
            read(self.store, *numbers)
        elif chance < 0.97:
            self.store.persist()
            self.safe |= self.done
        else:
            # a reset that a crash cuts short may have forgotten any of them
            self.safe, self.done = set(), set()
            self.store.reset()


def _crash_again_and_again(path: Path, seed: int, num_crashes: int) -> tuple[int, int]:
    """How many blocks were safe and lost, and how many were found in all. A wrong byte fails inside
    `read`."""
    rng = random.Random(seed)
    num_lost = num_found = 0
    for _ in range(num_crashes):
        life = _Life(path, rng)
        life.go_on_until_it_crashes()
        store = open_at(path, NUM_SLOTS, io=QuickDisk())
        found = sorted(those_in(store, BLOCKS))
        outcomes = dict(zip(found, read(store, *found), strict=True))
        num_found += len(found)
        num_lost += sum(outcomes.get(number) is not DONE for number in life.safe)
        store._now.index.check()
        store.close()
    return num_lost, num_found


@pytest.mark.parametrize("seed", range(SEEDS))
def test_after_a_crash_every_block_is_right_and_what_was_persisted_is_there(
    tmp_path: Path, seed: int
) -> None:
    num_lost, num_found = _crash_again_and_again(tmp_path, seed, NUM_CRASHES // SEEDS)
    assert num_lost == 0 and num_found > 0


def test_a_write_torn_at_every_place_is_a_miss_or_whole(tmp_path: Path) -> None:
    """The slot had another block before; of the new one only the first sectors, or only the last ones, have
    arrived."""

    def overwritten(path: Path, num_first: int, num_last: int) -> SsdStore:
        store = open_at(path, num_slots=1, io=QuickDisk())
        num_slots = store.usage().num_slots or 0
        write(store, *range(num_slots))
        segment, slot = store._now.segments.locate(store._now.index.find_each([key_of(num_slots - 1)])[0])
        file, start = store._now.directory.segment_path(segment.head.number), segment.offset(slot)
        old = file.read_bytes()
        write(store, 100)  # over the deepest
        new = file.read_bytes()
        abandon(store)
        changed = [
            place for place in range(0, len(new), 512) if old[place : place + 512] != new[place : place + 512]
        ]
        assert changed and changed[0] >= start
        torn = bytearray(old)
        for place in [*changed[:num_first], *changed[len(changed) - num_last :]]:
            torn[place : place + 512] = new[place : place + 512]
        file.write_bytes(torn)
        return open_at(path, num_slots=1, io=QuickDisk())

    for num in range(1, 12):
        for num_first, num_last in ((num, 0), (0, num)):
            store = overwritten(tmp_path / f"{num_first}-{num_last}", num_first, num_last)
            found = sorted(those_in(store, range(101)))
            outcomes = dict(zip(found, read(store, *found), strict=True))
            assert not (
                outcomes.get(100) is DONE and outcomes.get((store.usage().num_slots or 0) - 1) is DONE
            ), "one slot, two blocks"
            store.close()
