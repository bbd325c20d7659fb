"""The SSD store when its directory, its lock or a file of it is removed or replaced while it runs: that is
noticed before anything is called safe, and a probe opens everything anew, as soon as it can be had."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import ConfigError, StoreFailed
from penstock.kv.tiers.ssd.store import SsdStore
from penstock.kv.tiers.store import Outcome, StoreUsage
from tests.cpu.kv.ssd.ssd_rig import WAIT_S, GatedDisk, abandon, open_at, read, segment_paths, those_in, write

DONE = Outcome.DONE


def removed(path: Path) -> None:
    shutil.rmtree(path)


def made_anew(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir(0o700)


def moved_away(path: Path) -> None:
    path.rename(path.with_name("moved"))


def replaced(path: Path) -> None:
    """By one with blocks of an earlier life in it."""
    moved_away(path)
    earlier = open_at(path)
    write(earlier, 50, 51)
    earlier.close()


CHANGES = [removed, made_anew, moved_away, replaced]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def filled(path: Path) -> SsdStore:
    store = open_at(path)
    assert write(store, *range(10)) == [DONE] * 10
    store.persist()
    return store


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "call",
    [lambda store: write(store, 20), SsdStore.persist, SsdStore.reset],
    ids=["write", "persist", "reset"],
)
def test_a_directory_that_is_gone_is_noticed_by_the_first_call_that_changes_something(
    path: Path, change: Callable[[Path], None], call: Callable[[SsdStore], object]
) -> None:
    store = filled(path)
    change(path)
    before = sorted(path.iterdir()) if path.exists() else None
    for _ in range(2):
        with pytest.raises(StoreFailed, match="removed or replaced"):
            call(store)
    assert (sorted(path.iterdir()) if path.exists() else None) == before, (
        "nothing is written where nobody has the lock"
    )
    assert read(store, 0) == [DONE], "what is open can be read"
    store.close()


@pytest.mark.parametrize("change", CHANGES)
def test_a_probe_starts_anew_in_what_is_there_now(path: Path, change: Callable[[Path], None]) -> None:
    store = filled(path)
    change(path)
    store.probe()
    assert store.wait_scanned(WAIT_S)
    assert those_in(store, range(100)) == ({50, 51} if change is replaced else set()), (
        "what was in the old one is a miss"
    )
    assert read(store, 0) == [Outcome.MISSING]
    assert write(store, *range(30, 40)) == [DONE] * 10
    store.persist()
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        open_at(path)
    abandon(store)
    store = open_at(path)
    assert read(store, *range(30, 40)) == [DONE] * 10, "it is where the next process looks"
    store.close()


def test_one_start_after_the_other_leaks_nothing(path: Path) -> None:
    store = filled(path)
    before = num_open()
    for _ in range(3):
        made_anew(path)
        store.probe()
        assert write(store, *range(10)) == [DONE] * 10
        store.persist()
    assert num_open() == before
    store.close()


def test_a_new_directory_that_another_process_has_taken_is_left_to_it_until_it_is_gone(path: Path) -> None:
    before = num_open()
    store = filled(path)
    made_anew(path)
    other = open_at(path)
    write(other, 70)
    for _ in range(2):
        with pytest.raises(StoreFailed, match="in use by process"):
            store.probe()
    assert store.find([b"x" * 16]) == 0 and store.usage() == StoreUsage(0, 0)
    for call in (lambda: read(store, 0), lambda: write(store, 20), store.persist, store.reset):
        with pytest.raises(StoreFailed, match="not open"):
            call()
    assert read(other, 70) == [DONE]
    other.close()
    store.probe()
    assert store.wait_scanned(WAIT_S) and read(store, 70) == [DONE] and write(store, 20) == [DONE]
    store.persist()
    store.close()
    assert num_open() == before


def test_a_store_that_could_not_be_opened_anew_can_be_closed_and_stays_so(path: Path) -> None:
    before = num_open()
    store = filled(path)
    made_anew(path)
    path.chmod(0o777)
    with pytest.raises(StoreFailed, match="mode 0777"):
        store.probe()
    assert num_open() == before
    store.close()
    path.chmod(0o700)
    with pytest.raises(StoreFailed, match="closed"):
        store.probe()
    assert not list(path.iterdir())


def test_a_new_directory_that_others_may_write_is_not_used_until_they_may_not(path: Path) -> None:
    store = filled(path)
    made_anew(path)
    path.chmod(0o777)
    with pytest.raises(StoreFailed, match="mode 0777"):
        store.probe()
    path.chmod(0o700)
    store.probe()
    assert write(store, 20) == [DONE]
    store.close()


def test_a_removed_lock_is_noticed_and_taken_again_with_all_blocks(path: Path) -> None:
    """Somebody else could lock the name anew, and have the directory as well."""
    store = filled(path)
    (path / "lock").unlink()
    with pytest.raises(StoreFailed, match="lock"):
        write(store, 20)
    store.probe()
    assert store.wait_scanned(WAIT_S)
    assert read(store, *range(10)) == [DONE] * 10 and write(store, 20) == [DONE]
    with pytest.raises(ConfigError, match="in use"):
        open_at(path)
    store.close()


def test_a_removed_file_is_noticed_by_persist_and_costs_its_own_blocks(path: Path) -> None:
    store = filled(path)
    assert write(store, *range(10, 20)) == [DONE] * 10
    first, *others = segment_paths(path)
    assert others
    first.unlink()
    write(store, 20)
    for _ in range(2):
        with pytest.raises(StoreFailed, match="removed"):
            _persist_all(store)
    store.probe()
    assert store.wait_scanned(WAIT_S)
    kept = those_in(store, range(21))
    assert 0 < len(kept) < 21
    assert write(store, *range(21)) == [DONE] * 21
    _persist_all(store)
    abandon(store)
    store = open_at(path)
    assert read(store, *range(21)) == [DONE] * 21
    store.close()


def _persist_all(store: SsdStore) -> None:
    store._now.segments.note_unsynced(*(segment for segment in store._now.segments if segment.fd >= 0))
    store.persist()


def test_files_that_a_call_still_uses_are_not_closed_under_it(path: Path) -> None:
    store = open_at(path, io=(io := GatedDisk()))
    write(store, *range(10))
    io.gates["preadv"].clear()
    outcomes: list[Outcome] = []
    reader = threading.Thread(target=lambda: outcomes.extend(read(store, *range(10))))
    reader.start()
    assert io.there["preadv"].wait(WAIT_S)
    made_anew(path)
    with pytest.raises(StoreFailed, match="busy"):
        store.probe()
    io.gates["preadv"].set()
    reader.join()
    assert outcomes == [DONE] * 10
    store.probe()
    assert read(store, 0) == [Outcome.MISSING] and write(store, 0) == [DONE]
    assert store.directory.io is io, "the same calls of the system, or what a test has put in their place"
    store.close()


def test_a_probe_of_a_directory_that_is_in_place_opens_nothing(path: Path) -> None:
    store = filled(path)
    directory = store.directory
    store.probe()
    assert store.directory is directory and read(store, *range(10)) == [DONE] * 10
    store.close()


def test_a_directory_is_not_made_on_a_disk_that_nobody_has_chosen(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("NO FILE SYSTEM CAN BE MOUNTED HERE")
    store = filled(disk / "cache")
    subprocess.run(["umount", "--lazy", str(disk)], check=True)
    with pytest.raises(StoreFailed, match="removed or replaced"):
        store.persist()
    with pytest.raises(StoreFailed, match="No such file"):
        store.probe()
    assert not list(disk.iterdir())
    store.close()
