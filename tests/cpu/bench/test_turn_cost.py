"""The developers' measurement of the host's part of a turn runs, and every case of it measures something."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "turn_cost.py"


@pytest.fixture
def turn_cost(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("turn_cost", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "turn_cost", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "TOKENS", (400, 800))
    monkeypatch.setattr(module, "REQUESTS", (1, 3))
    return module


def test_every_case_of_the_turn_cost_runs(
    turn_cost: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["turn_cost.py", "--repeat", "1", "--json", str(found)])
    turn_cost.main()
    rows = json.loads(found.read_text())
    measured = {(row["what"], row["num_tokens"], row["num_requests"]) for row in rows}
    printed = capsys.readouterr().out
    for what, num_requests in turn_cost.DRAWN:
        assert all((what, num_tokens, min(num_requests, 3)) in measured for num_tokens in (400, 800)), f"nothing was measured of {what}"
        assert what in printed
    assert all(0 <= row["ms"] <= row["most_ms"] for row in rows)
