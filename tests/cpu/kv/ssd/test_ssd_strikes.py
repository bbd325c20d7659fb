"""A place is given up for failures that follow one another, and not for so many in a long life: what goes
well between them, or a probe that is answered, starts the count again."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from penstock.errors import StoreFailed
from penstock.kv.tiers.ssd.segments import FULL
from penstock.kv.tiers.ssd.store import _GONE, _STRIKES, SsdStore
from penstock.kv.tiers.store import Outcome
from tests.cpu.kv.ssd.ssd_rig import FailingDisk, open_at, read, segment_paths, write

GOOD = 0  # a block that is always there


def one_failure(store: SsdStore, disk: FailingDisk, name: str, number: int) -> Outcome:
    disk.errors, disk.num_left = {name: errno.EIO}, 1
    try:
        return (read if name == "preadv" else write)(store, number)[0]
    finally:
        disk.errors = {}


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_failures_with_a_success_between_them_never_add_up(tmp_path: Path, name: str) -> None:
    disk = FailingDisk()
    store = open_at(tmp_path, 512, io=disk)  # its first file has room for all of it
    numbers = range(1, _STRIKES + 3)
    write(store, GOOD, *(numbers if name == "preadv" else ()))
    for number in numbers:
        assert one_failure(store, disk, name, number) is Outcome.FAILED
        assert (read(store, GOOD) if name == "preadv" else write(store, 100 + number)) == [Outcome.DONE]
    store.close()


def test_a_probe_that_is_answered_starts_the_count_again(tmp_path: Path) -> None:
    disk = FailingDisk()
    store = open_at(tmp_path, 512, io=disk)  # its first file has room for all of it
    numbers = range(1, _STRIKES + 1)
    write(store, *numbers, 100)
    for number in numbers[:-1]:
        assert one_failure(store, disk, "preadv", number) is Outcome.FAILED
    with pytest.raises(StoreFailed):
        one_failure(store, disk, "preadv", numbers[-1])
    store.probe()
    assert one_failure(store, disk, "preadv", 100) is Outcome.FAILED
    store.close()


@pytest.mark.parametrize("number", FULL)
def test_a_full_disk_is_full_however_often_it_says_so(tmp_path: Path, number: int) -> None:
    disk = FailingDisk()
    store = open_at(tmp_path, 512, io=disk)  # its first file has room for all of it
    write(store, GOOD)
    disk.errors = {"pwritev": number}
    assert [write(store, block) for block in range(1, _STRIKES + 3)] == [[Outcome.FULL]] * (_STRIKES + 2)
    disk.errors = {"pwritev": errno.EIO}
    for block in range(1, _STRIKES):
        assert write(store, block) == [Outcome.FAILED]
    with pytest.raises(StoreFailed, match="cannot be written"):
        write(store, _STRIKES)
    disk.errors = {}
    store.close()


@pytest.mark.parametrize("number", _GONE)
@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_disk_that_is_gone_is_given_up_at_once(tmp_path: Path, name: str, number: int) -> None:
    disk = FailingDisk()
    store = open_at(tmp_path, 512, io=disk)
    write(store, GOOD)
    disk.errors = {name: number}
    with pytest.raises(StoreFailed, match="cannot be"):
        read(store, GOOD) if name == "preadv" else write(store, 1)
    disk.errors = {}
    assert (read(store, GOOD), write(store, 1)) == ([Outcome.DONE], [Outcome.DONE]), (
        "nothing was forgotten by that"
    )
    store.close()


def test_a_file_that_has_become_empty_fails_a_probe(tmp_path: Path) -> None:
    store = open_at(tmp_path, 512)
    write(store, GOOD)
    os.truncate(segment_paths(tmp_path)[0], 0)
    with pytest.raises(StoreFailed, match="cannot be read"):
        store.probe()
    store.close()


@pytest.mark.parametrize("failing", ["fdatasync", "fsync"])
def test_what_could_not_be_synced_is_synced_the_next_time(tmp_path: Path, failing: str) -> None:
    """Files and their names: a name that is not durable loses all blocks of its file."""
    synced: list[str] = []

    class Disk(FailingDisk):
        def fdatasync(self, fd: int) -> None:
            super().fdatasync(fd)
            synced.append("fdatasync")

        def fsync(self, fd: int) -> None:
            super().fsync(fd)
            synced.append("fsync")

    disk = Disk()
    store = open_at(tmp_path, 512, io=disk)
    write(store, GOOD)
    disk.errors = {failing: errno.EIO}
    with pytest.raises(StoreFailed, match="could not be synced"):
        store.persist()
    disk.errors = {}
    synced.clear()
    store.persist()
    assert synced == (["fdatasync", "fsync"] if failing == "fdatasync" else ["fsync"])
    synced.clear()
    store.persist()
    assert synced == [], "all of it is done"
    store.close()
