"""`penstock bench`: every kind prints its figures, writes them with their settings, draws them, and leaves
nothing on a disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main

EXCERPT = Path(__file__).resolve().parents[2] / "data" / "agentic-coding-excerpt.jsonl"
ENGINE = "--model tiny-qwen3 --load-format dummy --device cpu --kv-offload-host-gib 0.02"
SMALL = f"{ENGINE} --device-kv-blocks 64"
# what is asked for; settings and number of rows in the file; a figure of the first row, as it is shown
KINDS: dict[str, tuple[str, dict[str, Any], int, str, str]] = {
    "decode": (
        f"{SMALL} --batch 2,1,2,999 --prompt-tokens 8 --tokens 8 --repeat 1",
        {"batches": [2, 1, 999], "prompt_tokens": 8},
        2,
        "step_ms.median",
        ".3f",
    ),
    "ttft": (
        f"{SMALL} --tokens 48,9999 --repeat 2",
        {"lengths": [48, 9999], "repeat": 2},
        1,
        "ttft_ms.cold.median",
        ".2f",
    ),
    "turns": (
        f"{SMALL} --conversations 6 --turns 2 --prompt-tokens 40 --tokens 8",
        {"conversations": 6, "turns": 2, "seed": 0},
        3,
        "seconds.median",
        ".2f",
    ),
    "agents": (
        f"{EXCERPT} {ENGINE} --device-kv-blocks 400 --users 2 --requests 3 --scale 8",
        {"users": 2, "requests": 3, "scale": 8, "trace": EXCERPT.name},
        3,
        "ttft_s.p50",
        ".2f",
    ),
    "transfer": (
        "--model tiny-qwen3 --device cpu --blocks 4 --layers 1,9 --repeat 1 --kv-offload-ssd-dir {disk}",
        {"blocks": [4], "layers": [1, 9]},
        16,
        "gb_s",
        ".2f",
    ),
    "restore": (
        f"{ENGINE} --gib 0.001 --batch 2 --tokens 30 --repeat 1",
        {"gib": 0.001},
        1,
        "p99_ratio",
        ".3f",
    ),
    "deep": (f"{SMALL} --max-batch 2 --lengths 256 --tokens 4", {"lengths": [256]}, 1, "decode_ms", ".2f"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_command_prints_a_table_and_writes_file_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    line, settings, num_rows, name, form = KINDS[kind]
    file, picture, disk = tmp_path / "found.json", tmp_path / "found.png", tmp_path / "disk"
    disk.mkdir()
    argv = line.format(disk=disk).split()
    assert main(["bench", kind, *argv, "--json", str(file), "--plot", str(picture)]) == 0
    shown, report = capsys.readouterr(), json.loads(file.read_text())
    assert set(report) >= {"machine", "config", "results", "skipped", "settings", "model", "device"}
    assert (report["bench"], report["model"], report["device"]) == (kind, "tiny-qwen3", "cpu")
    assert settings.items() <= report["settings"].items() and len(report["results"]) == num_rows
    value = report["results"][0]
    for part in name.split("."):
        value = value[part]
    assert f"{value:{form}}" in shown.out
    assert all(f"skipped: {why}" in shown.err for why in report["skipped"])
    assert picture.read_bytes().startswith(b"\x89PNG") and list(disk.iterdir()) == []


def test_a_tier_that_a_measurement_needs_has_to_be_there(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("restore", "deep"):
        assert main(["bench", kind, "--no-kv-offload"]) == 2
        assert f"bench {kind} needs --kv-offload" in capsys.readouterr().err
