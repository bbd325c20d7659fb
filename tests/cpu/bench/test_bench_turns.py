"""`bench turns`: what was said before comes back from a tier, and the figures add up."""

from __future__ import annotations

import dataclasses
import json

import pytest

from penstock.bench.turns import ALL, TurnsBench
from penstock.cli import main
from penstock.config import EngineConfig, OffloadConfig
from penstock.engine.build import build
from penstock.errors import InvariantBroken
from penstock.models.progress import silent


def bench(**changes):
    return TurnsBench(
        **{
            "conversations": 4,
            "turns": 3,
            "prompt_tokens": 40,
            "tokens": 8,
            "repeat": 2,
            "seed": 0,
            **changes,
        }
    )


def test_each_turn_reuses_what_was_said_before_and_computes_the_rest(engine, config):
    results = bench().measure(engine, config, silent)
    assert results.skipped == []
    assert [row["turn"] for row in results.rows] == [1, 2, 3, ALL]
    for turn, row in enumerate(results.rows[:3], start=1):
        # tokens of a conversation when the turn begins; the last of them was never fed back
        before = 48 * (turn - 1)
        reused = max(0, before - 1) // 16 * 16
        assert row["source"] == {
            "device": 4 * reused,
            "host": 0,
            "ssd": 0,
            "remote": 0,
            "computed": 4 * (before + 40 - reused),
        }
        assert row["generated_tokens"] == 4 * 8
        assert len(row["seconds"]["all"]) == 2
    whole = results.rows[3]
    assert whole["generated_tokens"] == 3 * 4 * 8
    assert whole["source"] == {
        tier: sum(row["source"][tier] for row in results.rows[:3]) for tier in whole["source"]
    }
    assert whole["seconds"]["all"][0] == pytest.approx(
        sum(row["seconds"]["all"][0] for row in results.rows[:3])
    )
    assert whole["tokens_per_s"] == pytest.approx(whole["generated_tokens"] / whole["seconds"]["median"])


@pytest.fixture
def crowded(config):
    """More conversations than fit on the device, which is promised twice over."""
    crowded = dataclasses.replace(
        config,
        kv=dataclasses.replace(config.kv, device_blocks=20),
        engine=EngineConfig(max_batch=8, prefill_chunk=64, overcommit=2.0),
        offload=OffloadConfig(host_gib=0.05, load_always=True),
    )
    engine = build(crowded)
    yield engine, crowded
    engine.close(timeout_s=20.0)


def test_what_does_not_fit_on_the_device_comes_back_from_the_host(crowded):
    rows = bench(conversations=8, repeat=1).measure(*crowded, silent).rows
    assert rows[0]["source"]["host"] == 0
    assert min(row["source"]["host"] for row in rows[1:3]) > 0
    for row in rows[:3]:
        assert sum(row["source"].values()) == 8 * (48 * (row["turn"] - 1) + 40)
    assert rows[-1]["retractions"] == sum(row["retractions"] for row in rows[:3])


def test_a_second_run_finds_nothing_of_the_first(engine, config):
    first = bench(repeat=1).measure(engine, config, silent).rows[0]
    assert first["source"]["device"] == 0, "the warm-up asked something else, and its cache was emptied"


def test_sources_that_do_not_add_up_are_noticed(engine, config, monkeypatch):
    monkeypatch.setattr("penstock.bench.run.Reader.__call__", _deaf_to_sources)
    with pytest.raises(InvariantBroken, match="came from"):
        bench().measure(engine, config, silent)


def _deaf_to_sources(reader, event):
    reader.tokens.extend(event.tokens)
    if event.finish is not None:
        reader.tally.ended.append(event)


@pytest.mark.parametrize("changes", [{"turns": 100}, {"prompt_tokens": 400}, {"tokens": 100}])
def test_conversations_that_do_not_fit_are_skipped_with_a_reason(crowded, changes):
    results = bench(**changes).measure(*crowded, silent)
    assert results.rows == [] and "the context holds 320" in results.skipped[0]


def test_the_command_prints_a_table_and_writes_file_and_picture(tmp_path, capsys):
    file, picture = tmp_path / "turns.json", tmp_path / "turns.png"
    tiny = (
        "--model",
        "tiny-qwen3",
        "--load-format",
        "dummy",
        "--device",
        "cpu",
        "--device-kv-blocks",
        "32",
        "--kv-offload-host-gib",
        "0.05",
    )
    sizes = (
        "--conversations",
        "6",
        "--turns",
        "2",
        "--prompt-tokens",
        "40",
        "--tokens",
        "8",
        "--json",
        str(file),
        "--plot",
        str(picture),
    )
    assert main(["bench", "turns", *tiny, *sizes]) == 0
    shown = capsys.readouterr()
    report = json.loads(file.read_text())
    assert [row["turn"] for row in report["results"]] == [1, 2, ALL]
    assert report["settings"] == {
        "conversations": 6,
        "turns": 2,
        "prompt_tokens": 40,
        "tokens": 8,
        "repeat": 1,
        "seed": 0,
    }
    assert f"{report['results'][-1]['tokens_per_s']:.0f}" in shown.out
    assert picture.read_bytes().startswith(b"\x89PNG")
