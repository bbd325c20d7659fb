"""The tests of the Triton kernels, run by Triton's interpreter on CPU tensors. In a process of its own: the
choice is made at import."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[5]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="NOT TESTED: triton is not installed, so its kernels cannot be interpreted",
)


@pytest.mark.parametrize(
    # tests that have to pass, so that none is skipped unseen; and which are run
    ("name", "least", "only"),
    [
        ("attention", 30, ""),
        ("layers", 20, ""),
        ("sampling", 14, ""),
        ("drafts", 13, ""),
        ("states", 1, ""),
        ("delta", 15, ""),
        ("experts", 12, "groups"),
    ],
)
def test_the_kernels_agree_with_the_reference_when_interpreted(name: str, least: int, only: str) -> None:
    """The folder's conftest is left out: it skips everything where there is no GPU."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--noconftest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-k",
        only,
        str(ROOT / "tests" / "gpu" / f"test_{name}_kernels.py"),
    ]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None and int(passed[1]) >= least, run.stdout[-2000:]
