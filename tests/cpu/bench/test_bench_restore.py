"""`bench restore`: what is said to have come back has come back, beside requests that went on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from penstock.bench.decode import RestoreBench
from penstock.cli import main
from penstock.config import GIB, OffloadConfig
from penstock.engine.build import build
from penstock.errors import ConfigError, InvariantBroken
from penstock.models.progress import silent


def test_decoding_goes_on_while_prefixes_come_back(tiered_engine, tiered_config):
    block_gib = tiered_engine.cache.saves.layout.block_bytes / 2**30
    (row,) = (
        RestoreBench((2,), gib=10.5 * block_gib, tokens=40, repeat=1, seed=0)
        .measure(tiered_engine, tiered_config, silent)
        .rows
    )
    assert row["promoted_blocks"] == 10
    assert row["alone_ms"]["steps"] > 20 and row["restoring_ms"]["steps"] > 20
    assert row["p99_ratio"] == row["restoring_ms"]["p99"] / row["alone_ms"]["p99"]


def test_a_restore_that_brings_nothing_back_is_not_reported(tiered_engine, tiered_config, monkeypatch):
    monkeypatch.setattr(type(tiered_engine.cache.loads), "worth", lambda self, lease, depth: 0)
    block_gib = tiered_engine.cache.saves.layout.block_bytes / 2**30
    with pytest.raises(InvariantBroken, match="0 blocks were promoted"):
        RestoreBench((2,), gib=10.5 * block_gib, tokens=40, repeat=1, seed=0).measure(
            tiered_engine, tiered_config, silent
        )


def test_more_than_fits_is_skipped_with_a_reason(tiered_engine, tiered_config):
    results = RestoreBench((2,), gib=1.0, tokens=40, repeat=1, seed=0).measure(
        tiered_engine, tiered_config, silent
    )
    (said,) = results.skipped
    assert (
        not results.rows
        and said.startswith("1 GiB and 2 requests beside them: they need ")
        and "on the device, which holds 64" in said
    )


def test_host_memory_has_to_hold_what_returns(tiered_engine, config):
    block_bytes = tiered_engine.arena.layout.block_bytes
    bench = RestoreBench((2,), gib=10.5 * block_bytes / GIB, tokens=40, repeat=1, seed=0)
    for blocks, num_rows in ((10, 0), (11, 1)):  # one of them to write
        config = dataclasses.replace(
            config, offload=OffloadConfig(host_gib=blocks * block_bytes / GIB, load_always=True)
        )
        engine = build(config)
        results = bench.measure(engine, config, silent)
        assert len(results.rows) == num_rows
        assert (
            num_rows
            or ("they need 11 KV blocks in host memory, which holds 10 (160 tokens); --kv-offload")
            in results.skipped[0]
        )
        engine.close(timeout_s=20.0)


def test_requests_that_end_before_all_decode_together_are_no_measurement(tiered_engine, tiered_config):
    block_gib = tiered_engine.cache.saves.layout.block_bytes / GIB
    with pytest.raises(ConfigError, match="raise --tokens or --prefill-chunk"):
        RestoreBench((2,), gib=10.5 * block_gib, tokens=6, repeat=1, seed=0).measure(
            tiered_engine, tiered_config, silent
        )


def test_the_command_prints_a_table_and_writes_file_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, picture = tmp_path / "restore.json", tmp_path / "restore.svg"
    tiny = (
        "--model",
        "tiny-qwen3",
        "--load-format",
        "dummy",
        "--device",
        "cpu",
        "--kv-offload-host-gib",
        "0.02",
    )
    argv = ["bench", "restore", *tiny, "--gib", "0.001", "--batch", "2", "--tokens", "30", "--repeat", "1"]
    assert main([*argv, "--json", str(file), "--plot", str(picture)]) == 0
    (row,) = json.loads(file.read_text())["results"]
    assert f"{row['p99_ratio']:.3f}" in capsys.readouterr().out
    assert b"<svg" in picture.read_bytes()


def test_it_needs_a_tier_to_restore_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "restore", "--no-kv-offload"]) == 2
    assert "--kv-offload" in capsys.readouterr().err


def test_less_than_a_block_is_refused(tiered_engine, tiered_config):
    with pytest.raises(ConfigError, match="--gib 1e-09 is less than one KV block"):
        RestoreBench((2,), gib=1e-9, tokens=40, repeat=1, seed=0).measure(
            tiered_engine, tiered_config, silent
        )
