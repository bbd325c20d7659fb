"""Messages between an engine and its fronts, and between the processes of one server: their types, their
version, and their framing on a stream socket. Owns no process and no thread; both ends decide when to send.

A frame is four bytes of length and as many of MessagePack. Nothing is ever unpickled: a message is one of the
types below, or an error.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

import msgspec
import numpy as np

from penstock import errors
from penstock.config import Config, ServerConfig
from penstock.contract import (
    Adapter,
    Grammar,
    LoadedAdapter,
    Prefetched,
    PromptLimits,
    PromptLogprobs,
    Snapshot,
    SnapshotContent,
    SnapshotList,
    SnapshotRequest,
    Submission,
    TokenEvent,
    TokenScores,
)
from penstock.engine.scheduling.residency import ResidencyChoice
from penstock.engine.stats import EngineStats
from penstock.errors import InvalidRequest, Overloaded, PenstockError
from penstock.models.tokenizer import TokenizerSpec
from penstock.server.kept import KeptResponse
from penstock.server.lives import LivesChange, RequestLife
from penstock.server.seats import RequestFigures

VERSION = 12  # of everything below; both ends send it first
MAX_BYTES = 256 << 20  # of one message; a longer one is garbage and is not read
FlushLevel = Literal["captured", "visible", "persisted"]
_LENGTH = struct.Struct("<I")

M = TypeVar("M")


class ProtocolBroken(PenstockError):
    """The other end sent something impossible: another version, another program, or a defect."""


class Sent(msgspec.Struct, array_like=True):
    """Sent as an array of its fields."""


# ------------------------------------------------------------------------------------------------- plain data


class SentError(Sent):
    """An exception of ours."""

    kind: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


_KINDS: dict[str, type[PenstockError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, PenstockError)
}


def fault_from(error: BaseException) -> SentError:
    kind = next((one.__name__ for one in type(error).__mro__ if _KINDS.get(one.__name__) is one), "")
    return SentError(kind, str(error), getattr(error, "param", None), getattr(error, "retry_after_s", None))


def error_from(fault: SentError) -> Exception:
    """The same exception: type, text and named fields. Anything that is not our own exception is a defect
    there."""
    kind = _KINDS.get(fault.kind)
    if kind is None:
        return RuntimeError(f"in the engine's process: {fault.message}")
    error = kind.__new__(kind)
    error.args = (fault.message,)
    if isinstance(error, InvalidRequest):
        error.param = fault.param
    if isinstance(error, Overloaded):
        error.retry_after_s = fault.retry_after_s or 1.0
    return error


class SentEvent(Sent):
    """A `TokenEvent` with more than one plain token. The number stands for the request's id."""

    number: int
    event: TokenEvent
    scores: list[TokenScores | None] | None = None
    fault: SentError | None = None

    @staticmethod
    def of(number: int, event: TokenEvent) -> SentEvent:
        scored = event.prompt_logprobs
        scores = list(scored.parts) if isinstance(scored, PromptLogprobs) else None
        fault = None if event.failure is None else fault_from(event.failure)
        return SentEvent(
            number, event._replace(request_id="", prompt_logprobs=None, failure=None), scores, fault
        )

    def made(self, request_id: str) -> TokenEvent:
        scored = None if self.scores is None else PromptLogprobs(self.scores)
        failure = None if self.fault is None else error_from(self.fault)
        given = failure if isinstance(failure, PenstockError) else None
        return self.event._replace(request_id=request_id, prompt_logprobs=scored, failure=given)


# -------------------------------------------------------------------------------------------- engine to front


class Hello(Sent, tag=1):
    """The first message, once the model is loaded: facts that hold while the engine runs, and its present
    adapters."""

    version: int
    name: str
    limits: PromptLimits
    sampling: dict[str, Any]  # the model's defaults
    tiers: tuple[str, ...]
    max_open: int
    pid: int
    started_s: float  # time.time()
    lora_root: bool  # whether clients may load adapters
    tokenizer: TokenizerSpec | None  # None: the front has the engine's own
    adapters: list[LoadedAdapter]
    residency: ResidencyChoice
    # a front started during the warm-up learns from a later beat that the engine is warm
    is_warm: bool = True
    block_tokens: int = 16


class Tokens(Sent, tag=2):
    """All events of a step for one front. An event that is one token is a pair of numbers, request and token.
    The other events follow, in order for each request."""

    plain: list[int]
    rest: list[SentEvent]


class Returned(Sent, tag=3):
    call: int
    value: bytes = b""  # MessagePack of what the call returns
    fault: SentError | None = None


class Beat(Sent, tag=4):
    """The engine's process is alive; its loop last turned this long ago. Answered with Awake."""

    number: int
    age_s: float
    is_warm: bool = True


class AdapterList(Sent, tag=5):
    """All loaded adapters. Answered with Awake."""

    version: int
    loaded: list[LoadedAdapter]


class Bye(Sent, tag=6):
    """The last message of the engine: it has closed as requested, and every request has had its last event.
    Or it has failed."""

    why: str = ""  # it has failed


FromEngine = Hello | Tokens | Returned | Beat | AdapterList | Bye
Batch = list[tuple[int, TokenEvent]]  # events with the numbers of their requests


def tokens_of(batch: Batch) -> Tokens:
    """Of each request in order: once one has an event that is more than a token, what follows it in the batch
    is among those, too."""
    plain: list[int] = []
    rest: list[SentEvent] = []
    seen: set[int] = set()
    for number, event in batch:
        if len(event.tokens) == 1 and event[2:] == _PLAIN and number not in seen:
            plain += number, event.tokens[0]
        else:
            seen.add(number)
            rest.append(SentEvent.of(number, event))
    return Tokens(plain, rest)


_PLAIN = TokenEvent("")[2:]

# -------------------------------------------------------------------------------------------- front to engine


class Submit(Sent, tag=1):
    """Not answered: a refusal is the request's only event."""

    number: int
    asked: Submission


class Cancel(Sent, tag=2):
    number: int


class HoldAdapter(Sent, tag=3):
    """Keep the adapter's present content until LetGo."""

    number: int
    adapter: Adapter


class LetGo(Sent, tag=4):
    """The front no longer needs what has that number: an adapter, a grammar, or the answer to a call."""

    number: int


class Awake(Sent, tag=5):
    """This front reads its messages: the last beat and list of adapters that it has read, whether it knows a
    warm engine, and its figures."""

    beat: int = 0
    adapters: int = 0
    is_warm: bool = False
    figures: RequestFigures = msgspec.field(default_factory=RequestFigures)


class Call(Sent, tag=6):
    """One of CALLS. A compiled grammar is kept until LetGo of `number`."""

    number: int
    name: str
    arguments: bytes  # MessagePack of what it takes


FromFront = Submit | Cancel | HoldAdapter | LetGo | Awake | Call


class CallTypes(NamedTuple):
    gives: Any
    takes: Any
    blocks: bool = False  # it may take long, and gets a thread of its own


def _call(gives: Any, *takes: Any, blocks: bool = False) -> CallTypes:
    return CallTypes(gives, tuple[takes], blocks)  # type: ignore[valid-type]


# By the name of the method of the engine, of one of its parts, or of what is kept beside it.
CALLS: Mapping[str, CallTypes] = {
    # figures: of all other fronts
    "stats": _call(tuple[EngineStats, list[RequestFigures]], blocks=True),
    "kv.reset": _call(dict[str, int], Sequence[str], blocks=True),
    "kv.wait_flushed": _call(None, FlushLevel, float, blocks=True),
    "kv.note_seen": _call(None, str, int),
    # tokens, session, salt, adapter
    "kv.prefetch": _call(Prefetched | None, bytes | None, str, str, Adapter | None),
    "grammars.begin": _call(None, Grammar),
    "adapters.load_inside": _call(LoadedAdapter, str, str, blocks=True),
    "adapters.unload": _call(bool, str, blocks=True),
    "snapshots.begin_take": _call(Snapshot, SnapshotRequest),
    "snapshots.begin_all": _call(SnapshotList, str),
    "snapshots.begin_find": _call(Snapshot, str, str),
    "snapshots.begin_open": _call(SnapshotContent, str, str, Adapter | None),
    "snapshots.begin_delete": _call(None, str, str),
    "lives.changed": _call(LivesChange, int),
    "lives.find": _call(RequestLife | None, str),
    "responses.keep": _call(None, str, str, KeptResponse),
    "responses.find": _call(KeptResponse, str, str),
    "responses.delete": _call(None, str, str),
}


def arguments_of(call: Call) -> Any:
    """Raises ProtocolBroken if it is not a valid call."""
    if call.name not in CALLS:
        raise ProtocolBroken(f"{call.name} is no call")
    try:
        return msgspec.msgpack.decode(call.arguments, type=CALLS[call.name].takes)
    except msgspec.DecodeError as error:
        raise ProtocolBroken(f"what came for {call.name} is not what it takes: {error}") from None


# ------------------------------------------------------------------------------- the parent and its processes


C = TypeVar("C", Config, ServerConfig)


def packed(config: Config | ServerConfig) -> bytes:
    """JSON, since keys and paths may have bytes that are not UTF-8, and numbers may have any size;
    MessagePack allows neither."""
    return json.dumps(msgspec.to_builtins(config)).encode()


def unpacked(data: bytes, kind: type[C]) -> C:
    """Raises ProtocolBroken if it is not valid."""
    try:
        config: C = msgspec.convert(json.loads(data), kind)
    except (ValueError, PenstockError) as error:
        raise ProtocolBroken(f"what came is no {kind.__name__}: {error}") from None
    return config


class EngineSetup(Sent, tag=1):
    version: int
    config: bytes  # packed, as the next
    server: bytes
    logs: tuple[str, str]
    url: str


class FrontSetup(Sent, tag=2):
    version: int
    server: bytes  # packed
    logs: tuple[str, str]
    index: int
    num_fronts: int


class Attach(Sent, tag=3):
    """A front process is being started; its socket comes with this message."""

    index: int


class Stop(Sent, tag=4):
    """End in order; with `now`: without waiting for running requests."""

    now: bool = False


FromParent = EngineSetup | FrontSetup | Attach | Stop


class Starting(Sent, tag=1):
    """The engine's process is up and checks its configuration."""

    device: str


class Ready(Sent, tag=2):
    """Requests are served from now on."""


class Detached(Sent, tag=3):
    """The engine has cleaned up after a front process that is gone."""

    index: int


class Broken(Sent, tag=4):
    """The process cannot go on; says why."""

    fault: SentError


ToParent = Starting | Ready | Detached | Broken

# ----------------------------------------------------------------------------------------------------- frames


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes()
    raise NotImplementedError(f"{type(value).__name__} cannot be sent")


def _array(kind: Any, value: Any) -> Any:
    (dtype,) = get_args(get_args(kind)[1])  # of NDArray[dtype]
    return np.frombuffer(value[1], dtype).reshape(value[0])


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)


def frame(message: msgspec.Struct) -> bytes:
    data = bytearray(_LENGTH.size)
    _encoder.encode_into(message, data, _LENGTH.size)
    _LENGTH.pack_into(data, 0, len(data) - _LENGTH.size)
    return bytes(data)


class Frames(Generic[M]):
    """Bytes as they come in, cut into messages of `kind`."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=_array)
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        """Raises ProtocolBroken if the bytes are not a message."""
        self._data += data
        start = 0
        try:
            while len(self._data) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._data, start)
                if length > MAX_BYTES:
                    raise ProtocolBroken(f"a message of {length} bytes is announced; {MAX_BYTES} is the most")
                end = start + _LENGTH.size + length
                if len(self._data) < end:
                    break
                yield self._message(start + _LENGTH.size, end)
                start = end
        finally:
            del self._data[:start]

    def _message(self, start: int, end: int) -> M:
        with memoryview(self._data) as view, view[start:end] as part:
            try:
                message: M = self._decoder.decode(part)
            except (msgspec.DecodeError, PenstockError) as error:
                raise ProtocolBroken(f"what came is no message: {error}") from None
        return message


class Wire(Generic[M]):
    """One end of a blocking connection: one thread may read, any thread may write. Received messages are of
    `kind`."""

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        self.sock = sock
        self._writing = threading.Lock()
        self.frames: Frames[M] = Frames(kind)  # also for code that goes on reading the socket another way
        self._ready: list[M] = []
        self._fds: list[int] = []

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        data = frame(message)
        with self._writing:
            sent = socket.send_fds(self.sock, [data], fds) if fds else 0
            self.sock.sendall(data[sent:])

    def receive(self) -> M | None:
        """None: the other end is gone."""
        while not self._ready:
            data, fds, _, _ = socket.recv_fds(self.sock, 1 << 18, 4)
            self._fds += fds
            if not data:
                return None
            self._ready += self.frames.feed(data)
        return self._ready.pop(0)

    def take_fd(self) -> int:
        """The oldest descriptor that came with a message."""
        if not self._fds:
            raise ProtocolBroken("a socket was announced and did not come")
        return self._fds.pop(0)

    def left(self) -> list[M]:
        """Messages that were read and not yet received."""
        ready, self._ready = self._ready, []
        return ready
