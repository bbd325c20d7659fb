"""A writer that is killed at random instants, and what its store has afterwards. Run as a program: a process
without threads can fork a writer in a millisecond.

    python kill_rounds.py FOLDER SEED ROUNDS

The writer tells through a pipe which blocks a `persist` has covered. After each kill the store is opened and
read; a wrong byte, or a block that was persisted, not evicted, and is not there, ends the program with an
error.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import sys
import threading
import time
from pathlib import Path

from penstock.kv.tiers.store import Outcome
from tests.cpu.kv.ssd.ssd_rig import open_at, read, those_in, write

NUM_SLOTS = 60
NUM_BLOCKS = 40  # fewer than slots: nothing is ever evicted, so all that was persisted must be there


def write_until_killed(path: Path, seed: int, told: int) -> None:
    """Three threads write, one persists and tells."""
    rng = random.Random(seed)
    store = open_at(path, NUM_SLOTS)
    done: set[int] = set()

    def work(seed: int) -> None:
        rng = random.Random(seed)
        while True:
            numbers = rng.sample(range(NUM_BLOCKS), rng.randrange(1, 8))
            done.update(
                number
                for number, outcome in zip(numbers, write(store, *numbers), strict=True)
                if outcome is Outcome.DONE
            )
            read(store, *numbers)

    for _ in range(3):
        threading.Thread(target=work, args=(rng.random(),), daemon=True).start()
    while True:
        before = sorted(done)
        store.persist()
        os.write(told, b"".join(struct.pack("<I", number) for number in before))
        if len(before) == NUM_BLOCKS:
            done.clear()
            store.reset()
            os.write(told, struct.pack("<I", 1 << 31))


def main() -> None:
    path, rng, num_rounds = Path(sys.argv[1]), random.Random(int(sys.argv[2])), int(sys.argv[3])
    num_found = 0
    for number in range(num_rounds):
        hearing, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(hearing)
                write_until_killed(path, rng.randrange(1 << 30) + number, told)
            finally:
                os._exit(1)
        os.close(told)
        time.sleep(rng.random() * 0.03)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), "the writer ended by itself"
        with os.fdopen(hearing, "rb") as pipe:
            heard = pipe.read()
        persisted: set[int] = set()
        for (block,) in struct.iter_unpack("<I", heard):
            if block == 1 << 31:
                persisted.clear()
            elif len(persisted) < NUM_BLOCKS:
                persisted.add(block)
        may_be_resetting = len(persisted) == NUM_BLOCKS
        store = open_at(path, NUM_SLOTS)
        found = those_in(store, range(NUM_BLOCKS))
        outcomes = dict(zip(sorted(found), read(store, *sorted(found)), strict=True))
        if not may_be_resetting:
            lost = {block for block in persisted if outcomes.get(block) is not Outcome.DONE}
            assert not lost, f"round {number}: persisted and lost: {sorted(lost)}"
        num_found += len(found)
        if rng.random() < 0.3:
            store.reset()
        store.close()
    print(f"{num_rounds} kills, {num_found} blocks found and right")
    assert num_found or num_rounds < 10


if __name__ == "__main__":
    main()
