"""`bench turns` and `bench deep`: what was said before comes back from a tier, and the figures add up."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from penstock.bench.run import Driver
from penstock.bench.turns import ALL, TurnsBench
from penstock.cli import main
from penstock.config import EngineConfig, OffloadConfig
from penstock.contract import KvSource
from penstock.engine.build import build

BENCH = TurnsBench(conversations=4, turns=3, prompt_tokens=40, tokens=8, repeat=2, seed=0)
SIZES = "--model tiny-qwen3 --load-format dummy --device cpu --device-kv-blocks 40 --kv-offload-host-gib 0.05"


def test_each_turn_reuses_what_was_said_before_in_the_same_run_and_computes_the_rest(engine, config):
    results = BENCH.measure(Driver(engine, config))
    assert results.skipped == [] and [row["turn"] for row in results.rows] == [1, 2, 3, ALL]
    for turn, row in enumerate(results.rows[:3], start=1):
        # tokens of a conversation when the turn begins; the last of them was never fed back
        before = 48 * (turn - 1)
        reused = max(0, before - 1) // 16 * 16
        assert row["source"] == asdict(KvSource(device=4 * reused, computed=4 * (before + 40 - reused)))
        assert row["generated_tokens"] == 4 * 8 and len(row["seconds"]["all"]) == 2
    *turns, whole = results.rows
    assert whole["generated_tokens"] == 3 * 4 * 8
    assert whole["source"] == {tier: sum(row["source"][tier] for row in turns) for tier in whole["source"]}
    assert whole["seconds"]["all"][0] == pytest.approx(sum(row["seconds"]["all"][0] for row in turns))
    assert whole["tokens_per_s"] == pytest.approx(whole["generated_tokens"] / whole["seconds"]["median"])


@pytest.fixture
def crowded(config):
    """More conversations than fit on the device, which is promised twice over."""
    crowded = replace(
        config,
        kv=replace(config.kv, device_blocks=20),
        engine=EngineConfig(max_batch=8, prefill_chunk=64, overcommit=2.0),
        offload=OffloadConfig(host_gib=0.05, load_always=True),
    )
    engine = build(crowded)
    yield engine, crowded
    engine.close(timeout_s=20.0)


def test_what_does_not_fit_on_the_device_comes_back_from_the_host(crowded):
    *turns, whole = replace(BENCH, conversations=8, repeat=1).measure(Driver(*crowded)).rows
    assert turns[0]["source"]["host"] == 0 < min(row["source"]["host"] for row in turns[1:])
    for row in turns:
        assert sum(row["source"].values()) == 8 * (48 * (row["turn"] - 1) + 40)
    assert whole["retractions"] == sum(row["retractions"] for row in turns)


@pytest.mark.parametrize("changes", [{"turns": 100}, {"prompt_tokens": 400}, {"tokens": 100}])
def test_conversations_that_do_not_fit_are_skipped_with_a_reason(crowded, changes):
    results = replace(BENCH, **changes).measure(Driver(*crowded))
    assert results.rows == [] and "the context holds 320" in results.skipped[0]


# ------------------------------------------------------------------------------------------------------- deep


def deep(tmp_path: Path, flags: str) -> list[dict[str, float]]:
    file = tmp_path / "deep.json"
    argv = f"{SIZES} --max-batch 2 --tokens 4 --plot {tmp_path / 'deep.png'} {flags}".split()
    assert main(["bench", "deep", *argv, "--json", str(file)]) == 0
    return json.loads(file.read_text())["results"]


def test_long_sequences_are_measured_paged_out_and_where_they_fit_in_full(tmp_path, capsys):
    rows = deep(tmp_path, "--lengths 256,1024 --kv-resident-tokens 128")
    assert [(row["length"], row["resident"]) for row in rows] == [(256, 128), (1024, 128), (256, 256)]
    for row in rows:
        assert row["prefill_s"] > 0 and row["decode_ms"] > 0 and row["next_s"] > 0
        assert row["restored"] >= 1 - (64 + 4 + 16) / (row["length"] + 68)
        assert row["link_ms"] is None, "there is no link beside the CPU"
    assert "1024" in capsys.readouterr().out
    # without a flag, what does not fit is paged out
    assert [(row["length"], row["resident"]) for row in deep(tmp_path, "--lengths 1024")] == [(1024, 640)]


@pytest.mark.parametrize(("resident", "lengths", "tokens"), [(448, (256, 1024), 24), (384, (416, 1024), 4)])
def test_scored_residency_is_measured_beside_exact(tmp_path, capsys, resident, lengths, tokens):
    """What is pinned while parts are chosen needs no pin where all fits."""
    sizes = f"--lengths {lengths[0]},{lengths[1]} --kv-resident-tokens {resident} --tokens {tokens}"
    rows = deep(tmp_path, f"{sizes} --kv-residency scored --kv-pin-spans 0-64")
    both = [(mode, length, resident) for length in lengths for mode in ("exact", "scored")]
    full = ("full", lengths[0], lengths[0])
    expected = [full, *both[2:], full] if lengths[0] < resident else [*both, full]
    assert [(row["mode"], row["length"], row["resident"]) for row in rows] == expected
    assert all(row["decode_ms"] > 0 and row["next_s"] > 0 for row in rows)
    exact, scored = (row for row in rows if row["length"] == 1024)
    assert exact["restored"] >= 1 - (64 + tokens + 16) / (1024 + 64 + tokens)
    assert scored["restored"] >= 1 - (64 + tokens + 64 + 16) / (1024 + 192 + 2 * tokens + 2)
    shown = capsys.readouterr()
    assert "scored" in shown.out and "skipped" not in shown.err


def test_deep_sequences_need_host_memory_and_a_time_between_tokens(capsys):
    sizes = [*SIZES.split(), "--lengths", "256"]
    assert main(["bench", "deep", *sizes[:-4], "--no-kv-offload", *sizes[-2:]]) == 2
    assert "bench deep needs --kv-offload" in capsys.readouterr().err
    assert main(["bench", "deep", *sizes, "--tokens", "1"]) == 2
    assert "--tokens of at least 2" in capsys.readouterr().err
