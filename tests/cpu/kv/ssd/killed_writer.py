"""A writer under load that is killed at random instants, and what its store has afterwards. Run as a program:
a process without threads can fork a writer in a millisecond. Owns the killing; the load and the promise are
`crash_load`'s.

    python killed_writer.py FOLDER SEED KILLS

Ends with an error at the first wrong byte, and at the first block that was persisted and is not there.
Every other writer goes through the system's file cache and page by page, so that a kill cuts its blocks at
any page.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from penstock.kv.tiers.ssd.directory import DiskIo
from penstock.kv.tiers.ssd.store import SsdStore, open_ssd
from penstock.kv.tiers.store import Space
from tests.cpu.kv.ssd.crash_load import NUM_SLOTS, Found, Heard, Load
from tests.cpu.kv.ssd.ssd_rig import abandon, max_bytes_for

BLOCK_BYTES = 120_000  # large enough to be cut in the middle
SPACE = Space(b"k" * 32, BLOCK_BYTES)
MOST_TOLD = 6  # times that a writer has told something when it is killed
LONGEST_S = 0.03  # after that
_WORD = struct.Struct("<QQ")


class ShortDisk(DiskIo):
    """Writes a page at a time, through the system's file cache."""

    def open(self, path: Path, flags: int, dir_fd: int) -> int:
        return super().open(path, flags & ~os.O_DIRECT, dir_fd)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return super().pwritev(fd, [buffers[0][:4096]], offset)


def open_store(path: Path, io: DiskIo) -> SsdStore:
    return open_ssd(path, max_bytes_for(NUM_SLOTS, BLOCK_BYTES), SPACE, "lru", io)


def killed(path: Path, rng: random.Random, io: DiskIo) -> Heard:
    """One writer's life, and what it has said."""
    hearing, telling = os.pipe()
    seed, num_told, longer_s = rng.getrandbits(31), rng.randrange(MOST_TOLD + 1), rng.random() * LONGEST_S
    pid = os.fork()
    if pid == 0:
        try:
            load = Load(
                open_store(path, io),
                BLOCK_BYTES,
                seed,
                lambda *said: os.write(telling, _WORD.pack(*said)) and None,
            )
            load.run()
            print(f"the writer ended by itself: {load.failure!r}", file=sys.stderr)
        finally:
            os._exit(1)
    os.close(telling)
    heard = Heard()
    with os.fdopen(hearing, "rb") as pipe:
        for said in itertools.islice(iter(lambda: pipe.read(_WORD.size), b""), num_told):
            heard.hear(*_WORD.unpack(said))
        time.sleep(longer_s)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), "the writer ended by itself"
        for words in _WORD.iter_unpack(pipe.read()):
            heard.hear(*words)
    return heard


def main() -> None:
    path, rng, num_kills = Path(sys.argv[1]), random.Random(int(sys.argv[2])), int(sys.argv[3])
    counts = {"kills": num_kills, "good": 0, "torn": 0, "required": 0, "full": 0}
    for number in range(num_kills):
        io = ShortDisk() if number % 2 else DiskIo()
        heard = killed(path, rng, io)
        store = open_store(path, io)
        found = Found(store, BLOCK_BYTES)
        lost = found.lost(heard.required)
        assert not lost, f"kill {number}: persisted and lost: {lost}"
        store._now.index.check()
        abandon(store)  # whoever looks makes nothing safer than it was
        counts["good"] += found.num_good
        counts["torn"] += found.num_torn
        counts["required"] += heard.num_safe
        counts["full"] += found.is_full
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
