"""A listening server in this process: socket, signals, bounded shutdown. Owns the process's HTTP life; the engine's is its loop's."""

from __future__ import annotations

import contextlib
import math
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from penstock.config import ServerConfig
from penstock.errors import ConfigError
from penstock.server.app import make_app
from penstock.server.client import EngineClient, EngineLife, Fronts
from penstock.server.connection import connection_class
from penstock.server.service import CLOSE_GRACE_S, Service

BACKLOG = 2048  # connections that the kernel keeps while the event loop is busy


def serve(
    engine: EngineClient,
    loop: EngineLife,
    config: ServerConfig,
    listener: socket.socket | None = None,
    prepare: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until SIGTERM or SIGINT, then let running requests end for `shutdown_s` at most. Starts and closes `loop`. `listener` is from
    `bind`. `prepare` is called with the URL once the port is ours: what takes long before the first request."""
    server = HttpServer(engine, loop, config, listener)
    prepare(server.url)
    server.run()


class HttpServer(uvicorn.Server):
    """Uvicorn's server, which also says when it is ready and stops the engine loop while its readers are still there.

    It has its port from construction on, so that one that is taken is known before anything is started.
    """

    def __init__(
        self,
        engine: EngineClient,
        loop: EngineLife,
        config: ServerConfig,
        listener: socket.socket | None = None,
        fronts: Fronts | None = None,
    ) -> None:
        app = make_app(engine, loop, config, fronts)
        self.service: Service = app.state.service
        self._listener = listener or bind(config)
        self.url = url_of(config.host, self._listener)
        super().__init__(
            uvicorn.Config(
                app,
                http=connection_class(config.read_timeout_s, config.write_timeout_s),
                ws="none",
                lifespan="on",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                # The engine loop ends every request at its own deadline, so that readers are told; this is for those who do not read.
                timeout_graceful_shutdown=math.ceil(config.shutdown_s + CLOSE_GRACE_S),
            )
        )

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        super().run(sockets=sockets or [self._listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self.announce()

    def announce(self) -> None:
        """Requests are answered from now on."""
        print(f"Penstock is ready on {self.url}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.stop()
        await super().shutdown(sockets=sockets)
        if self.force_exit:  # a second interrupt: nobody is waited for any longer
            self.service.give_up()
            await self.lifespan.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A signal ends the server and is thereby dealt with: it is not raised again, so that the caller can clean up."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def bind(config: ServerConfig) -> socket.socket:
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {config.host} is not an address of this machine: {error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {config.host} port {config.port}: {error.strerror or error}") from None
    return listener


def url_of(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
