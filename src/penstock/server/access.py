"""One HTTP exchange from first to last byte: its id, how it ended and why. Owns the access log; the figures
go to `RequestFigures`."""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.server.about import ROUTES
from penstock.server.seats import RequestFigures

if TYPE_CHECKING:
    from penstock.server.tracing import Tracing

logger = logging.getLogger("penstock.access")

ID_HEADER = "x-request-id"
IGNORED_HEADER = "x-penstock-ignored"
MAX_ID = 128  # characters of a client's own id
MAX_PATH = 200  # characters of a path in the log
# asked every few seconds, or by the page: logged at debug
QUIET = frozenset({"/health", "/live", "/metrics", *(path for path in ROUTES if path.startswith("/page/"))})
HANGUP = 499
# Paths that end with a user's name.
NAMED = {
    "/v1/models/": "/v1/models/{model}",
    "/v1/snapshots/": "/v1/snapshots/{name}",
    "/v1/responses/": "/v1/responses/{id}",
    "/page/requests/": "/page/requests/{id}",
}
OTHER = "other"  # label for unknown paths: clients must not be able to create labels
_NOT_IN_ID = re.compile(rb"[^A-Za-z0-9._:/@+=-]")
_KEY = "penstock.exchange"


@dataclass(slots=True)
class Exchange:
    """The facts about one request and its answer. Routes fill them in; times are `time.monotonic()`."""

    method: str
    path: str
    started_s: float
    unique: str = field(default_factory=lambda: uuid4().hex)
    id: str = ""  # the client's own id if it sent one, which need not be unique
    client: str = ""
    status: int = 0  # 0: nothing was answered
    error: str | None = None  # the message sent to the client
    model: str | None = None
    stream: bool = False
    prompt_tokens: int = 0
    output_tokens: int = 0
    sources: dict[str, int] = field(default_factory=dict)  # prompt tokens by where their KV came from
    finish: list[str] = field(default_factory=list)  # by choice
    ignored: list[str] = field(default_factory=list)  # fields of the body that have no effect
    queue_s: float | None = None  # longest wait of a choice, from its submit to its first step
    matched_s: float = 0.0  # the part of it for hashing the prompt and looking it up
    loaded_s: float = 0.0  # the part of it for KV from colder tiers
    submitted_s: float = 0.0
    first_s: float | None = None
    ended_s: float = 0.0

    @property
    def is_anthropic(self) -> bool:
        """Its answers and errors have the shapes of Anthropic's API."""
        return self.path == "/v1/messages" or self.path.startswith("/v1/messages/")

    @property
    def route(self) -> str:
        path = next((named for start, named in NAMED.items() if self.path.startswith(start)), self.path)
        return path if path in ROUTES else OTHER

    @property
    def generating(self) -> bool:
        return self.prompt_tokens > 0

    def fields(self) -> dict[str, Any]:
        """For the log, without empty fields."""
        generated: dict[str, Any] = {}
        if self.generating:
            generated = {
                "model": self.model,
                "stream": self.stream,
                "prompt_tokens": self.prompt_tokens,
                **{f"from_{source}": num for source, num in self.sources.items() if num},
                "output_tokens": self.output_tokens,
                "finish": ",".join(dict.fromkeys(self.finish)) or None,
                "queue_s": None if self.queue_s is None else round(self.queue_s, 4),
                "ttft_s": None if self.first_s is None else round(self.first_s - self.started_s, 4),
            }
        every = {
            "id": self.id,
            "client": self.client,
            "method": self.method,
            "path": _printable(self.path),
            "status": self.status,
            **generated,
            "total_s": round(self.ended_s - self.started_s, 4),
            "error": None if self.error is None else _printable(self.error),
        }
        return {name: value for name, value in every.items() if value is not None}


def exchange_of(scope: Scope) -> Exchange:
    """The exchange of a request: made by the access log, or here if there is none."""
    found = scope.get(_KEY)
    if found is None:
        found = scope[_KEY] = Exchange(scope.get("method", ""), scope.get("path", ""), time.monotonic())
        found.id = found.unique
    exchange: Exchange = found
    return exchange


class AccessLog:
    """Outermost: gives every exchange its id and logs how it ended, even if no route was reached."""

    def __init__(self, app: ASGIApp, figures: RequestFigures, tracing: Tracing | None = None) -> None:
        self._app = app
        self._figures = figures
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = exchange_of(scope)
        exchange.id = _own_id(scope) or exchange.unique
        exchange.client = ":".join(map(str, scope.get("client") or ()))

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                names = (ID_HEADER, "request-id") if exchange.is_anthropic else (ID_HEADER,)
                added = [(name.encode(), exchange.id.encode()) for name in names]
                if exchange.ignored:
                    added.append((IGNORED_HEADER.encode(), ", ".join(exchange.ignored).encode()))
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        try:
            await self._app(scope, receive, with_id)
        finally:
            exchange.status = exchange.status or HANGUP
            exchange.ended_s = time.monotonic()
            self._figures.add(exchange)
            _log(exchange)
            if self._tracing is not None and not (exchange.route in QUIET and exchange.status < 400):
                self._tracing.add(exchange, scope["headers"])


def _log(exchange: Exchange) -> None:
    level = logging.DEBUG if exchange.route in QUIET and exchange.status < 400 else logging.INFO
    if logger.isEnabledFor(level):
        fields = exchange.fields()
        text = " ".join(f"{name}={_quoted(value)}" for name, value in fields.items())
        logger.log(level, "%s", text, extra={"fields": fields})


def _own_id(scope: Scope) -> str:
    """The id that the client sent, without characters that could forge a line of a log or a header, and
    shortened."""
    for name, value in scope["headers"]:
        if name == ID_HEADER.encode():
            return _NOT_IN_ID.sub(b"", value[: 4 * MAX_ID])[:MAX_ID].decode()
    return ""


def _printable(text: str) -> str:
    shown = "".join(character if character.isprintable() else "?" for character in text[: MAX_PATH * 3])
    return shown if len(text) <= MAX_PATH * 3 else shown + "..."


def _quoted(value: Any) -> str:
    text = str(value)
    return '"' + text.replace('"', "'") + '"' if " " in text or "=" in text else text
