"""What the server does about its own defects and about what changes under a request: an answer that fails
half-way, an adapter that is gone between two looks, a connection that is lost before its deadlines."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from penstock.errors import InvalidRequest, StoreFailed
from penstock.server.access import AccessLog
from penstock.server.app import LastResort
from penstock.server.replies import CompletionReply
from penstock.server.seats import RequestFigures
from tests.cpu.server.served import Served, completion, service_of, until
from tests.support.scripted_engine import ScriptedEngine, ScriptedLoop


def events_of(text: str) -> list[Any]:
    return [
        json.loads(line.removeprefix("data: "))
        for line in text.split("\n\n")
        if line and line != "data: [DONE]"
    ]


@pytest.mark.parametrize(
    ("error", "code", "told", "is_defect"),
    [
        (ZeroDivisionError("/secret"), "internal", "internal error", True),
        (StoreFailed("the disk"), "tier_failed", "the disk", False),
    ],
)
def test_a_stream_that_fails_half_way_ends_with_the_error_and_nothing_behind_it(
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    code: str,
    told: str,
    is_defect: bool,
) -> None:
    choice, num_chunks = CompletionReply.choice, 0

    def failing(self: CompletionReply, index: int, piece: Any) -> Any:
        nonlocal num_chunks
        num_chunks += 1
        if num_chunks == 2:
            raise error
        return choice(self, index, piece)

    monkeypatch.setattr(CompletionReply, "chunk_choice", failing)
    served.engine.hold()
    with served.http.stream("POST", "/v1/completions", json=completion(stream=True, max_tokens=50)) as reply:
        served.engine.permit(1)
        lines = reply.iter_text()
        text = next(lines)
        served.engine.release()
        text += "".join(lines)
    *_, last = events_of(text)
    assert last["error"]["code"] == code and told in last["error"]["message"] and "secret" not in text
    assert "[DONE]" not in text and len(events_of(text)) == 2
    (record,) = [record for record in caplog.records if "ended early" in record.message]
    assert record.levelname == "ERROR" and bool(record.exc_info) == is_defect, (
        "a defect is logged with where it was"
    )
    served.assert_idle()


def test_a_defect_behind_the_first_byte_of_an_answer_is_for_the_connection_to_tell() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    def logged(begins: bool) -> AccessLog:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            if begins:
                await send({"type": "http.response.start", "status": 200, "headers": []})
            raise ZeroDivisionError("/secret")

        return AccessLog(LastResort(app), RequestFigures())

    scope = {"type": "http", "method": "GET", "path": "/x", "headers": []}
    asyncio.run(logged(begins=False)(scope, receive, send))
    assert [message.get("status") for message in sent] == [500, None] and b"secret" not in sent[1]["body"]
    sent.clear()
    with pytest.raises(ZeroDivisionError):
        asyncio.run(logged(begins=True)(scope, receive, send))
    assert [message.get("status") for message in sent] == [200], "no second answer"
    with pytest.raises(ZeroDivisionError):
        asyncio.run(logged(begins=False)({"type": "lifespan"}, receive, send))


@pytest.mark.parametrize("path", ["/v1/completions", "/cache/prefetch"])
def test_an_adapter_that_is_unloaded_between_the_look_and_the_hold_is_a_404(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(served.service, "check_model", lambda name: None)
    reply = served.http.post(path, json={"model": "gone", "prompt": "x"})
    assert (reply.status_code, reply.json()["error"]["code"], reply.json()["error"]["param"]) == (
        404,
        "model_not_found",
        "model",
    )
    assert served.engine.submitted == []
    served.assert_idle()


def test_a_template_that_takes_no_greeting_does_not_keep_the_server_from_starting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine()
    asked: list[object] = []

    def refuse(messages: object, *rest: object) -> list[int]:
        asked.append(messages)
        raise InvalidRequest("it must begin with a system message")

    monkeypatch.setattr(engine.tokenizer, "encode_chat", refuse)
    caplog.set_level(logging.INFO, "penstock.server")
    asyncio.run(service_of(ScriptedLoop(engine)).warm())
    assert len(asked) == 2, "where a small body is worked at, and where a large one is"
    assert [record.message for record in caplog.records] == [
        "the chat template was not warmed up: it must begin with a system message"
    ] * 2


def test_the_deadlines_of_a_connection_end_with_it(served: Served) -> None:
    """Else one that has long closed is cut, and the log says that its client was slow."""
    served.engine.hold()
    connection = served.connect()
    (protocol,) = until_some(served)
    until(lambda: protocol._read_timer is not None, "its header is waited for")
    timer = protocol._read_timer
    assert not timer.cancelled()
    waiting = protocol._write_timer = protocol.loop.call_later(1000.0, print)
    connection.close()
    until(lambda: not served.server.server_state.connections, "the connection is gone")
    assert timer.cancelled() and waiting.cancelled()


def until_some(served: Served) -> list[Any]:
    until(lambda: served.server.server_state.connections, "somebody is connected")
    return list(served.server.server_state.connections)
