"""What the server does about its own defects and about what changes under a request: an answer that fails
half-way, an adapter that is gone between two looks, a connection that is lost before its deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import Any

import pytest

from penstock.errors import InvalidRequest, StoreFailed
from penstock.server.access import AccessLog
from penstock.server.app import LastResort
from penstock.server.faults import Hangup
from penstock.server.generate import while_connected
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


def test_a_hang_up_is_told_before_the_work_is_cancelled_and_work_that_ends_is_not() -> None:
    """Whatever the client sends besides is passed over until it is gone."""
    told: list[str] = []

    async def go(messages: list[str], work_ends: bool) -> None:
        coming = iter(messages)
        never = asyncio.Event()

        async def receive() -> Any:
            if (kind := next(coming, None)) is None:
                await never.wait()
            return {"type": kind}

        async def work() -> None:
            try:
                await (asyncio.sleep(0) if work_ends else never.wait())
                told.append("worked")
            except asyncio.CancelledError:
                told.append("cancelled")
                raise

        with contextlib.suppress(Hangup):
            await while_connected(receive, lambda: told.append("hung up"), work)

    asyncio.run(go(["http.request", "http.request", "http.disconnect"], work_ends=False))
    assert told == ["hung up", "cancelled"]
    told.clear()
    asyncio.run(go([], work_ends=True))
    assert told == ["worked"]


def test_every_answer_names_its_request_in_its_header_and_in_its_body(served: Served) -> None:
    """By that an operator finds what a client speaks of."""
    messages = [{"role": "user", "content": "x"}]
    seen = set()
    for path, prefix, body in (
        ("/v1/completions", "cmpl-", completion(max_tokens=2)),
        ("/v1/chat/completions", "chatcmpl-", {"model": "scripted", "messages": messages, "max_tokens": 2}),
    ):
        whole = served.http.post(path, json=body)
        streamed = served.http.post(path, json={**body, "stream": True})
        ids = {event["id"] for event in events_of(streamed.text)}
        assert whole.json()["id"] == prefix + whole.headers["x-request-id"]
        assert ids == {prefix + streamed.headers["x-request-id"]}
        assert (
            streamed.headers["content-type"].startswith("text/event-stream")
            and streamed.headers["cache-control"] == "no-cache"
        )
        seen |= {whole.headers["x-request-id"], streamed.headers["x-request-id"]}
    assert len(seen) == 4
