"""Resets of the SSD store last, whatever is under way."""

from __future__ import annotations

import errno
import random
import threading
from pathlib import Path

import pytest

from penstock.errors import StoreFailed
from penstock.kv.tiers.store import Outcome
from tests.cpu.kv.ssd.ssd_rig import (
    WAIT_S,
    CrashingDisk,
    GatedDisk,
    HookedDisk,
    QuickDisk,
    abandon,
    fails,
    open_at,
    those_in,
    until,
    write,
)

DONE = Outcome.DONE


# ------------------------------------------------------------------------------------------------------ reset


def test_what_was_reset_does_not_come_back_with_a_crash(tmp_path: Path) -> None:
    """Whoever is told that a reset is over need not fear that power fails: the generations are on the disk by
    then."""
    for seed in range(8):
        path = tmp_path / str(seed)
        path.mkdir(0o700)
        store = open_at(path, num_slots=40, io=(disk := CrashingDisk(path, random.Random(seed))))
        write(store, *range(30))
        store.persist()
        assert store.reset() == 30
        abandon(store)
        disk.crash()
        store = open_at(path, num_slots=40, io=QuickDisk())
        assert those_in(store, range(30)) == set(), seed
        store.close()


def test_a_block_being_written_during_a_reset_is_not_published_under_the_old_generation(
    tmp_path: Path,
) -> None:
    store = open_at(tmp_path, io=(io := GatedDisk()))
    write(store, 0)
    io.gates["pwritev"].clear()
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.extend(write(store, 1)))
    thread.start()
    assert io.there["pwritev"].wait(WAIT_S)
    resetting = threading.Thread(target=store.reset)  # its own write of the head waits at the gate, too
    resetting.start()
    until(lambda: not those_in(store, [0]))
    io.gates["pwritev"].set()
    thread.join()
    resetting.join()
    assert outcomes == [DONE]
    assert those_in(store, [0, 1]) == set(), "as if it had been written before"
    assert write(store, 1) == [DONE]
    abandon(store)
    store = open_at(tmp_path)
    assert those_in(store, [0, 1]) == {1}
    store.close()


def test_who_writes_a_block_after_a_reset_is_not_told_that_a_write_from_before_it_has_done_that(
    tmp_path: Path,
) -> None:
    store = open_at(tmp_path, io=(io := GatedDisk()))
    write(store, 0)
    io.gates["pwritev"].clear()
    first = threading.Thread(target=write, args=(store, 1))
    first.start()
    assert io.there["pwritev"].wait(WAIT_S)
    resetting = threading.Thread(target=store.reset)
    resetting.start()
    until(lambda: not those_in(store, [0]))
    outcomes: list[Outcome] = []
    second = threading.Thread(target=lambda: outcomes.extend(write(store, 1)))
    second.start()
    io.gates["pwritev"].set()
    for thread in (first, resetting, second):
        thread.join()
    assert outcomes == [DONE] and those_in(store, [1]) == {1}, "what is DONE can be found"
    store.close()


def test_a_reset_that_could_not_be_synced_says_so_and_is_made_good_by_the_next_persist(
    tmp_path: Path,
) -> None:
    store = open_at(tmp_path, io=(io := HookedDisk()))
    write(store, *range(10))
    io.hooks["pwritev"] = fails(errno.EIO)
    with pytest.raises(StoreFailed):
        store.reset()
    assert those_in(store, range(10)) == set()
    io.hooks.clear()
    store.persist()
    abandon(store)
    store = open_at(tmp_path)
    assert those_in(store, range(10)) == set()
    store.close()
