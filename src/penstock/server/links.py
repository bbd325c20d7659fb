"""The engine's process: an engine and its loop behind connections to front processes. Owns the requests of
fronts in the engine from submission to their last event, also where the front is gone, and the order in which
all of it ends; the parent says when.

Each front has a reader thread and a writer thread. The engine's thread only leaves a step's events as one
list for each front. A front that does not read is cut off when too many lists have gathered, or when it has
been silent for too long. It never delays other fronts.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from penstock.contract import FinishReason, TokenEvent
from penstock.errors import EngineClosed, InvalidRequest, Overloaded, PenstockError
from penstock.models.tokenizer import spec_of
from penstock.server import boundary
from penstock.server.boundary import FromFront, FromParent, ProtocolBroken, Wire
from penstock.server.client import RequestFigures
from penstock.server.kept import KeptResponses

if TYPE_CHECKING:
    from penstock.engine.engine import Engine
    from penstock.engine.loop import EngineLoop

logger = logging.getLogger("penstock.server")

# that wait for one front: seconds of a full machine, and 20 MiB, or 200 where all of them have scores
MOST_EVENTS = 1 << 16
MOST_MESSAGES = 1 << 12  # of any kind
BEAT_S = 0.25
# a front answers every beat; one that says nothing for 20 s of them stands still. Where this process does,
# none come
SILENT_BEATS = 80
# for a front to give its figures, or to take in which adapters there are; one that is late is left out
ANSWER_S = 1.0
DRAIN_S = 5.0  # for a front to read its last messages
WATCH_S = 0.25  # how often a loop that has failed is looked for


class FrontLink:
    """One front process."""

    def __init__(self, index: int, sock: socket.socket, links: FrontLinks) -> None:
        self.index = index
        self.figures: RequestFigures | None = None
        self.num_answers = 0  # to WantFigures
        self.adapters_seen = 0
        self.knows_warm = False
        self._links = links
        self._engine = links.engine
        self._wire: Wire[FromFront] = Wire(sock, FromFront)
        self._open: dict[int, str] = {}  # requests that have not had their last event
        self._batch: list[tuple[int, TokenEvent]] = []  # the engine thread's
        self._queue: SimpleQueue[list[tuple[int, TokenEvent]] | bytes | None] = SimpleQueue()
        self._num_queued = self._num_sent = 0  # events; each counted by one thread
        self._kept: dict[int, Any] = {}  # holds of adapters, and futures of grammars
        self._begun: dict[int, Future[Any]] = {}  # calls about snapshots that are not answered
        self._is_cut = False
        self._num_beats = 0  # beats sent to it
        # the number of beats when it last sent something; None while that is being handled, and before
        self._heard_at: int | None = None
        self._gone = False  # its messages are no longer read
        self._over = threading.Lock()  # acquired for good by the thread that sees that nothing of it is left
        self._threads = [
            threading.Thread(target=work, name=f"{name}-{index}", daemon=True)
            for name, work in (("front-read", self._read_all), ("front-write", self._write_all))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    # ------------------------------------------------------------------------------------------- to the front

    def tell(self, message: msgspec.Struct) -> None:
        if self._queue.qsize() > MOST_MESSAGES:
            self.cut(f"does not read: more than {MOST_MESSAGES} messages wait for it")
            return
        self._queue.put(boundary.frame(message))

    def hear(self, number: int, event: TokenEvent) -> None:
        """What a request's listener does, on the engine's thread."""
        self._batch.append((number, event))
        if event.finish is not None:
            self._open.pop(number, None)
            if self._gone:
                self._settle()

    def hand_over(self) -> None:
        """The engine's thread: a step has said what it had to say."""
        if not self._batch:
            return
        batch, self._batch = self._batch, []
        if self._gone:
            return
        self._num_queued += len(batch)
        if self._num_queued - self._num_sent > MOST_EVENTS:
            self.cut(f"does not read: {self._num_queued - self._num_sent} events wait for it")
            return
        self._queue.put(batch)

    def cut(self, why: str) -> None:
        """Its process sees that as the end of the engine, and its requests are cancelled."""
        if self._is_cut:
            return
        self._is_cut = True
        logger.error("front process %d is cut off: it %s", self.index, why)
        with contextlib.suppress(OSError):
            self._wire.sock.shutdown(socket.SHUT_RDWR)

    def beat(self, age_s: float, is_warm: bool) -> None:
        self.tell(boundary.Beat(age_s, is_warm))
        self._num_beats += 1
        if (heard_at := self._heard_at) is not None and self._num_beats - heard_at > SILENT_BEATS:
            self.cut(f"has said nothing for {SILENT_BEATS} beats")

    def close(self, why: str) -> None:
        """Behind everything that was left for it comes the end."""
        self.tell(boundary.Bye(why))
        self._queue.put(None)

    def wait_written(self, timeout_s: float) -> None:
        self._threads[1].join(timeout_s)

    def _write_all(self) -> None:
        sock = self._wire.sock
        with contextlib.suppress(OSError):
            for data, num_events in self._to_write():
                sock.sendall(data)
                self._num_sent += num_events
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)

    def _to_write(self) -> Iterator[tuple[bytes, int]]:
        """One message for a step; for several where they have gathered."""
        while (item := self._queue.get()) is not None:
            batch: list[tuple[int, TokenEvent]] = []
            while isinstance(item, list):
                batch += item
                try:
                    item = self._queue.get_nowait()
                except Empty:
                    item = b""
            if batch:
                yield boundary.frame(tokens_of(batch)), len(batch)
            if item is None:
                return
            yield item, 0

    # ----------------------------------------------------------------------------------------- from the front

    def _read_all(self) -> None:
        try:
            while (message := self._wire.receive()) is not None:
                self._heard_at = None
                self._handle(message)
                self._heard_at = self._num_beats
        except ProtocolBroken as error:
            self.cut(f"says what cannot be: {error}")
        except ConnectionResetError:
            logger.debug("front process %d has ended without reading all its messages", self.index)
        except OSError as error:
            logger.error("the connection to front process %d failed: %s", self.index, error)
        except Exception:
            logger.exception("a message of front process %d could not be dealt with", self.index)
        finally:
            self._end()

    def _handle(self, message: FromFront) -> None:
        match message:
            case boundary.Submit():
                self._submit(message)
            case boundary.Cancel():
                if (request_id := self._open.get(message.number)) is not None:
                    self._engine.cancel(request_id)
            case boundary.HoldAdapter():
                with contextlib.suppress(InvalidRequest):  # it is gone: what is submitted to it is refused
                    self._kept[message.number] = self._engine.adapters.hold(message.adapter)
            case boundary.LetGo():
                _end_kept(self._kept.pop(message.number, None))
                if (begun := self._begun.get(message.number)) is not None:
                    begun.cancel()
            case boundary.FrontFigures():
                self._links.note(self, message.figures, message.were_wanted)
            case boundary.Awake():
                self._links.note(self, adapters_seen=message.adapters, knows_warm=message.is_warm)
            case boundary.Call():
                self._call(message)

    def _submit(self, message: boundary.Submit) -> None:
        self._open[message.number] = message.request_id
        try:
            self._engine.submit(
                np.frombuffer(message.prompt, np.uint32),  # type: ignore[arg-type]
                message.sampling,
                functools.partial(self.hear, message.number),
                request_id=message.request_id,
                **msgspec.structs.asdict(message.options),
            )
        except Exception as error:
            self._open.pop(message.number, None)
            failure = error if isinstance(error, PenstockError) else None
            if failure is None:
                logger.exception("request %s could not be submitted", message.request_id)
            refusal = TokenEvent(
                message.request_id, finish=FinishReason.ERROR, error=str(error), failure=failure
            )
            self.tell(tokens_of([(message.number, refusal)]))

    def _call(self, call: boundary.Call) -> None:
        """Never blocks: what the engine answers with a future is begun here, and what takes long waits on a
        thread of its own."""
        arguments = boundary.arguments_of(call)
        try:
            match call.name:
                case "GrammarCompiler.begin":
                    # until its front lets go of it
                    self._kept[call.number] = future = self._engine.grammars.begin(*arguments)
                    future.add_done_callback(functools.partial(self._answer_compiled, call.number))
                    return
                case "EngineClient.prefetch":
                    prompt, session, salt, adapter = arguments
                    tokens: Any = None if prompt is None else np.frombuffer(prompt, np.uint32)
                    begun = self._engine.prefetch(tokens, session=session, cache_salt=salt, adapter=adapter)
                    begun.add_done_callback(lambda done: self._answer(call.number, done.result))
                    return
                case "EngineClient.note_seen":
                    noted = self._engine.note_seen(*arguments)
                    noted.add_done_callback(lambda done: self._answer(call.number, done.result))
                    return
                case name if name.startswith("SnapshotStore."):
                    asked: Future[Any] = getattr(self._engine.snapshots, name.partition(".")[2])(*arguments)
                    self._begun[call.number] = asked
                    asked.add_done_callback(functools.partial(self._end_begun, call.number))
                    return
                case "ResponseStore.keep" | "ResponseStore.find" | "ResponseStore.delete":
                    self._answer(
                        call.number,
                        getattr(self._links.responses, call.name.partition(".")[2])(*arguments).result,
                    )
                    return
                case _:
                    work = functools.partial(self._links.do, call.name, arguments, self)
            threading.Thread(
                target=self._answer, args=(call.number, work), name=f"front-call-{self.index}", daemon=True
            ).start()
        except Exception as error:
            self.tell(boundary.Returned(call.number, fault=_fault(error)))

    def _end_begun(self, call: int, asked: Future[Any]) -> None:
        self._begun.pop(call, None)
        if not asked.cancelled():
            self._answer(call, asked.result)

    def _answer_compiled(self, call: int, future: Future[Any]) -> None:
        if future.cancelled():
            return  # its front has let go of it
        if future.exception() is not None:
            self._kept.pop(call, None)
        self._answer(call, lambda: future.result() and None)

    def _answer(self, call: int, work: Callable[[], Any]) -> None:
        try:
            reply = boundary.Returned(call, msgspec.msgpack.encode(work()))
        except Exception as error:
            reply = boundary.Returned(call, fault=_fault(error))
        self.tell(reply)

    # --------------------------------------------------------------------------------------------------- ends

    def _end(self) -> None:
        """The front is gone: drop the events of its requests."""
        self._gone = True
        self._queue.put(None)
        self._links.note(self, gone=True)
        for kept in list(self._kept.values()):
            _end_kept(kept)
        self._kept.clear()
        for begun in list(self._begun.values()):
            begun.cancel()
        for request_id in list(self._open.values()):
            self._engine.cancel(request_id)
            with contextlib.suppress(EngineClosed):  # how much its client was given is not known
                self._engine.note_seen(request_id, 0)
        self._settle()

    def _settle(self) -> None:
        """Once, by the thread that sees the last of its requests end."""
        if not self._open and self._over.acquire(blocking=False):
            self._wire.sock.close()
            self._links.detached(self.index)


class FrontLinks:
    """All front processes of one engine. `detached` is called with the index of one of which nothing is
    left."""

    def __init__(self, engine: Engine, loop: EngineLoop, detached: Callable[[int], None]) -> None:
        self.engine = engine
        self.responses = KeptResponses()
        self._tokenizer = spec_of(engine.tokenizer)
        self._loop = loop
        self.detached = detached
        self._links: list[FrontLink] = []
        self._changed = threading.Condition()  # of what links have heard, and of which there are
        self._past: list[RequestFigures] = []  # of fronts that are gone
        self._adapters_version = 0
        self._busy: set[str] = set()
        self._loading = threading.Lock()
        self._started_s = time.time()
        self._stop = threading.Event()
        engine.call_after_events(self._hand_over)
        threading.Thread(target=self._beat, name="front-beat", daemon=True).start()

    def add(self, index: int, sock: socket.socket) -> None:
        link = FrontLink(index, sock, self)
        engine = self.engine
        with self._changed:
            link.adapters_seen = self._adapters_version
            hello = boundary.Hello(
                boundary.VERSION,
                engine.name,
                engine.limits,
                dict(engine.sampling),
                engine.tiers,
                engine.max_open,
                os.getpid(),
                self._started_s,
                engine.adapters.root is not None,
                self._tokenizer,
                list(engine.adapters.all()),
                engine.residency,
                self._loop.is_warm,
            )
            link.tell(hello)
            self._links = [*self._links, link]
            link.start()

    def close(self, why: str = "") -> None:
        """After the last event of every request: tell the fronts. Blocks until they have read that, or have
        had time to. `why`: the engine's loop has failed."""
        self._stop.set()
        by_s = time.monotonic() + DRAIN_S
        links = self._links
        for link in links:
            link.close(why)
        for link in links:
            link.wait_written(max(0.0, by_s - time.monotonic()))

    def _hand_over(self) -> None:
        for link in self._links:
            link.hand_over()

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            age_s, is_warm = self._loop.beat_age_s(), self._loop.is_warm
            for link in self._links:
                link.beat(age_s, is_warm)

    def wait_known_warm(self) -> None:
        """Block until all fronts have said that they know the engine to be warm, or should have."""
        with self._changed:
            self._changed.wait_for(lambda: all(link.knows_warm for link in self._links), 10 * BEAT_S)

    # ---------------------------------------------------------------------------------- what links have heard

    def note(
        self,
        link: FrontLink,
        figures: RequestFigures | None = None,
        wanted: bool = False,
        adapters_seen: int = 0,
        knows_warm: bool = False,
        gone: bool = False,
    ) -> None:
        with self._changed:
            link.figures = figures or link.figures
            link.num_answers += wanted
            link.adapters_seen = max(link.adapters_seen, adapters_seen)
            link.knows_warm |= knows_warm
            if gone and link in self._links:
                if link.figures is not None:
                    self._past.append(link.figures)
                self._links = [one for one in self._links if one is not link]
            self._changed.notify_all()

    # --------------------------------------------------------------------------------------------- slow calls

    def do(self, name: str, arguments: Any, asking: FrontLink) -> Any:
        """On a thread of its own."""
        owner, method = name.split(".")
        parts: dict[str, Any] = {"EngineClient": self.engine, "AdapterNames": self.engine.adapters}
        work = functools.partial(getattr(parts[owner], method), *arguments)
        match method:
            case "stats":
                return work(), self._figures(asking)
            case "reset_cache" | "wait_flushed":
                with self._alone(
                    "a cache reset is in progress"
                    if method == "reset_cache"
                    else "a cache flush is in progress"
                ):
                    return work()
            case "load_inside" | "unload":
                return self._change(arguments[0], work)
        return work()

    @contextlib.contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        with self._changed:
            if what in self._busy:
                raise Overloaded(what)
            self._busy.add(what)
        try:
            yield
        finally:
            with self._changed:
                self._busy.discard(what)

    def _figures(self, asking: FrontLink) -> list[RequestFigures]:
        """Of all fronts but the one that asks. One that does not answer in time counts as it last did."""
        with self._changed:
            asked = [(link, link.num_answers) for link in self._links if link is not asking]
            for link, _ in asked:
                link.tell(boundary.WantFigures())
            self._changed.wait_for(
                lambda: all(link.num_answers > num or link not in self._links for link, num in asked),
                ANSWER_S,
            )
            current = [
                link.figures for link in self._links if link is not asking and link.figures is not None
            ]
            return [*self._past, *current]

    def _change(self, name: str, change: Callable[[], Any]) -> Any:
        """Load or unload. It is over when every front knows of it; until then requests may still ask for what
        had the name before."""
        with self._loading, contextlib.ExitStack() as kept:
            if (before := self.engine.adapters.try_hold(name)) is not None:
                kept.enter_context(before)
            done = change()
            with self._changed:
                self._adapters_version += 1
                version, links = self._adapters_version, self._links
                for link in links:
                    link.tell(boundary.AdapterList(version, list(self.engine.adapters.all())))
                self._changed.wait_for(
                    lambda: all(one.adapters_seen >= version or one not in self._links for one in links),
                    ANSWER_S,
                )
            return done


def tokens_of(batch: list[tuple[int, TokenEvent]]) -> boundary.Tokens:
    """Of each request in order: once one has an event that is more than a token, what follows it in the batch
    is among those, too."""
    plain: list[int] = []
    rest: list[boundary.SentEvent] = []
    seen: set[int] = set()
    for number, event in batch:
        tokens = event.tokens
        if len(tokens) == 1 and event[2:] == _PLAIN and number not in seen:
            plain.append(number)
            plain.append(tokens[0])
        else:
            seen.add(number)
            rest.append(boundary.SentEvent.of(number, event))
    return boundary.Tokens(plain, rest)


_PLAIN = TokenEvent("")[2:]


def _fault(error: BaseException) -> boundary.SentError:
    if not isinstance(error, PenstockError):
        logger.error("a call of a front process failed", exc_info=error)
    return boundary.fault_from(error)


def _end_kept(kept: Any) -> None:
    """A hold ends; a grammar is let go of, and is compiled no further if no one else waits for it."""
    if isinstance(kept, Future):
        kept.cancel()
    elif kept is not None:
        kept.end()


# --------------------------------------------------------------------------------------- the engine's process


class EngineProcess:
    """Obeys the parent on a thread of its own, and waits for the end on the caller's."""

    def __init__(self, engine: Engine, loop: EngineLoop, parent: Wire[FromParent], shutdown_s: float) -> None:
        self._loop = loop
        self._parent = parent
        self._shutdown_s = shutdown_s
        self._links = FrontLinks(engine, loop, self._detached)
        self._closed = threading.Event()
        self._error: BaseException | None = None  # of closing

    def run(self, start: Callable[[], None]) -> int:
        """`start` warms the engine up; meanwhile fronts get its description. Returns the exit code."""
        threading.Thread(target=self._obey, name="parent", daemon=True).start()
        start()
        self._links.wait_known_warm()
        self._parent.send(boundary.Ready())
        while not self._closed.wait(WATCH_S) and self._loop.failed() is None:
            pass
        if (error := self._loop.failed()) is not None:  # it may have while it closed
            self._links.close(f"{type(error).__name__}: {error}")
            self._parent.send(
                boundary.Broken(
                    boundary.fault_from(
                        EngineClosed(f"the engine has failed: {type(error).__name__}: {error}")
                    )
                )
            )
            return 1
        self._links.close()
        if self._error is not None:
            logger.error("the engine loop closed with an error", exc_info=self._error)
        return 0 if self._error is None else 1

    def _obey(self) -> None:
        try:
            while (message := self._parent.receive()) is not None:
                self._do(message)
        except (OSError, ProtocolBroken) as error:
            logger.error("the connection to the parent process failed: %s", error)
        os._exit(1)  # the parent is gone: nothing can start fronts or stop this process

    def _do(self, message: FromParent) -> None:
        match message:
            case boundary.Attach():
                self._links.add(message.index, socket.socket(fileno=self._parent.take_fd()))
            case boundary.Stop():
                deadline_s = 0.0 if message.now else self._shutdown_s
                threading.Thread(target=self._close, args=(deadline_s,), name="close", daemon=True).start()
            case _:
                raise ProtocolBroken(f"{type(message).__name__} is no message for now")

    def _close(self, deadline_s: float) -> None:
        try:
            self._loop.close(deadline_s)
        except PenstockError as error:
            self._error = error
        self._closed.set()

    def _detached(self, index: int) -> None:
        """May be called on the engine's thread, which waits for no lock that fronts take."""
        threading.Thread(target=self._detach, args=(index,), name=f"detach-{index}", daemon=True).start()

    def _detach(self, index: int) -> None:
        """The parent frees the seats of a front that is gone: the engine has ended all that it asked for."""
        try:
            self._parent.send(boundary.Detached(index))
        except OSError:
            logger.debug("front process %d has left after the parent", index)
