"""`penstock bench deep` on a tiny model: what it shows, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli import main

SIZES = [
    "--model",
    "tiny-qwen3",
    "--load-format",
    "dummy",
    "--device",
    "cpu",
    "--device-kv-blocks",
    "40",
    "--kv-offload-host-gib",
    "0.05",
]


def deep(tmp_path: Path, *more: str) -> tuple[int, list[dict[str, float]]]:
    code = main(
        [
            "bench",
            "deep",
            *SIZES,
            "--max-batch",
            "2",
            "--tokens",
            "4",
            "--json",
            str(tmp_path / "deep.json"),
            *more,
        ]
    )
    return code, json.loads((tmp_path / "deep.json").read_text())["results"]


def test_long_sequences_are_measured_paged_out_and_where_they_fit_in_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, rows = deep(tmp_path, "--lengths", "256,1024", "--kv-resident-tokens", "128")
    assert code == 0
    assert [(row["length"], row["resident"]) for row in rows] == [(256, 128), (1024, 128), (256, 256)]
    for row in rows:
        assert row["prefill_s"] > 0 and row["decode_ms"] > 0 and row["next_s"] > 0
        assert row["restored"] >= 1 - (64 + 4 + 16) / (row["length"] + 68)
        assert row["link_ms"] is None, "there is no link beside the CPU"
    assert "1024" in capsys.readouterr().out


def test_what_is_pinned_while_parts_are_chosen_needs_no_pin_where_all_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, rows = deep(
        tmp_path,
        "--lengths",
        "416,1024",
        "--kv-resident-tokens",
        "384",
        "--kv-residency",
        "scored",
        "--kv-pin-spans",
        "0-64",
    )
    assert (code, capsys.readouterr().err.count("skipped")) == (0, 0)
    assert [(row["length"], row["resident"]) for row in rows] == [
        *2 * [(416, 384)],
        *2 * [(1024, 384)],
        (416, 416),
    ]


def test_without_a_flag_what_does_not_fit_is_paged_out(tmp_path: Path) -> None:
    _, rows = deep(tmp_path, "--lengths", "1024")
    assert [(row["length"], row["resident"]) for row in rows] == [(1024, 640)]


def test_it_needs_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [*SIZES[:-2], "--no-kv-offload", "--lengths", "256"]
    assert main(["bench", "deep", *sizes]) == 2
    assert "bench deep needs --kv-offload" in capsys.readouterr().err


def test_one_token_has_no_time_between_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "deep", *SIZES, "--lengths", "256", "--tokens", "1"]) == 2
    assert "--tokens of at least 2" in capsys.readouterr().err


def test_scored_residency_is_measured_beside_exact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scored = (
        "--kv-resident-tokens",
        "448",
        "--kv-residency",
        "scored",
        "--kv-pin-spans",
        "0-10",
        "--tokens",
        "24",
    )
    code, rows = deep(tmp_path, "--lengths", "256,1024", *scored)
    assert code == 0
    assert [(row["mode"], row["length"], row["resident"]) for row in rows] == [
        ("full", 256, 256),
        ("exact", 1024, 448),
        ("scored", 1024, 448),
        ("full", 256, 256),
    ]
    assert all(row["decode_ms"] > 0 and row["next_s"] > 0 for row in rows)
    assert rows[1]["restored"] >= 1 - (64 + 24 + 16) / (1024 + 64 + 24)
    assert rows[2]["restored"] >= 1 - (64 + 24 + 64 + 16) / (1024 + 192 + 50)
    assert "scored" in capsys.readouterr().out
