"""Real stores for tests, on loopback: where their programs come from, and starting, pausing and killing them.
Owns each process it started and its folder; nothing of a store outlives its object."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from penstock.errors import PenstockError

FETCH = Path(__file__).resolve().parents[2] / "tools" / "parts" / "fetch.py"
LOOPBACK = "127.0.0.1"
START_S = 20.0  # for a server to answer; a machine busy with other tests is slow
FETCH_S = 600.0


class ServerMissing(PenstockError):
    """The program cannot be had on this machine; the message says why."""


class ServerDied(PenstockError):
    """The program ended or did not answer; the message has the end of what it printed."""


# --------------------------------------------------------------------------------------------------- programs


@dataclass(frozen=True, slots=True)
class Program:
    """A program and the libraries that came with it."""

    path: Path
    library_dirs: tuple[Path, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        dirs = [str(path) for path in self.library_dirs]
        inherited = os.environ.get("LD_LIBRARY_PATH")
        return (
            {**os.environ, "LD_LIBRARY_PATH": ":".join([*dirs, *([inherited] if inherited else [])])}
            if dirs
            else dict(os.environ)
        )


@functools.cache
def fetched(part: str) -> Path:
    """The folder with the unpacked part, fetched where that has not happened yet."""
    if not FETCH.is_file():
        raise ServerMissing(f"{part} is not on PATH, and {FETCH} is not there to fetch it")
    try:
        done = subprocess.run(
            [sys.executable, FETCH, part], capture_output=True, text=True, timeout=FETCH_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ServerMissing(f"{part} could not be fetched in {FETCH_S:.0f} s") from error
    if done.returncode:
        raise ServerMissing(done.stderr.strip())
    return Path(done.stdout.strip())


def find_program(part: str, names: Sequence[str]) -> Program:
    """The first of `names` on PATH, or in the part that is fetched for it."""
    for name in names:
        if (found := shutil.which(name)) is not None:
            return Program(Path(found))
    folder = fetched(part)
    for name in names:
        if (path := folder / "usr" / "bin" / name).exists():
            return Program(path, tuple(sorted({file.parent for file in folder.rglob("*.so*")})))
    raise ServerMissing(f"the part {part} has none of {', '.join(names)}")


def free_port() -> int:
    """One that nobody listens on; somebody may, a moment later."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for loopback that is its own authority, and its key."""
    if shutil.which("openssl") is None:
        raise ServerMissing("certificates are made with openssl, which is not on PATH")
    certificate, key = folder / "server.crt", folder / "server.key"
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=penstock test", "-addext", f"subjectAltName=IP:{LOOPBACK},DNS:localhost"]
    command = [
        "openssl",
        "req",
        "-x509",
        *curve,
        *names,
        "-days",
        "2",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


# -------------------------------------------------------------------------------------------------- processes


class Server:
    """A child process that can be killed, paused and started again, with a folder of its own."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.folder = Path(tempfile.mkdtemp(prefix=f"penstock-{program.path.name}-"))
        self._log = self.folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def spawn(self, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
        """Its number. It ends with the thread that started it, however that ends, where the system has a
        command for that."""
        leash = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*leash, str(self._program.path), *arguments],
                cwd=self.folder,
                env={**self._program.environment, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:] if self._log.exists() else ""

    def kill(self) -> None:
        """As `kill -9`; idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """It keeps its sockets and answers nothing. So it is when this returns."""
        process = self._running()
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        self._running().send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Idempotent."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerDied("it is not running")
        return self._process


# ----------------------------------------------------------------------------------------------------- Valkey


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Of a cluster's slots, those of one node."""

    first: int = 0
    last: int = 16383


class Valkey(Server):
    """A Valkey or Redis server without persistence. With `tls` it speaks nothing else; with `slots` it is a
    node of a cluster."""

    def __init__(
        self,
        password: str | None = None,
        tls: bool = False,
        slots: SlotRange | None = None,
        settings: Sequence[str] = (),
    ) -> None:
        super().__init__(find_program("valkey", ("valkey-server", "redis-server")))
        self._password = password
        self._slots = slots
        self._settings = list(settings)
        self.certificate: Path | None = None
        self._key: Path | None = None
        self.port = self._bus_port = 0
        try:
            if tls:
                self.certificate, self._key = make_certificate(self.folder)
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Empty, on its old port if it had one."""
        fixed = self.port
        for _ in range(1 if fixed else 5):  # somebody else may take a port between finding it and binding it
            self.port, self._bus_port = fixed or free_port(), free_port()
            if self._wait_answering(self.spawn(self._arguments())):
                break
            self.kill()
        else:
            raise ServerDied(f"it does not answer: {self.log_tail()}")
        if self._slots is not None:
            self.ask("CLUSTER", "ADDSLOTSRANGE", str(self._slots.first), str(self._slots.last))
        if self._slots == SlotRange():
            self.wait_cluster()

    def kill(self) -> None:
        super().kill()
        for left in self.folder.glob("nodes*.conf"):  # who was in its cluster
            left.unlink()

    def restart(self) -> None:
        """Killed and started anew: everything in it is gone, its address is the same."""
        self.kill()
        self.start()

    def url(self, options: str = "", password: str | None = None) -> str:
        """As `--kv-offload-remote` takes it; `options` are joined to those that it needs. `password` instead
        of the right one."""
        secret = self._password if password is None else password
        needed = [f"ca={self.certificate}"] if self.certificate else []
        query = "&".join([*needed, *(["cluster=1"] if self._slots else []), *([options] if options else [])])
        scheme = "valkeys" if self.certificate else "valkey"
        return f"{scheme}://{f':{secret}@' if secret else ''}{LOOPBACK}:{self.port}{f'?{query}' if query else ''}"  # noqa: E501

    def ask(self, *words: str | bytes, patience_s: float = START_S) -> bytes:
        """The answer to one command, a line without its end or a value, over a connection of its own."""
        with self._connected(patience_s) as link:
            if self._password is not None:
                _exchange(link, ["AUTH", self._password])
            return _exchange(link, words)

    def join(self, other: Valkey) -> None:
        """One cluster of the nodes of both, once they have heard of each other."""
        self.ask("CLUSTER", "MEET", LOOPBACK, str(other.port), str(other._bus_port))

    def wait_cluster(self) -> None:
        """Until all slots have a node and this one knows it."""
        until = time.monotonic() + START_S
        while b"cluster_state:ok" not in self.ask("CLUSTER", "INFO"):
            if time.monotonic() > until:
                raise ServerDied(f"the cluster does not form: {self.log_tail()}")
            time.sleep(0.01)

    def _arguments(self) -> list[str]:
        given = ["--bind", LOOPBACK, "--save", "", "--appendonly", "no", "--dir", str(self.folder)]
        if self.certificate is None:
            given += ["--port", str(self.port)]
        else:
            given += ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
            given += [
                "--tls-cert-file",
                str(self.certificate),
                "--tls-key-file",
                str(self._key),
                "--tls-ca-cert-file",
                str(self.certificate),
            ]
        if self._password is not None:
            given += ["--requirepass", self._password]
        if self._slots is not None:
            given += [
                "--cluster-enabled",
                "yes",
                "--cluster-port",
                str(self._bus_port),
                "--tls-cluster",
                "yes" if self.certificate else "no",
            ]
        return [*given, *self._settings]

    def _connected(self, patience_s: float) -> socket.socket:
        link = socket.create_connection((LOOPBACK, self.port), timeout=patience_s)
        if self.certificate is None:
            return link
        return ssl.create_default_context(cafile=str(self.certificate)).wrap_socket(
            link, server_hostname=LOOPBACK
        )

    def _wait_answering(self, number: int) -> bool:
        """Process `number` itself: on a port that was taken meanwhile somebody else answers."""
        until = time.monotonic() + START_S
        while self.alive and time.monotonic() < until:
            with contextlib.suppress(OSError):
                if b"process_id:%d\r" % number in self.ask("INFO", "server", patience_s=2.0):
                    return True
            time.sleep(0.01)
        return False


def _exchange(link: socket.socket, words: Sequence[str | bytes]) -> bytes:
    encoded = [word.encode() if isinstance(word, str) else word for word in words]
    link.sendall(
        b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded)
    )
    with link.makefile("rb") as answers:
        line = answers.readline()
        is_value = line.startswith(b"$") and line != b"$-1\r\n"
        return answers.read(int(line[1:])) if is_value else line.rstrip(b"\r\n")
