"""Anthropic's `/v1/messages`: the shapes that only it has. What it shares with the other APIs is in
test_server_apis.py, and what it refuses in test_server_refusals.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.errors import (
    DeadlineExceeded,
    EngineClosed,
    InvalidRequest,
    Overloaded,
    SessionMissing,
    SnapshotTaken,
)
from penstock.server.access import Exchange
from penstock.server.faults import Refused, error_response
from tests.cpu.server.apis import CALL, FUNCTIONS, MESSAGES, QUESTION, Speaking
from tests.cpu.server.served import MODEL, Served, serving

TOOLS = MESSAGES.tools(*FUNCTIONS)


@pytest.fixture(scope="module")
def model() -> Speaking:
    return Speaking()


@pytest.fixture(scope="module")
def served(model: Speaking) -> Iterator[Served]:
    with serving(model) as running:
        yield running


def test_an_answer_without_text_has_an_empty_block(served: Served, model: Speaking) -> None:
    model.says("")
    assert MESSAGES.ask(served).raw["content"] == [{"type": "text", "text": ""}]


def test_an_answer_is_a_message_of_blocks(served: Served, model: Speaking) -> None:
    model.says("It is warm.")
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}]
    whole = MESSAGES.ask(served, system=system).raw
    assert whole["content"] == [{"type": "text", "text": "It is warm."}] and whole["id"].startswith("msg_")
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", MODEL)
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)
    assert model.prompt == f"system: Be\nbrief\nuser: {QUESTION}\nassistant: "
    streamed = MESSAGES.ask_streamed(served, system="Be\nbrief").raw
    assert {**streamed, "id": "", "usage": {}} == {**whole, "id": "", "usage": {}}
    # cached tokens are not counted as input tokens
    first, again = whole["usage"], streamed["usage"]
    assert (first["cache_read_input_tokens"], again["cache_read_input_tokens"]) == (0, 48)
    assert first["input_tokens"] == again["input_tokens"] + 48 == len(model.prompt)
    assert first["output_tokens"] == again["output_tokens"] == len("It is warm.") + 1


def test_why_an_answer_ended(served: Served, model: Speaking) -> None:
    model.says("one two three")
    for fields, reason, sequence, text in (
        ({"stop_sequences": ["zero", " two"]}, "stop_sequence", " two", "one"),
        ({"max_tokens": 3}, "max_tokens", None, "one"),
        ({}, "end_turn", None, "one two three"),
    ):
        said = MESSAGES.ask_both(served, **fields)
        assert (said.raw["stop_reason"], said.raw["stop_sequence"], said.text) == (reason, sequence, text)


def test_an_answer_may_be_allowed_more_than_the_context_has_and_ends_with_it() -> None:
    with serving(Speaking("x" * 100, max_model_len=64)) as served:
        for said in (MESSAGES.ask(served), MESSAGES.ask_streamed(served)):
            assert said.raw["stop_reason"] == "model_context_window_exceeded"
            assert said.raw["usage"]["output_tokens"] == 64 - len(served.engine.prompt)  # type: ignore[attr-defined]


def test_blocks_are_in_the_order_in_which_the_model_wrote_them(served: Served, model: Speaking) -> None:
    call = '<tool_call>{"name": "now"}</tool_call>'
    model.says(f"A{call}B{call}C")
    said = MESSAGES.ask_both(served, tools=TOOLS)
    assert [part if kind == "text" else part.name for kind, part in said.parts] == [
        "A",
        "now",
        "B",
        "now",
        "C",
    ]
    assert all(call.id.startswith("toolu_") for call in said.calls)
    failed = {"type": "tool_result", "tool_use_id": "a", "content": "no clock", "is_error": True}
    turn = [{"type": "tool_use", "id": "a", "name": "now", "input": {}}]
    turns = [{"role": "assistant", "content": turn}, {"role": "user", "content": [failed]}]
    MESSAGES.ask(served, messages=[*MESSAGES.body()["messages"], *turns])
    assert "Error: no clock" in model.prompt


def test_tokens_are_counted_as_a_message_would_have_them(served: Served, model: Speaking) -> None:
    model.says("x")
    asked = {"model": MODEL, "messages": MESSAGES.body()["messages"]}
    for fields in (
        {},
        {"system": "Be brief", "tools": TOOLS},
        {"tools": TOOLS, "tool_choice": {"type": "none"}},
        {"messages": [*asked["messages"], {"role": "assistant", "content": "It is "}]},
    ):
        counted = served.http.post("/v1/messages/count_tokens?beta=true", json={**asked, **fields})
        usage = MESSAGES.ask(served, **fields, cache_salt=repr(fields)).raw["usage"]
        assert counted.json() == {"input_tokens": usage["input_tokens"]}, counted.text
    for fields in ({"max_tokens": 1}, {"messages": []}, {"tools": [{"name": "x"}]}, {"model": "other"}):
        refused = served.http.post("/v1/messages/count_tokens", json={**asked, **fields})
        assert refused.status_code in (400, 404) and refused.json()["type"] == "error"


ERRORS: tuple[tuple[Exception, int, str], ...] = (
    (InvalidRequest("no"), 400, "invalid_request_error"),
    (Refused(401, "no"), 401, "authentication_error"),
    (Refused(403, "no"), 403, "permission_error"),
    (SessionMissing("no"), 404, "not_found_error"),
    (Refused(408, "no"), 408, "timeout_error"),
    (SnapshotTaken("no"), 409, "invalid_request_error"),
    (Refused(413, "no"), 413, "request_too_large"),
    (Overloaded("no"), 429, "rate_limit_error"),
    (RuntimeError("no"), 500, "api_error"),
    (EngineClosed("no"), 503, "overloaded_error"),
    (DeadlineExceeded("no"), 504, "timeout_error"),
)


def test_errors_are_of_the_kinds_that_clients_tell_apart() -> None:
    """They try again after some, and not after others."""
    for error, status, kind in ERRORS:
        reply = error_response(error, Exchange("POST", "/v1/messages", 0.0, id="mine"))
        body = json.loads(bytes(reply.body))
        found = reply.status_code, body["type"], body["error"]["type"], body["request_id"]
        assert found == (status, "error", kind, "mine")


def test_every_error_of_this_route_has_anthropics_shape() -> None:
    with serving(Speaking(CALL), api_key="k", max_body_bytes=4096) as served:
        right = {"x-api-key": "k", "anthropic-version": "2023-06-01"}
        body = {"model": MODEL, **MESSAGES.body(max_tokens=1)}
        refused: tuple[tuple[int, str, dict[str, Any]], ...] = (
            (401, "authentication_error", {"json": body}),
            (401, "authentication_error", {"json": body, "headers": {"x-api-key": "other"}}),
            (404, "not_found_error", {"json": {**body, "model": "other"}, "headers": right}),
            (413, "request_too_large", {"content": b"x" * 5000, "headers": right}),
            (400, "invalid_request_error", {"content": b"{", "headers": right}),
        )
        for status, kind, options in refused:
            reply = served.http.post("/v1/messages", **options)
            assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind), reply.text
        both = {"x-api-key": "other", "authorization": "Bearer k"}
        for headers in (right, {"authorization": "Bearer k"}, both):
            assert served.http.post("/v1/messages", json=body, headers=headers).status_code == 200
        for path, kind in (("", "invalid_request_error"), ("/batches", "not_found_error")):
            found = served.http.get(f"/v1/messages{path}", headers=right).json()["error"]["type"]
            assert found == kind
