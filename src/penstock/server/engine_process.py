"""The engine's process: an engine and its loop behind connections to front processes. Owns the order of their end; the parent says when."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.errors import EngineClosed, PenstockError
from penstock.server import boundary
from penstock.server.boundary import FromParent, ProtocolBroken, Wire, fault_from
from penstock.server.links import FrontLinks

if TYPE_CHECKING:
    from penstock.engine.engine import Engine
    from penstock.engine.loop import EngineLoop

logger = logging.getLogger("penstock.server")

WATCH_S = 0.25  # how often a loop that has failed is looked for


class EngineProcess:
    """Obeys the parent on a thread of its own, and waits for the end on the caller's."""

    def __init__(self, engine: Engine, loop: EngineLoop, parent: Wire[FromParent], shutdown_s: float) -> None:
        self._loop = loop
        self._parent = parent
        self._shutdown_s = shutdown_s
        self._links = FrontLinks(engine, loop, self._detached)
        self._closed = threading.Event()
        self._error: BaseException | None = None  # of closing

    def run(self, start: Callable[[], None]) -> int:
        """`start` warms the engine up; fronts are told what it is meanwhile. Returns the exit code."""
        threading.Thread(target=self._obey, name="parent", daemon=True).start()
        start()
        self._parent.send(boundary.Ready())
        while not self._closed.wait(WATCH_S) and self._loop.failed() is None:
            pass
        if (error := self._loop.failed()) is not None:  # it may have while it closed
            self._links.fail(f"{type(error).__name__}: {error}")
            self._parent.send(boundary.Broken(fault_from(EngineClosed(f"the engine has failed: {type(error).__name__}: {error}"))))
            return 1
        self._links.close()
        if self._error is not None:
            logger.error("the engine loop closed with an error", exc_info=self._error)
        return 0 if self._error is None else 1

    def _obey(self) -> None:
        try:
            while (message := self._parent.receive()) is not None:
                self._do(message)
        except (OSError, ProtocolBroken) as error:
            logger.error("the connection to the parent process failed: %s", error)
        os._exit(1)  # the parent is gone: nobody starts fronts, and nobody says when to end

    def _do(self, message: FromParent) -> None:
        match message:
            case boundary.Attach():
                self._links.add(message.index, socket.socket(fileno=self._parent.take_fd()))
            case boundary.Stop():
                deadline_s = 0.0 if message.now else self._shutdown_s
                threading.Thread(target=self._close, args=(deadline_s,), name="close", daemon=True).start()
            case _:
                raise ProtocolBroken(f"{type(message).__name__} is no message for now")

    def _close(self, deadline_s: float) -> None:
        try:
            self._loop.close(deadline_s)
        except PenstockError as error:
            self._error = error
        self._closed.set()

    def _detached(self, index: int) -> None:
        """May be called on the engine's thread, which waits for no lock that fronts take."""
        threading.Thread(target=self._detach, args=(index,), name=f"detach-{index}", daemon=True).start()

    def _detach(self, index: int) -> None:
        """The parent frees the seats of a front that is gone: the engine has ended all that it asked for."""
        try:
            self._parent.send(boundary.Detached(index))
        except OSError:
            logger.debug("front process %d has left after the parent", index)
