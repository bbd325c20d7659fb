"""Every error path of the SSD store, met by a fault: what was begun is undone, no descriptor and no lock
stays behind, one bad block is told from a bad disk, and the next call works."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import StoreFailed
from penstock.kv.tiers.ssd import segments as segments_module
from penstock.kv.tiers.ssd.directory import FULL, SECTOR_BYTES, DiskIo
from penstock.kv.tiers.ssd.index import SlotIndex
from penstock.kv.tiers.ssd.segments import slot_bytes
from penstock.kv.tiers.ssd.store import _GONE, _STRIKES, SsdStore
from penstock.kv.tiers.ssd.survey import verify
from penstock.kv.tiers.store import Outcome
from penstock.testing.stores import HandClock
from tests.cpu.kv.ssd.ssd_rig import (
    BLOCK_BYTES,
    WAIT_S,
    HookedDisk,
    abandon,
    fails,
    max_bytes_for,
    num_bytes_in,
    open_at,
    read,
    segment_paths,
    those_in,
    until,
    write,
)

DONE = Outcome.DONE
EIO = errno.EIO


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def no_slot_is_lost(store: SsdStore) -> None:
    store._now.index.check()
    num_slots = store.usage().num_slots or 0
    write(store, *range(1000, 1000 + num_slots))
    assert len(those_in(store, range(1000, 1000 + num_slots))) == num_slots
    store.close()


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """40 blocks in several files, and no store open."""
    path = tmp_path / "cache"
    store = open_at(path)
    assert write(store, *range(40)) == [DONE] * 40
    store.close()
    assert len(segment_paths(path)) > 2
    return path


def bad_file(*names: str) -> HookedDisk:
    """Calls of these names on the file of number 0 fail."""
    disk = HookedDisk()

    def hook(name: str) -> Callable[..., None]:
        def fail(at: Any, *args: object) -> None:
            number = int(at.stem[-6:]) if isinstance(at, Path) else disk.number_of.get(at)
            if number == 0:
                if name == "close":  # as close(2) does it: the descriptor is gone, whatever it says
                    os.close(at)
                raise OSError(EIO, os.strerror(EIO))

        return fail

    disk.hooks = {name: hook(name) for name in names}
    return disk


# --------------------------------------------------------------------------------------------------- at start


@pytest.mark.parametrize("name", ["open", "preadv"])
def test_a_file_that_cannot_be_read_at_start_is_left_alone_and_counts(
    filled: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = segment_paths(filled)[0]
    image, before = first.read_bytes(), num_open()
    with caplog.at_level(logging.WARNING):
        store = open_at(filled, io=bad_file(name))
    assert "left as it is" in caplog.text and first.name in caplog.text
    missing = set(range(40)) - those_in(store, range(40))
    assert 0 < len(missing) < 40
    for start in range(100, 300, 10):
        write(store, *range(start, start + 10))
        assert num_bytes_in(filled) <= max_bytes_for(64), "its bytes are taken"
    assert first.read_bytes() == image
    store.close()
    assert num_open() == before
    store = open_at(filled)
    assert those_in(store, range(40)) == missing and read(store, *missing) == [DONE] * len(missing)
    store.close()


@pytest.mark.parametrize("trouble", ["no threads", "no memory", "a defect"])
def test_a_scan_that_meets_anything_is_over_and_the_store_serves(
    filled: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    start, failed = threading.Thread.start, list[str]()

    def no_thread(thread: threading.Thread) -> None:
        if thread.name.startswith("ssd-scan-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    def no_memory(fd: int, buffers: list[memoryview], offset: int) -> None:
        if offset and not failed:
            failed.append(trouble)
            raise MemoryError

    with monkeypatch.context() as patch:
        if trouble == "no threads":
            patch.setattr(threading.Thread, "start", no_thread)
        elif trouble == "a defect":
            patch.setattr(SlotIndex, "end_scan", lambda self: 1 // 0)
            patch.setattr(threading, "excepthook", lambda _: None)
        store = open_at(filled, io=HookedDisk(preadv=no_memory) if trouble == "no memory" else None)
    missing = set(range(40)) - those_in(store, range(40))
    assert bool(missing) == bool(failed) and len(missing) < 40
    assert write(store, *range(40)) == read(store, *range(40)) == [DONE] * 40
    store.close()


def test_a_start_that_fails_late_gives_everything_back(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, start = num_open(), threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "ssd-scan":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError):
            open_at(filled)
    assert num_open() == before
    store = open_at(filled)
    assert read(store, *range(40)) == [DONE] * 40, "and the lock is free"
    store.close()


# --------------------------------------------------------------------------------------------- bad and broken


def test_short_reads_and_writes_are_continued(tmp_path: Path) -> None:
    def write_less(fd: int, buffers: list[memoryview], offset: int) -> int:
        return os.pwritev(fd, [buffers[0][:SECTOR_BYTES]], offset)

    def read_less(fd: int, buffers: list[memoryview], offset: int) -> int:
        return min(os.preadv(fd, buffers, offset), SECTOR_BYTES + 100)  # O_DIRECT goes on at a whole sector

    store = open_at(tmp_path, io=HookedDisk(pwritev=write_less, preadv=read_less))
    assert write(store, *range(10)) == [DONE] * 10
    assert read(store, *range(10)) == [DONE] * 10
    store.close()


@pytest.mark.parametrize("moved", [0, 100])
def test_a_write_that_gets_nowhere_is_a_failure_and_publishes_nothing(tmp_path: Path, moved: int) -> None:
    store = open_at(tmp_path, io=(io := HookedDisk()))
    write(store, 0)
    io.hooks["pwritev"] = lambda *args: moved
    assert write(store, 1, 2) == [Outcome.FAILED] * 2
    io.hooks.clear()
    assert those_in(store, range(3)) == {0} and write(store, 1, 2) == [DONE] * 2
    store.close()


def test_a_read_that_ends_early_is_no_hit(tmp_path: Path) -> None:
    store = open_at(tmp_path)
    write(store, *range(5))
    os.truncate(segment_paths(tmp_path)[0], 6 * SECTOR_BYTES)  # one block, and the head of the next
    assert read(store, *range(5)) == [DONE] + [Outcome.CORRUPT] * 4
    assert those_in(store, range(5)) == {0}
    assert write(store, *range(5)) == [DONE] * 5 and read(store, *range(5)) == [DONE] * 5
    os.truncate(segment_paths(tmp_path)[0], 0)
    with pytest.raises(StoreFailed, match="cannot be read"):
        store.probe()
    store.close()


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_block_that_cannot_be_moved_fails_alone_and_what_was_written_beside_it_is_synced(
    tmp_path: Path, name: str
) -> None:
    store = open_at(tmp_path, 512, io=(io := HookedDisk()))  # its first file has room for all of it
    write(store, *(range(1, 4) if name == "preadv" else (99,)))
    store.persist()
    io.calls.clear()
    io.hooks[name] = fails(EIO, 2)  # of all together, then of the first alone
    assert (read if name == "preadv" else write)(store, 1, 2, 3) == [Outcome.FAILED, DONE, DONE]
    assert those_in(store, range(1, 4)) == {2, 3}
    store.persist()
    assert io.count("fdatasync") == (name == "pwritev")
    assert write(store, 1) == [DONE]
    store._now.index.check()
    store.close()


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_disk_that_fails_again_and_again_is_broken_until_a_probe_is_answered(
    tmp_path: Path, name: str
) -> None:
    """Failures with a success between them never add up."""
    store = open_at(tmp_path, 512, io=(io := HookedDisk()))
    write(store, *range(50))
    call = read if name == "preadv" else write
    numbers = iter(range(50) if name == "preadv" else range(100, 150))
    for _ in range(_STRIKES + 2):
        io.hooks[name] = fails(EIO, 1)
        assert call(store, next(numbers)) == [Outcome.FAILED]
        assert call(store, next(numbers)) == [DONE]
    io.hooks[name] = fails(EIO)
    for _ in range(_STRIKES - 1):
        assert call(store, next(numbers)) == [Outcome.FAILED]
    with pytest.raises(StoreFailed, match="cache in"):
        call(store, next(numbers))
    if name == "preadv":
        with pytest.raises(StoreFailed):
            store.probe()
    io.hooks.clear()
    store.probe()
    io.hooks[name] = fails(EIO, 1)
    assert call(store, next(numbers)) == [Outcome.FAILED]
    store._now.index.check()
    store.close()


@pytest.mark.parametrize("number", _GONE)
@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_disk_that_is_gone_is_given_up_at_once(tmp_path: Path, name: str, number: int) -> None:
    store = open_at(tmp_path, 512, io=(io := HookedDisk()))
    write(store, 0)
    io.hooks[name] = fails(number, 1)
    with pytest.raises(StoreFailed, match="cannot be"):
        read(store, 0) if name == "preadv" else write(store, 1)
    assert (read(store, 0), write(store, 1)) == ([DONE], [DONE]), "nothing was forgotten by that"
    store.close()


@pytest.mark.parametrize("raises", [MemoryError, KeyboardInterrupt])
def test_a_write_that_ends_in_anything_gives_its_slots_back_and_lets_others_go(
    tmp_path: Path, raises: type[BaseException]
) -> None:
    store = open_at(tmp_path, io=(io := HookedDisk()))
    write(store, 0)
    there, gate, caught, outcomes = threading.Event(), threading.Event(), list[type](), list[Outcome]()

    def breaks(*args: object) -> None:
        io.hooks.clear()
        there.set()
        assert gate.wait(WAIT_S)
        raise raises

    def writes() -> None:
        try:
            outcomes.extend(write(store, 1))
        except BaseException as error:
            caught.append(type(error))

    io.hooks["pwritev"] = breaks
    threads = [threading.Thread(target=writes, daemon=True) for _ in range(2)]
    threads[0].start()
    assert there.wait(WAIT_S)
    threads[1].start()  # the same block: it waits for the first
    until(lambda: store._num_calls == 2)
    gate.set()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert caught == [raises] and outcomes == [DONE], "the other has written it"
    assert those_in(store, [0, 1]) == {0, 1} and store._num_calls == 0
    no_slot_is_lost(store)


# -------------------------------------------------------------------------------------------------- full disk


def test_a_full_disk_leaves_the_tier_at_what_it_has_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = HandClock()
    monkeypatch.setattr(segments_module, "time", SimpleNamespace(monotonic=clock))
    store = open_at(tmp_path, 64, io=(io := HookedDisk()))
    planned = store.usage().num_slots or 0
    assert planned >= 64
    with caplog.at_level(logging.WARNING):
        for number in range(2):
            io.hooks["fallocate"] = fails(errno.EDQUOT)
            room = 0 if number == 0 else store._now.segments.num_slots // 8  # of the file that was made
            assert Outcome.FULL in write(store, *range(100 * number, 100 * number + planned))
            assert store.usage().num_slots in (room, store.usage().num_used)
            assert len(segment_paths(tmp_path)) == number, "nothing half made is left behind"
            io.hooks.clear()
            if number:
                assert write(store, 2000) == [DONE], "what is there makes room"
            else:
                assert write(store, 2000) == [Outcome.FULL], "it is not asked at every write"
            clock.advance(segments_module._GROW_AGAIN_S + 1)
            assert write(store, 1000 + number) == [DONE]
            assert store.usage().num_slots == planned
    assert caplog.text.count("stays at") == 2
    store.close()


def test_a_disk_with_room_for_half_a_file_gets_half_a_file(tmp_path: Path) -> None:
    """A file system may keep what it has allocated when the rest does not fit."""
    limit = max_bytes_for(800) // 8 // 2 + SECTOR_BYTES

    def little(fd: int, num_bytes: int) -> None:
        if num_bytes > limit:
            os.ftruncate(fd, num_bytes)
            raise OSError(errno.ENOSPC, "No space left on device")

    store = open_at(tmp_path, num_slots=800, io=HookedDisk(fallocate=little))
    assert write(store, *range(30)) == [DONE] * 30
    assert all(path.stat().st_size <= limit for path in segment_paths(tmp_path))
    store.close()
    store = open_at(tmp_path, num_slots=800)
    assert read(store, *range(30)) == [DONE] * 30
    store.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 200 KiB."""
    path = tmp_path / "small"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=200k,mode=700", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_real_full_disk_takes_what_fits_and_serves_it(small_disk: Path) -> None:
    store = open_at(small_disk, num_slots=400)
    outcomes = write(store, *range(40))
    assert 0 < outcomes.count(DONE) < 20 and set(outcomes) == {DONE, Outcome.FULL}
    assert os.statvfs(small_disk).f_bavail * 4096 < 200 << 10
    num_there = store.usage().num_used
    assert write(store, *range(100, 105)) == [DONE] * 5, "what is there makes room"
    assert read(store, *range(100, 105)) == [DONE] * 5 and store.usage().num_used == num_there
    store.persist()
    store.close()
    store = open_at(small_disk, num_slots=400)
    assert read(store, *range(100, 105)) == [DONE] * 5
    store.close()


@pytest.mark.parametrize("number", FULL)
def test_no_room_when_writing_is_full_and_not_broken(tmp_path: Path, number: int) -> None:
    store = open_at(tmp_path, 512, io=(io := HookedDisk()))
    write(store, 0)
    io.hooks["pwritev"] = fails(number)
    assert write(store, *range(1, _STRIKES + 3)) == [Outcome.FULL] * (_STRIKES + 2)
    io.hooks["pwritev"] = fails(EIO)
    for block in range(1, _STRIKES):
        assert write(store, block) == [Outcome.FAILED]
    with pytest.raises(StoreFailed, match="cannot be written"):
        write(store, _STRIKES)
    io.hooks.clear()
    assert read(store, 0) == [DONE]
    store.close()


@pytest.mark.parametrize("name", ["fallocate", "pwritev"])
@pytest.mark.parametrize("stays", [False, True])
def test_a_file_that_is_made_by_half_goes_and_is_made_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, stays: bool
) -> None:
    """Also where it cannot even be removed at first."""
    store = open_at(tmp_path, io=(io := bad_file(name, *(["unlink"] if stays else []))))
    before = num_open()
    assert write(store, 1) == [Outcome.FULL]
    assert len(segment_paths(tmp_path)) == stays and num_open() == before
    io.hooks.clear()
    monkeypatch.setattr(segments_module.time, "monotonic", lambda: 1e12)
    assert write(store, 1) == [DONE] and read(store, 1) == [DONE]
    store.persist()
    store.close()


def test_a_file_system_without_direct_access_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = DiskIo.open

    def cached(self: DiskIo, path: Path, flags: int, dir_fd: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(self, path, flags, dir_fd)

    monkeypatch.setattr(DiskIo, "open", cached)
    with caplog.at_level(logging.WARNING):
        store = open_at(tmp_path, num_slots=40)
        write(store, *range(30))
    assert caplog.text.count("O_DIRECT") == 1
    assert read(store, *range(30)) == [DONE] * 30
    store.close()
    assert verify(tmp_path, lambda done, total: None).num_good == 30


# ---------------------------------------------------------------------------------------------------- persist


def test_persist_syncs_what_was_written_since_and_nothing_else(tmp_path: Path) -> None:
    store = open_at(tmp_path, num_slots=80, io=(io := HookedDisk()))
    write(store, *range(40))
    store.persist()
    num_files = len(segment_paths(tmp_path))
    assert io.count("fdatasync") == num_files > 1
    assert len({args for name, args in io.calls if name == "fdatasync"}) == num_files
    store.persist()
    read(store, *range(40))
    store.persist()
    assert io.count("fdatasync") == num_files
    write(store, 100)
    store.persist()
    assert io.count("fdatasync") == num_files + 1
    store.close()


@pytest.mark.parametrize("failing", ["fdatasync", "fsync"])
def test_what_could_not_be_synced_is_synced_the_next_time(tmp_path: Path, failing: str) -> None:
    """Files and their names: a name that is not durable loses all blocks of its file."""
    store = open_at(tmp_path, 512, io=(io := HookedDisk()))
    write(store, 0)
    io.hooks[failing] = fails(EIO, 2)
    for _ in range(2):
        with pytest.raises(StoreFailed, match="could not be synced"):
            store.persist()
    io.calls.clear()
    store.persist()
    assert [name for name, _ in io.calls] == (["fdatasync"] if failing == "fdatasync" else []) + ["fsync"]
    io.calls.clear()
    store.persist()
    assert io.calls == [], "all of it is done"
    store.close()


def test_a_persist_beside_another_does_not_return_before_what_that_one_took_over_is_safe(
    tmp_path: Path,
) -> None:
    there, gate = threading.Event(), threading.Event()
    store = open_at(
        tmp_path, io=HookedDisk(fdatasync=lambda fd: there.set() or not gate.wait(WAIT_S) or None)
    )
    write(store, 1)
    threads = [threading.Thread(target=store.persist) for _ in range(2)]
    threads[0].start()
    assert there.wait(WAIT_S)
    threads[1].start()
    threads[1].join(0.05)
    assert threads[1].is_alive()
    gate.set()
    for thread in threads:
        thread.join()
    store.close()


# ------------------------------------------------------------------------------------------------- at the end


def test_a_head_that_cannot_be_read_costs_no_other_and_a_bad_disk_is_not_tried_for_long(
    tmp_path: Path,
) -> None:
    """Heads are read many at once, then one by one. Each failure may take seconds."""
    store = open_at(tmp_path, num_slots=2400)
    write(store, *range(2400))
    there = those_in(store, range(2400))
    num_groups = sum(len(list(segment.groups())) for segment in store._now.segments)
    store.close()
    bad, failed = SECTOR_BYTES + 40 * slot_bytes(BLOCK_BYTES), list[int]()

    def bad_sector(fd: int, buffers: list[memoryview], offset: int) -> None:
        if offset <= bad < offset + sum(map(len, buffers)):
            failed.append(offset)
            raise OSError(EIO, "medium error")

    store = open_at(tmp_path, num_slots=2400, io=HookedDisk(preadv=bad_sector))
    num_files = len(segment_paths(tmp_path))
    assert len(failed) == 2 * num_files, "with others, and alone"
    assert len(there - those_in(store, range(2400))) == num_files
    abandon(store)
    failed.clear()

    def bad_disk(fd: int, buffers: list[memoryview], offset: int) -> None:
        if offset >= SECTOR_BYTES:
            failed.append(offset)
            raise OSError(EIO, "medium error")

    store = open_at(tmp_path, num_slots=2400, io=HookedDisk(preadv=bad_disk))
    assert num_groups < len(failed) <= num_groups * (1 + 8) < 2400
    assert not those_in(store, range(2400))
    store.close()


@pytest.mark.parametrize("raises", [MemoryError, KeyboardInterrupt])
def test_a_read_that_ends_in_anything_gives_its_pin_back(tmp_path: Path, raises: type[BaseException]) -> None:
    def breaks(*args: object) -> None:
        raise raises

    store = open_at(tmp_path, num_slots=8, io=(io := HookedDisk()))
    num_slots = store.usage().num_slots or 0
    write(store, *range(num_slots))
    io.hooks["preadv"] = breaks
    with pytest.raises(raises):
        read(store, *range(num_slots))
    io.hooks.clear()
    no_slot_is_lost(store)
