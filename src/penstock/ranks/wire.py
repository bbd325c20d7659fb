"""Messages between ranks, on a stream socket each. Owns their format: nothing in them is code or a pickled
object.

    kind, 1 byte | length, 4 bytes | payload: 32-bit words, or JSON

A step is words: its numbers by chunk, then the tokens and slots of all chunks. A copy is words, too.
"""

from __future__ import annotations

import contextlib
import enum
import json
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, get_type_hints

import numpy as np
from numpy.typing import NDArray

from penstock.config import Config
from penstock.contract import Adapter, Chunk, Echo, StateMove, StepPlan
from penstock.errors import InvariantBroken, RankLost
from penstock.models.hashed_file import DIGEST_BYTES

_HEAD = struct.Struct("<BI")
_MOST_BYTES = 1 << 30
_NUMBERS = ("row", "start", "writes", "num_logits", "num_unsure", "next_token", "num_left_out", "room")
# Work that other ranks cannot do yet. The flags that lead to it are refused.
_UNSUPPORTED = ("scoring",)
# per chunk: the slots of kept states that its row begins with and ends in (-1: none)
_MOVES = 2
# The adapters of a step follow it, each by its digest; that of the blank one is zero.
_ADAPTER_WORDS = DIGEST_BYTES // 4
# per chunk: the number of its adapter among them (-1: none); tokens, slots, host slots (-1: none), prompt
# tokens whose logprobs are wanted (-1: none), alternatives
_SIZES = 6
_NO_MOVE = StateMove()
_STEP_HEAD = 5
_TOKENS_OF, _SLOTS_OF = attrgetter("tokens"), attrgetter("slots")

Words = NDArray[np.int32]


class MessageKind(enum.IntEnum):
    JOIN = 1  # to rank 0: who it is
    SETUP = 2  # from rank 0: what to load
    READY = 3  # to rank 0: what was loaded
    BEGIN = 4  # from rank 0: the sizes that all ranks have
    STEP = 5
    COPY = 6
    COPIED = 7
    BEAT = 8  # nothing new
    FAILED = 9  # to rank 0: it ends, and why
    END = 10  # from rank 0
    ADAPTER = 11  # from rank 0: read one
    DROP = 12  # from rank 0: an adapter that no later step needs


_KINDS = frozenset(MessageKind)


class RankMessage(NamedTuple):
    kind: MessageKind
    payload: bytes

    @property
    def words(self) -> Words:
        return np.frombuffer(self.payload, np.int32)

    @property
    def fields(self) -> dict[str, Any]:
        found = json.loads(self.payload)
        if not isinstance(found, dict):
            raise RankLost(f"a message of kind {self.kind.name} is no object")
        return found


class RankWire:
    """One connection. `send` may be called from any thread, `receive` from one. A call that takes longer than
    `timeout_s` raises TimeoutError, one on a closed connection EOFError or another OSError."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._sock = sock
        self._sock.settimeout(timeout_s)
        self._sending = threading.Lock()

    def send(self, kind: MessageKind, payload: Words | Mapping[str, Any] | None = None) -> None:
        body = payload.tobytes() if isinstance(payload, np.ndarray) else json.dumps(payload or {}).encode()
        with self._sending:
            self._sock.sendall(_HEAD.pack(kind, len(body)) + body)

    def receive(self) -> RankMessage:
        kind, size = _HEAD.unpack(self._read(_HEAD.size))
        if size > _MOST_BYTES or kind not in _KINDS:
            raise RankLost(f"a message {kind} of {size} bytes: the other end is no rank of this engine")
        return RankMessage(MessageKind(kind), self._read(size))

    def set_timeout(self, timeout_s: float) -> None:
        self._sock.settimeout(timeout_s)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that receives
        self._sock.close()

    def _read(self, size: int) -> bytes:
        parts, left = list[bytes](), size
        while left:
            part = self._sock.recv(min(left, 1 << 20))
            if not part:
                raise EOFError("the connection has ended")
            parts.append(part)
            left -= len(part)
        return b"".join(parts)


# ---------------------------------------------------------------------------------------------------- steps


def step_words(plan: StepPlan) -> Words:
    """What other ranks need of a step. Its starts are about sampling, and its waits are over on rank 0."""
    chunks = plan.chunks
    for name in _UNSUPPORTED:
        if any(value is not None for value in map(attrgetter(name), chunks)):
            raise InvariantBroken(f"step {plan.number}: a chunk with {name} cannot run on several ranks")
    echoes, paged = [chunk.echo for chunk in chunks], [chunk.paged for chunk in chunks]
    hosted = [slots for slots in paged if slots is not None]
    targets = [echo.tokens for echo in echoes if echo is not None]
    moves = [chunk.state or _NO_MOVE for chunk in chunks]
    states = ([-1 if slot is None else slot for slot in column] for column in zip(*moves, strict=True))
    adapters = dict.fromkeys(chunk.adapter.digest for chunk in chunks if chunk.adapter is not None)
    numbers = {digest: number for number, digest in enumerate(adapters)}
    sizes = (
        (-1 if chunk.adapter is None else numbers[chunk.adapter.digest] for chunk in chunks),
        map(len, map(_TOKENS_OF, chunks)),
        map(len, map(_SLOTS_OF, chunks)),
        (-1 if slots is None else len(slots) for slots in paged),
        (-1 if echo is None else len(echo.tokens) for echo in echoes),
        (0 if echo is None else echo.num_top for echo in echoes),
    )
    columns = (*(map(attrgetter(name), chunks) for name in _NUMBERS), *states, *sizes)
    return np.concatenate(
        [
            np.array([plan.number, plan.num_decodes, plan.num_ahead, len(chunks), len(adapters)], np.int32),
            *(np.fromiter(column, np.int32, len(chunks)) for column in columns),
            np.fromiter(chain.from_iterable(map(_TOKENS_OF, chunks)), np.int32),
            *map(_SLOTS_OF, chunks),
            *hosted,
            np.fromiter(chain.from_iterable(targets), np.int32),
            *(np.frombuffer(bytes.fromhex(digest or "00" * DIGEST_BYTES), np.int32) for digest in adapters),
        ],
        dtype=np.int32,
    )


def step_of(words: Words) -> StepPlan:
    """The step again. Requests have the names of their rows."""
    number, num_decodes, num_ahead, num, num_adapters = (int(word) for word in words[:_STEP_HEAD])
    adapters = [
        _adapter_of(found)
        for found in words[len(words) - num_adapters * _ADAPTER_WORDS :].reshape(-1, _ADAPTER_WORDS)
    ]
    width = len(_NUMBERS) + _MOVES + _SIZES
    body = words[_STEP_HEAD:]
    table, rest = body[: width * num].reshape(width, num), body[width * num :]
    parts, start = list[list[Words]](), 0
    for lengths in (
        table[1 - _SIZES : -1].clip(min=0).tolist()
    ):  # tokens of all chunks, then their slots, and so on
        ends = start + np.cumsum(lengths, dtype=np.int64)
        parts.append([rest[end - length : end] for end, length in zip(ends, lengths, strict=True)])
        start = int(ends[-1]) if num else start
    chunks = []
    for index, row in enumerate(table.T.tolist()):
        tokens, slots, paged, targets = (part[index] for part in parts)
        values: dict[str, Any] = dict(zip(_NUMBERS, row, strict=False))
        values["writes"] = bool(values["writes"])
        move = StateMove(*(None if slot < 0 else slot for slot in row[len(_NUMBERS) : -_SIZES]))
        own, _, _, num_paged, num_echoed, num_top = row[-_SIZES:]
        echo = None if num_echoed < 0 else Echo(tuple(targets.tolist()), num_top)
        host = None if num_paged < 0 else paged
        values |= {"paged": host, "echo": echo, "state": None if move == _NO_MOVE else move}
        values["adapter"] = None if own < 0 else adapters[own]
        chunks.append(Chunk(f"row {row[0]}", tokens=tuple(tokens.tolist()), slots=slots, **values))
    return StepPlan(number, tuple(chunks), num_decodes, num_ahead=num_ahead)


def _adapter_of(words: Words) -> Adapter:
    return Adapter("", words.tobytes().hex() if words.any() else "")


# --------------------------------------------------------------------------------------------------- copies


class CopyOrder(NamedTuple):
    """Blocks to copy between the arenas of a rank, in one direction."""

    number: int
    direction: int  # an index of `copies.DIRECTIONS`
    layers: tuple[int, int]
    sources: NDArray[np.int64]
    dests: NDArray[np.int64]

    def words(self) -> Words:
        head = np.array([self.number, self.direction, *self.layers], np.int32)
        return np.concatenate([head, self.sources.astype(np.int32), self.dests.astype(np.int32)])

    @classmethod
    def of(cls, words: Words) -> CopyOrder:
        number, direction, first, end = (int(word) for word in words[:4])
        sources, dests = words[4:].astype(np.int64).reshape(2, -1)
        return cls(number, direction, (first, end), sources, dests)


# --------------------------------------------------------------------------------------------------- config


def config_fields(config: Config) -> dict[str, Any]:
    return asdict(config)


def config_of(found: Mapping[str, Any]) -> Config:
    """The config of `config_fields`, after its way through JSON."""
    kinds = get_type_hints(Config)
    return Config(
        **{
            part.name: kinds[part.name](**{name: _frozen(value) for name, value in found[part.name].items()})
            for part in fields(Config)
        }
    )


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, Sequence) and not isinstance(value, str) else value
