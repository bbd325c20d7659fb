"""`bench drafts`: as many drafts are kept as was asked for, every output says that this is made up, and no
other command can do it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from penstock.cli import main

ROOT = Path(__file__).resolve().parents[3]
TINY = ["--model", "tiny-llama", "--load-format", "dummy", "--device", "cpu", "--device-kv-blocks", "64"]
SIZES = ["--batch", "1,2", "--drafts", "2", "--prompt-tokens", "8", "--tokens", "40", "--repeat", "1"]


def test_as_many_drafts_are_kept_as_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "drafts.json"
    asked = ["--speculate", "draft:tiny-llama", "--synthetic-acceptance", "0,0.6,1", "--json", str(file)]
    assert main(["bench", "drafts", *TINY, *SIZES, *asked]) == 0
    said = capsys.readouterr().out
    assert "(synthetic acceptance)" in said and "synthetic acceptance" in said.splitlines()[1]
    written = json.loads(file.read_text())
    rows = written["results"]
    assert "synthetic" in written["bench"] and all(row["synthetic"] for row in rows)
    assert [(row["drafts"], row["batch"]) for row in rows] == [(0, 1), (0, 2), *[(2, 1), (2, 2)] * 3]
    for row in rows:
        kept, expected = row["tokens_per_step"], row["expected_tokens_per_step"]
        exact = row["synthetic_acceptance"] in (None, 0, 1)
        assert kept == pytest.approx(expected, abs=0.01 if exact else 0.6)
        assert row["against_plain"] > 0
    expected = sorted({row["expected_tokens_per_step"] for row in rows})
    assert expected == pytest.approx([1.0, 1.96, 3.0])


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "bench drafts needs --speculate"),
        (["--speculate", "ngram", "--drafts", "99"], "--drafts 99: a request has at most 16"),
        (["--speculate", "ngram", "--synthetic-acceptance", "1.5"], "no list of shares from 0 to 1"),
        (["--speculate", "ngram", "--speculate-sampling", "rejection"], "would change nothing"),
    ],
)
def test_what_makes_no_sense_is_refused(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "drafts", *TINY, *arguments]) == 2
    assert why in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "bench decode"])
def test_no_other_command_takes_the_flag(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), *TINY, "--speculate", "ngram", "--synthetic-acceptance", "0.5"]) == 2
    assert "unrecognized arguments: --synthetic-acceptance" in capsys.readouterr().err


def test_nothing_but_the_measurement_asks_for_it() -> None:
    """No setting, so no file of settings and no environment either."""
    sources = ROOT / "src" / "penstock"
    asking = {
        str(file.relative_to(sources))
        for file in sources.rglob("*.py")
        if re.search(r"synthetic=(?!False|synthetic)", file.read_text())
    }
    assert asking == {"commands/bench.py"}
    assert "synthetic" not in (sources / "config.py").read_text()
