"""Tiers under another engine over a real disk and a real Valkey: what survives, and a store that is killed,
paused, full, emptied and shared."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.kv.tiers.ssd.store import SsdStore
from penstock.kv.tiers.store import Space
from penstock.observe import PoolObserver
from penstock.plugins.events import DiskChanges
from penstock.plugins.matches import Matches
from penstock.plugins.options import TierOptions
from penstock.plugins.tiers import HostedTiers, key_of, open_tiers
from tests.store_servers import valkey_or_skip
from tests.support.servers import Valkey

BLOCK_BYTES = 16 * 1024
NUM_SLOTS = 64
SOON_S = 60.0
HANG_S = 5.0  # of a thread that waits for a lock
PATIENT = {"remote_timeout_s": 30.0}
KEYS = [key_of(b"%d" % number) for number in range(24)]
HIT, MISS = True, False


def content(key: bytes) -> bytes:
    return key * (BLOCK_BYTES // len(key))


class Engine:
    """The memory of one engine, and the tiers under it."""

    def __init__(
        self, digest: bytes = b"s" * 32, observer: PoolObserver | None = None, **options: Any
    ) -> None:
        self.memory = bytearray(NUM_SLOTS * BLOCK_BYTES)
        given = TierOptions.of(options)
        self.tiers: HostedTiers = open_tiers(given, Space(digest, BLOCK_BYTES), self.view, observer)
        self.matches = Matches(self.tiers.tiers, given.remote_timeout_s)
        self._jobs = itertools.count()
        for tier in self.tiers.tiers:
            if isinstance(store := tier.calls.store, SsdStore):
                assert store.wait_scanned(SOON_S)

    def view(self, slot: int) -> memoryview:
        return memoryview(self.memory)[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES]

    def write(self, keys: list[bytes]) -> list[bool]:
        for slot, key in enumerate(keys):
            self.view(slot)[:] = content(key)
        self.tiers.write(job := next(self._jobs), keys, range(len(keys)))
        return list(self.tiers.wait_finished(job, SOON_S).done)

    def read(self, keys: list[bytes]) -> list[bool]:
        self.memory[:] = bytes(len(self.memory))
        self.tiers.read(job := next(self._jobs), keys, range(len(keys)))
        done = list(self.tiers.wait_finished(job, SOON_S).done)
        for slot, key in enumerate(keys):
            assert not done[slot] or self.view(slot) == content(key), "wrong bytes served"
        return done

    def find(self, keys: list[bytes]) -> list[bool | None]:
        until, owner = time.monotonic() + SOON_S, object()
        self.matches.take_in()
        while None in (found := [self.matches.find(key, owner, "prompt") for key in keys]):
            assert time.monotonic() < until
            self.matches.ask()
            self.tiers.settle()
            self.matches.take_in()
        self.matches.release(owner)
        return found

    def wait_usable(self) -> None:
        until = time.monotonic() + SOON_S
        while not all(tier.usable for tier in self.tiers.tiers):
            assert time.monotonic() < until, "the tier did not come back"
            self.tiers.settle()


@contextlib.contextmanager
def engine(digest: bytes = b"s" * 32, **options: Any) -> Iterator[Engine]:
    with contextlib.closing(_Closing(Engine(digest, **options))) as closing:
        yield closing.engine


class _Closing:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def close(self) -> None:
        self.engine.tiers.close(SOON_S)


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    with valkey_or_skip() as server:
        yield server


# ------------------------------------------------------------------------------------------------------- disk


def test_blocks_survive_the_process(tmp_path: Path) -> None:
    options = {"ssd_dir": str(tmp_path / "kv"), "ssd_gib": 0.1}
    with engine(**options) as first:
        assert all(first.write(KEYS))
    with engine(**options) as second:
        assert second.find(KEYS) == [HIT] * len(KEYS)
        assert all(second.read(KEYS))


class AskingChanges(DiskChanges):
    """Another thread looks for a block whenever one comes to the disk, while that holds the locks."""

    def __init__(self) -> None:
        super().__init__()
        self.look: Callable[[], object] = lambda: None
        self.answers: list[list[object]] = []  # by block

    def sealed(self, pool: str, slot: int, key: bytes) -> None:
        found: list[object] = []
        asking = threading.Thread(target=lambda: found.append(self.look()), daemon=True)
        asking.start()
        asking.join(HANG_S)
        self.answers.append(list(found))


def test_a_lookup_does_not_wait_for_a_write_that_holds_the_books(tmp_path: Path) -> None:
    """Holds invariant 6: the scheduler's thread asks for thousands of blocks in a step."""
    changes = AskingChanges()
    with engine(ssd_dir=str(tmp_path / "kv"), ssd_gib=0.1, observer=changes) as host:
        host.write(KEYS[:1])
        changes.look = lambda: host.matches.find(KEYS[0], "request")
        host.write(KEYS[1:3])
    assert changes.answers[1:] == [[HIT], [HIT]]


_WRITER = """
import sys
from penstock.kv.tiers.store import Space
from penstock.plugins.options import TierOptions
from penstock.plugins.tiers import key_of, open_tiers
size = 16 * 1024
memory = bytearray(64 * size)
view = lambda slot: memoryview(memory)[slot * size : (slot + 1) * size]
tiers = open_tiers(TierOptions.of({"ssd_dir": sys.argv[1], "ssd_gib": 0.1}), Space(b"s" * 32, size), view)
for turn in range(10**6):
    keys = [key_of(b"%d" % (turn * 24 + number)) for number in range(24)]
    for slot, key in enumerate(keys):
        view(slot)[:] = key * (size // 16)
    tiers.write(turn, keys, range(24))
    tiers.wait_finished(turn, 60.0)
    print(turn, flush=True)
"""


def test_a_writer_that_is_killed_leaves_whole_blocks_only(tmp_path: Path) -> None:
    """Holds invariant 8: what it reported as written is there, and nothing is there by halves."""
    folder = str(tmp_path / "kv")
    with subprocess.Popen(
        [sys.executable, "-c", _WRITER, folder], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if int(line) == 20:
                break
        writer.send_signal(signal.SIGKILL)
    with engine(ssd_dir=folder, ssd_gib=0.1) as reader:
        for turn in range(26):
            keys = [key_of(b"%d" % (turn * 24 + number)) for number in range(24)]
            done = reader.read(keys)  # compares the bytes
            assert turn > 20 or all(done)


def test_flipped_bits_on_the_disk_are_a_miss_and_are_removed(tmp_path: Path) -> None:
    """Holds invariant 23: damaged bytes are not served."""
    with engine(ssd_dir=str(tmp_path / "kv"), ssd_gib=0.1) as host:
        host.write(KEYS)
        (damaged,) = [path for path in (tmp_path / "kv").iterdir() if content(KEYS[3]) in path.read_bytes()]
        with damaged.open("r+b") as file:
            file.seek(damaged.read_bytes().index(content(KEYS[3])) + 5000)
            file.write(b"!")
        assert host.read(KEYS) == [key != KEYS[3] for key in KEYS]
        assert host.find([KEYS[3]]) == [MISS]
        assert host.tiers.traffic().checksum_failures["ssd"] == 1


def test_a_directory_belongs_to_one_engine(tmp_path: Path) -> None:
    with engine(ssd_dir=str(tmp_path / "kv"), ssd_gib=0.1), pytest.raises(ConfigError, match="is in use by"):
        Engine(ssd_dir=str(tmp_path / "kv"), ssd_gib=0.1)


def test_a_store_that_cannot_be_opened_leaves_the_directory_free(tmp_path: Path) -> None:
    options = {"ssd_dir": str(tmp_path / "kv"), "ssd_gib": 0.1}
    with pytest.raises(ConfigError, match="the option remote must start with one of"):
        Engine(**options, remote="ftp://somewhere")
    with engine(**options) as host:
        assert all(host.write(KEYS))


def test_a_full_disk_forgets_old_blocks_and_takes_new_ones(tmp_path: Path) -> None:
    room = 0.004  # GiB: some two hundred blocks
    with engine(ssd_dir=str(tmp_path / "kv"), ssd_gib=room) as host:
        for turn in range(20):
            keys = [key_of(b"turn %d %d" % (turn, number)) for number in range(24)]
            assert all(host.write(keys))
        assert host.find(keys) == [HIT] * len(keys)
        assert host.find([key_of(b"turn 0 0")]) == [MISS]
        used = sum(file.stat().st_blocks * 512 for file in (tmp_path / "kv").rglob("*"))
        assert used <= room * (1 << 30) * 1.05


# ------------------------------------------------------------------------------------------------------ store


def test_two_engines_share_a_store_and_another_model_does_not(valkey: Valkey) -> None:
    """Holds invariant 13: another space never shares blocks."""
    valkey.ask("FLUSHALL")
    with (
        engine(remote=valkey.url(), **PATIENT) as first,
        engine(remote=valkey.url(), **PATIENT) as second,
        engine(b"t" * 32, remote=valkey.url(), **PATIENT) as other,
    ):
        assert all(first.write(KEYS))
        assert second.find(KEYS) == [HIT] * len(KEYS)
        assert all(second.read(KEYS))
        assert other.find(KEYS) == [MISS] * len(KEYS)
        assert not any(other.read(KEYS))


def test_a_store_that_is_emptied_is_a_miss(valkey: Valkey) -> None:
    with engine(remote=valkey.url(), **PATIENT) as host:
        host.write(KEYS)
        valkey.ask("FLUSHALL")
        assert not any(host.read(KEYS))
        assert host.find(KEYS) == [MISS] * len(KEYS)
        assert all(host.write(KEYS))
        assert all(host.read(KEYS))


def test_a_paused_store_is_left_alone_and_used_again_when_it_is_back(tmp_path: Path) -> None:
    """Holds invariant 22: a wait has a deadline. The disk goes on alone meanwhile."""
    with (
        valkey_or_skip() as server,
        engine(ssd_dir=str(tmp_path / "kv"), ssd_gib=0.1, remote=server.url(), remote_timeout_s=2.0) as host,
    ):
        assert all(host.write(KEYS[:8]))
        server.pause()
        try:
            assert all(host.write(KEYS[8:16]))  # by the disk
            assert all(host.read(KEYS[:16]))
            assert host.find([key_of(b"nowhere")]) == [MISS]
        finally:
            server.resume()
        host.wait_usable()
        server.ask("FLUSHALL")
        assert all(host.write(KEYS[16:]))
        assert int(server.ask("DBSIZE").lstrip(b":")) == len(KEYS[16:])


def test_a_killed_store_comes_back_empty(tmp_path: Path) -> None:
    with valkey_or_skip() as server, engine(remote=server.url(), remote_timeout_s=10.0) as host:
        assert all(host.write(KEYS))
        server.kill()
        assert not any(host.read(KEYS))
        server.restart()
        host.wait_usable()
        assert host.find(KEYS) == [MISS] * len(KEYS)
        assert all(host.write(KEYS))
        assert all(host.read(KEYS))


def test_a_full_store_takes_no_more_and_serves_what_it_has() -> None:
    with (
        valkey_or_skip(settings=("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")) as small,
        engine(remote=small.url(), **PATIENT) as host,
    ):
        fates = []
        for turn in range(12):
            keys = [key_of(b"turn %d %d" % (turn, number)) for number in range(24)]
            fates += [list(zip(keys, host.write(keys), strict=True))]
        written = [key for turn in fates for key, done in turn if done]
        assert 0 < len(written) < 12 * 24
        assert all(host.read(written[:24]))
        assert host.tiers.traffic().skipped["full"] == 12 * 24 - len(written)
