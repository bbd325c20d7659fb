"""Errors as the client sees them: exceptions to status codes and OpenAI's error object. Owns no routes."""

from __future__ import annotations

import http
import logging
import math
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import (
    ContextExceeded,
    DeadlineExceeded,
    EngineClosed,
    Overloaded,
    PenstockError,
    ResponseMissing,
    SessionMissing,
    SnapshotMissing,
    SnapshotRefused,
    SnapshotSpace,
    SnapshotTaken,
    StepFailed,
    StoreFailed,
    TransferFailed,
    UserError,
)
from penstock.server.access import Exchange, exchange_of

logger = logging.getLogger("penstock.server")

MAX_SHOWN = 512  # characters of a message or a name in an error: what a client sent is not sent back whole


class Refused(UserError):
    """An answer with an HTTP status of its own, such as 404 or 413."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class Hangup(Exception):
    """The client is gone: no answer is needed."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One error as the client sees it."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        param = None if self.param is None else shortened(self.param)
        return {
            "error": {
                "message": shortened(self.message),
                "type": self.type,
                "param": param,
                "code": self.code,
            }
        }

    def anthropic(self, request_id: str | None = None) -> dict[str, Any]:
        """In Anthropic's shape, with the words by which its clients decide to shorten a conversation."""
        kind = _ANTHROPIC.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        fields = self.body()["error"]
        if self.code == "context_length_exceeded":
            fields["message"] = f"prompt is too long: {fields['message']}"
        made = {"type": "error", "error": {**fields, "type": kind}}
        return made if request_id is None else {**made, "request_id": request_id}


_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def shortened(text: str) -> str:
    """The beginning and the end: a message names the field first, and the fault last."""
    half = MAX_SHOWN // 2
    return (
        text if len(text) <= MAX_SHOWN else (f"{text[:half]} ... ({len(text)} characters) ... {text[-half:]}")
    )


# The first match counts: status, code, and the message if the error has none.
KINDS: tuple[tuple[type[PenstockError], int, str | None, str], ...] = (
    (ContextExceeded, 400, "context_length_exceeded", ""),
    (SessionMissing, 404, "session_not_found", ""),
    (ResponseMissing, 404, "response_not_found", ""),
    (SnapshotMissing, 404, "snapshot_not_found", ""),
    (SnapshotTaken, 409, "snapshot_exists", ""),
    (SnapshotSpace, 409, "snapshot_space", ""),
    (SnapshotRefused, 409, "snapshot_unusable", ""),
    (UserError, 400, None, ""),
    (Overloaded, 429, "overloaded", ""),
    (EngineClosed, 503, "unavailable", "the engine is closed"),
    (DeadlineExceeded, 504, "deadline_exceeded", ""),
    # only if a tier itself was asked:
    (StoreFailed, 503, "tier_failed", "a tier of the cache cannot be used now"),
    # otherwise the request computes instead
    (TransferFailed, 503, "tier_failed", "a tier of the cache cannot be used now"),
    (StepFailed, 500, "step_failed", "the forward pass failed"),
)


def fault_of(error: BaseException, path: str = "") -> Fault:
    """The message of an unexpected exception stays in the log: it may contain paths or values that the client
    must not see. `path`: the requested one."""
    text, param = str(error), getattr(error, "param", None)
    if isinstance(error, Refused):
        return Fault(error.status, text, _type_of(error.status), param, error.code)
    if isinstance(error, HTTPException):
        return _http_fault(error, path)
    for kind, status, code, instead in KINDS:
        if isinstance(error, kind):
            headers = (
                {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
                if isinstance(error, Overloaded)
                else {}
            )
            return Fault(status, text or instead, _type_of(status), param, code, headers)
    return Fault(500, "internal error; the server's log says more", _type_of(500), code="internal")


# Routes of other servers, by prefix, and why they are missing.
NOT_HERE = {
    "/v1/embeddings": "causal models are served for the text that they write, and make no embeddings",
    "/v1/chat/completions/": "answers are not stored",
    "/v1/messages/batches": "there are no batches: send requests at once, they share steps",
    "/v1/batches": "there are no batches: send requests at once, they share steps",
    "/v1/files": "files are not stored",
    "/v1/audio": "models are served for text",
    "/v1/images": "models are served for text",
    "/v1/moderations": "models are served for the text that they write, and judge none",
    **dict.fromkeys(
        ("/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank", "/classify", "/pooling"),
        "causal models are served for the text that they write, and score none",
    ),
}
HERE = (
    "/v1/chat/completions, /v1/completions, /v1/responses and /v1/messages generate text; GET "
    "/openapi.json lists every route"
)


def _http_fault(error: HTTPException, path: str) -> Fault:
    message = {404: "there is no such path", 405: "this path does not take that method"}.get(
        error.status_code, error.detail
    )
    why = next(
        (why for start, why in NOT_HERE.items() if path == start or path.startswith(start.rstrip("/") + "/")),
        None,
    )
    if error.status_code == 404 and why is not None:
        message = f"there is no such path here: {why}. {HERE}"
    code = http.HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    return Fault(
        error.status_code, message, _type_of(error.status_code), code=code, headers=dict(error.headers or {})
    )


def _type_of(status: int) -> str:
    named = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
    return named.get(status, "invalid_request_error" if status < 500 else "server_error")


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def error_response(error: BaseException, exchange: Exchange | None = None) -> Response:
    """The answer, in the shape of the requested API; `exchange` gets the reason, for the log."""
    fault = fault_of(error, "" if exchange is None else exchange.path)
    if exchange is not None:
        exchange.error = shortened(fault.message)
        if exchange.is_anthropic:
            return json_response(fault.anthropic(exchange.id), fault.status, fault.headers)
    return json_response(fault.body(), fault.status, fault.headers)


async def on_error(request: Request, error: Exception) -> Response:
    """Exceptions that have an answer of their own."""
    if isinstance(error, StepFailed):
        logger.error("%s %s: %s", request.method, shortened(request.url.path), error)
    return error_response(error, exchange_of(request.scope))


async def on_hangup(request: Request, error: Exception) -> Response:
    """The client does not read this; it only tells the protocol that the exchange is over."""
    return Response(status_code=499)
