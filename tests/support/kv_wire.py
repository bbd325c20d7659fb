"""Sockets of a router that listens to KV events. Owns nothing that ships."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import zmq

ANSWER_MS = 60_000  # of what takes milliseconds


@contextlib.contextmanager
def connected(kind: int, endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, ANSWER_MS)
    socket.setsockopt(zmq.RCVHWM, 0)
    try:
        socket.connect(endpoint)
        yield socket
    finally:
        socket.close()
        context.term()


def replayed(endpoint: str, first: int) -> list[tuple[bytes, int, bytes]]:
    """Topic, sequence and payload of all messages from there on that the server repeats."""
    with connected(zmq.DEALER, endpoint) as socket:
        socket.send_multipart([b"", first.to_bytes(8, "big")])
        found: list[tuple[bytes, int, bytes]] = []
        while True:
            blank, topic, number, payload = socket.recv_multipart()
            assert blank == b""
            sequence = int.from_bytes(number, "big", signed=True)
            if sequence == -1:
                assert (topic, payload) == (b"", b"")
                return found
            found.append((topic, sequence, payload))
