"""One client's connection and its deadlines: for a header, for the rest of a body, for reading its reply.
Owns deadlines, and limits on the size of a body and its pieces. Owns no request; cutting the connection
cancels it like any hang-up."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import h11
from starlette.datastructures import Headers
from starlette.types import Receive, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.config import ServerConfig
from penstock.server.faults import Hangup, Refused, error_response

logger = logging.getLogger("penstock.server")

MIN_TAKEN = 16 << 10  # bytes of a reply that a client must read in its time, or all that there are
FREE_PIECES = 1024  # pieces of one body of any size; each costs as much as parsing a small request
MIN_PIECE = 64  # average bytes of each further piece


class Connection(H11Protocol):
    """Uvicorn's protocol only has a deadline for idle connections."""

    read_timeout_s = 30.0
    write_timeout_s = 30.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = _Pieces(h11.SERVER, self.conn._max_incomplete_event_size)
        self._awaited: tuple[str, object] | None = None  # what the client has to send, and of which request
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._pending = 0  # unread bytes of a reply at the last look

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # everything that the client has not read counts
        self._watch_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._read_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is not h11.IDLE:  # an idle connection has its own deadline
            self._watch_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def send_400_response(self, msg: str) -> None:
        """The client has stopped speaking HTTP. Its request is over for the application, too: further output
        is dropped instead of failing."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        # otherwise an answer has begun, and only closing can signal the error
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            refusal = error_response(Refused(400, "what was sent is not valid HTTP"))
            head = h11.Response(
                status_code=400,
                headers=[*refusal.raw_headers, (b"connection", b"close")],
                reason=b"Bad Request",
            )
            for event in (head, h11.Data(data=bytes(refusal.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch_reading(self) -> None:
        """One deadline from the first to the last byte of a header. A body has its own where it is read; here
        only after an early reply."""
        state, awaited = self.conn.their_state, None
        if state is h11.IDLE:
            awaited = ("header", self.cycle)
        elif state is h11.SEND_BODY and self.cycle.response_complete:
            awaited = ("body", self.cycle)
        if awaited == self._awaited:
            return
        self._awaited = awaited
        if self._read_timer is not None:
            self._read_timer.cancel()
        if awaited is not None:
            self._read_timer = self.loop.call_later(
                self.read_timeout_s, self._cut, f"did not finish a {awaited[0]}"
            )

    def _watch_writing(self) -> None:
        self._pending = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self.write_timeout_s, self._check_taken)

    def _check_taken(self) -> None:
        if self._pending - self.transport.get_write_buffer_size() < min(self._pending, MIN_TAKEN):
            sock = self.transport.get_extra_info("socket")
            # the kernel drops unread bytes, too
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._cut("did not take its reply")
        else:
            self._watch_writing()

    def _cut(self, why: str) -> None:
        """At once: an orderly close would wait for the client again."""
        logger.info("a connection was cut: its client %s in time", why)
        self.transport.abort()


class _Pieces(h11.Connection):
    """Refuses a body in very small pieces: parsing each takes far longer than sending it, and no client needs
    them."""

    num_pieces = num_bytes = 0  # of this body so far

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.num_pieces = self.num_bytes = 0
        elif isinstance(event, h11.Data):
            self.num_pieces += 1
            self.num_bytes += len(event.data)
            if self.num_pieces > FREE_PIECES + self.num_bytes // MIN_PIECE:
                raise h11.RemoteProtocolError("the body comes in too small pieces")
        return event


def connection_class(read_timeout_s: float, write_timeout_s: float) -> type[Connection]:
    """Uvicorn creates connections itself, from a class."""
    return type(
        "Connection", (Connection,), {"read_timeout_s": read_timeout_s, "write_timeout_s": write_timeout_s}
    )


async def read_body(scope: Scope, receive: Receive, config: ServerConfig) -> bytes:
    """The whole body, or a refusal as soon as it is known to be too large or too slow. Never holds more bytes
    than allowed."""
    limit, timeout_s = config.max_body_bytes, config.read_timeout_s
    headers = Headers(scope=scope)
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise Refused(415, "compressed bodies are not supported: send it without Content-Encoding")
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    with anyio.move_on_after(timeout_s):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Hangup
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)
    raise Refused(408, f"the body did not arrive within {timeout_s:g} seconds", code="timeout")


def _too_large(limit: int) -> Refused:
    return Refused(413, f"the body is larger than the limit of {limit} bytes", code="body_too_large")


async def while_connected(
    receive: Receive, on_hangup: Callable[[], None], work: Callable[[], Awaitable[None]]
) -> None:
    """Run `work` until it is over or the client hangs up. Then `on_hangup` is called first, and `work` is
    cancelled where it waits."""
    with anyio.CancelScope() as scope:

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            on_hangup()
            scope.cancel()

        watcher = asyncio.create_task(watch())
        try:
            await work()
        finally:
            watcher.cancel()
