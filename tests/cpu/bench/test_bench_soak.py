"""`bench soak`: a whole engine passes, and each kind of damage is in the verdict, also of a disk and a store
behind host memory."""

from __future__ import annotations

import json
import logging
import random
import threading
from dataclasses import replace

import pytest

from penstock.bench import soak, soak_trouble
from penstock.bench.soak import SoakBench, Verdict
from penstock.bench.soak_trouble import (
    Ask,
    Disturber,
    UnreliableCopier,
    random_asks,
)
from penstock.cli import main
from penstock.config import SanitizeConfig
from penstock.contract import SamplingParams
from penstock.engine.execution.arriving import Arriving
from penstock.kv.tiers.saves import Saves
from penstock.models.progress import silent
from penstock.testing.stores import MemoryStore
from tests.support.driving import tiny_config

NEVER = {"FAILED": 0.0, "STALLED": 0.0, "SPOILED": 0.0, "DOWN": 0.0, "EXAGGERATED": 0.0}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "NUM_ASKS", 12)
    monkeypatch.setattr(soak, "END_S", 20.0)
    monkeypatch.setattr(soak_trouble, "COPY_STALLED", 0.0)


def shares(monkeypatch: pytest.MonkeyPatch, **given: float) -> None:
    for name, share in {**NEVER, **given}.items():
        monkeypatch.setattr(soak_trouble, name, share)


def run(
    seconds: float = 1.0,
    adapters: int = 0,
    threads: int = 3,
    host_blocks: int = 64,
    seen=lambda engine: True,
    **offload,
) -> Verdict:
    config = tiny_config(blocks=24, host_blocks=host_blocks, overcommit=3.0, max_batch=12)
    config = replace(config, offload=replace(config.offload, **offload), sanitize=SanitizeConfig("report"))
    return SoakBench(seconds, threads, adapters, seed=1).measure(config, silent, seen)


def test_a_whole_engine_passes_and_was_really_troubled(monkeypatch):
    def troubled(engine) -> bool:
        stats = engine.stats()
        used = stats.cache["promoted"] and stats.prompt_tokens["host"]
        return bool(stats.retractions and used and sum(stats.traffic.failures.values()))

    monkeypatch.setattr(soak_trouble, "COPY_FAILED", 0.2)
    verdict = run(seconds=1.5, adapters=2, seen=troubled)
    assert verdict.violations == [] and verdict.counts["sanitizer reports"] == 0
    happened = ("requests", "cancelled", "retractions", "promoted blocks", "prompt tokens from host")
    for what in (*happened, "copies failed on purpose", "transfers seen to fail"):
        assert verdict.counts[what] > 0, what
    assert not any("disk" in what or "store" in what for what in verdict.counts)


def test_a_disk_and_a_store_that_fail_in_every_way_change_no_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "penstock.kv.build.open_remote", lambda url, space, timeout_s: MemoryStore(space=space.digest)
    )
    # so often that each kind happens, however slow the machine
    shares(monkeypatch, FAILED=0.15, SPOILED=0.3, EXAGGERATED=0.1)
    cold = {"ssd_dir": str(tmp_path), "ssd_gib": 0.004, "remote": "valkey://elsewhere"}
    verdict = run(
        1.5, 0, 3, 32, lambda engine: engine.stats().traffic.bytes["host", "ssd"] >= 1 << 20, **cold
    )
    assert verdict.violations == [] and verdict.counts["sanitizer reports"] == 0
    for what in ("disk writes lost", "disk calls failed", "blocks of a store failed"):
        assert verdict.counts[f"{what} on purpose"] > 0, what
    assert verdict.counts["MB written to ssd"] > 0


def test_what_is_larger_than_the_device_and_scored_is_soaked_too_but_not_compared():
    """Random scores give other tokens than all of the context would."""
    sizes = {"blocks": 160, "host_blocks": 600, "max_model_len": 4000, "positions": 4096, "max_batch": 8}
    config = tiny_config(resident_tokens=448, residency="scored", **sizes)
    config = replace(config, sanitize=SanitizeConfig("report"))
    verdict = SoakBench(1.0, 3, 0, seed=1).measure(
        config, silent, lambda engine: engine.stats().host_steps > 20
    )
    assert verdict.violations == [] and verdict.counts["scored answers, which are not compared"] > 0


# -------------------------------------------------------------------------------------- damage in the verdict


def test_bytes_that_did_not_come_are_noticed_by_their_tokens(monkeypatch):
    monkeypatch.setattr(UnreliableCopier, "copy", lambda self, *_: None)  # and no part is told
    verdict = run(seen=lambda engine: engine.stats().prompt_tokens["host"] > 300)
    assert any("differ from the" in violation for violation in verdict.violations)


def test_a_wait_that_is_left_out_is_noticed_by_the_sanitizer(monkeypatch):
    monkeypatch.setattr(Arriving, "wait_on", lambda self, lane, end: False)
    # alone, a request is set off while its load is on its way
    monkeypatch.setattr(soak_trouble, "OPEN_PER_THREAD", 1)
    monkeypatch.setattr(soak_trouble, "CANCELLED", 0.0)
    monkeypatch.setattr(
        soak,
        "random_asks",
        lambda *_: [Ask(tuple(range(100)), SamplingParams(max_tokens=1, temperature=0.0), "")],
    )
    monkeypatch.setattr(soak_trouble, "DISTURBED_S", 0.01)
    monkeypatch.setattr(Disturber, "reset", lambda self: self._engine.kv.reset(("device",)))
    verdict = run(threads=1, seen=lambda engine: any(engine.stats().sanitizer.values()))
    assert any("the sanitizer reports" in violation for violation in verdict.violations)


def test_a_pin_that_nobody_ends_is_noticed(monkeypatch):
    monkeypatch.setattr(soak, "END_S", 1.0)
    monkeypatch.setattr(Saves, "_end", lambda self, save: None)
    violations = run(seconds=0.5).violations
    assert any("slots of device are pinned" in violation for violation in violations)
    assert any("the engine's loop failed: Leaked" in violation for violation in violations)


def test_a_thread_that_is_left_behind_is_noticed(monkeypatch):
    leave = threading.Event()
    whole = soak.make_unreliable

    def and_a_thread(*args):
        threading.Thread(target=leave.wait, name="forgotten", daemon=True).start()
        return whole(*args)

    monkeypatch.setattr(soak, "make_unreliable", and_a_thread)
    violations = run(seconds=0.2).violations
    leave.set()
    assert violations == ["threads are left: forgotten"]


def test_a_request_that_fails_is_noticed(monkeypatch):
    def fail(*args):
        raise RuntimeError("the layer burst")

    monkeypatch.setattr("penstock.models.decoder.Decoder.embed", fail)
    monkeypatch.setattr("penstock.engine.engine.Engine.warm", lambda *_: None)  # which would notice it first
    monkeypatch.setattr(soak, "_Reference", _NoReference)
    assert any("the layer burst" in violation for violation in run(seconds=0.2).violations)


class _NoReference:
    def __init__(self, *args): ...

    def __enter__(self):
        return self

    def __exit__(self, *error): ...

    def difference(self, ask, outcome):
        return None


# --------------------------------------------------------------------------------------------------- mischief


def test_what_is_asked_fits_and_the_seed_decides_it():
    asks = random_asks(random.Random(3), 200, vocab=512, most_tokens=100)
    assert all(len(ask.prompt) >= 1 and len(ask.prompt) + ask.sampling.max_tokens <= 100 for ask in asks)
    assert asks == random_asks(random.Random(3), 200, vocab=512, most_tokens=100)
    assert len({ask.prompt for ask in asks}) > 100


def test_the_command_says_what_was_violated_and_fails(tmp_path, capsys, monkeypatch):
    file, near = tmp_path / "soak.json", tmp_path / "cache"
    near.mkdir()
    argv = f"bench soak --device cpu --seconds 1 --adapters 1 --json {file}".split()
    assert main([*argv, "--kv-offload-ssd-dir", str(near)]) == 0
    shown, report = capsys.readouterr(), json.loads(file.read_text())
    assert "nothing was violated" in shown.out and "not asked for" in shown.out
    assert "MB written to ssd" in shown.out and report["config"]["offload"]["ssd_gib"] == 0.016
    assert report["violations"] == [] and list(near.iterdir()) == []
    assert report["counts"]["requests"] > 0 and report["counts"]["adapter reloads"] > 0
    assert logging.getLogger("penstock.kv.tiers").level == logging.NOTSET  # others warn as before
    monkeypatch.setattr(
        SoakBench, "measure", lambda self, config, progress: Verdict({"requests": 1}, ["the sky fell"])
    )
    assert main(argv) == 1
    assert "violated: the sky fell" in capsys.readouterr().out
    assert json.loads(file.read_text())["violations"] == ["the sky fell"]
