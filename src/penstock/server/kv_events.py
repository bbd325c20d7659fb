"""KV events on the wire: vLLM's schema in MessagePack, published over ZeroMQ and repeated on request. Owns
the sockets, the sequence numbers and the thread that sends; which events there are is the work of
`kv.events`.

    published: topic, sequence (8 bytes, big-endian), payload
    replay:    asked for by the first sequence; answered with the kept ones from there on, then sequence -1.
               A client has one answer at a time: the newest it asked for

Imported only if events are on: it needs the extra `events`. Nothing here runs on the engine's thread.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec
import numpy as np
import zmq

from penstock.config import ServerConfig
from penstock.errors import ConfigError
from penstock.kv.events import Cleared, Event, KvEvents, Removed, Stored

logger = logging.getLogger("penstock.server")

MEDIA = {"device": "GPU", "host": "CPU", "ssd": "STORAGE"}  # by tier, in the words of routers
MOST_KEPT = 10_000  # messages, for replay
MOST_KEPT_BYTES = 64 << 20
_AT_ONCE = 1000  # changes taken in one go: about a millisecond of the interpreter
_EVENTS_PER_MESSAGE = 16
_ANSWERS = 8  # clients that are answered at the same time; others wait in their sockets
_SLICE = 64  # messages to one client in one go
_MOST_QUEUED = 8  # messages that wait for one client to read them; also requests of one client
_MOST_ASKED_BYTES = 1024  # a longer request is refused, and its client disconnected
_STUCK_S = 10.0  # a client that reads no message for so long gets no more
_LOOK_MS = 50  # between two looks for changes: each costs the interpreter a moment
_BUSY_MS = 1  # if there are more
_LINGER_MS = 500  # for the last message
_HASH_BYTES = 8
_END = (-1).to_bytes(8, "big", signed=True)


class BlockStored(msgspec.Struct, tag=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class EventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int = 0


def block_hash(key: bytes) -> int:
    """The first half of a key: all routers take integers of 64 bits."""
    return int.from_bytes(key[:_HASH_BYTES], "big")


def on_wire(event: Event, block_tokens: int) -> BlockStored | BlockRemoved | AllBlocksCleared:
    match event:
        case Stored():
            return BlockStored(
                [block_hash(key) for key in event.keys],
                None if event.parent is None else block_hash(event.parent),
                np.frombuffer(b"".join(event.tokens), "<u4").tolist(),
                block_tokens,
                None,
                MEDIA[event.tier],
                event.adapter or None,
            )
        case Removed():
            return BlockRemoved([block_hash(key) for key in event.keys], MEDIA[event.tier])
        case Cleared():
            return AllBlocksCleared()


class Kept:
    """The last messages, with their sequence numbers."""

    def __init__(self, most: int = MOST_KEPT, most_bytes: int = MOST_KEPT_BYTES) -> None:
        self._messages: deque[bytes] = deque()
        self._most, self._most_bytes = most, most_bytes
        self._num_bytes = 0
        self.next_sequence = 0

    def add(self, payload: bytes) -> int:
        """Returns its sequence number."""
        self._messages.append(payload)
        self._num_bytes += len(payload)
        while len(self._messages) > self._most or self._num_bytes > self._most_bytes:
            self._num_bytes -= len(self._messages.popleft())
        self.next_sequence += 1
        return self.next_sequence - 1

    def since(self, first: int) -> Iterator[tuple[int, bytes]]:
        """None may be added while it is read."""
        start = self.next_sequence - len(self._messages)
        num_before = min(max(0, first - start), len(self._messages))
        return islice(enumerate(self._messages, start), num_before, None)


@dataclass(slots=True)
class ReplayAnswer:
    """Kept messages on their way to one client."""

    blank: bytes
    next_sequence: int
    end: int  # the first that came after the request
    sent_s: float  # when a message was last sent


class EventReplay:
    """Answers requests for kept messages, in slices: a client that reads slowly delays nothing, and little
    waits for it in memory. Owns its socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], kept: Kept, topic: bytes) -> None:
        self._kept = kept
        self._topic = topic
        self.answers: dict[bytes, ReplayAnswer] = {}  # by client
        self.socket = context.socket(zmq.ROUTER)
        self.socket.set_hwm(_MOST_QUEUED)
        self.socket.setsockopt(zmq.MAXMSGSIZE, _MOST_ASKED_BYTES)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # what a client has no room for is not dropped

    def turn(self, wait_ms: int) -> None:
        """Take one request, waiting so long for it at most, and send a slice of each answer."""
        if len(self.answers) < _ANSWERS:
            if self.socket.poll(_BUSY_MS if self.answers else wait_ms):
                self._take(self.socket.recv_multipart())
        else:
            time.sleep(_BUSY_MS / 1000)
        for client, answer in list(self.answers.items()):
            if self._is_over(client, answer):
                del self.answers[client]

    def _take(self, frames: Sequence[bytes]) -> None:
        """Of a request with a wrong form, nothing is known but its sender."""
        if len(frames) != 3 or len(frames[2]) != len(_END):
            logger.warning("a request for KV events is not a sequence number of 8 bytes")
            return
        client, blank, asked = frames
        first = int.from_bytes(asked, "big")
        self.answers[client] = ReplayAnswer(blank, first, self._kept.next_sequence, time.monotonic())

    def _is_over(self, client: bytes, answer: ReplayAnswer) -> bool:
        """Send as much as the client has room for, up to a slice."""
        try:
            for sequence, payload in islice(self._kept.since(answer.next_sequence), _SLICE):
                if sequence >= answer.end:
                    break
                self._send(client, answer, self._topic, _number(sequence), payload)
                answer.next_sequence = sequence + 1
            else:
                if answer.next_sequence < answer.end:
                    return False
            self._send(client, answer, b"", _END, b"")
        except zmq.Again:
            if time.monotonic() - answer.sent_s <= _STUCK_S:
                return False
            logger.warning("a client that asked for KV events does not read them; it gets no more")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # it has gone
                raise
        return True

    def _send(self, client: bytes, answer: ReplayAnswer, *frames: bytes) -> None:
        self.socket.send_multipart((client, answer.blank, *frames), zmq.NOBLOCK)
        answer.sent_s = time.monotonic()


class KvPublisher:
    """Listens from construction on, so that a taken port is known before weights are read; sends from `start`
    on, on a thread of its own."""

    def __init__(self, endpoint: str, replay: str | None, topic: str) -> None:
        self._topic = topic.encode()
        self._kept = Kept()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._context = zmq.Context()
        self._out = self._context.socket(zmq.PUB)
        self._replay = EventReplay(self._context, self._kept, self._topic)
        try:
            _bind(self._out, endpoint, "--kv-events")
            if replay is not None:
                _bind(self._replay.socket, replay, "--kv-events-replay")
        except ConfigError:
            self._close_sockets(0)
            raise

    def start(self, events: KvEvents, block_tokens: int) -> None:
        self._thread = threading.Thread(
            target=self._run, args=(events, block_tokens), name="kv-events", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Idempotent. After the engine has closed."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if not self._context.closed:
            self._close_sockets(_LINGER_MS)

    def _close_sockets(self, linger_ms: int) -> None:
        self._out.close(linger_ms)
        self._replay.socket.close(0)
        self._context.term()

    def _run(self, events: KvEvents, block_tokens: int) -> None:
        try:
            while not self._stop.is_set():
                self._send(events.take(_AT_ONCE), block_tokens)
                self._replay.turn(_BUSY_MS if events.num_waiting else _LOOK_MS)
            self._send([*events.take(), *events.close()], block_tokens)
        except Exception:
            events.stop()
            logger.exception("KV events have stopped; the server goes on without them")

    def _send(self, events: Sequence[Event], block_tokens: int) -> None:
        for first in range(0, len(events), _EVENTS_PER_MESSAGE):
            some = [on_wire(event, block_tokens) for event in events[first : first + _EVENTS_PER_MESSAGE]]
            payload = msgspec.msgpack.encode(EventBatch(time.time(), some))
            sequence = self._kept.add(payload)
            self._out.send_multipart((self._topic, _number(sequence), payload))


def _number(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big")


def _bind(socket: zmq.Socket[bytes], endpoint: str, flag: str) -> None:
    try:
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{flag}: cannot listen on {endpoint}: {error}") from None


@contextlib.contextmanager
def listening(config: ServerConfig) -> Iterator[KvPublisher]:
    assert config.kv_events is not None
    publisher = KvPublisher(config.kv_events, config.kv_events_replay, config.kv_events_topic)
    try:
        yield publisher
    finally:
        publisher.close()
