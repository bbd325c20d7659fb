"""The tests of the Triton kernels, run by Triton's interpreter on CPU tensors. In a process of its own: the
choice is made at import."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[5]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="NOT TESTED: triton is not installed, so its kernels cannot be interpreted",
)


# Tests that have to pass, so that none is skipped unseen.
LEAST = {"attention": 30, "layers": 20, "sampling": 14, "drafts": 13, "states": 1, "delta": 14, "experts": 12}
ONLY = "groups or not test_experts_kernels"  # of the experts' tests


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> Counter[str]:
    """How many tests of each file passed; any other ending fails here. The folder's conftest is left out: it
    skips everything where there is no GPU."""
    report = tmp_path_factory.mktemp("interpreted") / "report.xml"
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    flags = ["--noconftest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={report}"]
    files = [str(ROOT / "tests" / "gpu" / f"test_{name}_kernels.py") for name in LEAST]
    command = [sys.executable, "-m", "pytest", *flags, "-k", ONLY, *files]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    cases = [case for case in ElementTree.parse(report).iter("testcase") if not len(case)]
    return Counter(case.get("classname", "").rsplit(".", 1)[-1] for case in cases)


@pytest.mark.parametrize("name", LEAST)
def test_the_kernels_agree_with_the_reference_when_interpreted(name: str, passed: Counter[str]) -> None:
    assert passed[f"test_{name}_kernels"] >= LEAST[name]
