"""From the engine's thread to the event loop: token events of one HTTP request, merged, bounded, cancelled when the reader leaves.

Owns the hand-over and the engine requests' ends; owns no text and no HTTP. What waits here for a slow reader is at most what its
`max_tokens` allows: nothing is queued twice, and a reader that comes late takes everything at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any
from uuid import uuid4

import anyio
from starlette.types import Receive

from penstock.contract import FinishReason, SamplingParams, TokenEvent
from penstock.server.client import EngineClient
from penstock.server.faults import Hangup
from penstock.server.seats import Seats

logger = logging.getLogger("penstock.server")


class Bridge:
    """Carries events of all requests to the event loop with one wake-up for however many have gathered."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.readings: set[Generations] = set()  # whose requests the engine has not ended yet, or that are still read
        self._loop = loop
        self._inbox: deque[tuple[Generations, int, TokenEvent]] = deque()
        self._armed = False  # a wake-up is on its way and will see everything that is in the inbox by then

    def post(self, reading: Generations, index: int, event: TokenEvent) -> None:
        """Called on the engine's thread. Append, then look: `_deliver` disarms first, so an event it misses arms it again."""
        self._inbox.append((reading, index, event))
        if not self._armed:
            self._armed = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the event loop is closed: the server is gone, and so are the readers
                logger.debug("an event came after the server had closed")

    def _deliver(self) -> None:
        self._armed = False
        for _ in range(len(self._inbox)):
            reading, index, event = self._inbox.popleft()
            reading.deliver(index, event)

    def end_all(self, finish: FinishReason, error: str | None = None) -> None:
        """The engine will say no more: end every request in its stead, so that nobody waits for it forever."""
        for reading in list(self.readings):
            reading.end_all(finish, error)


class Generations:
    """The generations of one HTTP request as one flow of events. Ends once, by `with`; what the engine still runs is cancelled then.

    A seat is given back when its generation is over on both sides: read to the end or given up here, and ended by the engine.
    """

    def __init__(self, engine: EngineClient, bridge: Bridge, seats: Seats, unique: str | None = None) -> None:
        self.id = unique or uuid4().hex
        self._engine = engine
        self._bridge = bridge
        self._seats = seats
        self._live: dict[int, str] = {}  # index to request id: submitted, and not yet ended by the engine
        self._events: dict[int, list[TokenEvent]] = {}
        self._wake = asyncio.Event()
        self._abandoned = False  # no more submits, and what was submitted is cancelled
        self._closed = False  # nobody reads any more
        bridge.readings.add(self)

    def widen(self, num: int) -> None:
        self._seats.widen(num)

    def submit(self, index: int, prompt: Sequence[int], sampling: SamplingParams, **options: Any) -> None:
        """From any thread, which the end of this reading waits for: a hang-up meanwhile cancels at that end, if not before. `options` are
        those of the engine's `submit`."""
        if self._abandoned:
            raise Hangup
        request_id = f"{self.id}-{index}"
        self._live[index] = request_id
        listener = partial(self._bridge.post, self, index)
        try:
            self._engine.submit(prompt, sampling, listener, request_id=request_id, **options)
        except BaseException:
            self._live.pop(index, None)
            raise

    async def next_events(self) -> dict[int, list[TokenEvent]]:
        """Everything that has come since the last call, by choice; waits for at least one event."""
        await self._wake.wait()
        self._wake.clear()
        events, self._events = self._events, {}
        return events

    def end(self, index: int) -> None:
        """The reader has what it wants of this choice."""
        if (request_id := self._live.get(index)) is not None:
            self._engine.cancel(request_id)

    def abandon(self) -> None:
        """The client is gone: cancel at once, from whatever state."""
        self._abandoned = True
        for request_id in list(self._live.values()):
            self._engine.cancel(request_id)

    def deliver(self, index: int, event: TokenEvent) -> None:
        if index not in self._live:
            return  # it was ended in the engine's stead
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
        self._seats.give_back(num)
        if not self._live:
            self._bridge.readings.discard(self)

    def __enter__(self) -> Generations:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closed = True
        self._events.clear()
        self.abandon()
        self._settle(self._seats.num - len(self._live))


async def while_connected(receive: Receive, on_hangup: Callable[[], None], work: Callable[[], Awaitable[None]]) -> None:
    """Run `work` until it is over or the client hangs up: `on_hangup` is then called first, and `work` is cancelled where it waits."""
    with anyio.CancelScope() as scope:

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            on_hangup()
            scope.cancel()

        watcher = asyncio.create_task(watch())
        try:
            await work()
        finally:
            watcher.cancel()
