"""The shared state of the routes: the engine, the gates, startup and shutdown, and the events of the
generations of one HTTP request. Owns readiness and the ends of engine requests; owns no route, no text and no
HTTP.

At most `max_tokens` tokens wait here for a slow reader: nothing is queued twice, and a late reader takes
everything at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from uuid import uuid4

import anyio
import anyio.to_thread
import msgspec
from starlette.requests import Request

from penstock import __version__
from penstock.config import ServerConfig
from penstock.contract import Adapter, SnapshotContent, Submission, TokenEvent
from penstock.engine.stats import EngineStats
from penstock.errors import ConfigError, DeadlineExceeded, EngineClosed, InvalidRequest
from penstock.server import ignored, schema
from penstock.server.access import Exchange, exchange_of
from penstock.server.client import EngineClient
from penstock.server.connection import read_body
from penstock.server.faults import Hangup, Refused
from penstock.server.schema import ChatBody, CompletionBody
from penstock.server.seats import Gate, GateNumber, RequestFigures, SeatBook, Seats
from penstock.server.tools import Asked
from penstock.server.viewers import BOUNDS_S, MOST_VIEWERS, Look, Viewers

if TYPE_CHECKING:
    from penstock.server.links import EngineService


class Rules(NamedTuple):
    """Limits on prompts."""

    most: int  # tokens
    special_in_text: bool = False  # whether messages may spell special tokens
    fitting: int = 0  # tokens of a prompt and its answer that the engine has room for


class Generations:
    """The generations of one HTTP request as one stream of events. Ends once, by `with`; running engine
    requests are cancelled then.

    A seat is given back when its generation is over on both sides: read to the end or abandoned here, and
    ended by the engine.
    """

    def __init__(self, engine: EngineClient, seats: Seats, unique: str | None = None) -> None:
        self.id = unique or uuid4().hex
        self.seats = seats
        self._engine = engine
        self._live: dict[int, int] = {}  # index to number: submitted, and not yet ended by the engine
        self._events: dict[int, list[TokenEvent]] = {}
        self._wake = asyncio.Event()
        self._abandoned = False  # no more submits, and submitted requests are cancelled
        self._closed = False  # no reader is left
        self._seen: dict[int, int] = {}  # of choices in a session: generated tokens sent to the client

    def submit(self, index: int, asked: Submission) -> None:
        """From any thread. The end of this reading waits for that thread, and cancels requests submitted
        after a hang-up."""
        if self._abandoned:
            raise Hangup
        number = self._live[index] = self._engine.new_number()
        if asked.session:
            self._seen[index] = 0
        listener = partial(self._deliver, index)
        try:
            self._engine.submit(number, replace(asked, id=self._id_of(index)), listener)
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
        if (number := self._live.get(index)) is not None:
            self._engine.cancel(number)
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
            return self._engine.call("kv.note_seen", self._id_of(index), num_tokens)
        except EngineClosed:
            return None  # and with it the session

    def abandon(self) -> None:
        """The client is gone: cancel at once, in any state. Sessions end at the last token that it was
        sent."""
        self._abandoned = True
        for number in list(self._live.values()):
            self._engine.cancel(number)
        seen, self._seen = self._seen, {}
        for index, num_tokens in seen.items():
            self._note_seen(index, num_tokens)

    def _deliver(self, index: int, event: TokenEvent) -> None:
        """On the event loop."""
        if event.finish is not None:
            del self._live[index]
            if self._closed:
                self.seats.give_back(1)
        if not self._closed:
            self._events.setdefault(index, []).append(event)
            self._wake.set()

    def __enter__(self) -> Generations:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._events.clear()
        self.abandon()
        self.seats.give_back(self.seats.num - len(self._live))


logger = logging.getLogger("penstock.server")

SEEN_S = 5.0  # for the engine to record what a client has seen, before the answer ends
BEAT_LIMIT_S = 10.0  # a step takes seconds at worst; a loop that is silent for longer is stuck
# A body up to this size is tokenised on the spot: a thread would take longer than the work.
INLINE_BYTES = 16 << 10
NUM_WORKERS = 2  # threads for larger bodies, which can neither delay small ones nor take more cores than this
NUM_SIDE = 32  # tokenise, detokenise and prefetch calls in progress
NUM_LOADS = 8  # adapter loads in progress or waiting
SIDE_TOKENS = 1 << 17  # of one of them, or as many as a prompt may have
FLUSH_S = 60.0
MAX_LOGGED = 256  # fields without effect, including types of tools, which clients can invent
CLOSE_GRACE_S = 5.0  # for the loop to end what was cancelled at its deadline
# By a call or its first word: seconds for its answer, and what a client is told if there is none by then.
PATIENCE: dict[str, tuple[float, str]] = {
    "stats": (10.0, "the engine's process did not answer within {:g} s"),
    "adapters": (600.0, "the engine's process did not answer within {:g} s"),
    "kv.reset": (30.0, "the cache was not reset within {:g} s; it continues in the background"),
    "kv.wait_flushed": (FLUSH_S + CLOSE_GRACE_S, "the engine loop did not come round to flush the cache"),
    # for the engine loop to come round and begin it
    "kv.prefetch": (10.0, "the engine loop did not come round within {:g} s to prefetch"),
    # for computed blocks to be saved, and for tiers to answer
    "snapshots": (150.0, "the engine did not answer about snapshots within {:g} s"),
    "lives": (10.0, "the engine's process did not answer within {:g} s"),
    "responses": (10.0, "what is kept of earlier answers could not be looked at within {:g} s"),
}

T = TypeVar("T")


class Service:
    """The shared state of the routes of one front. `book` and `row`: its seats, among those of all fronts.
    `here`: the engine's side, if that is in this process and has to be started and closed."""

    def __init__(
        self,
        engine: EngineClient,
        config: ServerConfig,
        book: SeatBook | None = None,
        row: int = 0,
        here: EngineService | None = None,
    ) -> None:
        self.engine = engine
        self.config = config
        for name in self.names:
            if name in engine.adapters:
                raise ConfigError(f"--served-model-name {name}: an adapter has that name")
        # the engine would refuse one more, behind the start of its stream
        most = min(config.max_concurrent, engine.facts.max_open)
        self.book, self.row = book or SeatBook.make(1), row
        self.generations = self._gate(most, "generations", GateNumber.GENERATIONS)
        self.side = self._gate(NUM_SIDE, "tokenize and prefetch calls", GateNumber.SIDE)
        self.loads = self._gate(NUM_LOADS, "adapter loads", GateNumber.LOADS)
        special, fitting = config.allow_special_tokens_in_text, engine.facts.limits.num_fitting
        self.prompt_rules = Rules(engine.max_model_len, special, fitting)
        self.viewers = Viewers(
            self._gate(MOST_VIEWERS, "viewers of the page", GateNumber.VIEWERS), self._look, self._facts
        )
        self.loading = anyio.CapacityLimiter(1)  # adapters: each reads and holds a whole file
        self._here = here
        self._workers = anyio.CapacityLimiter(NUM_WORKERS)
        self._askers = anyio.CapacityLimiter(NUM_WORKERS)
        self._ignored: set[str] = set()  # fields without effect that the log has named
        self._stop_by_s: float | None = None  # monotonic; when closing has taken too long

    def _gate(self, limit: int, what: str, number: GateNumber) -> Gate:
        return Gate(limit, what, self.book, self.row, number)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the model, for clients; the first is the main one."""
        return self.config.served_names or (self.engine.facts.name,)

    # ---- life

    def start(self) -> None:
        if self._here is not None:
            self._here.loop.start()
            self._here.start()  # with a beat that says that the engine is warm
        self.engine.start()

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

    def stop(self) -> None:
        """Begin to close the engine, once. Running requests end by themselves or at the deadline, and their
        readers get that end. The parent process closes an engine in another process."""
        if self.stopping:
            return
        self._stop_by_s = time.monotonic() + self.config.shutdown_s + CLOSE_GRACE_S
        self.viewers.close()
        if self._here is not None:
            close = partial(self._here.close, self.config.shutdown_s)
            threading.Thread(target=close, name="penstock-stop", daemon=True).start()

    async def wait_stopped(self) -> None:
        """A stuck loop must not keep the process alive: its thread is left behind."""
        self.stop()
        left_s = (self._stop_by_s or 0.0) - time.monotonic()
        try:
            await asyncio.wait_for(self.engine.over.wait(), max(0.0, left_s))
        except TimeoutError:
            logger.error("the engine loop did not close in time")

    @property
    def stopping(self) -> bool:
        return self._stop_by_s is not None

    def trouble(self) -> str | None:
        """Why the engine loop is not alive, or None."""
        if self.engine.error is not None:
            return "the engine loop has failed"
        age_s = self.engine.beat_age_s()
        return f"the engine loop has been silent for {age_s:.1f} seconds" if age_s > BEAT_LIMIT_S else None

    def not_ready(self) -> str | None:
        """Why requests are not taken, or would wait; None: they are."""
        if self.stopping:
            return "the server is shutting down"
        return self.trouble() or (None if self.engine.is_warm else "the engine is warming up")

    # ---- work

    @property
    def side_rules(self) -> Rules:
        """Of texts that are only to be cut into tokens or put together from them, and of prompts that are
        truncated: a reply has to be bounded, too."""
        return self.prompt_rules._replace(most=max(self.engine.max_model_len, SIDE_TOKENS))

    def open_reading(self, unique: str | None = None) -> Generations:
        """Takes one seat, before the body is read: what waits in memory is bounded by seats, too. No two open
        ones have one `unique` id."""
        if self.stopping:
            raise EngineClosed("the server is not taking requests")
        return Generations(self.engine, self.generations.take(1), unique)

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
        if name is not None and name not in self.names and name not in self.engine.adapters:
            raise self._no_model(name)

    def hold_model(self, name: str) -> AbstractContextManager[Adapter | None]:
        """The adapter that has the name now, or None for the model itself. While it is held, its content can
        still be submitted to, whatever becomes of the name."""
        if name in self.names:
            return contextlib.nullcontext()
        hold = self.engine.hold_adapter(name)
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

    async def ask(self, name: str, *arguments: Any) -> Any:
        """The engine's answer to a call. A wait that is cancelled ends a call that has not begun."""
        return await self.answered(name, self.engine.call(name, *arguments))

    async def answered(self, name: str, asked: Future[T]) -> T:
        timeout_s, late = PATIENCE.get(name) or PATIENCE[name.partition(".")[0]]
        try:
            return await asyncio.wait_for(asyncio.wrap_future(asked), timeout_s)
        except TimeoutError:
            kind = EngineClosed if name == "kv.wait_flushed" else DeadlineExceeded
            raise kind(late.format(timeout_s)) from None

    async def stats(self) -> tuple[EngineStats, RequestFigures]:
        """How the engine is doing, and what all fronts have answered."""
        async with self._askers:
            stats, others = await self.ask("stats")
        return stats, RequestFigures.total([self.engine.figures, *others])

    async def _look(self, since: int) -> Look:
        change = await self.ask("lives.changed", since)
        return Look(*await self.stats(), change, self.not_ready())

    def _facts(self) -> dict[str, Any]:
        facts = self.engine.facts
        return {
            "version": __version__,
            "started_s": facts.started_s,
            "models": [*self.names, *self.engine.adapters],
            "tiers": facts.tiers,
            "block_tokens": facts.block_tokens,
            "max_model_len": self.engine.max_model_len,
            "bounds_s": BOUNDS_S,
        }

    @contextlib.asynccontextmanager
    async def compiled(self, asked: Asked | None) -> AsyncIterator[None]:
        """Have the form of an answer compiled by the engine, which keeps it until the block is left: what is
        submitted meanwhile finds it. A hang-up ends it."""
        if asked is None:
            yield
            return
        try:
            number = await asyncio.wrap_future(self.engine.call("grammars.begin", asked.grammar))
        except InvalidRequest as error:
            # the engine's one name for all of these fields; the client gave another
            if error.param == "structured_outputs":
                raise InvalidRequest(str(error), asked.field) from None
            raise
        try:
            yield
        finally:
            self.engine.let_go(number)

    async def open_snapshot(self, body: CompletionBody | ChatBody, name: str) -> SnapshotContent:
        """What the request's prompts go on from."""
        with self.hold_model(body.model) as adapter:
            found: SnapshotContent = await self.ask(
                "snapshots.begin_open", name, body.cache_salt or "", adapter
            )
        return found
