"""The SSD store in one life: what is written can be read, once and nowhere else, within the bound."""

from __future__ import annotations

import errno
import mmap
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from penstock.kv.tiers.ssd import store as store_module
from penstock.kv.tiers.ssd.directory import SECTOR_BYTES, DiskIo, is_aligned
from penstock.kv.tiers.ssd.store import SsdStore
from penstock.kv.tiers.store import Outcome, Space
from tests.cpu.kv.ssd.ssd_rig import (
    WAIT_S,
    GatedDisk,
    HookedDisk,
    QuickDisk,
    bytes_of,
    key_of,
    open_at,
    read,
    segment_paths,
    those_in,
    write,
)

DONE = Outcome.DONE


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SsdStore]:
    opened = open_at(tmp_path / "cache")
    yield opened
    opened.close()


# --------------------------------------------------------------------------------------------- read and write


def test_neighbouring_blocks_are_one_call_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_at(tmp_path, num_slots=400, io=(io := HookedDisk()))
    write(store, 1)  # makes the first file
    io.calls.clear()
    write(store, *range(2, 32))
    read(store, *range(2, 32))
    assert len(io.calls) == 2
    monkeypatch.setattr(store_module, "_MOST_BLOCKS", 10)
    assert read(store, *range(2, 32)) == [DONE] * 30
    assert len(io.calls) == 5
    store.close()


def test_memory_that_is_aligned_goes_to_the_file_without_a_copy(tmp_path: Path) -> None:
    size = 3 * SECTOR_BYTES
    arena = memoryview(mmap.mmap(-1, 4 * size))
    views = [arena[place * size : (place + 1) * size] for place in range(4)]
    store = open_at(tmp_path, io=(io := HookedDisk()), space=Space(b"s" * 32, size))
    for number in (0, 1):
        views[number][:] = bytes_of(number, size)
    keys = [key_of(0), key_of(1)]
    assert store.write(keys, [0, 1], views[:2]) == [DONE] * 2
    assert store.read(keys, views[2:]) == [DONE] * 2
    assert arena[: 2 * size] == arena[2 * size :]
    seen = [buffer for name, args in io.calls if name in ("preadv", "pwritev") for buffer in args[1]]
    assert all(any(view is buffer for buffer in seen) for view in views)
    assert all(map(is_aligned, seen))
    store.close()


# Holds invariant 6: a store is asked while it writes, so no lock is held across a call of the system.
# Holds invariant 8: a block on disk has no key before its write is over.
def test_a_key_is_found_only_when_its_write_is_over(tmp_path: Path) -> None:
    store = open_at(tmp_path, io=(io := GatedDisk()))
    write(store, 0)
    io.gates["pwritev"].clear()
    thread = threading.Thread(target=write, args=(store, 1))
    thread.start()
    assert io.there["pwritev"].wait(WAIT_S)
    assert those_in(store, [0, 1]) == {0} and read(store, 1) == [Outcome.MISSING]
    io.gates["pwritev"].set()
    thread.join()
    assert those_in(store, [0, 1]) == {0, 1}
    store.close()


@pytest.mark.parametrize("fails", [False, True])
def test_two_writers_of_one_block_get_the_outcome_of_the_one_write(tmp_path: Path, fails: bool) -> None:
    class Gated(GatedDisk):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            done = super().pwritev(fd, buffers, offset)
            if fails and self.there["pwritev"].is_set():
                raise OSError(errno.EIO, "broken")
            return done

    store = open_at(tmp_path, io=(io := Gated()))
    write(store, 0)
    io.gates["pwritev"].clear()
    outcomes: list[Outcome] = []
    threads = [threading.Thread(target=lambda: outcomes.extend(write(store, 1))) for _ in range(2)]
    threads[0].start()
    assert io.there["pwritev"].wait(WAIT_S)
    threads[1].start()
    threads[1].join(0.05)
    assert threads[1].is_alive(), "it may not say DONE before the bytes are there"
    io.gates["pwritev"].set()
    for thread in threads:
        thread.join()
    assert outcomes == [Outcome.FAILED if fails else DONE] * 2
    assert store.usage().num_used == (1 if fails else 2)
    store.close()


# ----------------------------------------------------------------------------------------- bound and eviction


def test_nothing_is_evicted_for_two_writers_at_once_while_there_are_files_to_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them alone would have had room in the files that are there."""
    store = open_at(tmp_path, num_slots=80)
    write(store, 0)
    num_free = store._now.index._pool.num_free
    assert num_free > 2 and len(segment_paths(tmp_path)) == 1
    claim, others = store._now.index.claim, list(range(100, 99 + num_free))

    def late(*args: object, **kwargs: object) -> object:
        """Another writer comes between what this one has looked at and its claim."""
        if others:
            numbers = others[:]
            others.clear()
            write(store, *numbers)
        return claim(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(store._now.index, "claim", late)
    assert write(store, 1, 2) == [DONE, DONE]
    assert those_in(store, range(200)) == {0, 1, 2, *range(100, 99 + num_free)}
    assert len(segment_paths(tmp_path)) == 2
    store.close()


def test_a_block_that_is_being_read_is_neither_evicted_nor_overwritten(tmp_path: Path) -> None:
    assert _outcome_of_a_read_amid_writes(tmp_path) is DONE


def _outcome_of_a_read_amid_writes(path: Path) -> Outcome:
    """A reader is stopped before its call of the system while everything else is written over."""

    class Late(GatedDisk):
        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            self._pass("preadv")
            return DiskIo.preadv(self, fd, buffers, offset)

    store = open_at(path, num_slots=4, io=(io := Late()))
    num_slots = store.usage().num_slots or 0
    write(store, *range(num_slots))
    outcomes: list[Outcome] = []
    io.gates["preadv"].clear()
    thread = threading.Thread(target=lambda: outcomes.extend(read(store, 0)))
    thread.start()
    assert io.there["preadv"].wait(WAIT_S)
    write(store, *range(100, 100 + 3 * num_slots))
    io.gates["preadv"].set()
    thread.join()
    store.close()
    return outcomes[0]


def test_a_store_whose_slots_are_all_being_read_says_full(tmp_path: Path) -> None:
    store = open_at(tmp_path, num_slots=2, io=(io := GatedDisk()))
    num_slots = store.usage().num_slots or 0
    write(store, *range(num_slots))
    io.gates["preadv"].clear()
    thread = threading.Thread(target=read, args=(store, *range(num_slots)))
    thread.start()
    assert io.there["preadv"].wait(WAIT_S)
    assert write(store, 100) == [Outcome.FULL]
    io.gates["preadv"].set()
    thread.join()
    assert write(store, 100) == [DONE]
    store.close()


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
def test_readers_and_writers_at_once_see_only_right_bytes(tmp_path: Path, direct: bool) -> None:
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


DEPTHS = [0, 255, 2**16 - 1, 2**16, 2**24, 2**32 - 1]


def test_blocks_of_any_depth_are_written_and_found_after_a_restart(tmp_path: Path) -> None:
    numbers = range(len(DEPTHS))
    store = open_at(tmp_path / "cache")
    assert store.write([key_of(n) for n in numbers], DEPTHS, [memoryview(bytes_of(n)) for n in numbers]) == [
        Outcome.DONE
    ] * len(DEPTHS)
    store.close()
    again = open_at(tmp_path / "cache")
    assert read(again, *numbers) == [Outcome.DONE] * len(DEPTHS)
    again.close()
