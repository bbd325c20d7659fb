"""The ASGI application: routes, access control, the form of errors, and startup and shutdown. Owns no
socket."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
from collections.abc import AsyncIterator, Collection
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.config import ServerConfig
from penstock.errors import ConfigError, PenstockError
from penstock.server import view
from penstock.server.access import ID_HEADER, IGNORED_HEADER, AccessLog, exchange_of
from penstock.server.faults import Hangup, Refused, error_response, on_error, on_hangup
from penstock.server.routes import OPEN_PATHS, make_routes
from penstock.server.service import Service

if TYPE_CHECKING:
    from penstock.server.tracing import Tracing

logger = logging.getLogger("penstock.server")

BLANKS = b" \t"  # of HTTP


def make_app(service: Service) -> Starlette:
    """The app starts and stops `service`, which its routes share."""
    config = service.config
    if config.api_key is not None:
        _check_key(config.api_key)
    tracing = _tracing(config)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.start()
        await service.warm()
        try:
            yield
        finally:
            await service.wait_stopped()
            if tracing is not None:
                await anyio.to_thread.run_sync(tracing.close)

    app = Starlette(
        routes=make_routes(service),
        middleware=_middleware(config, service, tracing),
        exception_handlers={PenstockError: on_error, HTTPException: on_error, Hangup: on_hangup},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # an unknown path is an error, not redirected
    return app


def _tracing(config: ServerConfig) -> Tracing | None:
    """OpenTelemetry is imported only if it is configured."""
    if config.otlp_endpoint is None:
        return None
    from penstock.server.tracing import Tracing, exporting

    return Tracing(exporting(config.otlp_endpoint))


def _middleware(config: ServerConfig, service: Service, tracing: Tracing | None) -> list[Middleware]:
    """Outermost first. CORS comes before the key check: a browser asks before it sends a key, and must be
    able to read a refusal."""
    stack = [Middleware(AccessLog, figures=service.engine.figures, tracing=tracing)]
    if config.cors_origins:
        seen = (ID_HEADER, IGNORED_HEADER, "retry-after")
        methods = ("GET", "POST", "DELETE")
        cors = Middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=methods,
            allow_headers=("*",),
            expose_headers=seen,
        )
        stack.append(cors)
    stack.append(Middleware(LastResort))
    if config.api_key is not None:
        open_paths = OPEN_PATHS | {"/metrics"} if config.public_metrics else OPEN_PATHS
        open_paths |= set(view.FILES) if config.has_viewers else set()
        stack.append(Middleware(KeyCheck, api_key=config.api_key, open_paths=open_paths))
    return stack


def _check_key(key: str) -> None:
    """Refuses a key that no client can send, which would lock out all clients, and an empty key, which would
    lock out none."""
    if not key.strip(" \t"):
        raise ConfigError("--api-key is empty: give a key, or leave it out to serve without one")
    if any((ord(character) < 0x20 and character != "\t") or character == "\x7f" for character in key):
        raise ConfigError(
            "--api-key has a line break or another control character in it, which no header can carry"
        )


class LastResort:
    """Turns a defect in Penstock into a 500 that leaves the connection usable. If an answer has begun, only
    closing the connection can signal the error."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            if scope["type"] != "http" or (exchange := exchange_of(scope)).status:
                raise
            logger.exception("%s %s failed", scope["method"], scope["path"])
            await error_response(error, exchange)(scope, receive, send)


class KeyCheck:
    """Lets only `open_paths`, and OPTIONS, which does nothing, through without the key. Keeps only the key's
    digest, so that no log, error or dump can show it."""

    def __init__(self, app: ASGIApp, api_key: str, open_paths: Collection[str] = OPEN_PATHS) -> None:
        self._app = app
        self._open_paths = open_paths
        # Bytes that are not UTF-8 come from a shell as surrogates. Blanks around a key cannot be sent in a
        # header.
        self._digest = _digest(api_key.encode("utf-8", "surrogateescape").strip(BLANKS))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and not self._is_open(scope) and not self._admits(scope):
            error = Refused(
                401,
                "give the server's API key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
            )
            refusal = error_response(error, exchange_of(scope))
            refusal.headers["WWW-Authenticate"] = "Bearer"
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        """The page itself says nothing about the server; its data need the key."""
        if scope.get("method") == "OPTIONS":
            return True
        return scope["path"] in self._open_paths and (scope["path"] != "/" or view.is_browser(scope))

    def _admits(self, scope: Scope) -> bool:
        """Compares digests in constant time; they have one length for any input. Bytes are never decoded:
        blanks of HTTP are space and tab, and a key may end in a byte that some encoding calls blank."""
        scheme, _, bearer = _only(scope, b"authorization").partition(b" ")
        # OpenAI's way and Anthropic's
        keys = (bearer if scheme.lower() == b"bearer" else b"", _only(scope, b"x-api-key"))
        found = [hmac.compare_digest(_digest(key.strip(BLANKS)), self._digest) for key in keys]
        return any(found)


def _only(scope: Scope, header: bytes) -> bytes:
    """A header that occurs once; empty if it is missing or repeated."""
    given = [value for name, value in scope["headers"] if name == header]
    return given[0] if len(given) == 1 else b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
