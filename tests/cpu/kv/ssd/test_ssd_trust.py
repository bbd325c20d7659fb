"""Who may have written what an SSD cache is about to believe: directories and files of other users, or
writable by them, links in place of files. And the lock file, which locks whatever is in it."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.kv.tiers.ssd.directory import DiskIo, make_directory
from penstock.kv.tiers.ssd.survey import clear, inspect, verify
from penstock.kv.tiers.store import Outcome
from tests.cpu.kv.ssd.ssd_rig import open_at, read, segment_paths, write

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


@as_root
@everybody
def test_root_is_no_exception(cache: Path, call: Callable[[Path], Any]) -> None:
    os.chown(cache, STRANGER, -1)
    refuses(call, cache, f"owner {STRANGER}", "chown -R 0")
    assert cache.stat().st_uid == STRANGER
    os.chown(cache, 0, -1)
    call(cache)


@as_root
@everybody
@pytest.mark.parametrize("name", ["lock", "penstock-000001.kv"])
def test_a_file_of_somebody_else_is_refused(cache: Path, call: Callable[[Path], Any], name: str) -> None:
    os.chown(cache / name, STRANGER, -1)
    refuses(call, cache, str(cache / name), f"owner {STRANGER}", "mode 0600")


@everybody
@pytest.mark.parametrize("name", ["lock", "penstock-000001.kv"])
@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_is_refused(
    cache: Path, call: Callable[[Path], Any], name: str, mode: int
) -> None:
    (cache / name).chmod(mode)
    refuses(call, cache, str(cache / name), f"mode {mode:04o}", f"chmod go-w {cache / name}")
    (cache / name).chmod(0o644)
    call(cache)


@everybody
@pytest.mark.parametrize("name", ["lock", "penstock-000001.kv"])
def test_a_link_in_place_of_a_file_is_refused(
    cache: Path, tmp_path: Path, call: Callable[[Path], Any], name: str
) -> None:
    (cache / name).rename(tmp_path / "elsewhere")
    (cache / name).symlink_to(tmp_path / "elsewhere")
    before = (tmp_path / "elsewhere").read_bytes()
    refuses(call, cache, str(cache / name), "symbolic link")
    assert (tmp_path / "elsewhere").read_bytes() == before


@everybody
@pytest.mark.parametrize("name", ["lock", "penstock-000001.kv"])
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(
    cache: Path, call: Callable[[Path], Any], name: str
) -> None:
    (cache / name).unlink()
    os.mkfifo(cache / name, 0o600)
    refuses(call, cache, str(cache / name), "not a plain file")


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


def test_a_link_to_a_directory_of_ours_is_followed(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(cache)
    store = open_at(tmp_path / "link")
    assert read(store, *range(20)) == [DONE] * 20
    store.persist()
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


@everybody
@pytest.mark.parametrize("content", list(CONTENTS.values()), ids=list(CONTENTS))
def test_what_is_in_the_lock_file_does_not_matter(
    cache: Path, call: Callable[[Path], Any], content: bytes
) -> None:
    (cache / "lock").write_bytes(content)
    call(cache)
    assert (cache / "lock").read_bytes() == b"penstock %d\n" % os.getpid()


@pytest.mark.parametrize("content", list(CONTENTS.values()), ids=list(CONTENTS))
def test_a_damaged_lock_with_nothing_beside_it_is_taken_over(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "lock").write_bytes(content)
    store = open_at(tmp_path)
    assert write(store, 1) == [DONE]
    store.close()


@pytest.mark.parametrize("content", list(CONTENTS.values()), ids=list(CONTENTS))
def test_a_damaged_lock_that_is_held_still_locks(cache: Path, content: bytes) -> None:
    store = open_at(cache)
    (cache / "lock").write_bytes(content)
    num_open = len(os.listdir("/proc/self/fd"))
    for call in CALLS:
        with pytest.raises(ConfigError, match=r"in use by (another )?process"):
            call(cache)
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert (cache / "lock").read_bytes() == content
    assert read(store, *range(20)) == [DONE] * 20
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


def test_a_directory_of_another_program_that_has_a_lock_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    (tmp_path / "data").write_text("of another program")
    for call in CALLS:
        refuses(call, tmp_path, str(tmp_path))
    assert (tmp_path / "lock").is_dir()


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


@as_root
@pytest.mark.parametrize("reachable", [True, False])
def test_a_directory_that_cannot_even_be_opened_says_whose_it_is(tmp_path: Path, reachable: bool) -> None:
    """Where that can be seen: a parent may hide it as well."""
    parent = Path(tempfile.mkdtemp(dir="/tmp"))
    parent.chmod(0o755 if reachable else 0o700)
    (parent / "cache").mkdir(0o700)
    try:
        said = _said_to(STRANGER, parent / "cache")
    finally:
        shutil.rmtree(parent)
    assert str(parent / "cache") in said
    assert ("owner 0, mode 0700" in said) is reachable and ("Permission denied" in said) is not reachable


def _said_to(user: int, path: Path) -> str:
    """What a process of that user is told."""
    hearing, telling = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            make_directory(path, DiskIo())
        except ConfigError as error:
            os.write(telling, str(error).encode())
        finally:
            os._exit(0)
    os.close(telling)
    with os.fdopen(hearing, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(pid, 0)
    return said


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


def test_a_refused_start_leaves_no_descriptor_open(cache: Path) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    segment_paths(cache)[1].chmod(0o666)
    for call in CALLS:
        with pytest.raises(ConfigError):
            call(cache)
    (cache / "lock").chmod(0o666)
    with pytest.raises(ConfigError):
        open_at(cache)
    assert len(os.listdir("/proc/self/fd")) == num_open
