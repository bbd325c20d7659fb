"""What one client may hold and for how long: deadlines of a connection, crumbs, long names in errors, keys,
large replies."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import Any

import pytest
from starlette.types import Message

from penstock.config import ServerConfig
from penstock.errors import ConfigError
from penstock.server.connection import FREE_PIECES, read_body
from penstock.server.faults import MAX_SHOWN, Refused, fault_of
from penstock.server.replies import CompletionReply
from penstock.server.run import server_here
from tests.cpu.server.served import MODEL, Served, completion, read_until, serving
from tests.support.scripted_engine import ScriptedEngine, ScriptedLoop

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def ends(connection: socket.socket) -> bytes:
    """What the server still had to say before it closed."""
    said = b""
    try:
        while more := connection.recv(65536):
            said += more
    except ConnectionResetError:
        pass
    return said


def is_closed(connection: socket.socket) -> bool:
    """Looked at for as long as its time-out lasts."""
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


# ----------------------------------------------------------------------------------------------- slow clients


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTT"], ids=["nothing", "half a header"])
def test_a_header_that_does_not_end_ends_the_connection(sent: bytes) -> None:
    with serving(read_timeout_s=0.05) as served, served.connect() as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
        assert ends(connection) == b""


def test_a_header_in_drops_has_one_deadline_for_all_of_it() -> None:
    """Each drop comes in time; the header does not."""
    with serving(read_timeout_s=0.2) as served, served.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        connection.settimeout(0.02)
        num_drops = 0
        while not is_closed(connection):
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"X-Drop: 1\r\n")
            num_drops += 1
            assert num_drops < 500, (
                "long before the header is too large, which would end the connection as well"
            )


def test_a_body_that_does_not_end_behind_an_early_reply_ends_the_connection() -> None:
    with serving(read_timeout_s=1.0) as served, served.connect() as connection:
        connection.sendall(b"POST /no/such/path HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        read_until(connection, b"no such path")
        connection.sendall(b"x")  # what comes puts off the deadline of an idle connection, and no other
        ends(connection)


def test_a_connection_that_is_used_is_not_cut() -> None:
    """A reply takes many times as long as a header may."""
    ask = completion(stream=True, max_tokens=40)
    slow = serving(ScriptedEngine(pace_s=0.05), read_timeout_s=1.0, write_timeout_s=1.0)
    with slow as served, served.send("/v1/completions", ask) as connection:
        assert b"[DONE]" in read_until(connection, b"[DONE]")
        connection.sendall(HEALTH)
        assert b"200 OK" in read_until(connection, b"ready")


def test_a_body_in_crumbs_is_refused_and_one_in_pieces_is_not(served: Served) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    with served.connect() as connection:
        connection.sendall(head + b"1\r\nx\r\n" * 3000)
        assert ends(connection).startswith(b"HTTP/1.1 400")
    body = b'{"prompt": "' + b"x" * 100_000 + b'"}'
    pieces = [body[at : at + 64] for at in range(0, len(body), 64)]
    with served.connect() as connection:
        connection.sendall(
            head + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        )
        assert ends(connection).startswith(b"HTTP/1.1 200")


# ------------------------------------------------------------------------------------------------------- echo


def test_an_error_shows_the_beginning_and_the_end_of_a_long_name() -> None:
    for error in (
        Refused(404, f"no {'m' * 10_000} here", param="p" * 10_000),
        Refused(400, "x" * (MAX_SHOWN + 1)),
    ):
        body = fault_of(error).body()["error"]
        assert all(len(value) < MAX_SHOWN + 50 for value in body.values() if value)
        assert body["message"].endswith(str(error)[-100:]) and body["message"].startswith(str(error)[:100])
    assert fault_of(Refused(400, "x" * MAX_SHOWN)).body()["error"]["message"] == "x" * MAX_SHOWN


# ------------------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize("key", ["voilà", "plain", "two words", "東京", "\udca0\udcff", "x\u00a0"])
def test_a_key_of_any_bytes_admits_exactly_those_bytes(key: str) -> None:
    sent = key.encode("utf-8", "surrogateescape")
    with serving(api_key=f" {key}\t") as served:

        def status(value: bytes) -> int:
            return served.http.get("/v1/models", headers=[(b"authorization", value)]).status_code

        assert status(b"Bearer " + sent) == status(b"bearer   " + sent) == 200
        assert {
            status(b"Bearer " + wrong)
            for wrong in (sent[:-1], sent + b"\xa0", b"\xc2\xa0" + sent, sent.upper() + b"!")
        } == {401}
        twice = served.http.get(
            "/v1/models", headers=[(b"authorization", b"Bearer " + sent), (b"authorization", b"Bearer x")]
        )
        assert twice.status_code == 401


@pytest.mark.parametrize("key", ["", "  \t", "from a file\n", "a\rb", "a\0"])
def test_a_key_that_no_client_can_send_refuses_to_start(key: str) -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        server_here(ScriptedEngine(), ScriptedLoop(ScriptedEngine()), ServerConfig(port=0, api_key=key))


# ---------------------------------------------------------------------------------------------- large replies


@pytest.mark.parametrize("stream", [True, False])
def test_scores_of_a_long_prompt_are_written_off_the_event_loop(
    served: Served, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[int, str]] = []
    scores = CompletionReply.scores

    def watched(self: CompletionReply, tokens: Any) -> Any:
        written.append((len(tokens), threading.current_thread().name))
        return scores(self, tokens)

    monkeypatch.setattr(CompletionReply, "scores", watched)
    body = {
        "model": MODEL,
        "prompt": "x" * 5000,
        "echo": True,
        "logprobs": 5,
        "max_tokens": 2,
        "stream": stream,
    }
    assert served.http.post("/v1/completions", json=body).status_code == 200
    assert sum(count for count, _ in written) >= 5000
    assert all("worker" in name.lower() for count, name in written if count > 1000)


# ------------------------------------------------------------------------------------------------------- keys


# ---------------------------------------------------------------------------------------------------- readers


# ---------------------------------------------------------------------------- a connection that is used again


def test_each_body_of_a_connection_has_its_own_pieces(served: Served) -> None:
    """Neither is in crumbs; both together would be."""
    body = b'{"prompt": "' + b"x" * (FREE_PIECES - 100) + b'"}'
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    crumbs = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    with served.connect() as connection:
        for _ in range(3):
            connection.sendall(head + crumbs)
            assert read_until(connection, b'"max_model_len"').startswith(b"HTTP/1.1 200")


# ----------------------------------------------------------------------------------------------------- bodies


class _ClockedLoop(asyncio.SelectorEventLoop):
    """Its time passes only when a test says so."""

    now_s = 1000.0

    def time(self) -> float:
        return self.now_s


def test_a_body_has_one_deadline_however_many_pieces_it_comes_in() -> None:
    """Each piece comes well within the time for all of them."""
    loop = _ClockedLoop()
    num_pieces = 0

    async def receive() -> Message:
        nonlocal num_pieces
        num_pieces += 1
        loop.now_s += 0.4
        await asyncio.sleep(0)  # whatever is due by now happens
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"x", "more_body": num_pieces < 20}

    scope = {"type": "http", "headers": []}
    try:
        with pytest.raises(Refused) as refusal:
            loop.run_until_complete(read_body(scope, receive, ServerConfig(read_timeout_s=1.0)))
    finally:
        loop.close()
    assert refusal.value.status == 408
    assert num_pieces == 3
