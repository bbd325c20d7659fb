"""`bench ttft`: cold is cold, and what is said to come from a tier has come from there."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict

import pytest

from penstock.bench.run import Driver
from penstock.bench.ttft import NEW_TOKENS, TtftBench
from penstock.cli import main
from penstock.config import GIB, OffloadConfig
from penstock.contract import KvSource
from penstock.engine.build import build
from penstock.errors import InvariantBroken
from penstock.models.progress import silent


@pytest.mark.parametrize(("length", "from_device"), [(64, 63), (70, 64), (15, 0), (1, 0)])
def test_the_device_serves_all_full_blocks_but_never_the_last_token(engine, config, length, from_device):
    (row,) = TtftBench((length,), repeat=2, seed=0).measure(engine, config, silent).rows
    source = row["source"]
    assert source["cold"] == asdict(KvSource(computed=length))
    assert source["device"] == asdict(KvSource(device=from_device, computed=length - from_device))
    assert source["device_new"]["device"] == length // 16 * 16
    assert row["ratio"] == row["ttft_ms"]["cold"]["median"] / row["ttft_ms"]["device"]["median"]
    assert all(len(row["ttft_ms"][case]["all"]) == 2 for case in ("cold", "device", "device_new"))
    assert "host" not in source and "ratio_host" not in row


@pytest.mark.parametrize(("length", "from_host"), [(64, 63), (70, 64), (15, 0), (1, 0)])
def test_the_host_serves_what_the_device_has_forgotten(tiered_engine, tiered_config, length, from_host):
    (row,) = TtftBench((length,), repeat=2, seed=0).measure(tiered_engine, tiered_config, silent).rows
    source, num_blocks = row["source"], length // 16
    assert source["cold"] == asdict(KvSource(computed=length))
    assert source["device"] == asdict(KvSource(device=from_host, computed=length - from_host))
    assert source["host"] == asdict(KvSource(host=from_host, computed=length - from_host))
    assert source["host_new"] == asdict(
        KvSource(host=16 * num_blocks, computed=length + NEW_TOKENS - 16 * num_blocks)
    )
    assert row["promoted_blocks"] == {
        "cold": 0,
        "device": 0,
        "device_new": 0,
        "host": num_blocks,
        "host_new": num_blocks,
    }
    assert row["ratio_host"] == row["ttft_ms"]["cold"]["median"] / row["ttft_ms"]["host"]["median"]


def test_without_the_prefix_cache_everything_comes_from_the_host(tiered_config):
    config = dataclasses.replace(tiered_config, kv=dataclasses.replace(tiered_config.kv, prefix_cache=False))
    engine = build(config)
    (row,) = TtftBench((64,), repeat=2, seed=0).measure(engine, config, silent).rows
    assert set(row["source"]) == {"cold", "host", "host_new"} and "ratio" not in row
    assert row["source"]["host"] == asdict(KvSource(host=63, computed=1))
    assert row["promoted_blocks"]["host"] == 4
    engine.close(timeout_s=20.0)


def test_a_cache_that_serves_nothing_is_not_reported_as_served(engine, config, monkeypatch):
    monkeypatch.setattr("penstock.kv.blocks.pool.BlockPool.find", lambda self, keys, like=None: [])
    with pytest.raises(InvariantBroken, match="expected 63 from the device"):
        TtftBench((64,), repeat=1, seed=0).measure(engine, config, silent)


def test_a_host_that_has_nothing_is_not_reported_as_served(tiered_engine, tiered_config, monkeypatch):
    monkeypatch.setattr("penstock.kv.cache.KvCache.lease", lambda *_: None)
    with pytest.raises(InvariantBroken, match="expected 63 from the host"):
        TtftBench((64,), repeat=1, seed=0).measure(tiered_engine, tiered_config, silent)


def test_a_host_hit_that_moved_no_block_is_noticed(tiered_engine, tiered_config, monkeypatch):
    honest = type(tiered_engine).stats

    def stats(self):
        taken = honest(self)
        taken.cache["promoted"] = 0
        return taken

    monkeypatch.setattr(type(tiered_engine), "stats", stats)
    with pytest.raises(InvariantBroken, match="0 blocks were promoted"):
        TtftBench((64,), repeat=1, seed=0).measure(tiered_engine, tiered_config, silent)


def test_a_cold_run_that_was_not_cold_is_noticed(engine, config, monkeypatch):
    monkeypatch.setattr(Driver, "reset_cache", lambda self, *tiers: 0)
    monkeypatch.setattr(
        "penstock.bench.ttft.random_prompts", lambda num, length, vocab, seed: [list(range(length))]
    )
    with pytest.raises(InvariantBroken, match="expected none"):
        TtftBench((64,), repeat=1, seed=0).measure(engine, config, silent)


def test_counters_that_disagree_with_the_events_are_noticed(engine, config, monkeypatch):
    honest = type(engine).stats

    def stats(self):
        taken = honest(self)
        taken.prompt_tokens["device"] = 0
        return taken

    monkeypatch.setattr(type(engine), "stats", stats)
    with pytest.raises(InvariantBroken, match="the engine counted"):
        TtftBench((64,), repeat=1, seed=0).measure(engine, config, silent)


@pytest.mark.parametrize("length", [1008, 4000])
def test_a_length_that_does_not_fit_is_skipped_with_a_reason(engine, config, length):
    results = TtftBench((length, 32), repeat=1, seed=0).measure(engine, config, silent)
    (said,) = results.skipped
    blocks = -(-(length + NEW_TOKENS + 1) // 16)
    assert said.startswith(
        f"{length} tokens: with 16 new ones and one to write they exceed the context of 1024; "
    )
    assert said.endswith(
        f"they need {blocks} KV blocks on the device, which holds 64 (1024 tokens); --device-kv-blocks "
        f"{blocks} would do"
    )
    assert [row["tokens"] for row in results.rows] == [32]


def with_host(config, block_bytes, num_blocks):
    return dataclasses.replace(
        config, offload=OffloadConfig(host_gib=num_blocks * block_bytes / GIB, load_always=True)
    )


# a block more for each case with new tokens
@pytest.mark.parametrize(("length", "blocks"), [(256, 18), (264, 18), (15, 2)])
def test_a_length_that_host_memory_does_not_hold_is_refused_before_anything_is_measured(
    tiered_engine, config, length, blocks
):
    block_bytes, told = tiered_engine.cache.saves.layout.block_bytes, []
    small = with_host(config, block_bytes, blocks - 1)
    engine = build(small)
    results = TtftBench((length,), repeat=1, seed=0).measure(engine, small, lambda *said: told.append(said))
    engine.close(timeout_s=20.0)
    (said,) = results.skipped
    holds = f"which holds {blocks - 1} ({(blocks - 1) * 16} tokens)"
    assert results.rows == [] and told == []
    assert said.startswith(
        f"{length} tokens: they need {blocks} KV blocks in host memory, {holds}; --kv-offload-host-gib "
    )
    enough = dataclasses.replace(
        config, offload=OffloadConfig(host_gib=float(said.split()[-3]), load_always=True)
    )
    engine = build(enough)
    assert [
        row["tokens"] for row in TtftBench((length,), repeat=1, seed=0).measure(engine, enough, silent).rows
    ] == [length]
    assert blocks <= sum(engine.stats().kv_blocks["host"].values()) <= 1.01 * blocks + 1, (
        "what it proposes is not much more than needed"
    )
    engine.close(timeout_s=20.0)


def test_the_command_says_what_would_do_and_measures_what_fits(capsys):
    tiny = ["--model", "tiny-qwen3", "--load-format", "dummy", "--device", "cpu", "--repeat", "1"]
    assert main(["bench", "ttft", *tiny, "--kv-offload-host-gib", "0.0001", "--tokens", "96"]) == 1
    assert "KV blocks in host memory, which holds" in capsys.readouterr().err
    argv = ["bench", "ttft", *tiny, "--no-kv-offload", "--tokens", "32,1500", "--device-kv-gib"]
    assert main([*argv, "0.002"]) == 0
    *_, flag, gib, _, _ = capsys.readouterr().err.split()
    assert flag == "--device-kv-gib" and main([*argv, gib]) == 0
    assert "skipped" not in capsys.readouterr().err


def test_the_command_prints_a_table_and_writes_file_and_picture(tmp_path, capsys):
    file, picture = tmp_path / "ttft.json", tmp_path / "ttft.svg"
    tiny = ("--model", "tiny-qwen3", "--load-format", "dummy", "--device", "cpu", "--device-kv-blocks", "64")
    argv = [
        "bench",
        "ttft",
        *tiny,
        "--tokens",
        "48,9999",
        "--repeat",
        "2",
        "--json",
        str(file),
        "--plot",
        str(picture),
    ]
    assert main(argv) == 0
    shown = capsys.readouterr()
    report = json.loads(file.read_text())
    (row,) = report["results"]
    assert f"{row['ttft_ms']['cold']['median']:.2f}" in shown.out
    assert report["skipped"][0] in shown.err
    assert report["settings"] == {"lengths": [48, 9999], "repeat": 2, "seed": 0}
    assert b"<svg" in picture.read_bytes()
    assert row["source"]["host"]["host"] == 47 and row["promoted_blocks"]["host"] == 3


def test_the_command_measures_the_host_alone_or_the_device_alone(tmp_path, capsys):
    tiny = (
        "--model",
        "tiny-qwen3",
        "--load-format",
        "dummy",
        "--device",
        "cpu",
        "--device-kv-blocks",
        "64",
        "--tokens",
        "48",
        "--repeat",
        "1",
    )
    for flags, cases in (
        ("--no-prefix-cache", {"cold", "host", "host_new"}),
        ("--no-kv-offload", {"cold", "device", "device_new"}),
    ):
        file = tmp_path / "ttft.json"
        assert main(["bench", "ttft", *tiny, flags, "--json", str(file)]) == 0
        (row,) = json.loads(file.read_text())["results"]
        assert set(row["ttft_ms"]) == cases
    capsys.readouterr()
