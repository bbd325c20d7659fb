"""The developers' measurement of the host's part of a turn runs, and every case of it measures something."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import turn_cost


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_cost, "TOKENS", (400, 800))
    monkeypatch.setattr(turn_cost, "REQUESTS", (1, 3))


def test_every_case_of_the_turn_cost_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["turn_cost.py", "--repeat", "1", "--json", str(found)])
    turn_cost.main()
    rows = json.loads(found.read_text())
    measured = {(row["what"], row["num_tokens"], row["num_requests"]) for row in rows}
    printed = capsys.readouterr().out
    for what in ("decode: plan", "prompt chunk: pack", "line: plan, admits", "promote: plan", "cancel"):
        assert {(what, num_tokens, 1) for num_tokens in (400, 800)} <= measured
        assert what in printed
    assert all(0 <= row["ms"] <= row["most_ms"] for row in rows)
