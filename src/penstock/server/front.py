"""A front process: HTTP for an engine in another process. Owns the order of its start and end; the parent says when."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import uvicorn

from penstock.config import ServerConfig
from penstock.server.boundary import FromParent, FrontSetup, Ready, Stop, Wire
from penstock.server.remote import ManyFronts, RemoteEngine
from penstock.server.run import BACKLOG, HttpServer
from penstock.server.seats import SeatBook

logger = logging.getLogger("penstock.server")

YIELD_S = 0.002  # in which another front may take a connection
OUT_OF_FILES_S = 1.0
COLLECT_AFTER = (10_000, 50, 50)  # by generation: what a token makes is freed by counting, so that looking for cycles is mostly in vain


class FrontServer(HttpServer):
    """Takes its share of the connections to a socket that all fronts listen on, and ends when the parent says so."""

    def __init__(
        self, engine: RemoteEngine, config: ServerConfig, listener: socket.socket, fronts: ManyFronts, parent: Wire[FromParent]
    ) -> None:
        super().__init__(engine, engine, config, listener, fronts)
        engine.own_figures = self.service.figures
        self._fronts = fronts
        self._parent = parent
        self._opening: set[asyncio.Task[object]] = set()  # connections that are taken and have no protocol yet
        self._has_waited = False

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        uvicorn.Server.run(self, sockets=[])  # connections are taken here, not by the event loop

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
        """One connection. A front that has more than another leaves it to that one for a moment: of a burst, who wakes up first would take
        all."""
        loop = asyncio.get_running_loop()
        num_open = len(self.server_state.connections) + len(self._opening)
        if num_open > self._fronts.note_connections(num_open) and not self._has_waited:
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
        self._fronts.note_connections(num_open + 1)

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
        self._fronts.note_connections(len(self.server_state.connections) + len(self._opening))
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        await super().shutdown(sockets=[])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A terminal sends its signals to parent and children alike: the parent's word counts."""
        yield

    def _obey(self) -> None:
        while (message := self._parent.receive()) is not None:
            if isinstance(message, Stop):
                self.force_exit = self.force_exit or message.now
                self.should_exit = True
        os._exit(1)  # the parent is gone, and so is whoever could start this again


def run_front(setup: FrontSetup, parent: Wire[FromParent], engine: socket.socket, listener: socket.socket, seats_fd: int) -> None:
    """Blocks until the server ends."""
    remote = RemoteEngine(engine)
    config = replace(setup.server, max_concurrent=min(setup.server.max_concurrent, remote.max_open))
    fronts = ManyFronts(remote, SeatBook(seats_fd, setup.num_fronts), setup.index)
    FrontServer(remote, config, listener, fronts, parent).run()
