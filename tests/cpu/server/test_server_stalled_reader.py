"""A client that takes some of its reply and then no more: each time limit asks for something new. The clock
and the socket are a test's."""

from __future__ import annotations

import socket
from collections.abc import Callable

from penstock.server.connection import MIN_TAKEN, Connection


class _Transport:
    """Holds `num_left` bytes that its client has not taken."""

    def __init__(self, num_left: int) -> None:
        self.num_left = num_left
        self.aborted = False
        self._socket = socket.socket()

    def get_write_buffer_size(self) -> int:
        return self.num_left

    def get_extra_info(self, name: str) -> socket.socket:
        return self._socket

    def abort(self) -> None:
        self.aborted = True
        self._socket.close()


class _Timers:
    """An event loop whose timers go off when a test says so."""

    def __init__(self) -> None:
        self.pending: list[Callable[[], None]] = []

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        self.pending.append(call)

    def time_passes(self) -> None:
        due, self.pending = self.pending, []
        for call in due:
            call()


def test_what_was_taken_before_does_not_count_again() -> None:
    connection = Connection.__new__(Connection)
    connection.transport, connection.loop = transport, timers = _Transport(10 * MIN_TAKEN), _Timers()  # type: ignore[assignment]
    connection._watch_writing()
    for _ in range(3):
        transport.num_left -= MIN_TAKEN
        timers.time_passes()
        assert not transport.aborted
    timers.time_passes()
    assert transport.aborted and not timers.pending
