"""What the page shows, for all viewers of one front: one look at the engine a second while there is a viewer,
none without. Owns the newest figures, the shown requests, and how they are written; a late viewer gets the
newest, so that nothing is queued for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.engine.stats import INTER_TOKEN_BOUNDS_S, TTFT_BOUNDS_S, EngineStats
from penstock.errors import PenstockError
from penstock.figures import Traffic
from penstock.server import schema
from penstock.server.connection import while_connected
from penstock.server.lives import LivesChange, RequestLife
from penstock.server.seats import Gate, RequestFigures

logger = logging.getLogger("penstock.server")

PERIOD_S = 1.0
MOST_VIEWERS = 64
MOST_ROWS = 200  # requests that are shown
BOUNDS_S = {"first_token": TTFT_BOUNDS_S, "between_tokens": INTER_TOKEN_BOUNDS_S}  # of histograms
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]


class Look(NamedTuple):
    """At the engine: its figures, those of all fronts, and the requests that changed."""

    stats: EngineStats
    figures: RequestFigures
    change: LivesChange
    trouble: str | None  # why requests are not taken


class Viewers:
    """Lives on the event loop's thread. `look` asks the engine, from the number of the last change on;
    `facts` hold while the server runs, but for its adapters."""

    def __init__(
        self, gate: Gate, look: Callable[[int], Awaitable[Look]], facts: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._gate, self._look, self._facts = gate, look, facts
        self._rows: dict[str, RequestLife] = {}
        self._since = 0  # the last change of requests that is known
        self._number = 0  # of the newest event; 0: there is none yet
        self._figures: Mapping[str, Any] = {}
        # the newest event, for those who have the one before; for others, if someone needed that
        self._update = self._whole = b""
        self._is_closed = False
        self._news = asyncio.Event()  # set once, when there is a newer event
        self._looking: asyncio.Task[None] | None = None
        self.num = 0  # that watch

    def close(self) -> None:
        """The server stops: all streams end now."""
        self._is_closed = True
        self._news.set()

    @contextlib.contextmanager
    def seat(self) -> Iterator[None]:
        """Raises Overloaded if all are taken. Looking begins with the first viewer and ends with the last."""
        with self._gate.take(1):
            self.num += 1
            if self._looking is None:
                self._looking = asyncio.create_task(self._keep_looking())
            try:
                yield
            finally:
                self.num -= 1
                if not self.num:
                    self._looking.cancel()
                    self._looking, self._number = None, 0

    async def follow(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        """With a seat. Sends events until the server stops: all that is shown, then changes. A viewer that is
        late misses some, and gets all that is shown again."""
        seen = 0
        while not self._is_closed:
            if seen == self._number:
                await self._news.wait()
                continue
            is_next = 0 < seen == self._number - 1
            seen, data = self._number, (self._update if is_next else b"") or self._first()
            await send(data)

    def _first(self) -> bytes:
        if not self._whole:
            rows = [row_of(life) for life in self._rows.values()]
            self._whole = _event({"facts": self._facts(), "figures": self._figures, "all": rows})
        return self._whole

    async def _keep_looking(self) -> None:
        while not self._is_closed:
            rows = await self._new_rows()
            self._number += 1
            self._whole = b""
            self._update = b"" if rows is None else _event({"figures": self._figures, "changed": rows})
            news, self._news = self._news, asyncio.Event()
            news.set()
            await asyncio.sleep(PERIOD_S)

    async def _new_rows(self) -> list[dict[str, Any]] | None:
        """Of requests that changed; None: all rows are new. If the engine does not answer, that is all there
        is to show."""
        try:
            found = await self._look(self._since)
            self._figures = figures_of(found)
            self._take_in(found.change)
            return None if found.change.is_all else [row_of(life) for life in found.change.lives]
        except Exception as error:
            if not isinstance(error, PenstockError):
                logger.exception("the figures of the page could not be made")
            self._figures = {"at": time.time(), "status": str(error) or type(error).__name__}
            return []

    def _take_in(self, change: LivesChange) -> None:
        """Requests that ended first are dropped first, if there are too many."""
        if change.is_all:
            self._rows.clear()
        self._since = change.number
        self._rows.update((life.id, life) for life in change.lives)
        if len(self._rows) > MOST_ROWS:
            last = sorted(self._rows.values(), key=lambda life: (life.ended_s is None, life.arrived_s))
            self._rows = {life.id: life for life in last[-MOST_ROWS:]}


class ViewerStream:
    """ASGI endpoint of the events: server-sent, until the viewer hangs up or the server stops."""

    def __init__(self, viewers: Viewers) -> None:
        self._viewers = viewers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        schema.check_query(Request(scope).query_params)

        async def write(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        async def work() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await self._viewers.follow(write)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        if scope["method"] == "HEAD":
            await Response(media_type="text/event-stream")(scope, receive, send)
            return
        with self._viewers.seat():
            await while_connected(receive, lambda: None, work)


# ---------------------------------------------------------------------------------------------- what is shown


def _event(shown: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(shown) + b"\n\n"


def row_of(life: RequestLife) -> dict[str, Any]:
    """A request in the list; what is not known yet is null. GET /page/requests/{id} says more."""
    return {
        "id": life.id,
        "route": life.route,
        "arrived_s": round(life.arrived_s, 3),
        "state": life.states[-1][0] if life.finish is None else life.finish,
        "ended": life.finish is not None,
        "prompt_tokens": life.prompt_tokens,
        "source": life.source,
        "first_s": life.first_s,
        "tokens": None if life.totals is None else life.totals.written,
        "total_s": life.ended_s,
    }


def figures_of(look: Look) -> dict[str, Any]:
    """Totals since the server's start, but for what is now. Null: there is no such thing here, or it is not
    known."""
    stats, traffic = look.stats, look.stats.traffic
    usable = {} if traffic is None else traffic.usable
    return {
        "at": time.time(),
        "status": look.trouble or "ready",
        "requests": stats.requests,
        "finished": look.figures.by_finish,
        "refused": _by_status(look.figures),
        "prompt_tokens": stats.prompt_tokens,
        "generated_tokens": stats.generated_tokens,
        "tiers": {
            tier: {"blocks": blocks or None, "usable": usable.get(tier)}  # null: it has no breaker
            for tier, blocks in stats.kv_blocks.items()
        },
        "flows": [] if traffic is None else _flows(traffic),
        "first_token": stats.ttft.counts,
        "between_tokens": stats.inter_token.counts,
        "retractions": stats.retractions,
        "failures": None if traffic is None else {": ".join(key): n for key, n in traffic.failures.items()},
        "checksum_failures": None if traffic is None else traffic.checksum_failures,
        "skipped_saves": None if traffic is None else traffic.skipped,
        "findings": stats.sanitizer,
        "drafts": [stats.drafted, stats.accepted] if stats.drafted else None,
        "experts": stats.experts,
    }


def _flows(traffic: Traffic) -> list[tuple[str, str, int, int]]:
    """From, to, bytes so far, transfers in flight."""
    return [
        (*ends, traffic.bytes.get(ends, 0), traffic.in_flight.get(ends, 0))
        for ends in sorted({*traffic.bytes, *traffic.in_flight})
    ]


def _by_status(figures: RequestFigures) -> dict[str, int]:
    """Answers that were errors."""
    found = Counter[str]()
    for (_, status), num in figures.by_status.items():
        if status >= "400":
            found[status] += num
    return found
