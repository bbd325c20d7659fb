"""A client that hangs up cancels its request: in every state, at once, and nothing stays behind."""

from __future__ import annotations

import json
import threading

import pytest

from penstock.server.service import Generations
from tests.cpu.server.served import DEADLINE_S, Served, completion, read_until, serving, until
from tests.support.scripted_engine import ScriptedEngine

LONG = 50_000  # tokens: no test here lets one run to its end


def hang_up_mid_stream(served: Served) -> None:
    connection = served.send("/v1/completions", completion(stream=True, max_tokens=LONG))
    assert b"data: {" in read_until(connection, b"data: {")
    connection.close()


def hang_up_before_the_first_token(served: Served, stream: bool) -> None:
    served.engine.hold()
    connection = served.send("/v1/completions", completion(stream=stream, max_tokens=50, n=3))
    until(lambda: served.engine.num_open == 3, "the engine has the requests")
    connection.close()


def test_a_hang_up_mid_stream_cancels(served: Served) -> None:
    hang_up_mid_stream(served)
    served.assert_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_hang_up_before_the_first_token_cancels(served: Served, stream: bool) -> None:
    hang_up_before_the_first_token(served, stream)
    served.assert_idle()


def test_a_hang_up_cancels_a_reply_that_is_being_gathered(served: Served) -> None:
    connection = served.send(
        "/v1/chat/completions", {"model": "scripted", "messages": [{"role": "user", "content": "x"}]}
    )
    until(lambda: served.engine.stats().generated_tokens > 100, "tokens are flowing")
    connection.close()
    served.assert_idle()
    assert served.engine.stats().generated_tokens < LONG


def test_a_choice_that_met_its_stop_string_is_cancelled_while_others_go_on(served: Served) -> None:
    served.engine.hold()
    body = completion(stream=True, n=2, seed=7, stop=["choice 7"], max_tokens=50)
    connection = served.send("/v1/completions", body, "Connection: close\r\n")
    until(lambda: served.engine.num_open == 2, "the engine has both")
    served.engine.permit(8)
    read_until(connection, b'"finish_reason":"stop"')
    until(lambda: served.engine.num_open == 1, "the first choice is cancelled")
    served.engine.release()
    assert b"[DONE]" in read_until(connection, b"[DONE]")
    connection.close()


def test_a_hang_up_during_the_upload_gives_the_seat_back(served: Served) -> None:
    connection = served.connect()
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    until(lambda: served.service.generations.taken == 1, "the seat is taken")
    connection.close()
    served.assert_idle()
    assert served.engine.submitted == []


def test_a_hang_up_while_prompts_are_tokenised_submits_no_more_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker thread is between two prompts: one was submitted, the client goes, the next must not be."""
    with serving() as served:
        first, gone = threading.Event(), threading.Event()
        submit = served.service.engine.submit

        def slow_submit(*args, **fields):
            submit(*args, **fields)
            first.set()
            assert gone.wait(DEADLINE_S)

        monkeypatch.setattr(served.service.engine, "submit", slow_submit)
        served.engine.hold()
        connection = served.send("/v1/completions", completion(["x" * 20_000] * 3, max_tokens=LONG))
        assert first.wait(DEADLINE_S)
        until(lambda: served.engine.num_open == 1, "the engine has the first one")
        connection.close()
        until(
            lambda: served.engine.num_open == 0, "the first one is cancelled while the worker is still busy"
        )
        gone.set()
        served.assert_idle()
        assert len(served.engine.submitted) == 1


def test_a_hang_up_between_submit_and_its_return_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cancel comes before the engine knows the request: the submitter must look again."""
    with serving() as served:
        entered, gone = threading.Event(), threading.Event()
        submit = served.service.engine.submit

        def late_submit(*args, **fields):
            entered.set()
            assert gone.wait(DEADLINE_S)
            submit(*args, **fields)

        abandon, abandoned = Generations.abandon, threading.Event()
        monkeypatch.setattr(Generations, "abandon", lambda self: (abandon(self), abandoned.set()))
        monkeypatch.setattr(served.service.engine, "submit", late_submit)
        served.engine.hold()
        connection = served.send("/v1/completions", completion("x" * 20_000, max_tokens=LONG))
        assert entered.wait(DEADLINE_S)
        connection.close()
        assert abandoned.wait(DEADLINE_S), "the hang-up is noticed"
        gone.set()
        served.assert_idle()
        assert len(served.engine.submitted) == 1


# ------------------------------------------------------------------------------------------------------ crowd


# ------------------------------------------------------------------------------------------------ slow reader


def test_a_slow_reader_gets_everything_in_few_large_chunks(served: Served) -> None:
    num_tokens = 30_000
    body = completion(stream=True, max_tokens=num_tokens, seed=7)
    connection = served.send("/v1/completions", body, "Connection: close\r\n", small_buffer=True)
    until(
        lambda: served.engine.num_open == 0 and served.engine.submitted,
        "the engine does not wait for the reader",
    )
    data = b""
    while more := connection.recv(65536):
        data += more
    connection.close()
    chunks = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == ("choice 7: one two three four five six seven. " * 700)[:num_tokens]
    assert len(chunks) < num_tokens / 4
    assert data.count(b"data: [DONE]") == 1


def test_a_reader_that_stops_reading_is_given_up() -> None:
    with serving(ScriptedEngine(max_model_len=10_000_000), write_timeout_s=0.05) as served:
        prompt = "x" * 200_000  # echoed in every choice: more than all socket buffers on the way hold
        body = completion(prompt, stream=True, max_tokens=5_000_000, echo=True, n=64)
        connection = served.send("/v1/completions", body, small_buffer=True)
        until(lambda: len(served.engine.submitted) == 64, "the engine has the requests")
        served.assert_idle()
        connection.close()
