"""Who may have written what an SSD cache is about to believe: directories and files of other users, or
writable by them, links in place of files. And the lock file, which locks whatever is in it."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, StoreFailed
from penstock.kv.tiers.ssd.store import SsdStore, open_ssd
from penstock.kv.tiers.ssd.survey import clear, inspect, verify
from penstock.kv.tiers.store import Outcome, StoreUsage
from tests.cpu.kv.ssd.ssd_rig import (
    BLOCK_BYTES,
    SPACE,
    WAIT_S,
    GatedDisk,
    abandon,
    max_bytes_for,
    open_at,
    read,
    segment_paths,
    those_in,
    write,
)

DONE = Outcome.DONE
STRANGER = 54321  # no user of any machine that this runs on

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="ONLY ROOT CAN GIVE A FILE TO SOMEBODY ELSE")


def _ignore(done: int, total: int) -> None:
    assert 0 < done <= total


CALLS: list[Callable[[Path], Any]] = [
    lambda path: open_at(path).close(),
    inspect,
    lambda path: verify(path, _ignore),
    lambda path: clear(path, _ignore),
]
NAMES = ["serve", "inspect", "verify", "clear"]
everybody = pytest.mark.parametrize("call", CALLS, ids=NAMES)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """With 20 blocks in several files."""
    path = tmp_path / "cache"
    store = open_at(path)
    assert write(store, *range(20)) == [DONE] * 20
    store.close()
    return path


def images(path: Path) -> dict[str, tuple[int, int, bytes | str]]:
    """Everything in it: names, owners, modes, contents."""
    return {
        str(entry.relative_to(path)): (
            entry.lstat().st_uid,
            entry.lstat().st_mode,
            os.readlink(entry) if entry.is_symlink() else entry.read_bytes() if entry.is_file() else "",
        )
        for entry in path.rglob("*")
    }


def refuses(call: Callable[[Path], Any], path: Path, *said: str) -> None:
    before = images(path)
    with pytest.raises(ConfigError) as refused:
        call(path)
    for words in said:
        assert words in str(refused.value)
    assert images(path) == before, "nothing is lost or changed"


# ------------------------------------------------------------------------------------------------- ours alone


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_directories_and_files_are_made_for_their_owner_alone(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        store = open_at(tmp_path / "a" / "b")
        write(store, *range(20))
        store.close()
    finally:
        os.umask(before)
    for path in (tmp_path / "a", tmp_path / "a" / "b"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    files = list((tmp_path / "a" / "b").iterdir())
    assert len(files) > 2 and {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


@everybody
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o722, 0o1777])
def test_a_directory_that_others_may_write_is_refused(
    cache: Path, call: Callable[[Path], Any], mode: int
) -> None:
    cache.chmod(mode)
    refuses(call, cache, str(cache), f"owner {os.geteuid()}", f"mode {mode:04o}", f"chmod go-w {cache}")
    assert stat.S_IMODE(cache.stat().st_mode) == mode
    cache.chmod(0o755)
    call(cache)


@everybody
def test_a_directory_of_somebody_else_is_refused(
    cache: Path, call: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    refuses(call, cache, str(cache), f"owner {real}", "mode 0700", f"chown -R {STRANGER} {cache}")


def linked(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


@everybody
@pytest.mark.parametrize("name", ["lock", "penstock-000001.kv"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: path.chmod(0o620), "chmod go-w"),
        (lambda path: path.chmod(0o602), "chmod go-w"),
        (linked, "symbolic link"),
        (piped, "not a plain file"),
        pytest.param(lambda path: os.chown(path, STRANGER, -1), f"owner {STRANGER}", marks=as_root),
    ],
    ids=["group", "others", "link", "pipe", "owner"],
)
def test_a_file_that_others_may_have_written_is_refused(
    cache: Path, call: Callable[[Path], Any], name: str, change: Callable[[Path], None], said: str
) -> None:
    change(cache / name)
    refuses(call, cache, str(cache / name), said)


def test_a_file_is_checked_as_it_was_opened_not_as_it_was_listed(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at a name and its opening another file may get that name."""
    lstat, num_open = os.stat, len(os.listdir("/proc/self/fd"))
    num_looks = 0

    def loosened(path: Any, **where: Any) -> os.stat_result:
        nonlocal num_looks
        found = lstat(path, **where)
        if path == "penstock-000001.kv":
            num_looks += 1
            if num_looks == 2:  # before anything is changed, and once more when it is listed
                (cache / path).chmod(0o666)
        return found

    monkeypatch.setattr(os, "stat", loosened)
    for call in (open_at, inspect):
        num_looks = 0
        with pytest.raises(ConfigError, match="mode 0666"):
            call(cache)
        assert num_looks == 2
        (cache / "penstock-000001.kv").chmod(0o600)
    assert len(os.listdir("/proc/self/fd")) == num_open
    monkeypatch.undo()
    store = open_at(cache)
    assert read(store, *range(20)) == [DONE] * 20, "and nobody has kept it locked"
    store.close()


@pytest.mark.parametrize(("mode", "warned"), [(0o777, True), (0o770, True), (0o1777, False), (0o755, False)])
def test_a_parent_that_others_may_write_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
) -> None:
    """They can take the directory away, which is a miss; what they put in its place is not ours, and refused.
    So it is no reason not to start."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(mode)
    with caplog.at_level(logging.WARNING):
        store = open_at(tmp_path / "shared" / "cache")
    store.close()
    said = [
        record.getMessage() for record in caplog.records if str(tmp_path / "shared") in record.getMessage()
    ]
    assert len(said) == warned and all(f"mode {mode:04o}" in line for line in said)


# ------------------------------------------------------------------------------------------------------- lock

CONTENTS = {
    "empty": b"",
    "garbage": b"of another program",
    "binary": bytes(range(256)),
    "huge": b"x" * (1 << 20),
    "half": b"penst",
    "not a number": b"penstock one\n",
    "long": b"penstock 123\n" + b"\0" * 5000,
}


@pytest.mark.parametrize("content", list(CONTENTS.values()), ids=list(CONTENTS))
def test_a_damaged_lock_is_taken_over_unless_it_is_held(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "lock").write_bytes(content)
    store = open_at(tmp_path)
    write(store, *range(20))
    (tmp_path / "lock").write_bytes(content)
    num_open = len(os.listdir("/proc/self/fd"))
    for call in CALLS:
        with pytest.raises(ConfigError, match=r"in use by (another )?process"):
            call(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert (tmp_path / "lock").read_bytes() == content
    store.persist()
    store.close()


@everybody
def test_an_empty_directory_in_place_of_the_lock_makes_room(cache: Path, call: Callable[[Path], Any]) -> None:
    (cache / "lock").unlink()
    (cache / "lock").mkdir()
    call(cache)
    assert (cache / "lock").is_file()


@everybody
def test_a_directory_with_something_in_it_in_place_of_the_lock_is_refused(
    cache: Path, call: Callable[[Path], Any]
) -> None:
    (cache / "lock").unlink()
    (cache / "lock").mkdir()
    (cache / "lock" / "thesis").write_text("years of work")
    refuses(call, cache, str(cache / "lock"), "not empty")


def test_a_full_disk_locks_all_the_same(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (cache / "lock").write_bytes(b"")
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", full)
        patch.setattr(os, "pwrite", full)
        store = open_at(cache)
        with pytest.raises(ConfigError, match="in use by another process"):
            open_at(cache)
    store.close()


def test_a_lock_that_goes_while_it_is_taken_is_no_lock(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else could make a new one at once, and have the directory as well."""
    flock = fcntl.flock

    def removed_meanwhile(fd: int, how: int) -> None:
        (cache / "lock").unlink()
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    with pytest.raises(ConfigError, match="removed"):
        open_at(cache)
    monkeypatch.undo()
    open_at(cache).close()


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


def test_a_directory_is_not_made_on_a_disk_that_nobody_has_chosen(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("NO FILE SYSTEM CAN BE MOUNTED HERE")
    store = filled(disk / "cache")
    subprocess.run(["umount", "--lazy", str(disk)], check=True)
    with pytest.raises(StoreFailed, match="removed or replaced"):
        store.persist()
    with pytest.raises(StoreFailed, match="No such file"):
        store.probe()
    assert not list(disk.iterdir())
    store.close()


# ---------------------------------------------------------------------------------------------- two processes

_HOLDER = """
import sys
from tests.cpu.kv.ssd.ssd_rig import open_at, write
from pathlib import Path
store = open_at(Path(sys.argv[1]))
write(store, *range(10))
print("open", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    tests = Path(__file__).resolve().parents[3]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests.parent / "src")])}
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
        text=True,
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "open\n"
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        with pytest.raises(ConfigError) as refused:
            open_ssd(tmp_path, max_bytes_for(64), SPACE, "lru")
        assert str(tmp_path) in str(refused.value) and f"process {holder.pid}" in str(refused.value)
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
        holder.kill()
    store = open_at(tmp_path)
    assert read(store, *range(10)) == [DONE] * 10, "a lock file without a lock is no obstacle"
    store.close()


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
