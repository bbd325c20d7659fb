"""A real server process with the embedded model, shared by all end-to-end tests of one run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

import pytest

READY = "Penstock is ready on "
EMBEDDED = ("--device", "cpu", "--max-model-len", "2048", "--device-kv-blocks", "512")
# Four bits a weight, as in its file, take a quarter of the time of float32. For tests in which no figure
# depends on it.
HURRIED = ("--device", "cpu", "--weights", "int4", "--max-model-len", "1024", "--device-kv-blocks", "256")


@contextlib.contextmanager
def started_server(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`penstock serve` with `flags` on a free port; yields the process and its address. What it logs is shown
    if it never gets ready."""
    command = [sys.executable, "-m", "penstock", "serve", "--port", "0", *flags]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            line = next((line for line in process.stdout if line.startswith(READY)), None)
            if line is None:
                log.seek(0)
                pytest.fail(
                    f"the server ended with {process.wait()} before it was ready:\n{log.read()[-4000:]}"
                )
            yield process, line.removeprefix(READY).strip()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """Under the sanitizer, which would stop it at its first finding."""
    with started_server(*EMBEDDED, "--sanitize=strict") as (_, url):
        yield url


@pytest.fixture(scope="module")
def hurried_url() -> Iterator[str]:
    """With short deadlines, so that tests of them need not wait long."""
    with started_server(*HURRIED, "--read-timeout-s", "1", "--write-timeout-s", "1") as (_, url):
        yield url


@pytest.fixture
def start_server() -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """For tests that need flags or an end of their own."""
    with contextlib.ExitStack() as stack:
        yield lambda *flags: stack.enter_context(started_server(*flags))
