"""How fast one process tells another of a step: messages and bytes per second, with 256 requests in each
message. Unix stream sockets with a length before each message, as the server has it, beside pyzmq where it is
installed, and beside one message per request.

    PYTHONPATH=src python3 benchmarks/front_messages.py
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
import subprocess
import sys
import time
from typing import Any

from penstock.contract import TokenEvent
from penstock.server import boundary
from penstock.server.boundary import FromEngine, Wire, frame, tokens_of

NUM_REQUESTS = 256
NUM_MESSAGES = 20_000


def step() -> list[tuple[int, TokenEvent]]:
    return [
        (100_000 + number, TokenEvent(f"request-{number}", (50_000 + number,)))
        for number in range(NUM_REQUESTS)
    ]


def read_sockets(fd: int, num: int) -> None:
    wire: Wire[FromEngine] = Wire(socket.socket(fileno=fd), FromEngine)
    found = 0
    while found < num:
        message = wire.receive()
        assert isinstance(message, boundary.Tokens)
        found += len(message.plain) // 2
    wire.sock.sendall(b"!")


def read_zmq(address: str, num: int) -> None:
    zmq: Any = importlib.import_module("zmq")
    decoder = boundary.Frames[boundary.Tokens](FromEngine)._decoder
    pull, push = zmq.Context().socket(zmq.PULL), zmq.Context().socket(zmq.PUSH)
    pull.connect(address)
    push.connect(f"{address}-back")
    found = 0
    while found < num:
        found += len(decoder.decode(pull.recv()).plain) // 2
    push.send(b"!")


def reader(kind: str, at: str, num: int, fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, kind, at, str(num)], pass_fds=fds)


def over_sockets(name: str, num_messages: int, make: Any, per_message: int) -> None:
    ours, theirs = socket.socketpair()
    with (
        ours,
        theirs,
        reader("sockets", str(theirs.fileno()), num_messages * per_message, (theirs.fileno(),)),
    ):
        report(name, num_messages, make, ours.sendall, lambda: ours.recv(1), per_message)


def over_zmq() -> None:
    zmq: Any = importlib.import_module("zmq")
    address = f"ipc:///tmp/penstock-{os.getpid()}"
    push, pull = zmq.Context().socket(zmq.PUSH), zmq.Context().socket(zmq.PULL)
    push.bind(address)
    pull.bind(f"{address}-back")
    with reader("zmq", address, NUM_MESSAGES * NUM_REQUESTS):
        report(
            "pyzmq, one message a step",
            NUM_MESSAGES,
            lambda: frame(tokens_of(step_events))[4:],
            push.send,
            pull.recv,
            NUM_REQUESTS,
        )
    for one in (push, pull):
        one.close()


def report(name: str, num: int, make: Any, send: Any, wait_read: Any, per_message: int) -> None:
    """From making the first to the reader's word that it has decoded the last; the time of the sender's own
    thread beside it."""
    send(make())  # the reader is up when the socket takes no more
    begun, busy = time.perf_counter(), time.thread_time()
    size = 0
    for _ in range(num - 1):
        data = make()
        size += len(data)
        send(data)
    busy = time.thread_time() - busy
    wait_read()
    took = time.perf_counter() - begun
    tokens = num * per_message
    rates = f"{num / took:12.0f} messages/s{size / took / 1e6:8.1f} MB/s{tokens / took:12.0f} tokens/s"
    print(f"{name:36}{rates}{1e6 * busy / tokens:8.2f} us a token")


step_events = step()


def main() -> None:
    if sys.argv[1:2] == ["sockets"]:
        read_sockets(int(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1:2] == ["zmq"]:
        read_zmq(sys.argv[2], int(sys.argv[3]))
    else:
        over_sockets(
            "Unix socket, one message a step",
            NUM_MESSAGES,
            lambda: frame(tokens_of(step_events)),
            NUM_REQUESTS,
        )
        one = step_events[:1]
        over_sockets(
            "Unix socket, one message a request", NUM_MESSAGES * 10, lambda: frame(tokens_of(one)), 1
        )
        if importlib.util.find_spec("zmq") is not None:
            over_zmq()
        else:
            print("pyzmq is not installed")


if __name__ == "__main__":
    main()
