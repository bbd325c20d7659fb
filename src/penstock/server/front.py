"""A front process: HTTP for an engine in another process. Owns the order of its start and end; the parent says when."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

from penstock.config import ServerConfig
from penstock.server.messages import FromParent, FrontSetup, Ready, Stop, Wire
from penstock.server.remote import ManyFronts, RemoteEngine, greeted
from penstock.server.run import HttpServer
from penstock.server.seats import SeatBook

COLLECT_AFTER = (10_000, 50, 50)  # by generation: what a token makes is freed by counting, so that looking for cycles is mostly in vain


class FrontServer(HttpServer):
    """Accepts what the kernel gives it of a socket that all fronts share, and ends when the parent says so."""

    # Connections taken at once: with more, the front that wakes up first takes all of a burst. The parent sets the kernel's queue.
    backlog = 1

    def __init__(
        self, engine: RemoteEngine, config: ServerConfig, listener: socket.socket, fronts: ManyFronts, parent: Wire[FromParent]
    ) -> None:
        super().__init__(engine, engine, config, listener, fronts)
        engine.own_figures = self.service.figures
        self._parent = parent

    def announce(self) -> None:
        gc.collect()
        gc.freeze()
        gc.set_threshold(*COLLECT_AFTER)
        self._parent.send(Ready())
        threading.Thread(target=self._obey, name="parent", daemon=True).start()

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
    greeting = greeted(engine)
    remote = RemoteEngine(engine, greeting)
    config = replace(setup.server, max_concurrent=min(setup.server.max_concurrent, remote.max_open))
    fronts = ManyFronts(remote, SeatBook(seats_fd, setup.num_fronts), setup.index)
    FrontServer(remote, config, listener, fronts, parent).run()
