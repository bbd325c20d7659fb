"""`bench soak`: a whole engine passes, and each kind of damage is in the verdict."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import replace

import pytest

from penstock.bench import soak, soak_trouble
from penstock.bench.soak import SoakBench, Verdict
from penstock.bench.soak_trouble import Ask, Disturber, UnreliableCopier, random_asks
from penstock.cli import main
from penstock.config import SanitizeConfig
from penstock.contract import SamplingParams
from penstock.engine.execution.arriving import Arriving
from penstock.kv.tiers.host import HostLease, HostTier
from penstock.kv.tiers.saves import Saves
from penstock.models.progress import silent
from tests.support.driving import tiny_config


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "NUM_ASKS", 12)
    monkeypatch.setattr(soak, "END_S", 20.0)
    monkeypatch.setattr(soak_trouble, "COPY_STALLED", 0.0)


def run(
    seconds: float = 1.0, adapters: int = 0, threads: int = 3, host_blocks: int = 64, seen=lambda engine: True
) -> Verdict:
    config = tiny_config(blocks=24, host_blocks=host_blocks, overcommit=3.0, max_batch=12)
    config = replace(config, sanitize=SanitizeConfig("report"))
    return SoakBench(seconds, threads, adapters, seed=1).measure(config, silent, seen)


def test_a_whole_engine_passes_and_was_really_troubled(monkeypatch):
    monkeypatch.setattr(soak_trouble, "COPY_FAILED", 0.2)
    verdict = run(seconds=3.0, adapters=2, seen=_troubled)
    assert verdict.violations == []
    counts = verdict.counts
    for what in (
        "requests",
        "cancelled",
        "retractions",
        "promoted blocks",
        "prompt tokens from host",
        "copies failed on purpose",
    ):
        assert counts[what] > 0, what
    assert counts["transfers seen to fail"] > 0
    assert counts["sanitizer reports"] == 0


def _troubled(engine) -> bool:
    stats = engine.stats()
    return bool(
        stats.retractions
        and stats.cache["promoted"]
        and stats.prompt_tokens["host"]
        and sum(stats.traffic.failures.values())
    )


def test_what_is_larger_than_the_device_and_scored_is_soaked_too_but_not_compared():
    """Random scores give other tokens than all of the context would."""
    sizes = {"blocks": 160, "host_blocks": 600, "max_model_len": 4000, "positions": 4096, "max_batch": 8}
    config = tiny_config(resident_tokens=448, residency="scored", **sizes)
    bench = SoakBench(1.0, 3, 0, seed=1)
    verdict = bench.measure(
        replace(config, sanitize=SanitizeConfig("report")),
        silent,
        lambda engine: engine.stats().host_steps > 20,
    )
    assert verdict.violations == [] and verdict.counts["scored answers, which are not compared"] > 0


def test_bytes_that_did_not_come_are_noticed_by_their_tokens(monkeypatch):
    def pretend(self, source_slots, dest_slots, layers):
        """Nothing is copied, and nobody is told."""

    monkeypatch.setattr(UnreliableCopier, "copy", pretend)
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
    monkeypatch.setattr(Disturber, "_reset", lambda self: self._engine.reset_cache(("device",)))
    assert any(
        "the sanitizer reports" in violation for violation in run(threads=1, seen=_reported).violations
    )


def _reported(engine) -> bool:
    return any(engine.stats().sanitizer.values())


def test_a_lease_that_nobody_ends_is_noticed(monkeypatch):
    kept = []
    monkeypatch.setattr(HostLease, "end", lambda self: kept.extend({self} & self._tier.leases.keys()))
    monkeypatch.setattr(HostTier, "expire", lambda self: None)
    assert any("leases are open" in violation for violation in run(seen=lambda engine: bool(kept)).violations)


def test_a_pin_that_nobody_ends_is_noticed(monkeypatch):
    monkeypatch.setattr(soak, "END_S", 1.0)
    monkeypatch.setattr(Saves, "_end", lambda self, save: None)
    violations = run(seconds=0.5).violations
    assert any("slots of device are pinned" in violation for violation in violations)
    assert any("the engine's loop failed: Leaked" in violation for violation in violations)


def test_a_request_that_never_ends_is_noticed(monkeypatch):
    monkeypatch.setattr(soak, "END_S", 0.2)
    monkeypatch.setattr("penstock.engine.scheduling.scheduler.Scheduler.plan", lambda self: None)
    monkeypatch.setattr(soak, "_Reference", _NoReference)
    monkeypatch.setattr(soak_trouble, "CANCELLED", 0.0)
    assert any("have not ended" in violation for violation in run(seconds=0.2).violations)


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


def test_without_a_tier_there_is_still_a_soak():
    verdict = run(host_blocks=0)
    assert (
        verdict.violations == []
        and verdict.counts["copies failed on purpose"] == 0 == verdict.counts["promoted blocks"]
    )


def test_what_is_asked_fits_and_the_seed_decides_it():
    asks = random_asks(random.Random(3), 200, vocab=512, most_tokens=100)
    assert all(len(ask.prompt) >= 1 and len(ask.prompt) + ask.sampling.max_tokens <= 100 for ask in asks)
    assert asks == random_asks(random.Random(3), 200, vocab=512, most_tokens=100)
    assert len({ask.prompt for ask in asks}) > 100


def test_the_command_says_what_was_violated_and_fails(tmp_path, capsys, monkeypatch):
    file = tmp_path / "soak.json"
    argv = ["bench", "soak", "--device", "cpu", "--seconds", "1", "--adapters", "1", "--json", str(file)]
    assert main(argv) == 0
    shown = capsys.readouterr()
    assert "nothing was violated" in shown.out and "not asked for" in shown.out
    report = json.loads(file.read_text())
    assert (
        report["violations"] == []
        and report["counts"]["requests"] > 0
        and report["counts"]["adapter reloads"] > 0
    )
    monkeypatch.setattr(
        SoakBench, "measure", lambda self, config, progress: Verdict({"requests": 1}, ["the sky fell"])
    )
    assert main(argv) == 1
    assert "violated: the sky fell" in capsys.readouterr().out
    assert json.loads(file.read_text())["violations"] == ["the sky fell"]
