"""Where commands read and write: streams that are closed, full, without a reader, or of another encoding; and
a process that is ended."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import penstock

# what is tested, wherever it is installed
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(penstock.__file__).parents[1])}
PENSTOCK = (sys.executable, "-m", "penstock")
GENERATE = ("generate", "hi", "--max-tokens", "4")
DECODE = ("bench", "decode", "--batch", "1", "--prompt-tokens", "8", "--tokens", "4", "--repeat", "1")


def run(command: str, *argv: str, **more: str) -> subprocess.CompletedProcess[bytes]:
    """By a shell, which redirects."""
    return subprocess.run(
        ["bash", "-c", f'"$@" {command}', "bash", *PENSTOCK, *argv],
        capture_output=True,
        env=ENVIRONMENT | more,
    )


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_stream_that_was_closed_before_the_start_leads_nowhere(closed, tiny):
    ran = run(closed, *GENERATE, *tiny)
    assert ran.returncode == 0 and b"Traceback" not in ran.stderr
    assert b"first after" not in ran.stdout  # figures, which belong to stderr


def test_a_directory_whose_name_the_terminal_does_not_have_is_looked_into(tmp_path, tiny):
    folder = tmp_path / "kvü"
    folder.mkdir(mode=0o700)
    disk = ("--kv-offload-ssd-dir", str(folder))
    assert run("", *GENERATE, *tiny, *disk, "--kv-offload-ssd-gib", "0.01").returncode == 0
    ran = run("", "cache", "inspect", *disk, PYTHONIOENCODING="ascii")
    assert ran.returncode == 0 and b"kv?" in ran.stdout


@pytest.mark.parametrize(("argv", "to"), [((*GENERATE, "--json", "/dev/full"), ""), (GENERATE, ">/dev/full")])
def test_a_full_disk_is_said_in_one_line(argv, to, tiny):
    ran = run(to, *argv, *tiny)
    assert ran.returncode == 1
    assert ran.stderr.decode().splitlines()[-1] == "penstock: error: [Errno 28] No space left on device"
    assert b"Traceback" not in ran.stderr and b"ignored" not in ran.stderr


def test_a_measurement_is_kept_where_nobody_reads_its_table(tmp_path, tiny):
    run("| true", *DECODE, *tiny, "--json", str(tmp_path / "decode.json"))
    assert json.loads((tmp_path / "decode.json").read_text())["results"][0]["batch"] == 1


def test_a_measurement_is_shown_where_its_file_cannot_be_written(tiny):
    ran = run("", *DECODE, *tiny, "--json", "/dev/full")
    assert ran.returncode == 1 and b"penstock bench decode" in ran.stdout


def test_a_measurement_that_is_ended_leaves_nothing_on_the_disk(tmp_path, tiny):
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o700)
    disk = ("--kv-offload-ssd-dir", str(folder), "--kv-offload-ssd-gib", "0.05")
    turns = "--conversations 4 --turns 20 --repeat 10000 --prompt-tokens 32 --tokens 8"
    argv = ("bench", "turns", *turns.split())
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*PENSTOCK, *argv, *tiny, *disk], env=ENVIRONMENT, **quiet) as process:
        while not list(folder.glob("penstock-bench-*/*")):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
    assert list(folder.iterdir()) == []


def test_answers_of_a_chat_go_to_a_file_without_its_prompts(tmp_path: Path, tiny):
    terminal, its = pty.openpty()
    argv = (*PENSTOCK, "chat", *tiny, "--max-tokens", "4", "--temperature", "0")
    streams = {"stdin": its, "stderr": subprocess.PIPE, "env": ENVIRONMENT}
    with (tmp_path / "answers").open("wb") as file, subprocess.Popen(argv, stdout=file, **streams) as process:
        os.write(terminal, b"hello\n/quit\n")
        said = process.communicate()[1]
    os.close(its)
    os.close(terminal)
    written = (tmp_path / "answers").read_bytes()
    assert process.returncode == 0 and b"> " in said
    assert b"\x1b" not in written and b"\x01" not in written and written.count(b"\n") == 1


def test_ctrl_c_ends_both_processes_of_a_restart_in_one_line(tiny):
    argv = (*PENSTOCK, "bench", "ttft", "--restart", "--tokens", "512", "--repeat", "1000", *tiny)
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    # A shell that runs these tests in the background has SIGINT ignored, and so would the process.
    streams |= {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    with subprocess.Popen(argv, **streams, env=ENVIRONMENT, start_new_session=True) as process:
        while b"before the restart" not in (line := process.stderr.readline()):
            assert line
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate()[1]
    assert process.returncode == 130 and b"Traceback" not in said
    assert said.splitlines()[-1] == b"penstock: interrupted"
