"""`penstock demo` as its user runs it: a process with the embedded model, a disk and a real Valkey; what it
leaves when it is interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.servers import ServerMissing, find_program

SERVERS = ("valkey-server", "redis-server")
ENDS_S = 20.0  # only so that a hang ends
TINY = ("--model", "tiny-llama", "--load-format", "dummy", "--device", "cpu", "--tokens", "900")


def environment(folder: Path) -> dict[str, str]:
    """With a Valkey server on PATH; temporary files are in `folder`."""
    try:
        server = find_program("valkey", SERVERS)
    except ServerMissing as missing:
        pytest.skip(f"NO REAL VALKEY OR REDIS SERVER: {missing}")
    path = f"{server.path.parent}{os.pathsep}{os.environ['PATH']}"
    return {**server.environment, "PATH": path, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}


def started(folder: Path, *flags: str) -> subprocess.Popen[str]:
    """Leader of a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", "demo", *flags],
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # a test run in the background is started with the interrupt ignored, and its children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def left_of(session: int) -> list[psutil.Process]:
    """Processes that are still there after a while."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session:
                found.append(process)
        except ProcessLookupError:
            continue
    return psutil.wait_procs(found, timeout=ENDS_S)[1]


def test_the_same_answer_comes_from_every_place_and_nothing_is_left(tmp_path):
    folder, file = tmp_path / "temporary", tmp_path / "figures.json"
    folder.mkdir()
    with started(
        folder, "--device", "cpu", "--weights", "int4", "--tokens", "250", "--json", str(file)
    ) as running:
        out, err = running.communicate()
    assert running.returncode == 0, err
    assert list(folder.iterdir()) == [] and left_of(running.pid) == []
    figures = json.loads(file.read_text())
    stages = {one["name"]: one for one in figures["stages"]}
    assert list(stages) == ["cold", "host", "ssd", "remote", "next"] and figures["identical"] is True
    for one in stages.values():
        assert sum(one["source"].values()) == one["prompt_tokens"] > 250
    cold, *others = (stages[name] for name in ("cold", "host", "ssd", "remote"))
    full = (cold["prompt_tokens"] - 1) // 16 * 16
    assert cold["source"]["computed"] == cold["prompt_tokens"]
    for one in others:
        assert one["source"][one["name"]] == full and one["tokens"] == cold["tokens"] != []
    assert stages["next"]["source"]["device"] >= full - 48
    assert cold["text"] == "The gate was opened at night by a goat."
    assert out.count("by a goat.") == 4 and "identical, compared token by token: 4 answers" in out
    for one in stages.values():
        assert f"{one['prompt_tokens']:,} prompt tokens" in out
    assert "\x1b" not in out and "Traceback" not in err


@pytest.mark.parametrize(
    ("ending", "moment"), [(signal.SIGINT, "1 nothing cached"), (signal.SIGTERM, "A question about")]
)
def test_an_end_at_any_time_leaves_nothing(tmp_path, ending, moment):
    """Ctrl-C reaches all processes of a terminal, SIGTERM one."""
    with started(tmp_path, *TINY) as running:
        assert running.stdout is not None
        assert any(line.startswith(moment) for line in running.stdout)
        if ending is signal.SIGINT:
            os.killpg(running.pid, ending)
        else:
            running.send_signal(ending)
        _, err = running.communicate(timeout=ENDS_S)
    assert running.returncode == 128 + ending, err
    assert list(tmp_path.iterdir()) == [] and left_of(running.pid) == []
    assert "Traceback" not in err and ("penstock: interrupted" in err) == (ending is signal.SIGINT)
