"""A real server on loopback in front of a scripted engine, and raw connections to it. Owns nothing that
ships."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator

import httpx
import openai
import uvicorn.server

from penstock.config import ServerConfig
from penstock.server.client import EngineClient
from penstock.server.links import EngineService
from penstock.server.lives import Lives
from penstock.server.run import HttpServer, server_here
from penstock.server.service import Service
from tests.support.scripted_engine import ScriptedEngine, ScriptedLoop

DEADLINE_S = 120.0  # of what is expected to succeed at once, on a machine that does much else
MODEL = "scripted"


class _Impatient:
    """asyncio for uvicorn, which looks every 0.1 s whether it shall end, and waits as long when it does: a
    tenth of that."""

    def __getattr__(self, name: str) -> object:
        return getattr(asyncio, name)

    def sleep(self, seconds: float) -> Awaitable[None]:
        return asyncio.sleep(seconds / 10)


uvicorn.server.asyncio = _Impatient()  # type: ignore[attr-defined]


def until(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    by_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < by_s, f"not within {deadline_s} seconds: {what}"
        time.sleep(0.002)


class Served:
    """One server and what a test wants of it."""

    def __init__(self, engine: ScriptedEngine, loop: ScriptedLoop, server: HttpServer) -> None:
        self.engine = engine
        self.loop = loop
        self.server = server
        self.service = server.service
        self.url = server.url
        self.http = httpx.Client(base_url=self.url, timeout=DEADLINE_S, verify=False)

    def client(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=DEADLINE_S)

    def set_read_timeout(self, seconds: float) -> None:
        """From now on, also of connections that are there: what came before had all the time it needed."""
        self.server.config.http_protocol_class.read_timeout_s = seconds  # type: ignore[attr-defined]

    def connect(self, small_buffer: bool = False) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        connection = socket.socket()
        connection.settimeout(DEADLINE_S)
        if small_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        return connection

    def send(
        self, path: str, body: dict | bytes, headers: str = "", small_buffer: bool = False
    ) -> socket.socket:
        """A request whose answer the caller reads, or does not."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = self.connect(small_buffer)
        connection.sendall(
            (f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n{headers}\r\n").encode()
            + data
        )
        return connection

    def assert_idle(self, deadline_s: float = DEADLINE_S) -> None:
        """Every balance is back at zero: engine requests, seats, readings."""
        until(lambda: self.engine.num_open == 0, "the engine has no open request", deadline_s)
        until(lambda: self.service.generations.taken == 0, "no seat is taken", deadline_s)
        until(lambda: self.service.side.taken == 0, "no side seat is taken", deadline_s)
        until(lambda: not self.service.engine.num_open, "the front has no open request", deadline_s)


def service_of(loop: ScriptedLoop, **settings) -> Service:
    """What the routes of a server share, without a server."""
    here = EngineService(loop.engine, loop)
    client = EngineClient(here.attach_here(), loop.engine.tokenizer)
    return Service(client, ServerConfig(**settings), here=here)


@contextlib.contextmanager
def serving(engine: ScriptedEngine | None = None, lives: Lives | None = None, **settings) -> Iterator[Served]:
    engine = engine or ScriptedEngine()
    loop = ScriptedLoop(engine)
    config = ServerConfig(**{"port": 0, "shutdown_s": 5.0, **settings})
    server = server_here(engine, loop, config, lives=lives)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started, "the server is up")
    running = Served(engine, loop, server)
    try:
        yield running
    finally:
        engine.release()
        running.http.close()
        server.should_exit = True
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "the server did not stop"


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        more = connection.recv(65536)
        assert more, f"the connection ended without {mark!r}: {data[-200:]!r}"
        data += more
    return data


def completion(prompt: object = "hello", **fields) -> dict:
    return {"model": MODEL, "prompt": prompt, **fields}
