"""What `penstock serve` starts besides itself: `python -m penstock.commands.serve_child KIND PARENT SOCKET...`. Owns what is the same for
every such process: whose signals count, and whose end is its own."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence

from penstock.commands.logs import LogSettings, set_up_logs
from penstock.errors import PenstockError
from penstock.server import boundary
from penstock.server.boundary import FromParent, ProtocolBroken, Wire

logger = logging.getLogger("penstock.serve")

_PR_SET_PDEATHSIG = 1


def command(kind: str, fds: Sequence[int]) -> list[str]:
    """The command line of a child of this process."""
    return [sys.executable, "-m", "penstock.commands.serve_child", kind, str(os.getpid()), *map(str, fds)]


def main(argv: Sequence[str]) -> int:
    kind, parent_pid, *fds = argv
    _end_with(int(parent_pid))
    sockets = [int(fd) for fd in fds]
    parent: Wire[FromParent] = Wire(socket.socket(fileno=sockets[0]), FromParent)
    setup = parent.receive()
    try:
        if isinstance(setup, boundary.EngineSetup | boundary.FrontSetup):
            _check_version(setup.version)
            set_up_logs(LogSettings(*setup.logs))  # type: ignore[arg-type]
        if kind == "engine" and isinstance(setup, boundary.EngineSetup):
            from penstock.commands.serve import run_engine  # with torch, which fronts do without

            return run_engine(setup, parent)
        if kind == "front" and isinstance(setup, boundary.FrontSetup):
            from penstock.server.front import run_front

            run_front(setup, parent, socket.socket(fileno=sockets[1]), socket.socket(fileno=sockets[2]), sockets[3])
            return 0
        raise ProtocolBroken(f"a process of kind {kind} was told {type(setup).__name__} first")
    except PenstockError as error:
        parent.send(boundary.Broken(boundary.fault_from(error)))
        return 1


def _end_with(parent_pid: int) -> None:
    """A terminal and systemd send signals to all processes: the parent's word counts. Should it be killed, so is this one."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def _check_version(version: int) -> None:
    if version != boundary.VERSION:
        raise ProtocolBroken(f"the parent speaks version {version} of the protocol, and this process {boundary.VERSION}")


def _run() -> None:
    """Ends without waiting for threads that are left: what has to be closed is closed by then, and the parent waits."""
    code = 1
    try:
        code = main(sys.argv[1:])
    except BaseException:
        logger.exception("this process cannot go on")
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _run()
