"""`bench ttft`: cold is cold, and what is said to come from the device has come from there."""

from __future__ import annotations

import json

import pytest

from penstock.bench.run import Driver
from penstock.bench.ttft import TtftBench
from penstock.cli import main
from penstock.errors import InvariantBroken
from penstock.models.progress import silent


@pytest.mark.parametrize(("length", "from_device"), [(64, 63), (70, 64), (15, 0), (1, 0)])
def test_the_device_serves_all_full_blocks_but_never_the_last_token(engine, config, length, from_device):
    (row,) = TtftBench((length,), repeat=2, seed=0).measure(engine, config, silent).rows
    source = row["source"]
    assert source["cold"] == {"device": 0, "computed": length}
    assert source["device"] == {"device": from_device, "computed": length - from_device}
    assert source["device_new"]["device"] == length // 16 * 16
    assert row["ratio"] == row["ttft_ms"]["cold"]["median"] / row["ttft_ms"]["device"]["median"]
    assert all(len(row["ttft_ms"][case]["all"]) == 2 for case in ("cold", "device", "device_new"))


def test_a_cache_that_serves_nothing_is_not_reported_as_served(engine, config, monkeypatch):
    monkeypatch.setattr("penstock.kv.blocks.pool.BlockPool.find", lambda self, keys: [])
    with pytest.raises(InvariantBroken, match="0 of 64 prompt tokens came from the device; expected 63"):
        TtftBench((64,), repeat=1, seed=0).measure(engine, config, silent)


def test_a_cold_run_that_was_not_cold_is_noticed(engine, config, monkeypatch):
    monkeypatch.setattr(Driver, "reset_cache", lambda self: 0)
    monkeypatch.setattr("penstock.bench.ttft.random_prompts", lambda num, length, vocab, seed: [list(range(length))])
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


@pytest.mark.parametrize(("length", "said"), [(4000, "exceed the context")])
def test_a_length_that_does_not_fit_is_skipped_with_a_reason(engine, config, length, said):
    results = TtftBench((length, 32), repeat=1, seed=0).measure(engine, config, silent)
    assert said in results.skipped[0]
    assert [row["tokens"] for row in results.rows] == [32]


def test_the_command_prints_a_table_and_writes_file_and_picture(tmp_path, capsys):
    file, picture = tmp_path / "ttft.json", tmp_path / "ttft.svg"
    tiny = ("--model", "tiny-qwen3", "--load-format", "dummy", "--device", "cpu", "--device-kv-blocks", "64")
    argv = ["bench", "ttft", *tiny, "--tokens", "48,9999", "--repeat", "2", "--json", str(file), "--plot", str(picture)]
    assert main(argv) == 0
    shown = capsys.readouterr()
    report = json.loads(file.read_text())
    (row,) = report["results"]
    assert f"{row['ttft_ms']['cold']['median']:.2f}" in shown.out
    assert report["skipped"][0] in shown.err
    assert report["settings"] == {"lengths": [48, 9999], "repeat": 2, "seed": 0}
    assert b"<svg" in picture.read_bytes()
