"""A shared store for one measurement: a Valkey or Redis server of this machine, on loopback. Owns its
process; needs no torch."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path

from penstock.bench.child import signals_held
from penstock.errors import StoreFailed

PROGRAMS = ("valkey-server", "redis-server")
_LOOPBACK = "127.0.0.1"
_ATTEMPTS = 5  # another program may take a port between finding and binding it
_START_S = 10.0
_POLL_S = 0.02
_ANSWER_S = 1.0
_LOG_CHARS = 300


def store_program() -> str | None:
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


def why_no_store() -> str | None:
    """What is missing, and how to get it; None: nothing."""
    if store_program() is None:
        return (
            f"neither {PROGRAMS[0]} nor {PROGRAMS[1]} is installed; Debian and Ubuntu: apt install "
            f"{PROGRAMS[0]} (or {PROGRAMS[1]}), macOS: brew install valkey"
        )
    if not [*entry_points(group="penstock.stores", name="valkey")]:
        return "the package penstock-valkey is not installed; run: pip install 'penstock[valkey]'"
    return None


@contextmanager
def local_store(folder: Path) -> Iterator[str]:
    """Its URL, with a password: other users of this machine cannot read it. `folder` is its own. Raises
    StoreFailed if it does not start."""
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        for _ in range(_ATTEMPTS):
            port, password = _free_port(), secrets.token_hex(16)
            process = stack.enter_context(_serving(folder, port, password))
            if _answers(process, port, password):
                yield f"valkey://:{password}@{_LOOPBACK}:{port}"
                return
    said = " ".join((folder / "log").read_text(errors="replace").split())
    raise StoreFailed(f"{store_program()} did not start: {said[-_LOG_CHARS:]}")


@contextmanager
def _serving(folder: Path, port: int, password: str) -> Iterator[subprocess.Popen[bytes]]:
    """Its settings come through a pipe: other users see a command line."""
    settings = (
        f"bind {_LOOPBACK}",
        f"port {port}",
        f"requirepass {password}",
        'save ""',
        "appendonly no",
        f'dir "{folder}"',
    )
    # it ends with this process, even if that is killed, where the system has a command for it
    leash = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
    process = None
    try:
        with (folder / "log").open("ab") as log, signals_held():
            process = subprocess.Popen(
                [*leash, str(store_program()), "-"], stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write("\n".join(settings).encode())
        yield process
    finally:
        if process is not None:
            process.kill()
            process.wait()


def _answers(process: subprocess.Popen[bytes], port: int, password: str) -> bool:
    """Another server on that port would not know the password."""
    by_s = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < by_s:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((_LOOPBACK, port), _ANSWER_S) as link,
            link.makefile("rb") as answer,
        ):
            link.sendall(f"AUTH {password}\r\n".encode())
            if answer.readline() == b"+OK\r\n":
                return True
        time.sleep(_POLL_S)
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])
