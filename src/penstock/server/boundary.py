"""What the processes of one server say to each other: the messages, their version, and how they travel on a stream socket. Owns no process
and no thread; who says what when is the business of both ends.

A frame is four bytes of length and as many of MessagePack. Nothing is ever unpickled: a message is one of the types below or an error.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Generic, Literal, TypeVar

import msgspec
import numpy as np

from penstock import errors
from penstock.config import Config, ResidencyName, ServerConfig
from penstock.contract import (
    Adapter,
    CacheHint,
    FinishReason,
    Grammar,
    KvSource,
    LoadedAdapter,
    PromptLimits,
    PromptLogprobs,
    SamplingParams,
    SnapshotRequest,
    TokenEvent,
    TokenLogprob,
    TokenScores,
)
from penstock.errors import InvalidRequest, Overloaded, PenstockError
from penstock.figures import Histogram
from penstock.models.tokenizer import TokenizerSpec

VERSION = 2  # of everything below; both ends say it first
MAX_BYTES = 256 << 20  # of one message: more is garbage, and is not read
_LENGTH = struct.Struct("<I")

M = TypeVar("M")


class ProtocolBroken(PenstockError):
    """The other end says what cannot be: another version, another program, or a defect."""


# --------------------------------------------------------------------------------------------------------------- plain data


class SentError(msgspec.Struct, array_like=True, frozen=True):
    """An exception of ours."""

    kind: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


_KINDS: dict[str, type[PenstockError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, PenstockError)
}


def fault_from(error: BaseException) -> SentError:
    kind = next((one.__name__ for one in type(error).__mro__ if _KINDS.get(one.__name__) is one), "")
    return SentError(kind, str(error), getattr(error, "param", None), getattr(error, "retry_after_s", None))


def error_from(fault: SentError) -> Exception:
    """The same exception, as far as anybody asks: its type, its text and what it names. What was no exception of ours is a defect there."""
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


class Facts(msgspec.Struct, array_like=True, frozen=True):
    """What is the same for as long as an engine runs."""

    name: str
    limits: PromptLimits
    sampling: dict[str, Any]
    tiers: tuple[str, ...]
    max_open: int
    pid: int
    started_s: float  # time.time()
    lora_root: bool  # whether clients may load adapters


class FiguresState(msgspec.Struct, array_like=True):
    """`RequestFigures` of one front process."""

    by_status: dict[tuple[str, str], int]
    by_finish: dict[str, int]
    histograms: dict[str, Histogram]


class Scores(msgspec.Struct, array_like=True):
    """`TokenScores`, its arrays as bytes."""

    num_top: int
    tokens: bytes
    logprobs: bytes
    ranks: bytes
    top_tokens: bytes
    top_logprobs: bytes

    @staticmethod
    def of(scores: TokenScores) -> Scores:
        return Scores(scores.top_tokens.shape[1], *(np.ascontiguousarray(one).tobytes() for one in scores))

    def made(self) -> TokenScores:
        tops = (np.frombuffer(self.top_tokens, np.int32), np.frombuffer(self.top_logprobs, np.float32))
        num = len(self.tokens) // 4
        return TokenScores(
            np.frombuffer(self.tokens, np.int32),
            np.frombuffer(self.logprobs, np.float32),
            np.frombuffer(self.ranks, np.int32),
            *(one.reshape(num, self.num_top) for one in tops),  # type: ignore[arg-type]
        )


class SentEvent(msgspec.Struct, array_like=True, omit_defaults=True):
    """A `TokenEvent` that has more to say than one token."""

    number: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: list[Scores | None] | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None
    source: KvSource | None = None
    error: str | None = None
    waited_s: float | None = None
    matched_s: float | None = None
    loaded_s: float | None = None
    fault: SentError | None = None
    drafted: int = 0
    accepted: int = 0
    scored: bool = False

    @staticmethod
    def of(number: int, event: TokenEvent) -> SentEvent:
        scored = event.prompt_logprobs
        parts = None
        if isinstance(scored, PromptLogprobs):
            parts = [None if part is None else Scores.of(part) for part in scored.parts]
        fault = None if event.failure is None else fault_from(event.failure)
        times = event.waited_s, event.matched_s, event.loaded_s
        rest = (event.finish, event.stop_token, event.source, event.error, *times, fault, event.drafted, event.accepted, event.scored)
        return SentEvent(number, event.tokens, event.logprobs, parts, *rest)

    def made(self, request_id: str) -> TokenEvent:
        scored = self.prompt_logprobs
        prompt = None if scored is None else PromptLogprobs([None if part is None else part.made() for part in scored])
        failure = None if self.fault is None else error_from(self.fault)
        given = failure if isinstance(failure, PenstockError) else None
        times = self.waited_s, self.matched_s, self.loaded_s
        rest = (self.finish, self.stop_token, self.source, self.error, *times, given, self.drafted, self.accepted, self.scored)
        return TokenEvent(request_id, self.tokens, self.logprobs, prompt, *rest)


# ---------------------------------------------------------------------------------------------------------- engine to front


class Hello(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """The first message, once the model is loaded."""

    version: int
    facts: Facts
    tokenizer: TokenizerSpec
    adapters: list[LoadedAdapter]


class Tokens(msgspec.Struct, array_like=True, tag=2):
    """Everything that a step has to say to one front process. An event that is one token is a pair of numbers, whose it is and which; the
    others of a message follow, of each request in order."""

    plain: list[int]
    rest: list[SentEvent]


class Returned(msgspec.Struct, array_like=True, frozen=True, tag=3):
    call: int
    value: bytes = b""  # MessagePack of what the call returns
    fault: SentError | None = None


class Beat(msgspec.Struct, array_like=True, frozen=True, tag=4):
    """The engine's process is alive; its loop came round so long ago."""

    age_s: float


class AdapterList(msgspec.Struct, array_like=True, frozen=True, tag=5):
    """All that are loaded now. Answered with AdaptersSeen."""

    version: int
    loaded: list[LoadedAdapter]


class WantFigures(msgspec.Struct, array_like=True, frozen=True, tag=6):
    """Answered with FrontFigures."""


class Failed(msgspec.Struct, array_like=True, frozen=True, tag=7):
    """The engine will say no more, and why."""

    why: str


class Bye(msgspec.Struct, array_like=True, frozen=True, tag=8):
    """The engine has closed as it was told to; every request has had its last event."""


FromEngine = Hello | Tokens | Returned | Beat | AdapterList | WantFigures | Failed | Bye

# ---------------------------------------------------------------------------------------------------------- front to engine


class Submit(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """Not answered: a refusal is the request's only event."""

    number: int
    request_id: str
    prompt: bytes  # of uint32
    sampling: SamplingParams
    cache_salt: str
    adapter: Adapter | None
    priority: int
    session: str
    hint: CacheHint | None
    residency: ResidencyName | None = None
    pins: tuple[tuple[int, int], ...] | None = None


class Cancel(msgspec.Struct, array_like=True, frozen=True, tag=2):
    number: int


class HoldAdapter(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """Keep what the adapter is now until LetGo."""

    number: int
    adapter: Adapter


class LetGo(msgspec.Struct, array_like=True, frozen=True, tag=4):
    """Of an adapter or a compiled grammar that was kept."""

    number: int


class FrontFigures(msgspec.Struct, array_like=True, tag=5):
    state: FiguresState


class AdaptersSeen(msgspec.Struct, array_like=True, frozen=True, tag=6):
    version: int


class Stats(msgspec.Struct, array_like=True, frozen=True, tag=10):
    call: int


class Reset(msgspec.Struct, array_like=True, frozen=True, tag=11):
    call: int
    tiers: tuple[str, ...]


class Flush(msgspec.Struct, array_like=True, frozen=True, tag=12):
    call: int
    level: Literal["captured", "visible", "persisted"]
    timeout_s: float


class BeginPrefetch(msgspec.Struct, array_like=True, frozen=True, tag=13):
    call: int
    prompt: bytes | None
    session: str
    cache_salt: str
    adapter: Adapter | None


class LoadAdapter(msgspec.Struct, array_like=True, frozen=True, tag=14):
    call: int
    name: str
    path: str


class UnloadAdapter(msgspec.Struct, array_like=True, frozen=True, tag=15):
    call: int
    name: str


class Compile(msgspec.Struct, array_like=True, frozen=True, tag=16):
    """What it becomes is kept until LetGo of `call`."""

    call: int
    grammar: Grammar


class TakeSnapshot(msgspec.Struct, array_like=True, frozen=True, tag=17):
    call: int
    asked: SnapshotRequest


class ListSnapshots(msgspec.Struct, array_like=True, frozen=True, tag=18):
    call: int
    cache_salt: str


class FindSnapshot(msgspec.Struct, array_like=True, frozen=True, tag=19):
    call: int
    name: str
    cache_salt: str


class OpenSnapshot(msgspec.Struct, array_like=True, frozen=True, tag=20):
    call: int
    name: str
    cache_salt: str
    adapter: Adapter | None


class DeleteSnapshot(msgspec.Struct, array_like=True, frozen=True, tag=21):
    call: int
    name: str
    cache_salt: str


SnapshotCall = TakeSnapshot | ListSnapshots | FindSnapshot | OpenSnapshot | DeleteSnapshot
Call = Stats | Reset | Flush | BeginPrefetch | LoadAdapter | UnloadAdapter | Compile | SnapshotCall
FromFront = (
    Submit
    | Cancel
    | HoldAdapter
    | LetGo
    | FrontFigures
    | AdaptersSeen
    | Stats
    | Reset
    | Flush
    | BeginPrefetch
    | LoadAdapter
    | UnloadAdapter
    | Compile
    | SnapshotCall
)

# --------------------------------------------------------------------------------------------- the parent and its processes


class EngineSetup(msgspec.Struct, array_like=True, frozen=True, tag=1):
    version: int
    config: Config
    server: ServerConfig
    logs: tuple[str, str]
    url: str


class FrontSetup(msgspec.Struct, array_like=True, frozen=True, tag=2):
    version: int
    server: ServerConfig
    logs: tuple[str, str]
    index: int
    num_fronts: int


class Attach(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """A front process is being started; its socket comes along."""

    index: int


class Stop(msgspec.Struct, array_like=True, frozen=True, tag=4):
    """End in order; with `now`: without waiting for anybody's requests."""

    now: bool = False


class SharedSeats(msgspec.Struct, array_like=True, frozen=True, tag=5):
    """The memory with everybody's seats comes along."""

    num_fronts: int


FromParent = EngineSetup | FrontSetup | Attach | Stop | SharedSeats


class Starting(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """The engine's process is up and checks what it was given."""

    device: str


class Ready(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """Requests are served from now on."""


class Detached(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """Of a front process that is gone nothing is left in the engine."""

    index: int


class Broken(msgspec.Struct, array_like=True, frozen=True, tag=4):
    """The process cannot go on, and why."""

    fault: SentError


ToParent = Starting | Ready | Detached | Broken

# ------------------------------------------------------------------------------------------------------------------ frames

_encoder = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct) -> bytes:
    data = bytearray(_LENGTH.size)
    _encoder.encode_into(message, data, _LENGTH.size)
    _LENGTH.pack_into(data, 0, len(data) - _LENGTH.size)
    return bytes(data)


class Frames(Generic[M]):
    """Bytes as they come in, cut into messages of `kind`."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        """Raises ProtocolBroken at what is no message."""
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
    """One end of a connection that blocks: one thread may read, any may write. Messages of `kind` come in."""

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        self.sock = sock
        self._writing = threading.Lock()
        self._frames: Frames[M] = Frames(kind)
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
            self._ready += self._frames.feed(data)
        return self._ready.pop(0)

    def take_fd(self) -> int:
        """The oldest that came along with a message."""
        if not self._fds:
            raise ProtocolBroken("a socket was announced and did not come")
        return self._fds.pop(0)

    def left(self) -> list[M]:
        """What was read and not yet received."""
        ready, self._ready = self._ready, []
        return ready

    @property
    def frames(self) -> Frames[M]:
        """For who goes on reading the socket another way."""
        return self._frames
