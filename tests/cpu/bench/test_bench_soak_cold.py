"""`bench soak` with a disk and a store behind host memory: both are troubled, and wrong bytes from them are
in the verdict."""

from __future__ import annotations

import json
import logging
import os
import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest

from penstock.bench import soak, soak_trouble
from penstock.bench.soak import SoakBench, Verdict
from penstock.bench.soak_trouble import Mischief, UnreliableDisk, UnreliableStore
from penstock.cli import main
from penstock.config import SanitizeConfig
from penstock.errors import StoreFailed
from penstock.kv.tiers.store import Envelope, Outcome
from penstock.models.progress import silent
from penstock.testing.stores import MemoryStore
from tests.support.driving import tiny_config

NEVER = {"FAILED": 0.0, "STALLED": 0.0, "SPOILED": 0.0, "DOWN": 0.0, "EXAGGERATED": 0.0}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "NUM_ASKS", 12)
    monkeypatch.setattr(soak, "END_S", 20.0)
    monkeypatch.setattr(soak_trouble, "COPY_STALLED", 0.0)
    monkeypatch.setattr(soak_trouble, "COPY_FAILED", 0.0)


def shares(monkeypatch: pytest.MonkeyPatch, **given: float) -> None:
    for name, share in {**NEVER, **given}.items():
        monkeypatch.setattr(soak_trouble, name, share)


def run(tmp_path, seconds: float = 2.0, seen=lambda engine: True, **offload) -> Verdict:
    config = tiny_config(blocks=24, host_blocks=32, overcommit=3.0, max_batch=12)
    offload = {"ssd_dir": str(tmp_path), "ssd_gib": 0.004, **offload}
    config = replace(config, offload=replace(config.offload, **offload), sanitize=SanitizeConfig("report"))
    return SoakBench(seconds, 3, 0, seed=1).measure(config, silent, seen)


def test_a_disk_and_a_store_that_fail_in_every_way_change_no_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "penstock.kv.build.open_remote", lambda url, space, timeout_s: MemoryStore(space=space.digest)
    )
    # so often that each kind happens, however slow the machine
    shares(monkeypatch, FAILED=0.15, SPOILED=0.3, EXAGGERATED=0.1)
    verdict = run(tmp_path, seconds=3.0, seen=_written, remote="valkey://elsewhere")
    assert verdict.violations == []
    assert verdict.counts["MB written to ssd"] > 0
    for what in (
        "disk writes lost on purpose",
        "disk calls failed on purpose",
        "blocks of a store failed on purpose",
    ):
        assert verdict.counts[what] > 0, what
    assert verdict.counts["sanitizer reports"] == 0


def _written(engine) -> bool:
    return engine.stats().traffic.bytes["host", "ssd"] >= 1 << 20


def test_a_wrong_bit_that_nobody_checks_for_is_noticed_by_its_tokens(tmp_path, monkeypatch):
    shares(monkeypatch, SPOILED=1.0)
    # only what is read is spoiled, and in many places
    monkeypatch.setattr(UnreliableDisk, "pwritev", soak_trouble.DiskIo.pwritev)
    monkeypatch.setattr(UnreliableDisk, "preadv", _read_wrong)
    monkeypatch.setattr(Envelope, "fits", lambda self, payload: True)
    monkeypatch.setattr(soak_trouble, "DISTURBED_S", 0.01)
    monkeypatch.setattr(soak_trouble.Disturber, "flush", _persist)
    monkeypatch.setattr(
        soak_trouble.Disturber, "reset", lambda self: self._engine.reset_cache(("device", "host"))
    )
    assert any("differ from the" in violation for violation in run(tmp_path, seen=_read_from_disk).violations)


def _persist(self) -> None:
    with suppress(StoreFailed):  # what a reset at the same time takes from host memory cannot be written
        self._engine.wait_flushed("persisted", 20.0)


def _read_from_disk(engine) -> bool:
    return engine.stats().prompt_tokens["ssd"] > 1000


def _read_wrong(self, fd, buffers, offset):
    num = super(UnreliableDisk, self).preadv(fd, buffers, offset)
    for payload in buffers[1::2]:
        payload[:] = bytes(len(payload))
    return num


# --------------------------------------------------------------------------------------------------- mischief


def mischief() -> tuple[Mischief, Counter[str]]:
    counts: Counter[str] = Counter()
    return Mischief(counts, random.Random(0), 0.0), counts


def test_a_disk_fails_spoils_and_loses_as_it_is_told(tmp_path, monkeypatch):
    made, counts = mischief()
    disk = UnreliableDisk(made)
    folder = os.open(tmp_path, os.O_RDONLY)
    fd = disk.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, folder)
    shares(monkeypatch)
    assert disk.pwritev(fd, [memoryview(b"a" * 8), memoryview(b"b" * 8)], 0) == 16
    buffer = bytearray(16)
    shares(monkeypatch, SPOILED=1.0)
    assert disk.preadv(fd, [memoryview(buffer)], 0) == 16
    assert sum((a ^ b).bit_count() for a, b in zip(buffer, b"a" * 8 + b"b" * 8, strict=True)) == 1
    for _ in range(8):
        assert disk.pwritev(fd, [memoryview(b"c" * 8), memoryview(b"d" * 8)], 16) == 16  # so it says
    shares(monkeypatch, FAILED=1.0)
    for call in (
        lambda: disk.preadv(fd, [memoryview(buffer)], 0),
        lambda: disk.pwritev(fd, [memoryview(buffer)], 0),
    ):
        with pytest.raises(OSError, match="made to fail"):
            call()
    disk.close(fd)
    os.close(folder)
    assert counts == {
        "disk calls stalled on purpose": 0,
        "disk calls failed on purpose": 2,
        "disk reads spoiled on purpose": 1,
        "disk writes lost on purpose": 8,
    }


def test_a_store_fails_and_exaggerates_but_never_calls_wrong_bytes_done(monkeypatch):
    made, counts = mischief()
    inner = MemoryStore()
    store = UnreliableStore(inner, made)
    keys, blocks = [bytes([n]) * 16 for n in range(4)], [memoryview(bytes([n]) * 8) for n in range(4)]
    shares(monkeypatch, FAILED=1.0)
    assert store.write(keys, range(4), blocks) == [Outcome.FAILED] * 4 and inner.blocks == {}
    shares(monkeypatch)
    assert store.write(keys[:2], range(2), blocks[:2]) == [Outcome.DONE] * 2 and store.find(keys) == 2
    shares(monkeypatch, EXAGGERATED=1.0, FAILED=0.5)
    assert store.find(keys) == 4
    for _ in range(8):
        into = [memoryview(bytearray(8)) for _ in keys]
        outcomes = store.read(keys, into)
        assert Outcome.DONE not in outcomes[2:]
        assert all(into[n] == blocks[n] for n, outcome in enumerate(outcomes) if outcome is Outcome.DONE)
    assert counts["blocks of a store failed on purpose"] > 4
    shares(monkeypatch, DOWN=1.0)
    with pytest.raises(StoreFailed):
        store.persist()


def test_the_command_troubles_a_disk_in_a_directory_that_is_gone_afterwards(tmp_path, capsys):
    file, near = tmp_path / "soak.json", tmp_path / "cache"
    near.mkdir()
    argv = [
        "bench",
        "soak",
        "--device",
        "cpu",
        "--seconds",
        "1",
        "--adapters",
        "0",
        "--kv-offload-ssd-dir",
        str(near),
        "--json",
        str(file),
    ]
    assert main(argv) == 0
    assert "MB written to ssd" in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert report["violations"] == [] and report["config"]["offload"]["ssd_gib"] == 0.016
    assert list(near.iterdir()) == []
    assert logging.getLogger("penstock.kv.tiers").level == logging.NOTSET  # others warn as before


def test_without_a_disk_the_counts_are_as_before(capsys):
    config = tiny_config(blocks=24, host_blocks=32, overcommit=3.0, max_batch=12)
    counts = SoakBench(0.2, 1, 0, seed=1).measure(config, silent).counts
    assert not any("disk" in what or "store" in what for what in counts)
