"""The shared state of the routes: the engine, its loop, the gates, startup and shutdown, and the delivery of
token events from the engine's thread to the event loop. Owns readiness and the ends of engine requests; owns
no route, no text and no HTTP.

At most `max_tokens` tokens wait here for a slow reader: nothing is queued twice, and a late reader takes
everything at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import anyio
import anyio.to_thread
import msgspec
from starlette.requests import Request

from penstock.config import ServerConfig
from penstock.contract import Adapter, FinishReason, Prefetched, SamplingParams, SnapshotContent, TokenEvent
from penstock.engine.stats import EngineStats
from penstock.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineClosed,
    InvalidRequest,
    Overloaded,
)
from penstock.server import ignored, schema
from penstock.server.access import Exchange, exchange_of
from penstock.server.client import EngineClient, EngineLife, FlushLevel, Fronts, RequestFigures, SnapshotStore
from penstock.server.connection import read_body
from penstock.server.faults import Hangup, Refused
from penstock.server.kept import ResponseStore
from penstock.server.schema import ChatBody, CompletionBody
from penstock.server.seats import GateNumber, Seats
from penstock.server.tools import Asked


class Rules(NamedTuple):
    """Limits on prompts."""

    most: int  # tokens
    special_in_text: bool = False  # whether messages may spell special tokens


class Bridge:
    """Carries events of all requests to the event loop, with one wake-up for all events that have
    gathered."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # readings with a request that the engine has not ended, or that are still read
        self.readings: set[Generations] = set()
        self._loop = loop
        self._inbox: deque[tuple[Generations, int, TokenEvent]] = deque()
        self._armed = False  # a wake-up is scheduled and will see everything in the inbox by then

    def post(self, reading: Generations, index: int, event: TokenEvent) -> None:
        """Called on the engine's thread. Append, then check: `_deliver` disarms first, so an event it misses
        arms it again."""
        self._inbox.append((reading, index, event))
        if not self._armed:
            self._armed = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the event loop is closed: the server and its readers are gone
                logger.debug("an event came after the server had closed")

    def _deliver(self) -> None:
        self._armed = False
        for _ in range(len(self._inbox)):
            reading, index, event = self._inbox.popleft()
            reading.deliver(index, event)

    def end_all(self, finish: FinishReason, error: str | None = None) -> None:
        """The engine will send no more events: end every request here, so that no reader waits forever."""
        for reading in list(self.readings):
            reading.end_all(finish, error)


class Generations:
    """The generations of one HTTP request as one stream of events. Ends once, by `with`; running engine
    requests are cancelled then.

    A seat is given back when its generation is over on both sides: read to the end or abandoned here, and
    ended by the engine.
    """

    def __init__(self, engine: EngineClient, bridge: Bridge, seats: Seats, unique: str | None = None) -> None:
        self.id = unique or uuid4().hex
        self._engine = engine
        self._bridge = bridge
        self.seats = seats
        self._live: dict[int, str] = {}  # index to request id: submitted, and not yet ended by the engine
        self._events: dict[int, list[TokenEvent]] = {}
        self._wake = asyncio.Event()
        self._abandoned = False  # no more submits, and submitted requests are cancelled
        self._closed = False  # no reader is left
        self._seen: dict[int, int] = {}  # of choices in a session: generated tokens sent to the client
        bridge.readings.add(self)

    def submit(self, index: int, prompt: Sequence[int], sampling: SamplingParams, **options: Any) -> None:
        """From any thread. The end of this reading waits for that thread, and cancels requests submitted
        after a hang-up. `options` are those of the engine's `submit`."""
        if self._abandoned:
            raise Hangup
        request_id = self._id_of(index)
        self._live[index] = request_id
        if options.get("session"):
            self._seen[index] = 0
        listener = partial(self._bridge.post, self, index)
        try:
            self._engine.submit(prompt, sampling, listener, request_id=request_id, **options)
        except BaseException:
            self._live.pop(index, None)
            self._seen.pop(index, None)
            raise

    def _id_of(self, index: int) -> str:
        return f"{self.id}-{index}"

    async def next_events(self) -> dict[int, list[TokenEvent]]:
        """All events since the last call, by choice; waits for at least one."""
        await self._wake.wait()
        self._wake.clear()
        events, self._events = self._events, {}
        return events

    async def end(self, index: int, num_tokens: int) -> None:
        """The reader needs no more than `num_tokens` tokens of this choice. The engine may have run ahead;
        the session ends at that token."""
        if (request_id := self._live.get(index)) is not None:
            self._engine.cancel(request_id)
        if index in self._seen and (noted := self._note_seen(index, num_tokens)) is not None:
            await asyncio.wait([asyncio.wrap_future(noted)], timeout=SEEN_S)

    def saw(self, index: int, num_tokens: int) -> None:
        """The client was sent `num_tokens` tokens of this choice."""
        if index in self._seen:
            self._seen[index] = num_tokens

    def saw_all(self) -> None:
        """The client was sent its whole answer: sessions stay as their requests, or `end`, left them."""
        self._seen.clear()

    def _note_seen(self, index: int, num_tokens: int) -> Future[None] | None:
        try:
            return self._engine.note_seen(self._id_of(index), num_tokens)
        except EngineClosed:
            return None  # and with it the session

    def abandon(self) -> None:
        """The client is gone: cancel at once, in any state. Sessions end at the last token that it was
        sent."""
        self._abandoned = True
        for request_id in list(self._live.values()):
            self._engine.cancel(request_id)
        seen, self._seen = self._seen, {}
        for index, num_tokens in seen.items():
            self._note_seen(index, num_tokens)

    def deliver(self, index: int, event: TokenEvent) -> None:
        if index not in self._live:
            return  # it was ended in place of the engine
        if event.finish is not None:
            del self._live[index]
            if self._closed:
                self._settle(1)
        if not self._closed:
            self._events.setdefault(index, []).append(event)
            self._wake.set()

    def end_all(self, finish: FinishReason, error: str | None) -> None:
        for index, request_id in list(self._live.items()):
            self.deliver(index, TokenEvent(request_id, finish=finish, error=error))

    def _settle(self, num: int) -> None:
        self.seats.give_back(num)
        if not self._live:
            self._bridge.readings.discard(self)

    def __enter__(self) -> Generations:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._events.clear()
        self.abandon()
        self._settle(self.seats.num - len(self._live))


logger = logging.getLogger("penstock.server")

SEEN_S = 5.0  # for the engine to record what a client has seen, before the answer ends
BEAT_LIMIT_S = 10.0  # a step takes seconds at worst; a loop that is silent for longer is stuck
WATCH_S = 0.25  # how often a dead loop is looked for
# A body up to this size is tokenised on the spot: a thread would take longer than the work.
INLINE_BYTES = 16 << 10
NUM_WORKERS = 2  # threads for larger bodies, which can neither delay small ones nor take more cores than this
NUM_SIDE = 32  # tokenise, detokenise and prefetch calls in progress
NUM_LOADS = 8  # adapter loads in progress or waiting
SIDE_TOKENS = 1 << 17  # of one of them, or as many as a prompt may have
RESET_TIMEOUT_S = 30.0
PREFETCH_TIMEOUT_S = 10.0  # for the engine loop to come round and begin it
FLUSH_TIMEOUT_S = 60.0
SNAPSHOT_S = 150.0  # for computed blocks to be saved, and for tiers to answer
KEPT_TIMEOUT_S = 10.0
MAX_LOGGED = 256  # fields without effect, including types of tools, which clients can invent
CLOSE_GRACE_S = 5.0  # for the loop to end what was cancelled at its deadline

T = TypeVar("T")


class Service:
    """One engine behind one event loop, or behind several in as many processes, which share `fronts`."""

    def __init__(
        self, engine: EngineClient, loop: EngineLife, config: ServerConfig, fronts: Fronts | None = None
    ) -> None:
        self.engine = engine
        self.loop = loop
        self.config = config
        # names of the model for clients; the first is the main one
        self.names = config.served_names or (engine.name,)
        self.figures = RequestFigures()
        for name in self.names:
            if engine.adapters.find(name) is not None:
                raise ConfigError(f"--served-model-name {name}: an adapter has that name")
        self.fronts = fronts or Fronts()
        self.created = int(self.fronts.started_s)
        self.generations = self.fronts.gate(config.max_concurrent, "generations", GateNumber.GENERATIONS)
        self.side = self.fronts.gate(NUM_SIDE, "tokenize and prefetch calls", GateNumber.SIDE)
        self.loads = self.fronts.gate(NUM_LOADS, "adapter loads", GateNumber.LOADS)
        self.prompt_rules = Rules(engine.max_model_len, config.allow_special_tokens_in_text)
        self._workers = anyio.CapacityLimiter(NUM_WORKERS)
        self._askers = anyio.CapacityLimiter(NUM_WORKERS)
        self._bridge: Bridge | None = None
        self._ignored: set[str] = set()  # fields without effect that the log has named
        self._under_way: dict[str, asyncio.Future[Any]] = {}  # a reset, a flush
        self._stop: asyncio.Future[None] | None = None
        self._stop_by_s = 0.0  # monotonic; when closing has taken too long

    # ---- life

    def start(self) -> None:
        self._bridge = Bridge(asyncio.get_running_loop())
        self.loop.start()

    async def warm(self) -> None:
        """Do work that the first request would wait for: start worker threads with their imports, load
        tokenizer and template."""
        tokenizer = self.engine.tokenizer

        def work() -> None:
            tokenizer.decode(tokenizer.encode("warm"))
            if tokenizer.has_chat_template:
                tokenizer.encode_chat([{"role": "user", "content": "warm"}])

        for num_bytes in (0, INLINE_BYTES + 1):
            try:
                await self.compute(work, num_bytes)
            except InvalidRequest as error:
                # a template that refuses such a conversation; its users will see the same
                logger.info("the chat template was not warmed up: %s", error)

    async def watch(self) -> None:
        """Runs beside the routes: if the engine thread dies, ends all waits."""
        while (error := self.loop.failed()) is None:
            await asyncio.sleep(WATCH_S)
        logger.error("the engine loop failed", exc_info=error)
        assert self._bridge is not None
        self._bridge.end_all(FinishReason.ERROR, "the engine has failed; the server's log says why")

    def stop(self) -> asyncio.Future[None]:
        """Begin to close the engine loop, once. Running requests end by themselves or at the deadline, and
        their readers get that end."""
        if self._stop is None:
            self._stop_by_s = time.monotonic() + self.config.shutdown_s + CLOSE_GRACE_S
            self._stop = _in_thread(lambda: self.loop.close(self.config.shutdown_s), "penstock-stop")
            # a request submitted while admission closed would not be ended otherwise
            if (bridge := self._bridge) is not None:
                self._stop.add_done_callback(lambda _: bridge.end_all(FinishReason.CANCELLED))
        return self._stop

    def give_up(self) -> None:
        """End all waits now, and cancel the requests in the engine."""
        assert self._bridge is not None
        for reading in list(self._bridge.readings):
            reading.abandon()
        self._bridge.end_all(FinishReason.CANCELLED)

    async def wait_stopped(self) -> None:
        """A stuck loop must not keep the process alive: its thread is left behind."""
        stop = self.stop()
        done, _ = await asyncio.wait([stop], timeout=max(0.0, self._stop_by_s - time.monotonic()))
        if not done:
            logger.error("the engine loop did not close in time")
        elif error := stop.exception():
            logger.error("the engine loop closed with an error", exc_info=error)

    def trouble(self) -> str | None:
        """Why the engine loop is not alive, or None."""
        if self.loop.failed() is not None:
            return "the engine loop has failed"
        age_s = self.loop.beat_age_s()
        return f"the engine loop has been silent for {age_s:.1f} seconds" if age_s > BEAT_LIMIT_S else None

    def not_ready(self) -> str | None:
        """Why requests are not taken, or would wait; None: they are."""
        if self.stopping:
            return "the server is shutting down"
        return self.trouble() or (None if self.loop.is_warm else "the engine is warming up")

    @property
    def stopping(self) -> bool:
        return self._stop is not None

    # ---- work

    @property
    def side_rules(self) -> Rules:
        """Of texts that are only to be cut into tokens or put together from them: a reply has to be bounded,
        too."""
        return self.prompt_rules._replace(most=max(self.engine.max_model_len, SIDE_TOKENS))

    def open_reading(self, unique: str | None = None) -> Generations:
        """Takes one seat, before the body is read: what waits in memory is bounded by seats, too. No two open
        ones have one `unique` id."""
        if self._bridge is None or self._stop is not None:
            raise EngineClosed("the server is not taking requests")
        return Generations(self.engine, self._bridge, self.generations.take(1), unique)

    async def body(
        self, request: Request, kind: type[msgspec.Struct], **queries: tuple[str, ...]
    ) -> tuple[Any, int]:
        """The body as `kind`, of a request whose query and model are known, and its length in bytes."""
        schema.check_query(request.query_params, **queries)
        data = await read_body(request.scope, request.receive, self.config)
        body, names = ignored.decode(data, kind)
        if names:
            self._note_ignored(exchange_of(request.scope), names)
        self.check_model(getattr(body, "model", None))
        return body, len(data)

    def _note_ignored(self, exchange: Exchange, names: Sequence[str]) -> None:
        """Name them in a header of the answer, and log them once."""
        exchange.ignored = list(names)
        for name in names:
            if name not in self._ignored and len(self._ignored) < MAX_LOGGED:
                self._ignored.add(name)
                logger.info(
                    "%s: %s has no effect here, and this is said once; docs/compatibility.md says why",
                    exchange.path,
                    name,
                )

    def check_model(self, name: str | None) -> None:
        """Refuses a name that is neither the model's nor an adapter's."""
        if name is not None and name not in self.names and self.engine.adapters.find(name) is None:
            raise self._no_model(name)

    def hold_model(self, name: str) -> AbstractContextManager[Adapter | None]:
        """The adapter that has the name now, or None for the model itself. While it is held, its content can
        still be submitted to, whatever becomes of the name."""
        if name in self.names:
            return contextlib.nullcontext()
        hold = self.engine.adapters.try_hold(name)
        if hold is None:
            raise self._no_model(name)
        return hold

    def _no_model(self, name: str) -> Refused:
        message = (
            f"there is no model {name!r} here; this server has {self.names[0]!r} (GET /v1/models lists its "
            "adapters)"
        )
        return Refused(404, message, param="model", code="model_not_found")

    async def compute(self, work: Callable[[], T], num_bytes: int) -> T:
        """Run `work`, which grows with `num_bytes`. A hang-up while it waits for a thread undoes it; once it
        runs, it ends first."""
        if num_bytes <= INLINE_BYTES:
            return work()
        return await anyio.to_thread.run_sync(work, limiter=self._workers)

    async def snapshot(self) -> tuple[EngineStats, RequestFigures]:
        """How the engine is doing, and what all fronts have answered. It may have to be asked for, from
        another process."""
        ask = self.fronts.stats or (lambda: (self.engine.stats(), []))
        stats, others = await anyio.to_thread.run_sync(ask, limiter=self._askers)
        return stats, self.figures.with_others(others)

    async def compile(self, asked: Asked) -> object:
        """Have the form of an answer compiled by the engine. It is found again at no cost while the result is
        kept. A hang-up ends it."""
        try:
            return await asyncio.wrap_future(self.engine.grammars.begin(asked.grammar))
        except InvalidRequest as error:
            # the engine's one name for all of these fields; the client gave another
            if error.param == "structured_outputs":
                raise InvalidRequest(str(error), asked.field) from None
            raise

    async def reset_cache(self, tiers: Sequence[str]) -> dict[str, int]:
        """Evict idle blocks."""
        late = DeadlineExceeded(
            f"the cache was not reset within {RESET_TIMEOUT_S:g} s; it continues in the background"
        )
        return await self._alone("reset", lambda: self.engine.reset_cache(tiers), RESET_TIMEOUT_S, late)

    async def flush_cache(self, level: FlushLevel) -> None:
        late = EngineClosed("the engine loop did not come round to flush the cache")
        await self._alone(
            "flush",
            lambda: self.engine.wait_flushed(level, FLUSH_TIMEOUT_S),
            FLUSH_TIMEOUT_S + CLOSE_GRACE_S,
            late,
        )

    async def _alone(self, what: str, work: Callable[[], T], timeout_s: float, late: Exception) -> T:
        """One of its kind at a time: each waits for the engine loop to come round."""
        if what in self._under_way and not self._under_way[what].done():
            raise Overloaded(f"a cache {what} is in progress")
        self._under_way[what] = begun = _in_thread(work, f"penstock-{what}")
        if not (await asyncio.wait([begun], timeout=timeout_s))[0]:
            raise late
        return begun.result()

    async def prefetch(self, begun: Future[Prefetched | None]) -> Prefetched | None:
        """Wait until it has begun, not until it is over."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(begun), PREFETCH_TIMEOUT_S)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the engine loop did not come round within {PREFETCH_TIMEOUT_S:g} s to prefetch"
            ) from None

    async def on_responses(self, work: Callable[[ResponseStore], Future[T]]) -> T:
        """What is kept of earlier answers, beside the engine."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(work(self.fronts.responses)), KEPT_TIMEOUT_S)
        except TimeoutError:
            raise DeadlineExceeded(
                f"what is kept of earlier answers could not be looked at within {KEPT_TIMEOUT_S:g} s"
            ) from None

    async def on_snapshots(self, begin: Callable[[SnapshotStore], Future[T]]) -> T:
        """A disk or a store may have to be waited for. A wait that is cancelled leaves the line."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(begin(self.engine.snapshots)), SNAPSHOT_S)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the engine did not answer about snapshots within {SNAPSHOT_S:g} s"
            ) from None

    async def open_snapshot(self, body: CompletionBody | ChatBody, name: str) -> SnapshotContent:
        """What the request's prompts go on from."""
        with self.hold_model(body.model) as adapter:
            return await self.on_snapshots(
                lambda snapshots: snapshots.begin_open(name, body.cache_salt or "", adapter)
            )


def _in_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run `work` on a thread of its own that does not keep the process alive, should the engine never
    answer."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as caught:
            error = caught
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            logger.warning("%s ended after the server had closed", name)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
