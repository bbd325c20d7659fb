"""The README is tried: every command in its sh blocks is run, and so is its Python. Owns how a command is
run; a command that it does not know fails the test."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
README_URL = "http://127.0.0.1:8000"
HANG_S = 200.0  # only so that a hang ends; nothing here is about speed


class Block(NamedTuple):
    language: str
    text: str


def blocks(markdown: str) -> list[Block]:
    return [
        Block(*found)
        for found in re.findall(r"^```(\w*)\n(.*?)^```$", markdown, flags=re.MULTILINE | re.DOTALL)
    ]


def commands(markdown: str) -> list[str]:
    """The commands of all sh blocks, continued lines joined."""
    found = []
    for block in blocks(markdown):
        if block.language == "sh":
            joined = block.text.replace("\\\n", " ")
            found += [
                line.strip()
                for line in joined.splitlines()
                if line.strip() and not line.lstrip().startswith("#")
            ]
    return found


# --------------------------------------------------------------------------------------- how commands are run


def run_setup_target(command: str, url: str) -> None:
    """What it would set up is set up: this test itself runs in it. The rest of it is looked at, since it
    would run this test again."""
    target = shlex.split(command)[1]
    planned = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=True
    )
    if target == "demo":  # tests/e2e/cli/test_demo.py runs it
        assert "penstock demo" in planned.stdout
    if target == "test":
        assert "-m pytest" in planned.stdout and "ruff check" in planned.stdout and "mypy" in planned.stdout
        assert "make test" in (ROOT / ".ci" / "run").read_text()


def run_serve(command: str, url: str) -> None:
    """It is running, or there would be no url; it says so itself."""
    ask(f"curl -s {url}/health", url)


def ask(command: str, url: str) -> None:
    words = shlex.split(command.replace(README_URL, url))
    assert any(word.startswith(url) for word in words), f"{command} does not ask the README's server"
    answer = run([*words, "--fail-with-body"]) if shutil.which("curl") else as_curl(words)
    assert answer.strip(), f"{command} answered nothing"


def as_curl(words: list[str]) -> str:
    """What curl would ask, where there is none. Other options than these raise."""
    asked = argparse.ArgumentParser(exit_on_error=False)
    asked.add_argument("-s", action="store_true")
    asked.add_argument("-H", action="append", default=[])
    asked.add_argument("-d")
    asked.add_argument("url")
    options = asked.parse_args(words[1:])
    headers = dict(header.split(": ", 1) for header in options.H)
    body = None if options.d is None else options.d.encode()
    with urllib.request.urlopen(urllib.request.Request(options.url, body, headers), timeout=HANG_S) as reply:
        text: str = reply.read().decode()
    return text


def run_chat(command: str, url: str) -> None:
    printed = run(shlex.split(command), typed="What is the capital of France?\n/quit\n").splitlines()
    assert [line for line in printed if line.strip() and not line.startswith(".venv/bin/penstock")], (
        "no answer"
    )


def run_penstock(command: str, url: str) -> None:
    assert run(shlex.split(command)).strip()


def run(words: list[str], typed: str = "") -> str:
    done = subprocess.run(
        words, cwd=ROOT, input=typed, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, f"{shlex.join(words)} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


RUNNERS: dict[str, Callable[[str, str], None]] = {
    r"make (setup|test|demo)": run_setup_target,
    r"make serve": run_serve,
    r"make chat": run_chat,
    r"curl .*": ask,
    r"\.venv/bin/penstock (generate|doctor)( .*)?": run_penstock,
}


def runner_of(command: str) -> Callable[[str, str], None] | None:
    for pattern, runner in RUNNERS.items():
        if re.fullmatch(pattern, command):
            return runner
    return None


# ------------------------------------------------------------------------------------------------- the server


@contextmanager
def served(command: str) -> Iterator[str]:
    """Run the README's command for the server on a free port, until it says that it is ready; end it as
    Ctrl-C does."""
    with started([*shlex.split(command), "ARGS=--port 0"]) as ready:
        yield ready


@contextmanager
def started(words: list[str]) -> Iterator[str]:
    process = subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        with killed_after_a_while(process):
            ready = _ready_url(process)
        yield ready
    finally:
        with killed_after_a_while(process):
            os.killpg(process.pid, signal.SIGINT)
            rest, _ = process.communicate()
    assert "Traceback" not in rest, rest


@contextmanager
def killed_after_a_while(process: subprocess.Popen[str]) -> Iterator[None]:
    watchdog = threading.Timer(HANG_S, lambda: os.killpg(process.pid, signal.SIGKILL))
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()


def _ready_url(process: subprocess.Popen[str]) -> str:
    said = []
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        if found := re.search(r"is ready on (http://\S+)", line):
            return found[1]
    raise AssertionError("the server ended before it was ready:\n" + "".join(said))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    done = subprocess.run(["make", "--question", "setup"], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, (
        "the README's commands run in what `make setup` makes, which is missing or out of date: run `make "
        "test`"
    )
    with served("make serve") as ready:
        yield ready


# -------------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("command", commands(README))
def test_a_command_of_the_readme_works(command: str, url: str) -> None:
    runner = runner_of(command)
    assert runner is not None, f"no way is known to try this command: {command}"
    runner(command, url)


@pytest.mark.parametrize("program", [block.text for block in blocks(README) if block.language == "python"])
def test_a_program_of_the_readme_works(program: str, url: str) -> None:
    answer = run([sys.executable, "-c", program.replace(README_URL, url)])
    assert "Paris" in answer


@pytest.mark.parametrize("command", commands((ROOT / "docs" / "deep-context.md").read_text())[:2])
def test_the_first_commands_on_deep_contexts_start_a_server_as_they_stand(command: str) -> None:
    program, *words = shlex.split(command)
    assert program == ".venv/bin/penstock"
    with started([sys.executable, "-m", "penstock", *words, "--port", "0"]) as url:
        ask(f"curl -s {url}/health", url)


def test_the_readme_has_its_two_commands_and_its_examples() -> None:
    assert {"make serve", "make test"} <= set(commands(README))
    assert any(command.startswith("curl ") for command in commands(README))
    assert any(block.language == "python" for block in blocks(README))


def test_nothing_in_the_readme_escapes_these_tests() -> None:
    """Every fence is one of a kind that is tried, or is marked as what a program prints."""
    assert README.count("```") == 2 * len(blocks(README))
    assert {block.language for block in blocks(README)} <= {"sh", "python", "text"}


def test_a_command_that_nobody_knows_how_to_try_is_noticed() -> None:
    found = commands("```sh\nmake serve\nrm -rf build\n```\n")
    assert [runner_of(command) is None for command in found] == [False, True]


def test_a_continued_command_is_one_command() -> None:
    assert commands("```sh\n# why\ncurl \\\n  -s x\n\nmake test\n```\n") == ["curl    -s x", "make test"]


def test_where_curl_is_missing_the_same_is_asked_without_it(url: str) -> None:
    command = next(command for command in commands(README) if command.startswith("curl "))
    assert "Paris" in as_curl(shlex.split(command.replace(README_URL, url)))
