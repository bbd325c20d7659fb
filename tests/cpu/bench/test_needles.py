"""`benchmarks/needles.py`: what it counts is what the model wrote, and engine options reach the engine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import needles
from penstock.contract import Submission
from penstock.engine.engine import Engine
from retrieval import haystack

OPTIONS = ["--device", "cpu", "--device-kv-gib", "0.05", "--lengths", "1024,3000", "--prefill-chunk", "256"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_all_needles_are_found_at_every_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "needles.json"
    needles.main([*OPTIONS, "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert [(row["tokens"], row["found"], row["asked"], row["asked_again"]) for row in rows] == [
        (1024, 16, 16, 0),
        (3000, 16, 16, 0),
    ]
    assert all(
        row["prefill_s"] > 0 and 0 < row["decode_ms"]["median"] <= row["decode_ms"]["max"] for row in rows
    )
    assert capsys.readouterr().out.count("16/16") == 2


def test_a_needle_that_the_engine_loses_is_missing_in_the_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that reads a filler where the second needle was."""
    submit, model = Engine.submit, needles.Retrieval()
    lost = haystack(1024, 4).needles[1]
    token = model.needle(lost.key, lost.value)

    def submit_without(engine: Engine, asked: Submission, listener: Any) -> str:
        prompt = [model.filler(0) if one == token else one for one in asked.prompt]
        return submit(engine, dataclasses.replace(asked, prompt=prompt), listener)

    monkeypatch.setattr(Engine, "submit", submit_without)
    file = tmp_path / "needles.json"
    needles.main([*OPTIONS, "--lengths", "1024", "--needles", "4", "--json", str(file)])
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["found"], row["asked"], row["asked_again"]) == (3, 4, model.tries - 1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--model", "tiny-llama"], "--model is not taken"),
        (["--lengths", "64"], "64 tokens have no room for 6 needles"),
        (["--layers", "9"], "heads of all layers at most 16"),
        (["--device-kv-blocks", "16", "--device-kv-gib", "1"], "device"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(options: list[str], reason: str) -> None:
    with pytest.raises(SystemExit, match=f"needles.py: .*{reason}"):
        needles.main(["--device", "cpu", *options])
