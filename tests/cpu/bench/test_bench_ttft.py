"""`bench ttft`: cold is cold, and what is said to come from a tier has come from there, also across a
restart. No existing cache is touched."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.bench.child import run_in_process
from penstock.bench.run import Driver
from penstock.bench.scratch import scratch_ssd
from penstock.bench.ttft import NEW_TOKENS, RestartBench, TtftBench
from penstock.cli import main
from penstock.config import GIB, Config, OffloadConfig
from penstock.contract import KvSource
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.errors import ConfigError, InvariantBroken, StepFailed
from penstock.models.progress import silent
from tests.cpu.bench import child_work

TINY = ["--model", "tiny-qwen3", "--load-format", "dummy", "--device", "cpu", "--device-kv-blocks", "64"]
TIERS = ("device", "host", "ssd")
BENCH = TtftBench((64,), repeat=1, seed=0)
Make = Callable[[Config], Engine]


@pytest.fixture
def ssd_config(config: Config, tmp_path: Path) -> Config:
    ssd = str(tmp_path / "ssd")
    return replace(config, offload=OffloadConfig(host_gib=0.05, load_always=True, ssd_dir=ssd, ssd_gib=0.01))


@pytest.fixture
def make_engine() -> Iterator[Make]:
    made: list[Engine] = []

    def make(config: Config) -> Engine:
        made.append(build(config))
        return made[-1]

    yield make
    for engine in made:
        engine.close(timeout_s=20.0)


def offloaded(config: Config, **changes: Any) -> Config:
    return replace(config, offload=replace(config.offload, **changes))


def served(config: Config, length: int, **by: int) -> dict[str, int]:
    return asdict(KvSource(**by, computed=length - sum(by.values())))


@pytest.mark.parametrize(
    ("num_tiers", "length", "reused"),
    [(1, 64, 63), (2, 70, 64), (3, 64, 63), (3, 70, 64), (3, 15, 0), (2, 1, 0)],
)
def test_a_tier_serves_all_full_blocks_but_never_the_last_token(
    make_engine: Make, ssd_config: Config, config: Config, num_tiers: int, length: int, reused: int
) -> None:
    tiers = TIERS[:num_tiers]
    config = (config, offloaded(ssd_config, ssd_dir=None), ssd_config)[num_tiers - 1]
    (row,) = TtftBench((length,), repeat=2, seed=0).measure(Driver(make_engine(config), config)).rows
    assert set(row["source"]) == {"cold", *tiers, *(f"{tier}_new" for tier in tiers)}
    full, times = length // 16, {case: taken["median"] for case, taken in row["ttft_ms"].items()}
    assert row["source"]["cold"] == served(config, length) and row["promoted_blocks"]["cold"] == 0
    for tier in tiers:
        assert row["source"][tier] == served(config, length, **{tier: reused})
        assert row["source"][f"{tier}_new"] == served(config, length + NEW_TOKENS, **{tier: 16 * full})
        promoted = 0 if tier == "device" else full
        assert row["promoted_blocks"][tier] == row["promoted_blocks"][f"{tier}_new"] == promoted
        ratio = "ratio" if tier == "device" else f"ratio_{tier}"
        assert row[ratio] == times["cold"] / times[tier] and len(row["ttft_ms"][tier]["all"]) == 2


# ------------------------------------------------------------------------------------------ the proof


@pytest.mark.parametrize(
    ("what", "name", "fake", "said"),
    [
        (
            "penstock.kv.blocks.pool.BlockPool",
            "find",
            lambda *_: np.empty(0, np.int32),
            "expected 63 from the device",
        ),
        ("penstock.kv.cache.KvCache", "lease", lambda *_: None, "expected 63 from the host"),
    ],
)
def test_what_did_not_come_from_the_named_tier_is_not_reported(
    tiered_engine: Engine,
    tiered_config: Config,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    name: str,
    fake: Any,
    said: str,
) -> None:
    monkeypatch.setattr(f"{what}.{name}", fake)
    with pytest.raises(InvariantBroken, match=said):
        BENCH.measure(Driver(tiered_engine, tiered_config))


@pytest.mark.parametrize(
    ("counter", "said"), [("device", "the engine counted"), ("promoted", "'host': 0"), ("ssd", "'ssd': 0")]
)
def test_counters_that_disagree_are_noticed(
    make_engine: Make, ssd_config: Config, monkeypatch: pytest.MonkeyPatch, counter: str, said: str
) -> None:
    honest = Engine.stats

    def stats(self: Engine) -> Any:
        taken: Any = honest(self)
        if counter == "device":
            taken.prompt_tokens["device"] = 0
        elif counter == "promoted":
            taken.cache["promoted"] = 0
        else:
            taken.traffic.bytes["ssd", "host"] = 0
        return taken

    engine = make_engine(ssd_config)
    monkeypatch.setattr(Engine, "stats", stats)
    with pytest.raises(InvariantBroken, match=said):
        BENCH.measure(Driver(engine, ssd_config))


# ------------------------------------------------------------------------------------------ what does not fit


@pytest.mark.parametrize("length", [1008, 4000])
def test_a_length_that_does_not_fit_is_skipped_with_a_reason(
    engine: Engine, config: Config, length: int
) -> None:
    results = TtftBench((length, 32), repeat=1, seed=0).measure(Driver(engine, config))
    blocks = -(-(length + NEW_TOKENS + 1) // 16)
    assert results.skipped == [
        f"{length} tokens: with 16 new ones and one to write they exceed the context of 1024; they need "
        f"{blocks} KV blocks on the device, which holds 64 (1024 tokens); --device-kv-blocks {blocks} "
        "would do"
    ]
    assert [row["tokens"] for row in results.rows] == [32]


@pytest.mark.parametrize(
    ("tier", "place", "small", "length", "blocks"),
    [
        # a block more for each case with new tokens
        ("host", "in host memory", 17.5 * 8192 / GIB, 264, 18),
        ("ssd", "on the disk", 0.0002, 640, 43),
    ],
)
def test_a_length_that_a_tier_does_not_hold_is_refused_at_once_and_the_proposed_size_is_enough(
    make_engine: Make, ssd_config: Config, tier: str, place: str, small: float, length: int, blocks: int
) -> None:
    told: list[Any] = []
    if tier == "host":
        ssd_config = offloaded(ssd_config, ssd_dir=None)
    tight, bench = offloaded(ssd_config, **{f"{tier}_gib": small}), TtftBench((length,), repeat=1, seed=0)
    engine = make_engine(tight)
    there = sum(engine.stats().kv_blocks[tier].values())
    results = bench.measure(Driver(engine, tight, lambda *said: told.append(said)))
    engine.close(timeout_s=20.0)
    (said,) = results.skipped
    assert results.rows == [] and told == [] and there < blocks
    assert said.startswith(
        f"{length} tokens: they need {blocks} KV blocks {place}, which holds {there} ({there * 16} tokens); "
        f"--kv-offload-{tier}-gib "
    )
    enough = offloaded(ssd_config, **{f"{tier}_gib": float(said.split()[-3])})
    engine = make_engine(enough)
    assert [row["tokens"] for row in bench.measure(Driver(engine, enough)).rows] == [length]
    if tier == "host":
        assert blocks <= sum(engine.stats().kv_blocks["host"].values()) <= 1.01 * blocks + 1


# ------------------------------------------------------------------------------------------ a restart


RESTART = RestartBench((64, 20), repeat=1, seed=0)
LONGER = RestartBench((64, 320), repeat=1, seed=0)


def lengths(results: Any) -> list[int]:
    return [row["tokens"] for row in results.rows]


def asked_again(bench: RestartBench, config: Config, num_blocks: int, results: Any) -> list[dict[str, Any]]:
    before = {row["tokens"]: row["samples"] for row in results.rows}
    return bench.ask_again(config, "bench", num_blocks, before, silent)


def test_what_one_engine_computed_the_next_reads_from_disk(ssd_config: Config) -> None:
    _, before, num_blocks = RESTART.compute(ssd_config, "bench", silent)
    assert num_blocks == 2 * (4 + 1) and before.skipped == []
    rows = asked_again(RESTART, ssd_config, num_blocks, before)
    for row, (length, from_disk) in zip(rows, ((64, 63), (20, 16)), strict=True):
        assert row["tokens"] == length and row["first_ms"] > 0
        assert row["source"]["cold"] == row["source"]["cold_before"] == served(ssd_config, length)
        assert row["source"]["ssd"] == served(ssd_config, length, ssd=from_disk)


def test_errors_progress_and_results_come_from_another_process() -> None:
    for work, args, kind, said in (
        (child_work.fail, ("no good",), ConfigError, "no good"),
        (child_work.fail_oddly, (), StepFailed, "no message says it"),
        (child_work.vanish, (3,), StepFailed, "code 3"),
    ):
        with pytest.raises(kind, match=said):
            run_in_process(work, args, silent)
    told: list[Any] = []
    assert run_in_process(child_work.say, (2,), lambda *said: told.append(said)) != os.getpid()
    assert told == [("working", 0, 2), ("working", 1, 2)]
    assert run_in_process(child_work.interrupted, (), silent) == "went on"  # Ctrl-C is for the parent
    assert run_in_process(child_work.held, (), silent) == (True, False)  # also before it can ignore it


def test_a_scratch_directory_lies_near_the_one_that_is_named_and_is_removed(
    config: Config, tmp_path: Path
) -> None:
    with scratch_ssd(replace(config, offload=OffloadConfig(ssd_dir=str(tmp_path / "not" / "there")))) as made:
        (folder,) = tmp_path.iterdir()
        assert made.offload.ssd_dir == str(folder) and list(folder.iterdir()) == []
    assert list(tmp_path.iterdir()) == []
    with scratch_ssd(config) as made:
        assert made is config
    (tmp_path / "file").touch()
    with_file = replace(config, offload=OffloadConfig(ssd_dir=str(tmp_path / "file")))
    with pytest.raises(ConfigError, match="not a directory"), scratch_ssd(with_file):
        pass


# ------------------------------------------------------------------------------------------ the command


def test_the_command_restarts_in_new_processes_and_leaves_no_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, near = tmp_path / "restart.json", tmp_path / "cache"
    near.mkdir()
    (near / "penstock-000000.kv").write_text("a cache of others")
    flags = ["--tokens", "48,9999", "--repeat", "1", "--kv-offload-ssd-dir", str(near), "--json", str(file)]
    assert main(["bench", "ttft", "--restart", *TINY, *flags]) == 0
    report = json.loads(file.read_text())
    (row,) = report["results"]
    assert report["bench"] == "ttft --restart" and report["model"] == "tiny-qwen3"
    assert row["source"]["ssd"] == asdict(KvSource(ssd=47, computed=1))
    assert f"{row['ratio_ssd']:.1f}" in capsys.readouterr().out
    assert [path.read_text() for path in near.iterdir()] == ["a cache of others"]
    assert main(["bench", "ttft", "--restart", "--no-kv-offload"]) == 2
    assert "--restart needs --kv-offload" in capsys.readouterr().err
    assert main(["bench", "ttft", "--restart", "--trace", str(tmp_path / "trace.json")]) == 2
    assert "--restart: --trace" in capsys.readouterr().err
