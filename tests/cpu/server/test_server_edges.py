"""Limits and answers of the server looked at from both sides, without a connection: errors by kind, brackets
of a body, times that the documents name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock import errors
from penstock.config import ServerConfig
from penstock.errors import InvalidRequest
from penstock.server import connection, faults, schema, service, tools
from penstock.server.faults import error_response, fault_of

DOCS = Path(__file__).parents[3] / "docs"

# Every error that has an answer of its own: status, type, code, and whether the client reads its message.
ANSWERS = {
    errors.UserError: (400, "invalid_request_error", None, True),
    errors.ConfigError: (400, "invalid_request_error", None, True),
    errors.ModelError: (400, "invalid_request_error", None, True),
    errors.InvalidRequest: (400, "invalid_request_error", None, True),
    errors.PromptTooLong: (400, "invalid_request_error", None, True),
    errors.ContextExceeded: (400, "invalid_request_error", "context_length_exceeded", True),
    errors.SessionMissing: (404, "invalid_request_error", "session_not_found", True),
    errors.SnapshotMissing: (404, "invalid_request_error", "snapshot_not_found", True),
    errors.ResponseMissing: (404, "invalid_request_error", "response_not_found", True),
    errors.SnapshotTaken: (409, "invalid_request_error", "snapshot_exists", True),
    errors.SnapshotRefused: (409, "invalid_request_error", "snapshot_unusable", True),
    errors.SnapshotSpace: (409, "invalid_request_error", "snapshot_space", True),
    errors.Overloaded: (429, "rate_limit_error", "overloaded", True),
    errors.EngineClosed: (503, "service_unavailable_error", "unavailable", True),
    errors.DeadlineExceeded: (504, "server_error", "deadline_exceeded", True),
    errors.StoreFailed: (503, "service_unavailable_error", "tier_failed", True),
    errors.TransferFailed: (503, "service_unavailable_error", "tier_failed", True),
    errors.StepFailed: (500, "server_error", "step_failed", True),
}
MADE: dict[type[Exception], Callable[[], Exception]] = {  # those that take more than a message
    errors.IllegalTransition: lambda: errors.IllegalTransition("lane", "open", "close"),
    errors.PromptTooLong: lambda: errors.PromptTooLong("9 tokens", 8),
    errors.ContextExceeded: lambda: errors.ContextExceeded(8, "you requested 9 tokens"),
}
OURS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.PenstockError)
]


def test_each_error_has_its_answer() -> None:
    for kind in (*OURS, ValueError, MemoryError):
        check_answer(kind)


def check_answer(kind: type[Exception]) -> None:
    error = MADE[kind]() if kind in MADE else kind("what happened")
    status, type_, code, tells = ANSWERS.get(kind, (500, "server_error", "internal", False))
    fault = fault_of(error)
    assert (fault.status, fault.type, fault.code, fault.param) == (
        status,
        type_,
        code,
        getattr(error, "param", None),
    )
    assert fault.message == (str(error) if tells else "internal error; the server's log says more")
    reply = error_response(error)
    assert (reply.status_code, json.loads(reply.body)) == (status, fault.body())
    assert reply.headers.get("retry-after") == ("1" if kind is errors.Overloaded else None)


def test_a_client_is_told_to_wait_for_whole_seconds_and_never_less_than_one() -> None:
    for wait_s, told in ((0.0, "1"), (1.0, "1"), (1.2, "2"), (7.5, "8")):
        assert fault_of(errors.Overloaded("busy", wait_s)).headers == {"Retry-After": told}


# ----------------------------------------------------------------------------------------------------- bodies


def body_of(num_lists: int, *texts: str) -> bytes:
    """JSON with so many lists and objects, and these texts before, between and behind them."""
    lists = [*texts, *([] for _ in range(num_lists - 2)), *texts]
    return json.dumps(dict.fromkeys(texts, 0) | {"messages": lists}).encode()


BRACKETS = "[{" * schema.MAX_CONTAINERS
TEXTS = {
    "plain": (BRACKETS,),
    "a backslash at the end": (BRACKETS + "\\",),
    "two backslashes at the end": (BRACKETS + "\\\\",),
    "a quote at the end": (BRACKETS + '"',),
    "a quote at the start": ('"' + BRACKETS,),
    "an escaped quote": (BRACKETS + '\\"' + BRACKETS,),
    "short ones that end in backslashes": ("\\", BRACKETS, "\\\\", "a\\"),
}


@pytest.mark.parametrize("texts", TEXTS.values(), ids=TEXTS)
def test_lists_are_counted_up_to_the_limit_and_brackets_in_text_are_not(texts: tuple[str, ...]) -> None:
    schema.check_shape(body_of(schema.MAX_CONTAINERS, *texts))
    with pytest.raises(InvalidRequest, match="more than 16384 lists and objects"):
        schema.check_shape(body_of(schema.MAX_CONTAINERS + 1, *texts))


# -------------------------------------------------------------------------------------------------- documents


def test_the_times_after_which_an_operator_is_answered_are_those_of_the_document() -> None:
    text = (DOCS / "http-api.md").read_text()
    assert "504 after half a minute" in text and service.PATIENCE["kv.reset"][0] == 30.0
    assert "504 after a minute" in text and service.FLUSH_S == 60.0
    assert f"did not begin within {service.PATIENCE['kv.prefetch'][0]:g} seconds" in text


def rows() -> list[str]:
    """Of the table of limits, made from what the code has."""
    of = ServerConfig()
    return [
        f"| a header takes longer than | {of.read_timeout_s:g} s | `--read-timeout-s` |",
        f"| a body takes longer than | {of.read_timeout_s:g} s | `--read-timeout-s` |",
        f"| a client takes less than {connection.MIN_TAKEN >> 10} KiB of a waiting reply in | "
        f"{of.write_timeout_s:g} s |",
        f"| pieces of a body | {connection.FREE_PIECES}, and more only where they have "
        f"{connection.MIN_PIECE} bytes on average |",
        f"| size of a body | {of.max_body_bytes >> 20} MiB | `--max-body-bytes` |",
        f"| lists and objects in a body | {schema.MAX_CONTAINERS:,} |",
        "| lists and objects in one another: a schema, a tool's parameters, the input of a call | "
        f"{tools.MAX_DEPTH} |",
        f"| generations at once (prompts × `n`), running or waiting | {of.max_concurrent} | "
        "`--max-concurrent` |",
        f"| tokens of a `/tokenize` or `/detokenize` call | {service.SIDE_TOKENS:,}, or `--max-model-len` "
        "if that is more |",
        f"| `/tokenize`, `/detokenize` and `/cache/prefetch` calls at once | {service.NUM_SIDE} |",
        f"| adapter loads at once | {service.NUM_LOADS} |",
        f"| `cache_salt`, `session_id`, `prompt_cache_key`, `user`, `lora_name` | {schema.MAX_LABEL} "
        "characters each |",
        f"| what an error repeats of a request | {faults.MAX_SHOWN} characters of a message or name, its "
        "beginning and its end |",
        f"| running requests at the end | {of.shutdown_s:g} s | `--shutdown-s` |",
    ]


def test_every_limit_is_the_one_that_the_document_says() -> None:
    page = (DOCS / "security.md").read_text()
    assert [row for row in rows() if row not in page] == []
