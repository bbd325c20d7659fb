"""Bodies, paths, methods and keys: what a route does not take gets a clear 4xx, and the server goes on."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from tests.cpu.server.served import MODEL, Served, completion, serving, until
from tests.support.scripted_engine import ScriptedEngine

# ------------------------------------------------------------------------------------------- size and methods


def test_a_body_of_ten_megabytes_is_refused_whole_or_in_parts(served: Served) -> None:
    body = json.dumps(completion("x" * 10_000_000)).encode()

    def parts():
        for start in range(0, len(body), 1 << 16):
            yield body[start : start + (1 << 16)]

    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        for content in (body, parts()):
            reply = served.http.post(path, content=content)
            assert reply.status_code == 413, path
            assert reply.json()["error"]["code"] == "body_too_large"
    served.assert_idle()


def test_a_body_that_is_announced_too_large_is_refused_before_it_comes(served: Served) -> None:
    connection = served.connect()
    connection.sendall(
        b"POST "
        b"/v1/completions "
        b"HTTP/1.1\r\nHost: "
        b"x\r\nContent-Length: "
        b"99999999999\r\nExpect: 100-continue\r\n\r\n"
    )
    assert connection.recv(1000).startswith(b"HTTP/1.1 413")
    connection.close()


def test_an_endless_upload_is_refused_while_little_of_it_is_held(served: Served) -> None:
    """The chunks never end; the answer comes all the same, and memory does not grow with what was sent."""
    connection = served.connect()
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    tracemalloc.start()
    try:
        for _ in range(64):
            connection.sendall(chunk)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert connection.recv(1000).startswith(b"HTTP/1.1 413")
    assert peak < 5 * served.service.config.max_body_bytes
    connection.close()


def test_a_body_just_within_the_limit_is_taken() -> None:
    with serving(ScriptedEngine(max_model_len=10_000), max_body_bytes=2048) as served:
        size = len(json.dumps(completion("")))
        assert (
            served.http.post(
                "/v1/completions", content=json.dumps(completion("x" * (2048 - size)))
            ).status_code
            == 200
        )
        assert (
            served.http.post(
                "/v1/completions", content=json.dumps(completion("x" * (2049 - size)))
            ).status_code
            == 413
        )


def test_a_body_that_never_comes_does_not_hold_its_seat() -> None:
    with serving(read_timeout_s=1.0) as served:
        connection = served.connect()
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")
        served.assert_idle()
        connection.close()


def test_compressed_bodies_are_refused(served: Served) -> None:
    assert (
        served.http.post("/v1/completions", content=b"x", headers={"content-encoding": "gzip"}).status_code
        == 415
    )


def test_paths_methods_and_queries_that_do_not_exist(served: Served) -> None:
    for status, asked in (
        (404, "GET /v1/models/|POST /v1/completions/|POST /cache/clear|GET /v1/%ff%fe"),
        (403, "POST /v1/load_lora_adapter"),
        (
            405,
            "GET /v1/completions|PUT /v1/chat/completions|POST /v1/models|DELETE /metrics|GET /cache/reset|"
            "POST /health|POST /|GET /cache/flush|GET /v1/unload_lora_adapter|PUT /v1/snapshots/talk",
        ),
        (
            400,
            "GET /?x=1|GET /version?x=1|GET /openapi.json?x=1|POST /cache/reset?tier=host|GET /live?x=1|"
            "POST /cache/reset?tier=device&tier=all|POST /cache/reset?level=1|GET /cache/stats?x=1|"
            f"POST /v1/completions?x=1|GET /v1/models?x=1|GET /v1/models/{MODEL}?x=1|GET /health?x=1|"
            "GET /metrics?x=1|POST /cache/flush?level=durable|GET /v1/snapshots?salt=x|"
            f"GET /v1/snapshots?cache_salt={'x' * 1025}",
        ),
    ):
        for one in asked.split("|"):
            reply = served.http.request(*one.split(" "))
            assert (reply.status_code, "allow" in reply.headers) == (status, status == 405), one
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}, one


def test_garbage_instead_of_http_is_survived(served: Served) -> None:
    for garbage in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    ):
        connection = served.connect()
        connection.sendall(garbage)
        connection.shutdown(1)
        while connection.recv(1000):
            pass
        connection.close()
    assert served.http.get("/health").status_code == 200


CHUNKED = b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "garbage", [b"zz\r\n", b'5\r\n{"mod\r\nzz\r\n'], ids=["at once", "behind a part of the body"]
)
@pytest.mark.parametrize("path", [b"/v1/completions", b"/tokenize", b"/nowhere"])
def test_a_client_that_stops_speaking_http_within_a_request_is_refused_once_and_fails_nothing(
    served: Served, caplog: pytest.LogCaptureFixture, path: bytes, garbage: bytes
) -> None:
    for pieces in ([CHUNKED % path + garbage], [CHUNKED % path, garbage]):
        with served.connect() as connection:
            for piece in pieces:
                connection.sendall(piece)
            answer = connection.makefile("rb").read()
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith((b"HTTP/1.1 400", b"HTTP/1.1 404")) and answer.count(b"HTTP/1.1") == 1, answer
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    served.assert_idle()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


# -------------------------------------------------------------------------------------------------------- key


def test_the_key_guards_everything_but_the_probes() -> None:
    with serving(api_key="secret-key-value") as served:
        http = served.http
        assert http.get("/health").status_code == 200
        assert http.get("/live").status_code == 200
        for method, path in [
            ("GET", "/metrics"),
            ("GET", "/v1/models"),
            ("GET", "/cache/stats"),
            ("POST", "/cache/reset?tier=all"),
            ("POST", "/tokenize"),
            ("POST", "/v1/completions"),
            ("POST", "/v1/load_lora_adapter"),
            ("POST", "/v1/unload_lora_adapter"),
            ("GET", "/nowhere"),
            ("GET", "/health/"),
            ("GET", "/live/../metrics"),
        ]:
            reply = http.request(method, path)
            assert reply.status_code == 401, path
            assert reply.json()["error"]["code"] == "invalid_api_key"
        for wrong in (
            "",
            "Bearer",
            "Bearer secret",
            "Basic secret-key-value",
            "secret-key-value",
            "Bearer secret-key-valuex",
        ):
            assert http.get("/metrics", headers={"authorization": wrong}).status_code == 401, wrong
        assert http.get("/metrics", headers={"authorization": "bearer secret-key-value"}).status_code == 200


def test_the_key_shows_in_no_log_and_no_error(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(0)
    with serving(api_key="secret-key-value") as served:
        monkeypatch.setattr(served.engine, "stats", lambda: 1 / 0)
        answers = [
            served.http.get("/metrics", headers={"authorization": f"Bearer {key}"})
            for key in ("secret-key-value", "wrong-value")
        ]
        assert [answer.status_code for answer in answers] == [500, 401]
        until(lambda: "ZeroDivisionError" in caplog.text, "the failure is in the log")
        for text in (caplog.text, *(answer.text for answer in answers)):
            assert "secret-key-value" not in text
            assert "wrong-value" not in text
        assert "division" not in answers[0].text, "an internal error tells its details to the log only"
