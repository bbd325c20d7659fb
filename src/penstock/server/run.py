"""A listening server: socket, signals, bounded shutdown; in one process with the engine, or one of several
fronts of an engine in another process. Owns the HTTP life of the process; the loop owns the engine's."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import uvicorn

from penstock.config import ServerConfig
from penstock.errors import ConfigError
from penstock.server.app import make_app
from penstock.server.boundary import FromParent, FrontSetup, Ready, Stop, Wire, unpacked
from penstock.server.channel import SocketFrontEnd
from penstock.server.client import EngineClient
from penstock.server.connection import connection_class
from penstock.server.links import EngineService
from penstock.server.lives import Lives
from penstock.server.seats import SeatBook
from penstock.server.service import CLOSE_GRACE_S, Service

if TYPE_CHECKING:
    from penstock.engine.engine import Engine
    from penstock.engine.loop import EngineLoop

logger = logging.getLogger("penstock.server")

BACKLOG = 2048  # connections that the kernel keeps while the event loop is busy
YIELD_S = 0.002  # time for another front to take a connection
OUT_OF_FILES_S = 1.0
# By generation: token objects are freed by reference counting, so searching for cycles is mostly in vain.
COLLECT_AFTER = (10_000, 50, 50)


class HttpServer(uvicorn.Server):
    """Uvicorn's server, which also reports when it is ready, and stops the engine while its readers are still
    there. `run` serves until SIGTERM or SIGINT, then lets running requests end for at most `shutdown_s`.

    It has its port from construction on, so that a taken port is known before anything is started.
    """

    def __init__(self, service: Service, listener: socket.socket | None = None) -> None:
        app, config = make_app(service), service.config
        self.service = service
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
                # The engine loop ends every request at its own deadline, with a last event. This timeout is
                # for clients that do not read.
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
        if self.force_exit:  # a second interrupt: stop waiting for requests
            self.service.engine.give_up()
            await self.lifespan.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A signal ends the server and is not raised again, so that the caller can clean up."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)
        }
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
        raise ConfigError(
            f"cannot listen on {config.host} port {config.port}: {error.strerror or error}"
        ) from None
    return listener


def url_of(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_here(
    engine: Engine,
    loop: EngineLoop,
    config: ServerConfig,
    listener: socket.socket | None = None,
    lives: Lives | None = None,
) -> HttpServer:
    """HTTP and engine in one process: `run` also starts and closes `loop`."""
    here = EngineService(engine, loop, lives=lives)
    client = EngineClient(here.attach_here(), engine.tokenizer)
    return HttpServer(Service(client, config, here=here), listener)


# -------------------------------------------------------------------------------------------- a front process


class FrontServer(HttpServer):
    """Takes its share of the connections to a socket that all fronts listen on, and ends when the parent says
    so."""

    def __init__(self, service: Service, listener: socket.socket, parent: Wire[FromParent]) -> None:
        super().__init__(service, listener)
        self._parent = parent
        # accepted connections without a protocol yet
        self._opening: set[asyncio.Task[object]] = set()
        self._has_waited = False

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        uvicorn.Server.run(self, sockets=[])  # connections are accepted here, not by the event loop

    def announce(self) -> None:
        gc.collect()
        gc.freeze()
        gc.set_threshold(*COLLECT_AFTER)
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        self._listen()
        self._parent.send(Ready())
        threading.Thread(target=self._obey, name="parent", daemon=True).start()

    def _listen(self) -> None:
        if not self.should_exit:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Accept one connection. A front that has more than another waits a moment for that one: otherwise,
        the first to wake up would take all of a burst."""
        loop = asyncio.get_running_loop()
        if self._note_connections() and not self._has_waited:
            self._has_waited = True
            self._pause(YIELD_S)
            return
        self._has_waited = False
        try:
            taken, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptors are left
            logger.error("a connection could not be taken: %s", error)
            self._pause(OUT_OF_FILES_S)
            return
        taken.setblocking(False)
        opening: asyncio.Task[object] = loop.create_task(loop.connect_accepted_socket(self._protocol, taken))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        self._note_connections()

    def _note_connections(self) -> bool:
        """Returns whether another front has fewer."""
        num = len(self.server_state.connections) + len(self._opening)
        return num > self.service.book.note_connections(self.service.row, num)

    def _pause(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        loop.call_later(seconds, self._listen)

    def _protocol(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made

    async def on_tick(self, counter: int) -> bool:
        self._note_connections()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        await super().shutdown(sockets=[])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A terminal sends its signals to parent and children alike; only the parent decides."""
        yield

    def _obey(self) -> None:
        while (message := self._parent.receive()) is not None:
            if isinstance(message, Stop):
                self.force_exit = self.force_exit or message.now
                self.should_exit = True
        os._exit(1)  # the parent is gone, and nothing else could restart this process


def run_front(
    setup: FrontSetup, parent: Wire[FromParent], engine: socket.socket, listener: socket.socket, seats_fd: int
) -> None:
    """Blocks until the server ends."""
    config = unpacked(setup.server, ServerConfig)
    book = SeatBook(seats_fd, setup.num_fronts)
    service = Service(EngineClient(SocketFrontEnd(engine)), config, book, setup.index)
    FrontServer(service, listener, parent).run()
