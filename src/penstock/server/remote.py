"""An engine in another process, as this front process sees it. Owns the connection, the unanswered calls, and
the last received list of adapters; the requests themselves belong to the engine."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

import msgspec

from penstock.contract import (
    Adapter,
    FinishReason,
    Grammar,
    Listener,
    LoadedAdapter,
    Prefetched,
    SamplingParams,
    TokenEvent,
)
from penstock.engine.stats import EngineStats
from penstock.errors import DeadlineExceeded, EngineClosed, InvariantBroken, PenstockError
from penstock.models.tokenizer import tokenizer_of
from penstock.server import boundary
from penstock.server.boundary import FromEngine, Hello, ProtocolBroken, SubmitOptions, Wire
from penstock.server.client import AdapterNames, EngineClient, RequestFigures, SnapshotStore
from penstock.server.kept import KeptResponse

logger = logging.getLogger("penstock.server")

STATS_S = 10.0  # for the engine's process to return its figures
SLOW_S = 600.0  # for calls that read files or clear disks there
CLOSE_MARGIN_S = 30.0  # the engine's loop may exceed its deadline by less than this
RECEIVE_BYTES = 1 << 18
_SHUTTING_DOWN = "the server is shutting down"

P = ParamSpec("P")
R = TypeVar("R")


class _Asked(NamedTuple):
    request_id: str
    listener: Listener


def greeted(wire: Wire[FromEngine]) -> Hello:
    """Block until the engine has introduced itself. Raises EngineClosed if it never does, ProtocolBroken if
    it has another version."""
    hello = wire.receive()
    if hello is None:
        raise EngineClosed("the engine's process ended before it was ready")
    if not isinstance(hello, Hello):
        raise ProtocolBroken(f"the engine began with {type(hello).__name__}")
    if hello.version != boundary.VERSION:
        raise ProtocolBroken(
            f"the engine speaks version {hello.version} of the protocol, and this process {boundary.VERSION}"
        )
    return hello


def _result(future: Future[Any], timeout_s: float) -> Any:
    """Block for the answer. Not on the event loop's thread: the loop reads the answer."""
    if asyncio._get_running_loop() is not None:
        raise InvariantBroken("the event loop would wait for itself: call this on another thread")
    try:
        return future.result(timeout_s)
    except FutureTimeout:
        future.cancel()
        raise DeadlineExceeded(f"the engine's process did not answer within {timeout_s:g} s") from None


def asked(method: Callable[Concatenate[Any, P], R], timeout_s: float) -> Callable[Concatenate[Any, P], R]:
    """A method of the interface that the engine's process answers. Blocks."""
    begin = begun(method)

    def ask(self: Any, /, *args: P.args, **options: P.kwargs) -> R:
        answer: R = _result(cast(Future[Any], begin(self, *args, **options)), timeout_s)
        return answer

    return ask


def begun(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A method of the interface that the engine's process answers with a future."""
    signature = inspect.signature(method)

    def begin(self: Any, /, *args: P.args, **options: P.kwargs) -> R:
        bound = signature.bind(self, *args, **options)
        bound.apply_defaults()
        future: R = self.engine.call(method.__qualname__, *bound.args[1:])
        return future

    return begin


class RemoteEngine:
    """`EngineClient` and `EngineLife` over a socket. Messages are read on the event loop, from `start` on;
    any thread may call."""

    def __init__(self, sock: socket.socket) -> None:
        """Blocks until the engine has introduced itself, see `greeted`."""
        wire: Wire[FromEngine] = Wire(sock, FromEngine)
        hello = greeted(wire)
        self.name, self.max_model_len = hello.name, hello.limits.max_model_len
        self.sampling: Mapping[str, Any] = hello.sampling
        self.tiers, self.max_open, self.pid, self.started_s = (
            hello.tiers,
            hello.max_open,
            hello.pid,
            hello.started_s,
        )
        self.tokenizer = tokenizer_of(hello.tokenizer)
        self.engine = self  # of its own calls, and of the calls of the parts below
        self.adapters = RemoteAdapters(self, hello.adapters, hello.lora_root)
        self.grammars = RemoteGrammars(self)
        self.snapshots = RemoteSnapshots(self)
        self.responses = RemoteResponses(self)
        self.own_figures: RequestFigures | None = None
        self._figures_sent = b""
        self._limits, self._residency = hello.limits, hello.residency
        self._sock = sock
        self._early = wire.left()  # messages read after the greeting
        self._frames = wire.frames
        self.next_number = itertools.count(1).__next__
        self._asked: dict[int, _Asked] = {}
        self._number_of: dict[str, int] = {}
        self._calls: dict[int, tuple[Future[Any], str]] = {}  # with the name of the method
        self.dropped: deque[int] = deque()  # grammars that this process no longer keeps
        self._lock = threading.Lock()  # guards writes
        self._unsent: deque[memoryview] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beat_s, self._beat_age_s = time.monotonic(), 0.0
        self.is_warm = hello.is_warm
        self._error: PenstockError | None = None
        self._over = threading.Event()  # nothing more will come

    # --------------------------------------------------------------------------------------------------- life

    def start(self) -> None:
        """On the event loop."""
        self._loop = asyncio.get_running_loop()
        self._sock.setblocking(False)
        self._beat_s = time.monotonic()
        self._loop.add_reader(self._sock, self._read)
        for message in self._early:
            self._take(message)

    def failed(self) -> BaseException | None:
        return self._error

    def beat_age_s(self) -> float:
        """Time since the engine's loop last turned, or since its process was last heard."""
        return time.monotonic() - self._beat_s + self._beat_age_s

    def close(self, deadline_s: float) -> None:
        """Block until the engine has closed: its parent tells its process to close."""
        if not self._over.wait(deadline_s + CLOSE_MARGIN_S):
            raise DeadlineExceeded("the engine's process did not close in time")

    # ----------------------------------------------------------------------------------------------- requests

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        listener: Listener,
        *,
        request_id: str | None = None,
        **options: Any,
    ) -> str:
        """Invalid requests are refused here. If the engine refuses one anyway, the refusal is its only
        event."""
        self._check_alive()
        _, known = self._limits.checked(prompt, sampling)
        self._residency.for_request(
            options.get("residency"), options.get("pins"), len(known), max(0, sampling.max_tokens - 1)
        )
        number = self.next_number()
        request_id = request_id or f"request-{number}"
        self._asked[number] = _Asked(request_id, listener)
        self._number_of[request_id] = number
        try:
            self.send(
                boundary.Submit(number, request_id, known.tobytes(), sampling, SubmitOptions(**options))
            )
        except BaseException:
            self._forget(number)
            raise
        # the engine has ended meanwhile, and its end has missed this one
        if self._over.is_set() and self._forget(number) is not None:
            self._check_alive()
        return request_id

    def cancel(self, request_id: str) -> None:
        if (number := self._number_of.get(request_id)) is not None:
            self.send(boundary.Cancel(number))

    def _forget(self, number: int) -> _Asked | None:
        asked = self._asked.pop(number, None)
        if asked is not None:
            self._number_of.pop(asked.request_id, None)
        return asked

    # -------------------------------------------------------------------------------------------------- calls

    def prefetch(
        self,
        prompt: Sequence[int] | None = None,
        *,
        session: str = "",
        cache_salt: str = "",
        adapter: Adapter | None = None,
    ) -> Future[Prefetched | None]:
        tokens = (
            None
            if prompt is None
            else self._limits.checked(prompt, SamplingParams(max_tokens=0))[1].tobytes()
        )
        return self.call("EngineClient.prefetch", tokens, session, cache_salt, adapter)

    note_seen = begun(EngineClient.note_seen)
    reset_cache = asked(EngineClient.reset_cache, SLOW_S)
    wait_flushed = asked(EngineClient.wait_flushed, SLOW_S)

    def stats(self) -> EngineStats:
        return self.stats_and_figures()[0]

    def stats_and_figures(self) -> tuple[EngineStats, list[RequestFigures]]:
        """Also returns the figures of all other front processes."""
        answer: tuple[EngineStats, list[RequestFigures]] = _result(self.call("EngineClient.stats"), STATS_S)
        return answer

    def call(self, name: str, *arguments: Any) -> Future[Any]:
        """Ends with the answer, or when the engine is gone. Its owner may cancel it: the engine is notified,
        and the answer is dropped."""
        self._check_alive()
        number, future = self.next_number(), Future[Any]()
        self._calls[number] = future, name
        future.add_done_callback(lambda over: self._abandon(number) if over.cancelled() else None)
        self.send(boundary.Call(number, name, msgspec.msgpack.encode(arguments)))
        if self._over.is_set():  # it has ended meanwhile, and its end may have missed this one
            self._end_calls(self._error or EngineClosed(_SHUTTING_DOWN))
        return future

    def _abandon(self, number: int) -> None:
        if self._calls.pop(number, None) is not None:
            self.send(boundary.LetGo(number))

    def _check_alive(self) -> None:
        if self._error is not None:
            raise EngineClosed(str(self._error))
        if self._over.is_set():
            raise EngineClosed(_SHUTTING_DOWN)

    # ------------------------------------------------------------------------------------------------ writing

    def send(self, message: msgspec.Struct) -> None:
        """From any thread; never blocks. Bytes that the socket does not take yet are bounded by the seats of
        the callers."""
        data = memoryview(boundary.frame(message))
        with self._lock:
            if self._over.is_set() or self._loop is None:
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

    # ------------------------------------------------------------------------------------------------ reading

    def _read(self) -> None:
        try:
            data = self._sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:  # it has ended without reading all messages
            data = b""
        except OSError as error:
            self._fail(EngineClosed(f"the connection to the engine's process failed: {error}"))
            return
        if not data:
            self._fail(EngineClosed("the engine's process has ended; the server's log says more"))
            return
        try:
            for message in self._frames.feed(data):
                self._take(message)
        except ProtocolBroken as error:
            logger.error("the engine's process says what cannot be: %s", error)
            self._fail(
                EngineClosed("the connection to the engine's process is broken; the server's log says more")
            )

    def _take(self, message: FromEngine) -> None:
        match message:
            case boundary.Tokens():
                self._deliver(message)
            case boundary.Returned():
                self._settle(message)
            case boundary.Beat():
                self._beat_s, self._beat_age_s, self.is_warm = (
                    time.monotonic(),
                    message.age_s,
                    message.is_warm,
                )
                self.send(boundary.Awake(self.adapters.version, self.is_warm))
                self._send_figures()
                while self.dropped:
                    self.send(boundary.LetGo(self.dropped.popleft()))
            case boundary.AdapterList():
                self.adapters.loaded, self.adapters.version = (
                    {one.adapter.name: one for one in message.loaded},
                    message.version,
                )
                self.send(boundary.Awake(message.version, self.is_warm))
            case boundary.WantFigures():
                if self.own_figures is not None:
                    self.send(boundary.FrontFigures(self.own_figures, were_wanted=True))
            case boundary.Bye(""):
                self._end()
            case boundary.Bye():
                self._fail(EngineClosed(f"the engine has failed: {message.why}"))
            case _:
                raise ProtocolBroken(f"{type(message).__name__} is no message for now")

    def _deliver(self, message: boundary.Tokens) -> None:
        if len(message.plain) % 2:
            raise ProtocolBroken(f"{len(message.plain)} numbers and tokens are no pairs")
        asked, pairs = self._asked, iter(message.plain)
        for number, token in zip(pairs, pairs, strict=True):
            if (one := asked.get(number)) is not None:
                one.listener(TokenEvent(one.request_id, (token,)))
        for event in message.rest:
            found = asked.get(event.number) if event.event.finish is None else self._forget(event.number)
            if found is not None:
                found.listener(event.made(found.request_id))

    def _settle(self, reply: boundary.Returned) -> None:
        future, name = self._calls.pop(reply.call, (None, ""))
        if future is None or not future.set_running_or_notify_cancel():
            return
        if reply.fault is not None:
            future.set_exception(boundary.error_from(reply.fault))
            return
        try:
            value = msgspec.msgpack.decode(reply.value, type=boundary.CALLS[name].gives)
            future.set_result(_KeptGrammar(self, reply.call) if name == "GrammarCompiler.begin" else value)
        except msgspec.MsgspecError as error:
            future.set_exception(ProtocolBroken(f"the engine's process answered what cannot be: {error}"))

    def _send_figures(self) -> None:
        """Sends them if they have changed: if this process is killed, only the figures since the last beat
        are lost."""
        if (
            self.own_figures is not None
            and (now := boundary.frame(boundary.FrontFigures(self.own_figures))) != self._figures_sent
        ):
            self.send(boundary.FrontFigures(self.own_figures))
            self._figures_sent = now

    # --------------------------------------------------------------------------------------------------- ends

    def _fail(self, error: PenstockError) -> None:
        """Nothing more will come: fail every waiting call at once."""
        self._error = self._error or error
        self._end()

    def _end(self) -> None:
        if self._loop is not None and not self._over.is_set():
            self._loop.remove_reader(self._sock)
            with self._lock:
                self._loop.remove_writer(self._sock)
                self._unsent.clear()
                self._over.set()
        error = self._error or EngineClosed("the server is shutting down and gave this request up")
        for number in list(self._asked):
            if (asked := self._forget(number)) is not None:
                asked.listener(
                    TokenEvent(asked.request_id, finish=FinishReason.ERROR, error=str(error), failure=error)
                )
        self._end_calls(error)

    def _end_calls(self, error: PenstockError) -> None:
        for call in list(self._calls):
            future, _ = self._calls.pop(call, (None, ""))
            if future is not None and future.set_running_or_notify_cancel():
                future.set_exception(EngineClosed(str(error)))


class RemoteAdapters:
    """Names as the engine last sent them. A change is complete only when every front knows of it."""

    def __init__(self, engine: RemoteEngine, loaded: Sequence[LoadedAdapter], may_load: bool) -> None:
        self.loaded = {one.adapter.name: one for one in loaded}
        self.root = True if may_load else None
        self.version = 0  # of that list
        self.engine = engine

    def all(self) -> tuple[LoadedAdapter, ...]:
        return tuple(self.loaded.values())

    def find(self, name: str) -> LoadedAdapter | None:
        return self.loaded.get(name)

    def try_hold(self, name: str) -> AbstractContextManager[Adapter] | None:
        found = self.loaded.get(name)
        return None if found is None else self._hold(found.adapter)

    @contextmanager
    def _hold(self, adapter: Adapter) -> Iterator[Adapter]:
        """Requests sent meanwhile find the adapter as it was: the engine reads messages in order."""
        number = self.engine.next_number()
        self.engine.send(boundary.HoldAdapter(number, adapter))
        try:
            yield adapter
        finally:
            self.engine.send(boundary.LetGo(number))

    load_inside = asked(AdapterNames.load_inside, SLOW_S)
    unload = asked(AdapterNames.unload, SLOW_S)


class RemoteSnapshots:
    """The engine's process answers each call, and waits for its tiers."""

    def __init__(self, engine: RemoteEngine) -> None:
        self.engine = engine

    begin_take = begun(SnapshotStore.begin_take)
    begin_all = begun(SnapshotStore.begin_all)
    begin_find = begun(SnapshotStore.begin_find)
    begin_open = begun(SnapshotStore.begin_open)
    begin_delete = begun(SnapshotStore.begin_delete)


class RemoteResponses:
    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine

    def keep(self, id: str, owner: str, kept: KeptResponse) -> Future[None]:
        return self._engine.call("ResponseStore.keep", id, owner, kept)

    def find(self, id: str, owner: str) -> Future[KeptResponse]:
        return self._engine.call("ResponseStore.find", id, owner)

    def delete(self, id: str, owner: str) -> Future[None]:
        return self._engine.call("ResponseStore.delete", id, owner)


class RemoteGrammars:
    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine

    def begin(self, grammar: Grammar) -> Future[Any]:
        return self._engine.call("GrammarCompiler.begin", grammar)


class _KeptGrammar:
    """While this object lives, the engine keeps the compiled grammar."""

    def __init__(self, engine: RemoteEngine, call: int) -> None:
        self._engine = engine
        self._call = call

    def __del__(self) -> None:
        # sent with the next beat: this may run at any point
        self._engine.dropped.append(self._call)
