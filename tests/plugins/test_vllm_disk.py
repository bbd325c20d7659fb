"""The benchmark of the disk tier beside vLLM's own, made small: both serve every prefix from disk, neither
loses a block to a kill -9, and Penstock serves no flipped bit. Takes minutes: `make plugins`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins.environments import ROOT, VLLM, python_of

pytestmark = pytest.mark.skipif(
    not python_of(VLLM).exists(), reason="NO VLLM IS INSTALLED HERE: make plugins installs it"
)


def test_the_benchmark_of_the_disk_finds_every_prefix_and_serves_no_flipped_bit(tmp_path: Path) -> None:
    script, found = ROOT / "benchmarks" / "vllm_disk.py", tmp_path / "found.json"
    sizes = ["--tokens", "128,256", "--rounds", "2", "--kills", "1", "--dir", tmp_path, "--json", found]
    subprocess.run(
        [sys.executable, script, "--python", python_of(VLLM), "--log", tmp_path / "log", *sizes], check=True
    )
    figures = json.loads(found.read_text())
    for tokens, times in figures["speed"]["ttft_ms"].items():
        assert times["least_cached"] == {"penstock": int(tokens), "fs": int(tokens)}
        assert times["same_answers"] == {"penstock": True, "fs": True}
    (trouble,) = figures["trouble"]
    for one in trouble.values():
        assert one["found"] == one["written"] > 0
        assert one["after_kill"]["blocks_with_other_bytes"] == one["after_kill"]["wrong_answers"] == 0
        assert one["flipped"] == one["after_flips"]["prompts"]
    ours, theirs = trouble["penstock"]["after_flips"], trouble["fs"]["after_flips"]
    assert ours["blocks_with_other_bytes"] == ours["wrong_answers"] == 0
    assert theirs["blocks_with_other_bytes"] == theirs["prompts"]  # the flips are where KV is
