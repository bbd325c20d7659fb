"""The SSD store when the disk does not do what it is asked: short calls, errors, a full disk, places that
cannot be used."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from penstock.errors import ConfigError, StoreFailed
from penstock.kv.tiers.ssd import segments as segments_module
from penstock.kv.tiers.ssd.directory import SECTOR_BYTES, DiskIo
from penstock.kv.tiers.ssd.store import open_ssd
from penstock.kv.tiers.store import Outcome
from tests.cpu.kv.ssd.ssd_rig import (
    BLOCK_BYTES,
    SPACE,
    WAIT_S,
    FailingDisk,
    max_bytes_for,
    open_at,
    read,
    segment_paths,
    those_in,
    write,
)

DONE = Outcome.DONE


# ---------------------------------------------------------------------------------------------------- trouble


def test_short_reads_and_writes_are_continued(tmp_path: Path) -> None:
    class Stingy(DiskIo):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            return super().pwritev(fd, [buffers[0][:SECTOR_BYTES]], offset)

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            return super().preadv(fd, [buffers[0][:SECTOR_BYTES]], offset) - (1 if len(buffers) > 1 else 0)

    store = open_at(tmp_path, io=Stingy())
    assert write(store, *range(10)) == [DONE] * 10
    assert read(store, *range(10)) == [DONE] * 10
    store.close()


@pytest.mark.parametrize("moved", [0, 100])
def test_a_write_that_gets_nowhere_is_a_failure_and_publishes_nothing(tmp_path: Path, moved: int) -> None:
    class Stuck(DiskIo):
        stuck = False

        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            return moved if self.stuck else super().pwritev(fd, buffers, offset)

    store = open_at(tmp_path, io=(io := Stuck()))
    write(store, 0)
    io.stuck = True
    assert write(store, 1, 2) == [Outcome.FAILED] * 2
    io.stuck = False
    assert those_in(store, range(3)) == {0} and write(store, 1, 2) == [DONE] * 2
    store.close()


def test_a_read_that_ends_early_is_no_hit(tmp_path: Path) -> None:
    store = open_at(tmp_path)
    write(store, *range(5))
    os.truncate(segment_paths(tmp_path)[0], 6 * SECTOR_BYTES)  # one block, and the head of the next
    assert read(store, *range(5)) == [DONE] + [Outcome.CORRUPT] * 4
    assert those_in(store, range(5)) == {0}
    assert write(store, *range(5)) == [DONE] * 5 and read(store, *range(5)) == [DONE] * 5
    store.close()


def test_a_block_that_cannot_be_written_fails_alone(tmp_path: Path) -> None:
    class BadSpot(DiskIo):
        spot = 0

        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            size = sum(len(buffer) for buffer in buffers)
            if offset <= self.spot < offset + size:
                raise OSError(errno.EIO, "medium error")
            return super().pwritev(fd, buffers, offset)

    store = open_at(tmp_path, io=(io := BadSpot()))
    io.spot = -1
    write(store, 99)
    segment = next(iter(store._now.segments))
    io.spot = segment.offset(3) + 10
    outcomes = write(store, *range(6))
    assert outcomes.count(Outcome.FAILED) == 1 and outcomes.count(DONE) == 5
    assert len(those_in(store, range(6))) == 5
    store.close()


def test_a_block_that_cannot_be_read_fails_alone_and_is_not_tried_again(tmp_path: Path) -> None:
    io = FailingDisk()
    store = open_at(tmp_path, io=io)
    write(store, 1, 2)
    io.errors, io.num_left = {"preadv": errno.EIO}, 2  # of both together, then of the first alone
    assert read(store, 1, 2) == [Outcome.FAILED, DONE]
    assert those_in(store, [1, 2]) == {2}
    assert write(store, 1) == [DONE]
    store._now.index.check()
    store.close()


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_place_that_fails_again_and_again_is_a_broken_store(tmp_path: Path, name: str) -> None:
    io = FailingDisk()
    store = open_at(tmp_path, io=io)
    write(store, *range(30))
    io.errors = {name: errno.EIO}
    with pytest.raises(StoreFailed, match="cache in"):
        _ = read(store, *range(30)) if name == "preadv" else write(store, *range(50, 80))
    if name == "preadv":
        with pytest.raises(StoreFailed):
            store.probe()
    io.errors = {}
    store.probe()
    assert DONE in read(store, *range(30)) and write(store, 50) == [DONE]
    store._now.index.check()
    store.close()


def test_a_descriptor_that_is_gone_breaks_the_store_at_once(tmp_path: Path) -> None:
    io = FailingDisk()
    store = open_at(tmp_path, io=io)
    write(store, 1)
    io.errors = {"preadv": errno.EBADF}
    with pytest.raises(StoreFailed):
        read(store, 1)
    assert io.num_calls == 1
    store.close()


# -------------------------------------------------------------------------------------------------- full disk


def test_a_full_disk_leaves_the_tier_at_what_it_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    io = FailingDisk()
    store = open_at(tmp_path, num_slots=40, io=io)
    write(store, 0)
    io.errors = {"fallocate": errno.ENOSPC}
    with caplog.at_level(logging.WARNING):
        for number in range(1, 30):
            assert write(store, number) == [DONE], "what is there makes room"
    assert len(segment_paths(tmp_path)) == 1
    assert len([record for record in caplog.records if "stays at" in record.getMessage()]) == 1
    assert read(store, 29) == [DONE]
    store.close()


def test_a_disk_that_is_full_from_the_start_says_full_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    io = FailingDisk()
    store = open_at(tmp_path, io=io)
    io.errors = {"fallocate": errno.EDQUOT}
    assert write(store, 1, 2) == [Outcome.FULL] * 2
    assert not segment_paths(tmp_path), "nothing half made is left behind"
    io.errors = {}
    assert write(store, 1) == [Outcome.FULL], "it is not asked at every write"
    monkeypatch.setattr(segments_module.time, "monotonic", lambda: 1e12)
    assert write(store, 1) == [DONE]
    store.close()


def test_a_disk_with_room_for_half_a_file_gets_half_a_file(tmp_path: Path) -> None:
    class Small(DiskIo):
        limit = 1 << 40

        def fallocate(self, fd: int, num_bytes: int) -> None:
            if num_bytes > self.limit:
                raise OSError(errno.ENOSPC, "full")
            super().fallocate(fd, num_bytes)

    io = Small()
    io.limit = max_bytes_for(800) // 8 // 2 + SECTOR_BYTES
    store = open_at(tmp_path, num_slots=800, io=io)
    assert write(store, *range(30)) == [DONE] * 30
    assert sum(path.stat().st_size for path in segment_paths(tmp_path)) <= io.limit * len(
        segment_paths(tmp_path)
    )
    store.close()
    store = open_at(tmp_path, num_slots=800)
    assert read(store, *range(30)) == [DONE] * 30
    store.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 200 KiB."""
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k,mode=700", "tmpfs", str(path)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
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


def test_no_room_when_writing_is_full_and_not_broken(tmp_path: Path) -> None:
    io = FailingDisk()
    store = open_at(tmp_path, io=io)
    write(store, 1)
    io.errors = {"pwritev": errno.ENOSPC}
    assert write(store, *range(2, 6)) == [Outcome.FULL] * 4
    io.errors = {}
    assert read(store, 1) == [DONE]
    store.close()


def test_a_file_system_without_direct_access_is_used_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    io = FailingDisk()
    io.errors = {"open_direct": errno.EINVAL}
    with caplog.at_level(logging.WARNING):
        store = open_at(tmp_path, num_slots=40, io=io)
        write(store, *range(30))
    assert len([record for record in caplog.records if "O_DIRECT" in record.getMessage()]) == 1
    assert read(store, *range(30)) == [DONE] * 30
    store.close()


# ---------------------------------------------------------------------------------------------------- persist


def test_persist_syncs_what_was_written_since_and_nothing_else(tmp_path: Path) -> None:
    class Counting(DiskIo):
        def __init__(self) -> None:
            self.synced: list[int] = []

        def fdatasync(self, fd: int) -> None:
            self.synced.append(fd)
            super().fdatasync(fd)

    store = open_at(tmp_path, num_slots=80, io=(io := Counting()))
    write(store, *range(40))
    store.persist()
    num_files = len(segment_paths(tmp_path))
    assert len(set(io.synced)) == len(io.synced) == num_files > 1
    store.persist()
    read(store, *range(40))
    store.persist()
    assert len(io.synced) == num_files
    write(store, 100)
    store.persist()
    assert len(io.synced) == num_files + 1
    store.close()


@pytest.mark.parametrize("name", ["fdatasync", "fsync"])
def test_what_could_not_be_synced_is_synced_the_next_time(tmp_path: Path, name: str) -> None:
    io = FailingDisk()
    store = open_at(tmp_path, io=io)
    write(store, 1)
    io.errors = {name: errno.EIO}
    for _ in range(2):
        with pytest.raises(StoreFailed, match="synced"):
            store.persist()
    assert io.num_calls == 2
    io.errors = {}
    store.persist()
    io.errors = {name: errno.EIO}
    store.persist()
    store.close()


def test_a_persist_beside_another_does_not_return_before_what_that_one_took_over_is_safe(
    tmp_path: Path,
) -> None:
    class Slow(DiskIo):
        def __init__(self) -> None:
            self.there, self.gate = threading.Event(), threading.Event()

        def fdatasync(self, fd: int) -> None:
            self.there.set()
            assert self.gate.wait(WAIT_S)
            super().fdatasync(fd)

    store = open_at(tmp_path, io=(io := Slow()))
    write(store, 1)
    threads = [threading.Thread(target=store.persist) for _ in range(2)]
    threads[0].start()
    assert io.there.wait(WAIT_S)
    threads[1].start()
    threads[1].join(0.05)
    assert threads[1].is_alive()
    io.gate.set()
    for thread in threads:
        thread.join()
    store.close()


# --------------------------------------------------------------------------------------------------- refusals


def test_a_bound_without_room_for_a_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--kv-offload-ssd-gib"):
        open_ssd(tmp_path, BLOCK_BYTES, SPACE, "lru")
    open_at(tmp_path).close()


def test_a_place_that_cannot_be_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nothing/here")):
        with pytest.raises(ConfigError, match="cannot be used"):
            open_ssd(path, max_bytes_for(4), SPACE, "lru")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_missing_directory_is_made(tmp_path: Path) -> None:
    store = open_at(tmp_path / "a" / "b")
    assert write(store, 1) == [DONE]
    store.close()


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "penstock-0.kv").mkdir()
    (tmp_path / "penstock-0000001.kv").symlink_to(tmp_path / "notes.txt")
    os.mkfifo(tmp_path / "pipe")
    store = open_at(tmp_path)
    write(store, *range(20))
    store.close()
    assert (tmp_path / "notes.txt").read_text() == "mine" and (tmp_path / "penstock-0.kv").is_dir()


def test_a_directory_whose_lock_file_is_somebody_elses_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("of another program")
    (tmp_path / "data").write_text("of another program, too")
    with pytest.raises(ConfigError, match="not of penstock"):
        open_ssd(tmp_path, max_bytes_for(4), SPACE, "lru")
    assert (tmp_path / "lock").read_text() == "of another program"


def test_a_closed_store_fails_and_can_be_closed_again(tmp_path: Path) -> None:
    store = open_at(tmp_path)
    write(store, 1)
    store.close()
    store.close()
    for call in (lambda: read(store, 1), lambda: write(store, 2), store.persist, store.probe, store.reset):
        with pytest.raises(StoreFailed, match="closed"):
            call()
