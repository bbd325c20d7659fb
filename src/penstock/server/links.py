"""The engine as a service to its fronts, in this process or others: one object, with a link for each front.
Owns the requests of fronts in the engine from submission to their last event, also if the front is gone, and
the order in which all of it ends.

Each front has a reader thread. The engine's thread only leaves a step's events as one list for each front. A
front process that does not read is cut off when too many lists have gathered, or when it has been silent for
too long. It never delays other fronts.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from penstock.contract import FinishReason, TokenEvent
from penstock.errors import EngineClosed, InvalidRequest, Overloaded, PenstockError
from penstock.models.tokenizer import TokenizerSpec, spec_of
from penstock.server import boundary
from penstock.server.boundary import FromEngine, FromFront, FromParent, ProtocolBroken, Wire, tokens_of
from penstock.server.channel import EngineEnd, MemoryChannel, SocketEngineEnd
from penstock.server.kept import KeptResponses
from penstock.server.lives import Lives
from penstock.server.seats import RequestFigures

if TYPE_CHECKING:
    from penstock.engine.engine import Engine
    from penstock.engine.loop import EngineLoop

logger = logging.getLogger("penstock.server")

BEAT_S = 0.25
# a front answers every beat; one that says nothing for 20 s of them stands still. Where this process does,
# none come
SILENT_BEATS = 80
# for a front to answer a beat, or to take in which adapters there are; one that is late is left out
ANSWER_S = 1.0
DRAIN_S = 5.0  # for a front to read its last messages


class FrontLink:
    """One front."""

    def __init__(self, index: int, channel: EngineEnd, service: EngineService) -> None:
        self.index = index
        self.heard = boundary.Awake()  # what it last said of itself; changed by the service
        self.num_beats = 0  # beats sent to it
        self._service = service
        self._channel = channel
        self._open: dict[int, str] = {}  # requests that have not had their last event
        self._batch: boundary.Batch = []  # the engine thread's
        self._kept: dict[int, Any] = {}  # holds of adapters, and futures of calls and grammars
        self._is_cut = False
        # the number of beats when it last sent something; None while that is being handled, and before
        self._heard_at: int | None = None
        self._gone = False  # its messages are no longer read
        self._over = threading.Lock()  # acquired for good by the thread that sees that nothing of it is left

    def start(self) -> None:
        threading.Thread(target=self._read_all, name=f"front-read-{self.index}", daemon=True).start()

    # ------------------------------------------------------------------------------------------- to the front

    def tell(self, message: boundary.Batch | FromEngine) -> None:
        if self._gone or self._is_cut:
            return
        self._channel.put(message)
        if (why := self._channel.too_full()) is not None:
            self.cut(f"does not read: {why}")

    def hear(self, number: int, event: TokenEvent) -> None:
        """What a request's listener does, on the engine's thread."""
        self._batch.append((number, event))
        if event.finish is not None:
            self._open.pop(number, None)
            if self._gone:
                self._settle()

    def hand_over(self) -> None:
        """The engine's thread: a step has said what it had to say."""
        if self._batch:
            batch, self._batch = self._batch, []
            self.tell(batch)

    def cut(self, why: str) -> None:
        """Its process sees that as the end of the engine, and its requests are cancelled."""
        if not self._is_cut:
            self._is_cut = True
            logger.error("front process %d is cut off: it %s", self.index, why)
            self._channel.cut()

    def beat(self, age_s: float, is_warm: bool) -> None:
        self.num_beats += 1
        self.tell(boundary.Beat(self.num_beats, age_s, is_warm))
        if (heard_at := self._heard_at) is not None and self.num_beats - heard_at > SILENT_BEATS:
            self.cut(f"has said nothing for {SILENT_BEATS} beats")

    def wait_written(self, timeout_s: float) -> None:
        self._channel.wait_written(timeout_s)

    # ----------------------------------------------------------------------------------------- from the front

    def _read_all(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                self._heard_at = None
                self._handle(message)
                self._heard_at = self.num_beats
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
        engine = self._service.engine
        match message:
            case boundary.Submit():
                self._submit(message)
            case boundary.Cancel():
                if (request_id := self._open.get(message.number)) is not None:
                    engine.cancel(request_id)
            case boundary.HoldAdapter():
                with contextlib.suppress(InvalidRequest):  # it is gone: what is submitted to it is refused
                    self._kept[message.number] = engine.adapters.hold(message.adapter)
            case boundary.LetGo():
                _end_kept(self._kept.pop(message.number, None))
            case boundary.Awake():
                self._service.note(self, message)
            case boundary.Call():
                self._call(message)

    def _submit(self, message: boundary.Submit) -> None:
        request_id = self._open[message.number] = message.asked.id
        try:
            self._service.engine.submit(message.asked, functools.partial(self.hear, message.number))
        except Exception as error:
            self._open.pop(message.number, None)
            failure = error if isinstance(error, PenstockError) else None
            if failure is None:
                logger.exception("request %s could not be submitted", request_id)
            refusal = TokenEvent(request_id, finish=FinishReason.ERROR, error=str(error), failure=failure)
            self.tell(tokens_of([(message.number, refusal)]))

    def _call(self, call: boundary.Call) -> None:
        """Never blocks: what the engine answers with a future is begun here, and what takes long waits on a
        thread of its own."""
        work = functools.partial(self._service.do, call.name, boundary.arguments_of(call), self)
        answer = functools.partial(self._answer, call, work)
        if boundary.CALLS[call.name].blocks:
            threading.Thread(target=answer, name=f"front-call-{self.index}", daemon=True).start()
        else:
            answer()

    def _answer(self, call: boundary.Call, work: Callable[[], Any]) -> None:
        try:
            value = work()
            if isinstance(value, Future):
                self._kept[call.number] = value
                value.add_done_callback(functools.partial(self._answer_done, call))
                return
            reply = boundary.Returned(call.number, msgspec.msgpack.encode(value))
        except Exception as error:
            if not isinstance(error, PenstockError):
                logger.error("a call of a front process failed", exc_info=error)
            reply = boundary.Returned(call.number, fault=boundary.fault_from(error))
        self.tell(reply)

    def _answer_done(self, call: boundary.Call, done: Future[Any]) -> None:
        if done.cancelled():
            return  # its front has let go of it
        is_grammar = call.name == "grammars.begin" and done.exception() is None
        if not is_grammar:  # which is kept until its front lets go of it
            self._kept.pop(call.number, None)
        self._answer(call, (lambda: None) if is_grammar else done.result)

    # --------------------------------------------------------------------------------------------------- ends

    def _end(self) -> None:
        """The front is gone: drop the events of its requests."""
        self._channel.put(boundary.Bye())  # ends what writes
        self._gone = True
        self._service.forget(self)
        for kept in list(self._kept.values()):
            _end_kept(kept)
        self._kept.clear()
        engine = self._service.engine
        for request_id in list(self._open.values()):
            engine.cancel(request_id)
            with contextlib.suppress(EngineClosed):  # how much its client was given is not known
                engine.kv.note_seen(request_id, 0)
        self._settle()

    def _settle(self) -> None:
        """Once, by the thread that sees the last of its requests end."""
        if not self._open and self._over.acquire(blocking=False):
            self._channel.close()
            self._service.detached(self.index)


def _end_kept(kept: Any) -> None:
    """A hold ends; a call that has not begun is given up; a grammar is let go of, and is compiled no further
    if no one else waits for it."""
    if isinstance(kept, Future):
        kept.cancel()
    elif kept is not None:
        kept.end()


class EngineService:
    """An engine, its loop, and all its fronts. `detached` is called with the index of a front once nothing of
    it is left. `lives` are empty if they do not observe the engine."""

    def __init__(
        self,
        engine: Engine,
        loop: EngineLoop,
        detached: Callable[[int], None] = lambda index: None,
        lives: Lives | None = None,
    ) -> None:
        self.engine = engine
        self.loop = loop
        self.detached = detached
        self.lives = lives or Lives()
        self.responses = KeptResponses()
        self.ended = threading.Event()  # and all fronts know
        self.is_well = True  # False: the loop could not be closed
        self._links: list[FrontLink] = []
        self._changed = threading.Condition()  # of what links have heard, and of which there are
        self._past: list[RequestFigures] = []  # of fronts that are gone
        self._adapters_version = 0
        self._busy: set[str] = set()
        self._loading = threading.Lock()
        self._started_s = time.time()
        self._stop = threading.Event()
        engine.call_after_events(self._hand_over)

    def start(self) -> None:
        """Beats, from now until the end."""
        with self._changed:
            self._beat_all(self._links)
        threading.Thread(target=self._beat, name="front-beat", daemon=True).start()

    def attach(self, index: int, sock: socket.socket) -> None:
        """A front in another process."""
        self._add(index, SocketEngineEnd(sock, str(index)), self._tokenizer)

    @functools.cached_property
    def _tokenizer(self) -> TokenizerSpec:
        return spec_of(self.engine.tokenizer)

    def attach_here(self) -> MemoryChannel:
        """A front in this process, which has the engine's own tokenizer."""
        channel = MemoryChannel()
        self._add(0, channel, None)
        return channel

    def _add(self, index: int, channel: EngineEnd, tokenizer: TokenizerSpec | None) -> None:
        link, engine = FrontLink(index, channel, self), self.engine
        with self._changed:
            link.heard.adapters = self._adapters_version
            hello = boundary.Hello(
                boundary.VERSION,
                engine.name,
                engine.limits,
                dict(engine.sampling),
                engine.kv.tiers,
                engine.max_open,
                os.getpid(),
                self._started_s,
                engine.adapters.root is not None,
                tokenizer,
                list(engine.adapters.all()),
                engine.residency,
                self.loop.is_warm,
                engine.kv.block_tokens,
            )
            link.tell(hello)
            self._links = [*self._links, link]
            link.start()

    def close(self, deadline_s: float) -> None:
        """Close the loop: running requests have `deadline_s` to end. Then tell the fronts."""
        try:
            self.loop.close(deadline_s)
        except Exception as error:
            self.is_well = False
            logger.error("the engine loop closed with an error", exc_info=error)
        self._say_bye()

    def _say_bye(self) -> None:
        """After the last event of every request, or if the loop has failed. Blocks until the fronts have read
        that, or have had time to."""
        error = self.loop.failed()
        with self._changed:
            if not self._stop.is_set():
                self._stop.set()
                for link in self._links:
                    link.tell(boundary.Bye("" if error is None else f"{type(error).__name__}: {error}"))
        by_s = time.monotonic() + DRAIN_S
        for link in self._links:
            link.wait_written(max(0.0, by_s - time.monotonic()))
        self.ended.set()

    def _hand_over(self) -> None:
        for link in self._links:
            link.hand_over()

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            if self.loop.failed() is not None:
                self._say_bye()
                return
            with self._changed:
                self._beat_all(self._links)

    def _beat_all(self, links: list[FrontLink]) -> None:
        age_s, is_warm = self.loop.beat_age_s(), self.loop.is_warm
        for link in links:
            link.beat(age_s, is_warm)

    def wait_known_warm(self) -> None:
        """Block until all fronts have said that they know the engine to be warm, or should have."""
        with self._changed:
            self._changed.wait_for(lambda: all(link.heard.is_warm for link in self._links), 10 * BEAT_S)

    # ---------------------------------------------------------------------------------- what links have heard

    def note(self, link: FrontLink, heard: boundary.Awake) -> None:
        with self._changed:
            link.heard = heard
            self._changed.notify_all()

    def forget(self, link: FrontLink) -> None:
        """It is gone."""
        with self._changed:
            self._past.append(link.heard.figures)
            self._links = [one for one in self._links if one is not link]
            self._changed.notify_all()

    def _wait_heard(self, links: list[FrontLink], is_heard: Callable[[FrontLink], bool]) -> None:
        """Until all of them have said so, or are gone, or are late."""
        self._changed.wait_for(
            lambda: all(is_heard(link) or link not in self._links for link in links), ANSWER_S
        )

    # -------------------------------------------------------------------------------------------------- calls

    def do(self, name: str, arguments: Any, asking: FrontLink) -> Any:
        """One of `boundary.CALLS`."""
        owner = self if name.startswith(("lives.", "responses.")) else self.engine
        work = functools.partial(operator.attrgetter(name)(owner), *arguments)
        match name:
            case "stats":
                return work(), self._figures(asking)
            case "kv.prefetch":
                prompt, session, salt, adapter = arguments
                tokens: Any = None if prompt is None else np.frombuffer(prompt, np.uint32)
                return self.engine.kv.prefetch(tokens, session=session, cache_salt=salt, adapter=adapter)
            case "kv.reset" | "kv.wait_flushed":
                with self._alone(f"a cache {'reset' if name == 'kv.reset' else 'flush'} is in progress"):
                    return work()
            case "adapters.load_inside" | "adapters.unload":
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
            others = [link for link in self._links if link is not asking]
            self._beat_all(others)
            asked = {link: link.num_beats for link in others}
            self._wait_heard(others, lambda link: link.heard.beat >= asked[link])
            return [*self._past, *(link.heard.figures for link in self._links if link is not asking)]

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
                self._wait_heard(links, lambda link: link.heard.adapters >= version)
            return done


# --------------------------------------------------------------------------------------- the engine's process


class EngineProcess:
    """Obeys the parent on a thread of its own, and waits for the end on the caller's."""

    def __init__(
        self,
        engine: Engine,
        loop: EngineLoop,
        parent: Wire[FromParent],
        shutdown_s: float,
        lives: Lives | None = None,
    ) -> None:
        self._parent = parent
        self._shutdown_s = shutdown_s
        self._service = EngineService(engine, loop, self._detached, lives)

    def run(self, start: Callable[[], None]) -> int:
        """`start` warms the engine up; meanwhile fronts get its description. Returns the exit code."""
        self._service.start()
        threading.Thread(target=self._obey, name="parent", daemon=True).start()
        start()
        self._service.wait_known_warm()
        self._parent.send(boundary.Ready())
        self._service.ended.wait()
        if (error := self._service.loop.failed()) is not None:  # it may have while it closed
            failure = EngineClosed(f"the engine has failed: {type(error).__name__}: {error}")
            self._parent.send(boundary.Broken(boundary.fault_from(failure)))
            return 1
        return 0 if self._service.is_well else 1

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
                self._service.attach(message.index, socket.socket(fileno=self._parent.take_fd()))
            case boundary.Stop():
                deadline_s = 0.0 if message.now else self._shutdown_s
                close = functools.partial(self._service.close, deadline_s)
                threading.Thread(target=close, name="close", daemon=True).start()
            case _:
                raise ProtocolBroken(f"{type(message).__name__} is no message for now")

    def _detached(self, index: int) -> None:
        """May be called on the engine's thread, which waits for no lock that fronts take."""
        threading.Thread(target=self._detach, args=(index,), name=f"detach-{index}", daemon=True).start()

    def _detach(self, index: int) -> None:
        """The parent frees the seats of a front that is gone: the engine has ended all that it asked for."""
        try:
            self._parent.send(boundary.Detached(index))
        except OSError:
            logger.debug("front process %d has left after the parent", index)
