"""A connection that is used again: what one request of it counted and timed is not held against the next."""

from __future__ import annotations

import asyncio

import pytest

from penstock.server.connection import FREE_PIECES, Connection
from tests.cpu.server.served import Served, completion, read_until, serving, until
from tests.support.scripted_engine import ScriptedEngine


def test_each_body_of_a_connection_has_its_own_pieces(served: Served) -> None:
    """Neither is in crumbs; both together would be."""
    body = b'{"prompt": "' + b"x" * (FREE_PIECES - 100) + b'"}'
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    crumbs = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    with served.connect() as connection:
        for _ in range(3):
            connection.sendall(head + crumbs)
            assert read_until(connection, b'"max_model_len"').startswith(b"HTTP/1.1 200")


def test_a_reply_that_was_taken_leaves_no_deadline_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that goes on would look at the next reply as if it had been slow all along."""
    timers: list[asyncio.TimerHandle | None] = []
    watch = Connection._watch_writing

    def watched(self: Connection) -> None:
        watch(self)
        timers.append(self._write_timer)

    monkeypatch.setattr(Connection, "_watch_writing", watched)
    with serving(ScriptedEngine(max_model_len=10_000_000)) as served:
        # more than all socket buffers on the way hold
        body = completion("x" * 200_000, echo=True, n=32, max_tokens=1)
        with served.send("/v1/completions", body) as connection:
            until(lambda: timers, "the reply waits for its reader")
            end = b""
            while b'"total_tokens"' not in end:
                end = end[-100:] + connection.recv(1 << 20)
            # its answer comes behind all that the first one left
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            read_until(connection, b"ready")
            assert all(timer is not None and timer.cancelled() for timer in timers)
