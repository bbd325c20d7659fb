"""Nothing is compiled, allocated or imported under a request: all that steps need is there when the engine is
warm. In fresh processes, so that no other test has done it before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

pytest.importorskip("triton", reason="NOT TESTED: kernels need triton")

_PROCESS = Path(__file__).with_name("warm_process.py")


@pytest.fixture(
    scope="module",
    params=[
        ("bfloat16", "plain"),
        ("float32", "plain"),
        ("bfloat16", "mtp"),
        ("bfloat16", "eagle"),
        ("bfloat16", "hybrid"),
    ],
    ids="-".join,
)
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a fresh process says of itself."""
    scratch = tmp_path_factory.mktemp("warm")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(scratch / "triton")}
    ended = subprocess.run(
        [sys.executable, str(_PROCESS), request.param[0], str(scratch), request.param[1]],
        capture_output=True,
        text=True,
        timeout=280,
        env=env,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    assert found["compiled_before"] > 10, "the hook tells of every kernel"
    return found["kinds"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["prompts", "sampled", "echoed", "adapted", "returned", "drafted"])
def test_nothing_is_made_ready_under_a_request(told: dict[str, Any], kind: str) -> None:
    if kind not in told:
        pytest.skip("drafts are of an engine with a head; one with recurrent layers takes no adapters")
    assert told[kind] == {"compiled": [], "imported": [], "device": 0, "pinned": 0}
