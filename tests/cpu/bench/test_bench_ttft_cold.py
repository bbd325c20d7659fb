"""`bench ttft` with tiers behind host memory, and across a restart: each case comes from its tier alone, and
nobody's cache is touched."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from dataclasses import asdict

import pytest

from penstock.bench import ttft
from penstock.bench.run import Driver, scratch_ssd
from penstock.bench.ttft import NEW_TOKENS, RestartBench, TtftBench, run_in_process
from penstock.cli import main
from penstock.config import GIB, OffloadConfig
from penstock.contract import KvSource
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.errors import ConfigError, DeadlineExceeded, InvariantBroken, StepFailed
from penstock.kv.tiers.policy import PrefillRate
from penstock.models.progress import silent
from penstock.testing.stores import MemoryStore
from tests.cpu.bench import child_work


@pytest.fixture
def ssd_config(config, tmp_path):
    return dataclasses.replace(
        config,
        offload=OffloadConfig(host_gib=0.05, load_always=True, ssd_dir=str(tmp_path / "ssd"), ssd_gib=0.01),
    )


@pytest.fixture
def blocks(monkeypatch):
    """What is in a store that every engine of the test shares. It is given a second to answer, however fast
    computing is."""
    shared: dict[bytes, bytearray] = {}
    monkeypatch.setattr(
        "penstock.kv.build.open_remote",
        lambda url, space, timeout_s: MemoryStore(space=space.digest, blocks=shared),
    )
    monkeypatch.setattr(PrefillRate, "seconds", lambda self, *_: None)
    return shared


@pytest.fixture
def make_engine():
    made: list[Engine] = []

    def make(config):
        made.append(build(config))
        return made[-1]

    yield make
    for engine in made:
        engine.close(timeout_s=20.0)


@pytest.mark.parametrize(("length", "expected"), [(64, 63), (70, 64), (15, 0)])
def test_the_disk_serves_what_device_and_host_have_forgotten(make_engine, ssd_config, length, expected):
    (row,) = TtftBench((length,), repeat=2, seed=0).measure(make_engine(ssd_config), ssd_config, silent).rows
    source, num_blocks = row["source"], length // 16
    assert source["cold"] == asdict(KvSource(computed=length))
    assert source["host"] == asdict(KvSource(host=expected, computed=length - expected))
    assert source["ssd"] == asdict(KvSource(ssd=expected, computed=length - expected))
    assert source["ssd_new"] == asdict(
        KvSource(ssd=16 * num_blocks, computed=length + NEW_TOKENS - 16 * num_blocks)
    )
    assert row["promoted_blocks"]["ssd"] == row["promoted_blocks"]["ssd_new"] == num_blocks
    assert row["ratio_ssd"] == row["ttft_ms"]["cold"]["median"] / row["ttft_ms"]["ssd"]["median"]
    assert "remote" not in source


def with_disk(config, ssd_gib):
    return dataclasses.replace(config, offload=dataclasses.replace(config.offload, ssd_gib=ssd_gib))


def proposed(said):
    """The size that a refusal proposes."""
    *_, flag, gib, would, do = said.split()
    assert (flag, would, do) == ("--kv-offload-ssd-gib", "would", "do")
    return float(gib)


def test_a_length_that_the_disk_does_not_hold_is_refused_before_anything_is_measured(make_engine, ssd_config):
    small, bench, told = with_disk(ssd_config, 0.0002), TtftBench((640,), repeat=1, seed=0), []
    engine = make_engine(small)
    there = sum(engine.stats().kv_blocks["ssd"].values())
    results = bench.measure(engine, small, lambda *said: told.append(said))
    (said,) = results.skipped
    assert results.rows == [] and told == [] and there < 43
    assert said.startswith(
        f"640 tokens: they need 43 KV blocks on the disk, which holds {there} ({there * 16} tokens); "
    )
    engine.close(timeout_s=20.0)
    enough = with_disk(ssd_config, proposed(said))
    assert len(bench.measure(make_engine(enough), enough, silent).rows) == 1


def test_a_disk_that_has_no_room_is_said_to_have_none(make_engine, ssd_config, monkeypatch):
    engine = make_engine(ssd_config)
    monkeypatch.setattr(
        "penstock.bench.run.shutil.disk_usage", lambda folder: shutil._ntuple_diskusage(GIB, GIB, 1000)
    )
    (said,) = TtftBench((64,), repeat=1, seed=0).measure(engine, ssd_config, silent).skipped
    assert said.startswith("64 tokens: they need 0.00 GiB of the disk of ") and said.endswith(
        "where 0.00 are free"
    )


def test_behind_a_disk_the_store_serves_alone_and_keeps_what_others_have(make_engine, ssd_config, blocks):
    config = dataclasses.replace(
        ssd_config, offload=dataclasses.replace(ssd_config.offload, remote="valkey://elsewhere")
    )
    blocks[bytes(16)] = bytearray(b"somebody else's")
    (row,) = TtftBench((64,), repeat=1, seed=0).measure(make_engine(config), config, silent).rows
    assert [case for case in row["source"] if "new" not in case] == [
        "cold",
        "device",
        "host",
        "ssd",
        "remote",
    ]
    assert row["source"]["ssd"] == asdict(KvSource(ssd=63, computed=1))
    assert row["source"]["remote"] == asdict(KvSource(remote=63, computed=1))
    assert row["source"]["remote_new"] == asdict(KvSource(remote=64, computed=16))
    assert bytes(16) in blocks and row["ratio_remote"] > 0


def test_a_second_run_against_the_same_store_is_cold_all_the_same(make_engine, ssd_config, blocks):
    config = dataclasses.replace(
        ssd_config, offload=OffloadConfig(host_gib=0.05, load_always=True, remote="valkey://elsewhere")
    )
    for _ in range(2):
        (row,) = TtftBench((64,), repeat=1, seed=0).measure(make_engine(config), config, silent).rows
        assert row["source"]["cold"] == asdict(KvSource(computed=64))


def test_a_host_that_was_not_emptied_is_noticed(make_engine, ssd_config, monkeypatch):
    honest = Driver.reset_cache
    monkeypatch.setattr(
        Driver, "reset_cache", lambda self, *tiers: honest(self, *(tier for tier in tiers if tier != "host"))
    )
    with pytest.raises(InvariantBroken, match="expected 63 from the ssd"):
        TtftBench((64,), repeat=1, seed=0).measure(make_engine(ssd_config), ssd_config, silent)


def test_a_hit_on_disk_for_which_nothing_was_read_is_noticed(make_engine, ssd_config, monkeypatch):
    engine, honest = make_engine(ssd_config), Engine.stats

    def stats(self):
        taken = honest(self)
        taken.traffic.bytes["ssd", "host"] = 0
        return taken

    monkeypatch.setattr(Engine, "stats", stats)
    with pytest.raises(InvariantBroken, match="0 bytes were read from the ssd tier"):
        TtftBench((64,), repeat=1, seed=0).measure(engine, ssd_config, silent)


# ---------------------------------------------------------------------------------------------------- restart


BENCH = RestartBench((64, 20), repeat=1, seed=0)
LONGER = RestartBench((64, 320), repeat=1, seed=0)


def test_what_one_engine_computed_the_next_reads_from_disk(ssd_config):
    before = BENCH.compute(ssd_config, "bench", silent)
    assert before.num_blocks == 2 * (4 + 1) and before.refused == []
    after = BENCH.ask_again(ssd_config, "bench", before.num_blocks, silent)
    for length, from_disk in ((64, 63), (20, 16)):
        (computed,), (restored,) = after.samples[length]["cold"], after.samples[length]["ssd"]
        assert computed.source == KvSource(computed=length)
        assert (
            restored.source
            == after.first[length].source
            == KvSource(ssd=from_disk, computed=length - from_disk)
        )


def test_prompts_that_the_disk_does_not_hold_together_are_refused_before_a_process_computes_them(
    ssd_config, monkeypatch
):
    """Of 64 tokens, two runs: two prompts of 4 blocks that the first process computes, and one that the
    second does before the last is asked for. Those of 320 are as many of 20, and the disk has 8 + 8 for the
    others."""
    small = with_disk(ssd_config, 0.0003)
    monkeypatch.setattr(ttft, "sample", lambda *_: pytest.fail("something was measured"))
    refused = RestartBench((320,), repeat=1, seed=0).compute(small, "bench", silent).refused
    (said,) = refused
    assert said.startswith("320 tokens, 4 prompts: they need 60 KV blocks on the disk, which holds ")
    monkeypatch.undo()
    before = LONGER.compute(small, "bench", silent)
    (said,) = before.refused
    assert list(before.cold) == [64] and said.startswith(
        "320 tokens, 4 prompts: they need 76 KV blocks on the disk, which holds "
    )


def test_the_size_that_a_refusal_proposes_is_enough_for_a_restart(ssd_config):
    (said,) = LONGER.compute(with_disk(ssd_config, 0.0003), "bench", silent).refused
    enough = with_disk(ssd_config, proposed(said))
    before = LONGER.compute(enough, "again", silent)
    assert before.refused == [] and set(
        LONGER.ask_again(enough, "again", before.num_blocks, silent).samples
    ) == {64, 320}


def test_a_restart_needs_host_memory_for_each_prompt(ssd_config):
    config = dataclasses.replace(
        ssd_config, offload=dataclasses.replace(ssd_config.offload, host_gib=3.5 * 8192 / GIB)
    )
    before = BENCH.compute(config, "bench", silent)
    (said,) = before.refused
    assert (
        list(before.cold) == [20]
        and ("64 tokens, 4 prompts: they need 4 KV blocks in host memory, which holds 3 (48 tokens)") in said
    )


def test_a_directory_that_lost_its_files_is_no_restart(ssd_config, monkeypatch, tmp_path):
    before = BENCH.compute(ssd_config, "bench", silent)
    for file in (tmp_path / "ssd").glob("*.kv"):
        file.unlink()
    monkeypatch.setattr(ttft, "SCAN_S", 0.1)
    with pytest.raises(DeadlineExceeded, match="0 of 10 blocks"):
        BENCH.ask_again(ssd_config, "bench", before.num_blocks, silent)


def test_the_command_restarts_in_new_processes_and_leaves_no_directory(tmp_path, capsys):
    file, near = tmp_path / "restart.json", tmp_path / "cache"
    near.mkdir()
    (near / "penstock-000000.kv").write_text("somebody's cache")
    tiny = ["--model", "tiny-qwen3", "--load-format", "dummy", "--device", "cpu", "--device-kv-blocks", "64"]
    flags = ["--tokens", "48,9999", "--repeat", "1", "--kv-offload-ssd-dir", str(near), "--json", str(file)]
    assert main(["bench", "ttft", "--restart", *tiny, *flags]) == 0
    report = json.loads(file.read_text())
    (row,) = report["results"]
    assert report["bench"] == "ttft --restart" and report["model"] == "tiny-qwen3"
    assert row["source"]["ssd"] == asdict(KvSource(ssd=47, computed=1)) and row["source"]["cold"] == asdict(
        KvSource(computed=48)
    )
    assert f"{row['ratio_ssd']:.1f}" in capsys.readouterr().out
    assert [path.name for path in near.iterdir()] == ["penstock-000000.kv"] and (
        near / "penstock-000000.kv"
    ).stat().st_size == 16


def test_an_error_in_a_process_of_the_measurement_is_an_error_here():
    with pytest.raises(ConfigError, match="no good"):
        run_in_process(child_work.fail, ("no good",), silent)
    with pytest.raises(StepFailed, match="no message says it"):
        run_in_process(child_work.fail_oddly, (), silent)
    with pytest.raises(StepFailed, match="code 3"):
        run_in_process(child_work.vanish, (3,), silent)


def test_progress_and_result_come_from_another_process():
    told = []
    assert run_in_process(child_work.say, (2,), lambda *said: told.append(said)) != os.getpid()
    assert told == [("working", 0, 2), ("working", 1, 2)]


def test_nothing_outlives_a_process_without_offload(capsys):
    assert main(["bench", "ttft", "--restart", "--no-kv-offload"]) == 2
    assert "--restart needs --kv-offload" in capsys.readouterr().err
    assert RestartBench((1,), 1, 0).name == "ttft --restart"


def test_a_scratch_directory_lies_near_the_one_that_is_named_and_is_removed(config, tmp_path):
    with_dir = dataclasses.replace(config, offload=OffloadConfig(ssd_dir=str(tmp_path / "not" / "there")))
    with scratch_ssd(with_dir) as made:
        (folder,) = tmp_path.iterdir()
        assert made.offload.ssd_dir == str(folder) and list(folder.iterdir()) == []
    assert list(tmp_path.iterdir()) == []
    with scratch_ssd(config) as made:
        assert made is config
    (tmp_path / "file").touch()
    with_file = dataclasses.replace(config, offload=OffloadConfig(ssd_dir=str(tmp_path / "file")))
    with pytest.raises(ConfigError, match="not a directory"), scratch_ssd(with_file):
        pass


def test_ctrl_c_is_the_parents_to_hear():
    assert run_in_process(child_work.interrupted, (), silent) == "went on"
