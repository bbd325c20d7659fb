"""Every error path of the SSD store, met by a fault: what was begun is undone, no descriptor and no lock
stays behind, and the next call works."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.errors import ConfigError, StoreFailed
from penstock.kv.tiers.ssd import segments as segments_module
from penstock.kv.tiers.ssd.directory import SECTOR_BYTES, DiskIo
from penstock.kv.tiers.ssd.index import SlotIndex
from penstock.kv.tiers.ssd.segments import Segments, slot_bytes
from penstock.kv.tiers.ssd.survey import inspect, verify
from penstock.kv.tiers.store import Outcome, Space
from tests.cpu.kv.ssd.ssd_rig import (
    BLOCK_BYTES,
    SPACE,
    WAIT_S,
    FailingDisk,
    abandon,
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


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """40 blocks in several files, and no store open."""
    path = tmp_path / "cache"
    store = open_at(path)
    assert write(store, *range(40)) == [DONE] * 40
    store.close()
    assert len(segment_paths(path)) > 2
    return path


class Fails(DiskIo):
    """Calls on files whose number is in `numbers` fail as told."""

    def __init__(self, **errors: int) -> None:
        self.errors = errors
        self.numbers: set[int] = {0}
        self.on = True
        self._number: dict[int, int] = {}

    def _meet(self, name: str, number: int | None) -> None:
        if self.on and name in self.errors and number in self.numbers:
            raise OSError(self.errors[name], os.strerror(self.errors[name]))

    def open(self, path: Path, flags: int, dir_fd: int) -> int:
        number = int(path.stem.split("-")[1])
        self._meet("open", number)
        fd = super().open(path, flags, dir_fd)
        self._number[fd] = number
        return fd

    def close(self, fd: int) -> None:
        number = self._number.pop(fd, None)
        super().close(fd)  # as close(2) does it: the descriptor is gone, whatever it says
        self._meet("close", number)

    def unlink(self, path: Path, dir_fd: int) -> None:
        self._meet("unlink", int(path.stem.split("-")[1]))
        super().unlink(path, dir_fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._meet("preadv", self._number.get(fd))
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._meet("pwritev", self._number.get(fd))
        return super().pwritev(fd, buffers, offset)

    def fallocate(self, fd: int, num_bytes: int) -> None:
        self._meet("fallocate", self._number.get(fd))
        super().fallocate(fd, num_bytes)


# --------------------------------------------------------------------------------------------------- at start


@pytest.mark.parametrize("name", ["open", "preadv"])
def test_a_file_that_cannot_be_read_at_start_is_left_alone_and_counts(
    filled: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = segment_paths(filled)[0]
    image, before = first.read_bytes(), num_open()
    with caplog.at_level(logging.WARNING):
        store = open_at(filled, io=Fails(**{name: errno.EIO}))
    assert [
        record
        for record in caplog.records
        if "left as it is" in record.getMessage() and first.name in record.getMessage()
    ]
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


def test_a_file_that_goes_while_it_is_opened_is_not_missed(filled: Path) -> None:
    class Gone(DiskIo):
        def open(self, path: Path, flags: int, dir_fd: int) -> int:
            if path == segment_paths(filled)[0] and path.name.endswith("000.kv"):
                os.unlink(path)
            return super().open(path, flags, dir_fd)

    store = open_at(filled, io=Gone())
    assert 0 < len(those_in(store, range(40))) < 40
    assert write(store, *range(40)) == [DONE] * 40
    store.close()


@pytest.mark.parametrize("name", ["close", "unlink"])
def test_a_file_of_another_model_that_cannot_be_closed_or_removed_does_not_stop_the_start(
    filled: Path, name: str
) -> None:
    other = Space(b"o" * 32, SPACE.block_bytes)
    before = num_open()
    store = open_at(filled, io=Fails(**{name: errno.EIO}), space=other)
    assert (filled / "penstock-000000.kv").exists() is (name == "unlink")
    assert write(store, 1) == [DONE] and read(store, 1) == [DONE]
    assert num_bytes_in(filled) <= max_bytes_for(64)
    store.close()
    assert num_open() == before


def test_heads_that_cannot_be_read_are_slots_that_can_be_used(
    filled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class BadHeads(DiskIo):
        """Of the first slots of each file."""

        on = True

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if self.on and offset == 4096:
                raise OSError(errno.EIO, "medium error")
            return super().preadv(fd, buffers, offset)

    with caplog.at_level(logging.WARNING):
        store = open_at(filled, io=(io := BadHeads()))
    io.on = False
    assert [record for record in caplog.records if "cannot be read" in record.getMessage()]
    there = those_in(store, range(40))
    assert 0 < len(there) < 40
    assert write(store, *range(40)) == [DONE] * 40 and read(store, *range(40)) == [DONE] * 40
    store._now.index.check()
    store.close()


def test_a_head_that_cannot_be_read_costs_no_other(tmp_path: Path) -> None:
    """Heads are read many at once: a bad sector does not take those along that are read together with it."""
    bad = SECTOR_BYTES + 40 * slot_bytes(BLOCK_BYTES)  # in each file

    class BadSector(DiskIo):
        num_failed = 0

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if offset <= bad < offset + sum(map(len, buffers)):
                self.num_failed += 1
                raise OSError(errno.EIO, "medium error")
            return super().preadv(fd, buffers, offset)

    store = open_at(tmp_path, num_slots=800)
    write(store, *range(800))
    there = those_in(store, range(800))
    store.close()
    again = open_at(tmp_path, num_slots=800, io=(io := BadSector()))
    num_files = len(segment_paths(tmp_path))
    assert io.num_failed == 2 * num_files, "with others, and alone"
    assert len(there - those_in(again, range(800))) == num_files
    again.close()


def test_a_disk_of_which_no_head_can_be_read_is_not_tried_for_long(tmp_path: Path) -> None:
    """Each of them may take seconds."""

    class Bad(DiskIo):
        offsets: list[int] = []  # noqa: RUF012

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if offset >= SECTOR_BYTES:
                self.offsets.append(offset)
                raise OSError(errno.EIO, "medium error")
            return super().preadv(fd, buffers, offset)

    store = open_at(tmp_path, num_slots=2400)
    write(store, *range(2400))
    num_groups = sum(len(list(segment.groups())) for segment in store._now.segments)
    store.close()
    again = open_at(tmp_path, num_slots=2400, io=(io := Bad()))
    assert num_groups < len(io.offsets) <= num_groups * (1 + 8) < 2400
    assert not those_in(again, range(2400))
    again.close()


def test_memory_that_cannot_be_had_while_heads_are_read_costs_those_blocks_alone(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    class NoMemory(DiskIo):
        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if offset > 0 and not failed.is_set():
                failed.set()
                raise MemoryError
            return super().preadv(fd, buffers, offset)

    store = open_at(filled, io=NoMemory())
    assert failed.is_set() and store.wait_scanned(0.0)
    assert 0 < len(those_in(store, range(40))) < 40
    num_slots = store.usage().num_slots
    assert num_slots is not None
    write(store, *range(100, 100 + num_slots))
    assert len(those_in(store, range(100, 100 + num_slots))) == num_slots, "no slot is kept from use"
    store.close()


@pytest.mark.parametrize("num_threads", [0, 1])
def test_threads_that_cannot_be_had_leave_the_work_to_those_that_are_there(
    filled: Path, monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    start, left = threading.Thread.start, [num_threads]

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith("ssd-scan-"):
            if not left[0]:
                raise RuntimeError("can't start new thread")
            left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    store = open_at(filled)
    assert those_in(store, range(40)) == set(range(40))
    store.close()


def test_a_scan_that_ends_in_a_defect_is_over_all_the_same(
    filled: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def broken(self: SlotIndex) -> None:
        raise RuntimeError("ours")

    with monkeypatch.context() as patch:
        patch.setattr(SlotIndex, "end_scan", broken)
        patch.setattr(threading, "excepthook", lambda _: None)
        store = open_at(filled)
        assert store.wait_scanned(0.0)
    assert read(store, *range(40)) == [DONE] * 40
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


# ------------------------------------------------------------------------------------------------- in service


@pytest.mark.parametrize("name", ["fallocate", "pwritev"])
@pytest.mark.parametrize("stays", [False, True])
def test_a_file_that_is_made_by_half_goes_and_is_made_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, stays: bool
) -> None:
    """Also where it cannot even be removed at first."""
    io = Fails(**{name: errno.EIO, **({"unlink": errno.EIO} if stays else {})})
    store = open_at(tmp_path, io=io)
    before = num_open()
    assert write(store, 1) == [Outcome.FULL]
    assert len(segment_paths(tmp_path)) == stays and num_open() == before
    io.on = False
    monkeypatch.setattr(segments_module.time, "monotonic", lambda: 1e12)
    assert write(store, 1) == [DONE] and read(store, 1) == [DONE]
    store.persist()
    store.close()


def test_room_that_was_taken_for_a_larger_file_is_given_back_for_a_smaller_one(tmp_path: Path) -> None:
    """A file system may keep what it has allocated when the rest does not fit."""

    class Partial(DiskIo):
        limit = max_bytes_for(800) // 8 // 2 + 4096

        def fallocate(self, fd: int, num_bytes: int) -> None:
            if num_bytes > self.limit:
                os.ftruncate(fd, num_bytes)
                raise OSError(errno.ENOSPC, "No space left on device")
            super().fallocate(fd, num_bytes)

    store = open_at(tmp_path, num_slots=800, io=Partial())
    assert write(store, *range(5)) == [DONE] * 5
    assert [path.stat().st_size <= Partial.limit for path in segment_paths(tmp_path)] == [True]
    store.close()


@pytest.mark.parametrize("raises", [MemoryError, KeyboardInterrupt])
def test_a_write_that_ends_in_anything_gives_its_slots_back_and_lets_others_go(
    tmp_path: Path, raises: type[BaseException]
) -> None:
    class Breaks(DiskIo):
        on = False

        def __init__(self) -> None:
            self.there, self.gate = threading.Event(), threading.Event()

        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if self.on:
                self.on = False
                self.there.set()
                assert self.gate.wait(WAIT_S)
                raise raises
            return super().pwritev(fd, buffers, offset)

    store = open_at(tmp_path, io=(io := Breaks()))
    write(store, 0)
    io.on = True
    caught: list[BaseException] = []

    def writes() -> None:
        try:
            write(store, 1)
        except BaseException as error:
            caught.append(error)

    first = threading.Thread(target=writes, daemon=True)
    first.start()
    assert io.there.wait(WAIT_S)
    outcomes: list[Outcome] = []
    # the same block: it waits for the first
    second = threading.Thread(target=lambda: outcomes.extend(write(store, 1)), daemon=True)
    second.start()
    until(lambda: store._num_calls == 2)
    io.gate.set()
    first.join(WAIT_S)
    second.join(WAIT_S)
    assert not first.is_alive() and not second.is_alive() and isinstance(caught[0], raises)
    assert outcomes == [DONE] and those_in(store, [0, 1]) == {0, 1}, "the other has written it"
    store._now.index.check()
    assert store._num_calls == 0
    num_slots = store.usage().num_slots
    assert num_slots is not None
    write(store, *range(100, 100 + num_slots))
    assert len(those_in(store, range(100, 100 + num_slots))) == num_slots, "no slot is lost"
    store.close()


@pytest.mark.parametrize("raises", [MemoryError, KeyboardInterrupt])
def test_a_read_that_ends_in_anything_gives_its_pin_back(tmp_path: Path, raises: type[BaseException]) -> None:
    class Breaks(DiskIo):
        on = False

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if self.on:
                raise raises
            return super().preadv(fd, buffers, offset)

    store = open_at(tmp_path, num_slots=8, io=(io := Breaks()))
    num_slots = store.usage().num_slots
    assert num_slots is not None
    write(store, *range(num_slots))
    io.on = True
    with pytest.raises(raises):
        read(store, *range(num_slots))
    io.on = False
    store._now.index.check()
    assert write(store, *range(100, 100 + num_slots)) == [DONE] * num_slots, "nothing is pinned any more"
    store.close()


def test_a_call_that_ends_in_anything_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or files that were replaced could never be opened anew."""
    path = tmp_path / "cache"
    store = open_at(path)
    write(store, 1)

    def broken(self: Segments) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Segments, "persist", broken)
        with pytest.raises(MemoryError):
            store.persist()
    path.rename(tmp_path / "moved")
    with pytest.raises(StoreFailed):
        store.persist()
    store.probe()
    assert write(store, 1) == [DONE]
    store.close()


def test_a_store_without_a_sync_is_closed_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    io = FailingDisk()
    store = open_at(tmp_path, io=io)
    write(store, 1)
    io.errors = {"fdatasync": errno.EIO}
    before = num_open()
    with caplog.at_level(logging.WARNING):
        store.close()
    assert any("synced" in record.getMessage() for record in caplog.records) and num_open() < before
    open_at(tmp_path).close()


@pytest.mark.parametrize("fault", ["persist", "close"])
def test_a_store_whose_files_cannot_be_closed_properly_is_unlocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    before = num_open()
    io = Fails(close=errno.EIO)
    io.on = False
    store = open_at(tmp_path, io=io)
    write(store, *range(40))
    io.on = fault == "close"
    if fault == "persist":

        def broken(self: Segments) -> None:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(Segments, "persist", broken)
            with pytest.raises(MemoryError):
                store.close()
    else:
        store.close()
    assert num_open() == before
    store = open_at(tmp_path)
    assert read(store, *range(40)) == [DONE] * 40
    store.close()


def test_a_sync_that_fails_halfway_leaves_what_it_did_not_reach(tmp_path: Path) -> None:
    """Those behind the file that failed are synced the next time, those before it are not synced again."""

    class Halfway(DiskIo):
        fails_at = 1

        def __init__(self) -> None:
            self.synced: list[int] = []

        def fdatasync(self, fd: int) -> None:
            if len(self.synced) == self.fails_at:
                raise OSError(errno.EIO, "medium error")
            self.synced.append(fd)
            super().fdatasync(fd)

    store = open_at(tmp_path, io=(io := Halfway()))
    write(store, *range(40))
    num_files = len(segment_paths(tmp_path))
    assert num_files > 2
    with pytest.raises(StoreFailed):
        store.persist()
    io.fails_at = -1
    store.persist()
    assert len(io.synced) == len(set(io.synced)) == num_files
    abandon(store)


def test_a_persist_syncs_what_was_written_beside_a_block_that_failed(tmp_path: Path) -> None:
    class Counting(FailingDisk):
        num_synced = 0

        def fdatasync(self, fd: int) -> None:
            self.num_synced += 1
            super().fdatasync(fd)

    store = open_at(tmp_path, 512, io=(io := Counting()))  # its first file has room for all of it
    write(store, 0)
    store.persist()
    # of a run, and of its first block when they go one by one
    io.num_synced, io.errors, io.num_left = 0, {"pwritev": errno.EIO}, 2
    assert write(store, 1, 2, 3) == [Outcome.FAILED, DONE, DONE]
    store.persist()
    assert io.num_synced == 1
    store.close()


# ----------------------------------------------------------------------------------------------------- survey


def test_a_disk_that_fails_under_a_survey_is_told_and_the_lock_is_free(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: DiskIo, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    before = num_open()
    with monkeypatch.context() as patch:
        patch.setattr(DiskIo, "preadv", broken)
        for call in (inspect, lambda path: verify(path, lambda done, total: None)):
            with pytest.raises(ConfigError, match="Input/output error"):
                call(filled)
    assert num_open() == before
    assert inspect(filled).num_blocks == 40


def test_a_survey_does_without_direct_access_where_there_is_none(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = DiskIo.open

    def cached(self: DiskIo, path: Path, flags: int, dir_fd: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(self, path, flags, dir_fd)

    monkeypatch.setattr(DiskIo, "open", cached)
    assert verify(filled, lambda done, total: None).num_good == 40
