"""The commands with the embedded model: a right answer, and a conversation that reuses its own KV."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys

from penstock.cli import main

SMALL = ("--device", "cpu", "--weights", "int4", "--device-kv-blocks", "128", "--max-model-len", "1024")


def test_generate_knows_the_capital_of_france(tmp_path):
    file = tmp_path / "figures.json"
    argv = [
        "generate",
        "What is the capital of France?",
        *SMALL,
        "--max-tokens",
        "16",
        "--temperature",
        "0",
        "--json",
        str(file),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *argv],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    figures = json.loads(file.read_text())
    assert figures["finish"] == "stop" and figures["text"] + "\n" == done.stdout


def test_a_raw_prompt_is_continued_as_it_stands(capsys):
    assert main(["generate", "The capital of France is", "--raw", *SMALL, "--max-tokens", "4"]) == 0
    assert "Paris" in capsys.readouterr().out


def test_a_conversation_reuses_the_kv_of_its_earlier_turns(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is the capital of France?\nAnd what is 2 + 2?\n"))
    assert main(["chat", *SMALL, "--temperature", "0", "--max-tokens", "24"]) == 0
    shown = capsys.readouterr()
    assert "Paris" in shown.out.splitlines()[0]
    lengths = [int(count) for count in re.findall(r"prompt (\d+) tokens", shown.err)]
    cached = [int(count) for count in re.findall(r"(\d+) from the device cache", shown.err)]
    assert cached[0] == 0
    assert cached[1] >= lengths[0] // 16 * 16
