"""Host memory on its way to being usable: nobody waits for it to begin, it ends when asked to, and an error
ends nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.memory import HostMemory
from penstock.kv.tiers.host import HostTier

WAIT_S = 30.0
PIECES = [range(first, first + 64) for first in range(0, 640, 64)]


class Pieces:
    """An arena whose pieces become usable one for each `let`."""

    def __init__(self, fails_at: int | None = None, error: BaseException | None = None) -> None:
        self.deeds: list[str] = []
        self._allowed = threading.Semaphore(0)
        self._done = threading.Semaphore(0)
        self._fails_at = fails_at
        self._error = error or OSError("no memory is left")

    def prepare(
        self, ready: Callable[[range], None], progress: Callable[[int, int], None], stop: Callable[[], bool]
    ) -> None:
        self.deeds.append("begins")
        for number, piece in enumerate(PIECES):
            assert self._allowed.acquire(timeout=WAIT_S)
            if stop():
                break
            if number == self._fails_at:
                raise self._error
            ready(piece)
            progress(number + 1, len(PIECES))
            self._done.release()
        self.deeds.append("ends")

    def close(self) -> None:
        self.deeds.append("closes")

    def let(self, num: int) -> None:
        self._allowed.release(num)

    def wait_done(self, num: int) -> None:
        assert all(self._done.acquire(timeout=WAIT_S) for _ in range(num))


def test_a_tier_is_built_before_any_of_its_memory_is_ready_and_gets_all_of_it_piece_by_piece() -> None:
    tier = HostTier(BlockPool(640, "host"), 4, 100.0)
    tier.withhold()
    arena = Pieces()
    memory = HostMemory(arena, tier.ready)
    assert tier.pool.counts.free == 0
    arena.let(3)
    arena.wait_done(3)
    assert tier.pool.counts.free == 3 * 64
    arena.let(7)
    arena.wait_done(7)
    assert tier.pool.counts.free == 640
    memory.close()
    tier.close()


def test_a_close_ends_it_before_its_next_piece_and_closes_the_arena_behind_it() -> None:
    seen: list[range] = []
    arena = Pieces()
    memory = HostMemory(arena, seen.append)
    arena.let(2)
    arena.wait_done(2)
    threading.Thread(target=lambda: (memory._stop.wait(WAIT_S), arena.let(1))).start()
    memory.close()
    assert seen == PIECES[:2] and arena.deeds == ["begins", "ends", "closes"]
    memory.close()


@pytest.mark.parametrize("error", [OSError("no memory is left"), SystemExit("a library gave up")])
def test_an_error_of_any_kind_is_told_and_what_is_ready_stays_ready(
    caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    seen: list[range] = []
    arena = Pieces(fails_at=2, error=error)
    arena.let(10)
    memory = HostMemory(arena, seen.append)
    memory._thread.join(WAIT_S)
    assert seen == PIECES[:2] and "the host tier uses what it has" in caplog.text
    memory.close()
    assert arena.deeds == ["begins", "closes"]


ENDS = """
import time
from penstock.kv.memory import HostMemory

class Endless:
    def prepare(self, ready, progress, stop):
        while not stop():
            time.sleep(0.01)
        print("it has ended by itself", flush=True)

memory = HostMemory(Endless(), print)
"""


def test_a_program_that_ends_waits_until_no_memory_is_being_pinned() -> None:
    """The interpreter stops threads wherever they are, and inside the driver that takes the process down."""
    env = {**os.environ, "PYTHONPATH": str(Path(penstock.__file__).parents[1])}
    run = subprocess.run(
        [sys.executable, "-c", ENDS], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0 and run.stdout == "it has ended by itself\n", run.stderr
