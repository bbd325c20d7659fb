"""`penstock bench collectives` times sums between processes, and leaves none behind."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from penstock.cli import main


def test_it_times_sums_by_size(tmp_path: Path) -> None:
    file, command = tmp_path / "figures.json", ["bench", "collectives", "--tensor-parallel", "2"]
    assert main([*command, "--device", "cpu", "--kib", "4,16", "--repeat", "2", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["results"]
    assert [row["kib"] for row in rows] == [4, 16]
    assert all(row["sum_s"]["median"] > 0 and row["backend"] == "gloo" for row in rows)
    left = [
        child for child in psutil.Process().children() if "bench.collectives" in " ".join(child.cmdline())
    ]
    assert not left


def test_one_rank_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "collectives", "--device", "cpu"]) == 2
    assert "needs --tensor-parallel" in capsys.readouterr().err
