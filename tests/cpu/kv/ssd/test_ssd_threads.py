"""Readers, writers, persists, questions and resets on many threads at once: never a wrong byte, and the books
balance at the end."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.kv.tiers.store import Outcome
from tests.cpu.kv.ssd.ssd_rig import QuickDisk, key_of, open_at, read, write

BLOCKS = range(120)


def _together(*works: Callable[[], None]) -> None:
    """Run all at once; the first error of any is raised."""
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("resets", [False, True])
def test_readers_and_writers_at_once_see_only_right_bytes(tmp_path: Path, direct: bool, resets: bool) -> None:
    store = open_at(tmp_path, num_slots=40, io=None if direct else QuickDisk())
    num_done = [0] * 6
    writers_gone = threading.Semaphore(0)
    write(store, *range(40))

    def reader(who: int) -> None:
        rng = random.Random(who)
        while not writers_gone.acquire(blocking=False):  # each writer lets one reader go
            first = rng.randrange(len(BLOCKS) - 6)
            num_done[who] += read(store, *range(first, first + 6)).count(Outcome.DONE)
            store.find([key_of(number) for number in range(first, first + 6)])

    def writer(who: int) -> None:
        rng = random.Random(who)
        try:
            for _ in range(60):
                first = rng.randrange(len(BLOCKS) - 6)
                outcomes = write(store, *range(first, first + 6))
                assert set(outcomes) <= {Outcome.DONE, Outcome.FULL}
                num_done[who] += outcomes.count(Outcome.DONE)
        finally:
            writers_gone.release()

    def other() -> None:
        for _ in range(10):
            store.persist()
            if resets:
                store.reset()
            store.probe()

    works = [lambda who=who: reader(who) for who in range(3)] + [
        lambda who=who: writer(who) for who in range(3, 6)
    ]  # type: ignore[misc]
    _together(*works, other)
    assert sum(num_done[:3]) > 0 and sum(num_done[3:]) > 0
    assert not store._now.index._writing
    store._now.index.check()
    store.close()


def test_all_may_write_the_same_blocks_at_once(tmp_path: Path) -> None:
    store = open_at(tmp_path, num_slots=64)
    got: list[list[Outcome]] = []

    def work(seed: int) -> None:
        numbers = random.Random(seed).sample(range(30), 30)
        got.append(write(store, *numbers))
        got.append(read(store, *numbers))

    _together(*[lambda seed=seed: work(seed) for seed in range(6)])  # type: ignore[misc]
    assert all(outcomes == [Outcome.DONE] * 30 for outcomes in got), (
        "whoever was told DONE can read it at once"
    )
    assert store.usage().num_used == 30
    store.close()


def test_reads_and_writes_go_on_during_a_scan(tmp_path: Path) -> None:
    store = open_at(tmp_path, num_slots=200)
    write(store, *range(100))
    store.close()
    store = open_at(tmp_path, num_slots=200, scanned=False)
    _together(
        lambda: [read(store, *range(0, 100, 3)) for _ in range(10)] and None,
        lambda: [write(store, *range(number, number + 20)) for number in range(0, 120, 10)] and None,
        lambda: [store.persist() for _ in range(5)] and None,
    )
    assert store.wait_scanned(60.0)
    assert read(store, *range(120)) == [Outcome.DONE] * 120
    store._now.index.check()
    store.close()
