"""A store that is too small for what several threads write into it, when its process is killed or its machine
stops: no wrong byte comes back, and what was persisted and not evicted is there.

PENSTOCK_KILLS and PENSTOCK_CRASHES set how often; `make crash` does it hundreds of times.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.kv.tiers.ssd.segments import slot_bytes
from penstock.kv.tiers.ssd.store import SsdStore, open_ssd
from penstock.kv.tiers.store import Outcome
from tests.cpu.kv.ssd.crash_load import (
    NUM_SLOTS,
    Found,
    Heard,
    Load,
    read_checked,
    write_some,
)
from tests.cpu.kv.ssd.ssd_rig import (
    BLOCK_BYTES,
    SPACE,
    Crashed,
    CrashingDisk,
    QuickDisk,
    abandon,
    max_bytes_for,
    open_at,
)

NUM_KILLS = int(os.environ.get("PENSTOCK_KILLS", "25"))  # of the process
NUM_CRASHES = int(os.environ.get("PENSTOCK_CRASHES", "200"))  # of the machine, over all seeds
SEEDS = 4

# ----------------------------------------------------------------------------------------------------- killed


def test_a_writer_killed_while_slots_are_written_over_leaves_right_bytes_and_all_that_was_persisted(
    tmp_path: Path,
) -> None:
    tests = Path(__file__).resolve().parents[3]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests.parent / "src")])}
    writer = str(Path(__file__).with_name("killed_writer.py"))
    program = [sys.executable, writer, str(tmp_path), "1", str(NUM_KILLS)]
    done = subprocess.run(program, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout)
    print(counts)
    assert counts["kills"] == NUM_KILLS and counts["good"] > NUM_KILLS
    assert counts["required"] > 0, "nothing was promised"
    assert counts["full"] > 0, "nothing was written over"


# ---------------------------------------------------------------------------------------------------- crashed


class StoppingDisk(CrashingDisk):
    """A crashing disk for several threads: it stops in the middle of a write or between two, for all of them
    at once."""

    def __init__(self, path: Path, rng: random.Random) -> None:
        super().__init__(path, rng)
        self.calls_left: int | None = None  # None: it does not stop
        self._lock = threading.Lock()

    def _count(self) -> None:
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left <= 0:
                raise Crashed

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            if self.calls_left == 1:  # on its way when the machine stops
                self._files[self._path_of[fd]].writes.append((offset, b"".join(buffers)))
            self._count()
            return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        with self._lock:
            self._count()
            super().fdatasync(fd)

    def fsync(self, fd: int) -> None:
        with self._lock:
            self._count()
            super().fsync(fd)


def _open(path: Path, io: QuickDisk) -> SsdStore:
    return open_ssd(path, max_bytes_for(NUM_SLOTS), SPACE, "lru", io)


def _crash(path: Path, rng: random.Random) -> Heard:
    """One life of a machine, and what it has promised."""
    disk, heard = StoppingDisk(path, rng), Heard()
    store = _open(path, disk)
    load = Load(store, BLOCK_BYTES, rng.getrandbits(31), heard.hear)
    disk.calls_left = rng.randrange(1, 100)
    load.run()
    if not isinstance(load.failure, Crashed):
        raise AssertionError("it ended before the machine did") from load.failure
    abandon(store)
    disk.crash()
    return heard


def _crash_again_and_again(path: Path, seed: int, num_crashes: int) -> dict[str, int]:
    rng = random.Random(seed)
    counts = dict.fromkeys(("good", "torn", "required", "lost", "full"), 0)
    for _ in range(num_crashes):
        heard = _crash(path, rng)
        store = _open(path, QuickDisk())
        found = Found(store, BLOCK_BYTES)
        store._now.index.check()
        store.close()
        counts["good"] += found.num_good
        counts["torn"] += found.num_torn
        counts["required"] += heard.num_safe
        counts["lost"] += len(found.lost(heard.required))
        counts["full"] += found.is_full
    return counts


@pytest.mark.parametrize("torn_bytes", [512, 4096])
@pytest.mark.parametrize("seed", range(SEEDS // 2))
def test_a_machine_that_stops_under_load_leaves_right_bytes_and_all_that_was_persisted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, torn_bytes: int
) -> None:
    monkeypatch.setattr(CrashingDisk, "TORN_BYTES", torn_bytes)
    counts = _crash_again_and_again(tmp_path, seed, NUM_CRASHES // SEEDS)
    print(counts)
    assert counts["lost"] == 0
    assert min(counts["good"], counts["torn"], counts["required"], counts["full"]) > 0, "it happened"


# ---------------------------------------------------------------------------------------------- not even told


class ForgetfulDisk(QuickDisk):
    """Says that it has written, and has not, or somewhere else in the file; nobody is told."""

    def __init__(self, rng: random.Random) -> None:
        self.chance = 0.0
        self._rng = rng

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        num_bytes, width = sum(map(len, buffers)), slot_bytes(BLOCK_BYTES)
        if offset and self._rng.random() < self.chance:
            if self._rng.random() < 0.5:
                return num_bytes
            elsewhere = offset + width * self._rng.choice((-1, 1, 2))
            if 0 < elsewhere <= self.stat(fd).st_size - num_bytes:
                offset = elsewhere
        return super().pwritev(fd, buffers, offset)


def _forget_and_misplace(path: Path, seed: int) -> dict[Outcome, int]:
    """What reading gives, over two lives. A wrong byte raises."""
    rng = random.Random(seed)
    disk = ForgetfulDisk(rng)
    store = open_at(path, num_slots=12, io=disk)
    counts = dict.fromkeys(Outcome, 0)
    written: list[bytes] = []
    for _ in range(120):
        disk.chance = 0.3
        keys = [rng.randbytes(16) for _ in range(rng.randrange(1, 4))]
        write_some(store, keys, BLOCK_BYTES)
        written += keys
        for outcome in read_checked(store, rng.sample(written[-16:], min(len(written), 8)), BLOCK_BYTES):
            counts[outcome] += 1
        if rng.random() < 0.1:
            abandon(store)
            store = open_at(path, num_slots=12, io=disk)
    store.close()
    return counts


@pytest.mark.parametrize("seed", range(3))
def test_writes_that_were_lost_or_landed_elsewhere_are_misses(tmp_path: Path, seed: int) -> None:
    counts = _forget_and_misplace(tmp_path, seed)
    assert min(counts[Outcome.DONE], counts[Outcome.CORRUPT], counts[Outcome.MISSING]) > 0
