"""Both ends of the connection between an engine and one of its fronts: over a socket, or in memory if they
are one process. Owns the queues, the writing and the reading; `links` and `client` own what messages mean.

The engine's thread only leaves messages in a queue. A front reads on its event loop and sends from any
thread; neither waits for the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, Protocol

import msgspec

from penstock.server.boundary import (
    Batch,
    Bye,
    FromEngine,
    FromFront,
    ProtocolBroken,
    Wire,
    frame,
    tokens_of,
)

logger = logging.getLogger("penstock.server")

RECEIVE_BYTES = 1 << 18
# that wait for one front: seconds of a full machine, and 20 MiB, or 200 where all of them have scores
MOST_EVENTS = 1 << 16
MOST_MESSAGES = 1 << 12  # of any kind


Take = Callable[[Batch | FromEngine], None]


class EngineEnd(Protocol):
    """Only `receive` and `wait_written` block."""

    def put(self, item: Batch | FromEngine) -> None:
        """A step's events, or another message. Nothing is read after a Bye."""

    def too_full(self) -> str | None:
        """What waits for a front that does not read; None: not too much."""

    def receive(self) -> FromFront | None:
        """None: the front is gone."""

    def cut(self) -> None:
        """The front sees that as the end of the engine, and `receive` as the end of the front."""

    def wait_written(self, timeout_s: float) -> None: ...

    def close(self) -> None: ...


class FrontEnd(Protocol):
    def greeting(self) -> FromEngine | None:
        """Blocks for the engine's first message. None: the engine is gone."""

    def start(self, take: Take, fail: Callable[[str], None]) -> None:
        """On the event loop, on which messages are taken from now on; `fail` says that no more will come."""

    def send(self, message: msgspec.Struct) -> None:
        """From any thread; never blocks. Waiting messages are bounded by the seats of the callers."""

    def stop(self) -> None:
        """No more messages are taken or sent."""


class Outgoing:
    """Messages that wait for one front. `wake` is called when there are some, and again only after `take`."""

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._items: deque[Batch | FromEngine] = deque()
        self._armed = False  # the reader is awake, and will see everything that is here by then
        self._num_put = self._num_taken = 0  # events; each counted by one thread

    def put(self, item: Batch | FromEngine) -> None:
        """Append, then check: `take` disarms first, so an item that it misses wakes the reader again."""
        if isinstance(item, list):
            self._num_put += len(item)
        self._items.append(item)
        if not self._armed:
            self._armed = True
            self._wake()

    def take(self) -> Iterator[Batch | FromEngine]:
        """Everything that has gathered. Events of several steps are one batch, and are counted as waiting
        until the next item is asked for."""
        self._armed = False
        while self._items:
            item = self._items.popleft()
            if not isinstance(item, list):
                yield item
                continue
            while self._items and isinstance(self._items[0], list):
                item += self._items.popleft()  # type: ignore[arg-type]
            yield item
            self._num_taken += len(item)

    def too_full(self) -> str | None:
        if len(self._items) > MOST_MESSAGES:
            return f"more than {MOST_MESSAGES} messages wait for it"
        num = self._num_put - self._num_taken
        return f"{num} events wait for it" if num > MOST_EVENTS else None


# --------------------------------------------------------------------------------------------------- a socket


class SocketEngineEnd:
    """Writes on a thread of its own."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._wire: Wire[FromFront] = Wire(sock, FromFront)
        self._waiting = threading.Event()
        self._out = Outgoing(self._waiting.set)
        self.put, self.too_full, self.receive = self._out.put, self._out.too_full, self._wire.receive
        self._writer = threading.Thread(target=self._write, name=f"front-write-{name}", daemon=True)
        self._writer.start()

    def cut(self) -> None:
        with contextlib.suppress(OSError):
            self._wire.sock.shutdown(socket.SHUT_RDWR)

    def wait_written(self, timeout_s: float) -> None:
        self._writer.join(timeout_s)

    def close(self) -> None:
        self._out.put(Bye())  # ends the writer, which cannot send it
        self._wire.sock.close()

    def _write(self) -> None:
        sock, is_over = self._wire.sock, False
        with contextlib.suppress(OSError):
            while not is_over:
                self._waiting.wait()
                self._waiting.clear()
                for item in self._out.take():
                    sock.sendall(frame(tokens_of(item) if isinstance(item, list) else item))
                    is_over = is_over or isinstance(item, Bye)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)


class SocketFrontEnd:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._wire: Wire[FromEngine] = Wire(sock, FromEngine)
        self.greeting = self._wire.receive
        self._lock = threading.Lock()  # guards writes
        self._unsent: deque[memoryview] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None  # while it is started

    def start(self, take: Take, fail: Callable[[str], None]) -> None:
        self._take, self._fail = take, fail
        self._sock.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._sock, self._read)
        for message in self._wire.left():  # that came with the greeting
            take(message)

    def stop(self) -> None:
        with self._lock:
            if self._loop is not None:
                self._loop.remove_reader(self._sock)
                self._loop.remove_writer(self._sock)
            self._unsent.clear()
            self._loop = None

    def send(self, message: msgspec.Struct) -> None:
        data = memoryview(frame(message))
        with self._lock:
            if self._loop is None:
                return
            if not self._unsent:
                data = data[self._try_send(data) :]
                if not data:
                    return
                self._loop.call_soon_threadsafe(self._loop.add_writer, self._sock, self._write)
            self._unsent.append(data)

    def _try_send(self, data: memoryview) -> int:
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # the reading side sees the same error
            return len(data)

    def _write(self) -> None:
        with self._lock:
            while self._unsent:
                left = self._unsent[0][self._try_send(self._unsent[0]) :]
                if left:
                    self._unsent[0] = left
                    return
                self._unsent.popleft()
            if self._loop is not None:
                self._loop.remove_writer(self._sock)

    def _read(self) -> None:
        try:
            data = self._sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:  # it has ended without reading all messages
            data = b""
        except OSError as error:
            self._fail(f"the connection to the engine's process failed: {error}")
            return
        if not data:
            self._fail("the engine's process has ended; the server's log says more")
            return
        try:
            for message in self._wire.frames.feed(data):
                self._take(message)
        except ProtocolBroken as error:
            logger.error("the engine's process says what cannot be: %s", error)
            self._fail("the connection to the engine's process is broken; the server's log says more")


# -------------------------------------------------------------------------------------------------- in memory


class MemoryChannel:
    """Both ends. It is never cut off: what waits is bounded by the requests of this process."""

    def __init__(self) -> None:
        self._out = Outgoing(self._wake)
        self._sent: SimpleQueue[FromFront | None] = SimpleQueue()
        self.put, self.receive = self._out.put, self._sent.get
        self._taken = threading.Event()  # the front has read a Bye, or will read nothing more
        self._loop: asyncio.AbstractEventLoop | None = None  # while it is started

    # ---- the engine's end

    def too_full(self) -> None:
        return None

    def cut(self) -> None:
        self._sent.put(None)

    def wait_written(self, timeout_s: float) -> None:
        self._taken.wait(timeout_s)

    def close(self) -> None:
        pass

    # ---- the front's end

    def greeting(self) -> Any:
        return next(self._out.take())

    def start(self, take: Take, fail: Callable[[str], None]) -> None:
        self._take_one = take
        self._loop = asyncio.get_running_loop()
        self._take_all()

    def send(self, message: msgspec.Struct) -> None:
        if self._loop is not None:
            self._sent.put(message)  # type: ignore[arg-type]

    def stop(self) -> None:
        self._loop = None
        self._sent.put(None)
        self._taken.set()

    def _wake(self) -> None:
        if (loop := self._loop) is not None:
            try:
                loop.call_soon_threadsafe(self._take_all)
            except RuntimeError:  # the event loop is closed: the server and its readers are gone
                logger.debug("an event came after the server had closed")

    def _take_all(self) -> None:
        for message in self._out.take():
            if self._loop is not None:
                self._take_one(message)
