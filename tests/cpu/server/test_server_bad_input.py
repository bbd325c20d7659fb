"""Whatever a client sends gets a clear 4xx in OpenAI's shape, and the server goes on.

Holds invariant 26: a field that is unknown or not supported is a 400."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from tests.cpu.server.served import MODEL, Served, completion, serving, until
from tests.support.scripted_engine import ScriptedEngine

DEEP = 10_000  # far deeper than the interpreter's stack, and not yet too many lists and objects to look at


def chat(**fields) -> dict:
    return {"model": MODEL, "messages": [{"role": "user", "content": "x"}], **fields}


def said(content: object, role: str = "user") -> dict:
    return {"model": MODEL, "messages": [{"role": role, "content": content}]}


BAD_COMPLETIONS = {
    "no json": (b"{", None, "valid JSON"),
    "no body": (b"", None, "valid JSON"),
    "not an object": (b"[]", None, "object"),
    "trailing characters": (b'{"model":"scripted","prompt":"x"} x', None, "valid JSON"),
    "not utf-8": (b'{"model":"scripted","prompt":"\xff"}', None, "valid UTF-8"),
    "half a surrogate pair": (b'{"model":"scripted","prompt":"\\ud800 x"}', None, "valid JSON"),
    "nan": (b'{"model":"scripted","prompt":"x","temperature":NaN}', None, "valid JSON"),
    "infinity": (b'{"model":"scripted","prompt":"x","temperature":Infinity}', None, "valid JSON"),
    "a number beyond floats": (
        b'{"model":"scripted","prompt":"x","temperature":1e999}',
        "temperature",
        "out of range",
    ),
    "deep lists": (b'{"model":"scripted","prompt":' + b"[" * DEEP, "prompt[0][0]", "expected `int`"),
    "deep objects": (b'{"a":' * DEEP, "a", "not a field"),
    "too many lists": (
        b'{"model":"scripted","prompt":[' + b"[]," * 20_000 + b"[]]}",
        None,
        "more than 16384 lists and objects",
    ),
    "no model": ({"prompt": "x"}, "model", "required"),
    "no prompt": ({"model": MODEL}, "prompt", "required"),
    "an empty prompt": (completion(""), "prompt", "empty"),
    "no prompts": (completion([]), "prompt", "empty"),
    "an empty list of ids": (completion([[]]), "prompt", "empty"),
    "mixed prompts": (completion(["a", 1]), "prompt", "mix"),
    "a number as a prompt": (completion(5), "prompt", "expected `str | array`"),
    "an object as a prompt": (completion({"a": 1}), "prompt", "expected"),
    "fractional ids": (completion([1.5]), "prompt[0]", "expected"),
    "negative ids": (completion([-1]), "prompt[0]", ">= 0"),
    "huge ids": (completion([10**30]), "prompt[0]", "<="),
    "an unknown field": (completion(temprature=1), "temprature", "temprature is not a field"),
    "an unsupported field": (completion(best_of=2), "best_of", "best_of is not supported"),
    "negative max_tokens": (completion(max_tokens=-1), "max_tokens", ">= 0"),
    "fractional max_tokens": (completion(max_tokens=1.5), "max_tokens", "`float`"),
    "max_tokens as text": (completion(max_tokens="5"), "max_tokens", "`str`"),
    "max_tokens as a truth value": (completion(max_tokens=True), "max_tokens", "`bool`"),
    "huge max_tokens": (completion(max_tokens=10**30), "max_tokens", "<="),
    "more than the context": (
        completion("x" * 90_000, max_tokens=20_000),
        "max_tokens",
        "maximum context length is 100000 tokens",
    ),
    "a prompt longer than the context": (
        completion("x" * 100_001),
        "prompt",
        "maximum context length is 100000 tokens",
    ),
    "ids longer than the context": (
        completion([1] * 100_001),
        "prompt",
        "maximum context length is 100000 tokens",
    ),
    "a negative temperature": (completion(temperature=-0.1), "temperature", "at least 0"),
    "top_p of nothing": (completion(top_p=0), "top_p", "above 0"),
    "top_p above one": (completion(top_p=1.1), "top_p", "at most 1"),
    "top_k below minus one": (completion(top_k=-2), "top_k", ">= -1"),
    "a huge top_k": (completion(top_k=2**40), "top_k", "<="),
    "min_p above one": (completion(min_p=2), "min_p", "at most 1"),
    "penalty": (completion(presence_penalty=2.5), "presence_penalty", "at most 2"),
    "no repetition penalty": (completion(repetition_penalty=0), "repetition_penalty", "above 0"),
    "a huge seed": (completion(seed=2**70), "seed", "at most"),
    "no choices": (completion(n=0), "n", ">= 1"),
    "too many choices": (completion(n=129), "n", "<= 128"),
    "too many logprobs": (completion(logprobs=21), "logprobs", "at most 20"),
    "negative logprobs": (completion(logprobs=-1), "logprobs", "at least 0"),
    "logprobs as a truth value": (completion(logprobs=True), "logprobs", "`bool`"),
    "an empty stop": (completion(stop=""), "stop", "none of them empty"),
    "too many stops": (completion(stop=["a"] * 17), "stop", "at most 16"),
    "a stop of the wrong type": (completion(stop=[1]), "stop[0]", "expected `str`"),
    "stream as text": (completion(stream="yes"), "stream", "`str`"),
    "stream options without a stream": (
        completion(stream_options={"include_usage": True}),
        "stream_options",
        "stream is true",
    ),
    "unknown stream options": (
        completion(stream=True, stream_options={"x": 1}),
        "stream_options.x",
        "not a field",
    ),
    "a salt of the wrong type": (completion(cache_salt=1), "cache_salt", "expected `str"),
}


def tool(name: str = "f", **fields: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, **fields}}


def nested(depth: int) -> dict[str, Any]:
    """So many lists and objects in one another."""
    value: Any = {}
    for _ in range(depth - 2):
        value = [value]
    return {"a": value}


BAD_CHATS = {
    "no messages": ({"model": MODEL, "messages": []}, "messages", "length >= 1"),
    "messages of the wrong type": ({"model": MODEL, "messages": "hi"}, "messages", "expected `array`"),
    "an unknown role": (said("x", "wizard"), "messages[0].role", "wizard"),
    "no content": (said(None), "messages[0]", "`null`"),
    "calls by a user": (
        chat(
            messages=[
                {
                    "role": "user",
                    "content": "x",
                    "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
                }
            ]
        ),
        "messages[0]",
        "only an assistant",
    ),
    "a call without an id": (
        chat(
            messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]
        ),
        "messages[0].tool_calls[0].id",
        "required",
    ),
    "arguments that are no text": (
        chat(
            messages=[
                {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {}}}]}
            ]
        ),
        "messages[0].tool_calls[0].function.arguments",
        "`object`",
    ),
    "a result of no call": (said("x", "tool"), "messages[0]", "tool_call_id"),
    "a call id of a user": (
        chat(messages=[{"role": "user", "content": "x", "tool_call_id": "c"}]),
        "messages[0]",
        "tool_call_id",
    ),
    "a picture": (
        said([{"type": "image_url", "image_url": {"url": "x"}}]),
        "messages[0].content[0].type",
        "image_url",
    ),
    "an unknown field of a message": (
        chat(messages=[{"role": "user", "content": "x", "nom": "n"}]),
        "messages[0].nom",
        "not a field",
    ),
    "a name of the wrong type": (
        chat(messages=[{"role": "user", "content": "x", "name": 1}]),
        "messages[0].name",
        "expected `str",
    ),
    "a huge name": (
        chat(messages=[{"role": "user", "content": "x", "name": "n" * 1025}]),
        "messages[0].name",
        "<= 1024",
    ),
    "a tool without a function": (chat(tools=[{"type": "function"}]), "tools[0].function", "required"),
    "a tool of another kind": (
        chat(tools=[{"type": "web_search", "function": {"name": "f"}}]),
        "tools[0].type",
        "web_search",
    ),
    "a tool without a name": (
        chat(tools=[{"type": "function", "function": {}}]),
        "tools[0].function.name",
        "required",
    ),
    "a tool with a strange name": (chat(tools=[tool("a b")]), "tools[0].function.name", "regex"),
    "a tool whose name ends with a line break": (
        chat(tools=[tool("a\n")]),
        "tools[0].function.name",
        "regex",
    ),
    "a tool with a list of parameters": (
        chat(tools=[tool(parameters=[])]),
        "tools[0].function.parameters",
        "`array`",
    ),
    "a tool with parameters in one another without end": (
        chat(tools=[tool(parameters=nested(101))]),
        "tools",
        "deeper than 100",
    ),
    "the same where it is not told of": (
        chat(tools=[tool(parameters=nested(900))], tool_choice="none"),
        "tools",
        "deeper than 100",
    ),
    "the same where it has to be called": (
        chat(tools=[tool(parameters=nested(480))], tool_choice="required"),
        "tools",
        "deeper than 100",
    ),
    "a schema in itself without end": (
        chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": nested(101)}}),
        "response_format",
        "deeper than 100",
    ),
    "the same of another field": (
        chat(structured_outputs={"json": nested(900)}),
        "structured_outputs.json",
        "deeper than 100",
    ),
    "two tools of one name": (chat(tools=[tool(), tool()]), "tools", "same name"),
    "too many tools": (chat(tools=[tool(f"f{i}") for i in range(129)]), "tools", "length <= 128"),
    "a tool choice without tools": (chat(tool_choice="required"), "tool_choice", "where there are tools"),
    "an unknown tool choice": (chat(tools=[tool()], tool_choice="any"), "tool_choice", "any"),
    "a tool choice that is no tool": (
        chat(tools=[tool()], tool_choice={"type": "function", "function": {"name": "g"}}),
        "tool_choice",
        "no tool has that name",
    ),
    "parallel calls as text": (
        chat(tools=[tool()], parallel_tool_calls="no"),
        "parallel_tool_calls",
        "`str`",
    ),
    "an unknown format": (chat(response_format={"type": "xml"}), "response_format.type", "xml"),
    "a format without its schema": (
        chat(response_format={"type": "json_schema"}),
        "response_format",
        "json_schema goes with",
    ),
    "a schema without its format": (
        chat(response_format={"type": "text", "json_schema": {"name": "x", "schema": {}}}),
        "response_format",
        "json_schema goes with",
    ),
    "a schema without a name": (
        chat(response_format={"type": "json_schema", "json_schema": {"schema": {}}}),
        "response_format.json_schema.name",
        "required",
    ),
    "a schema that is a list": (
        chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": []}}),
        "response_format.json_schema.schema",
        "`array`",
    ),
    "a form without an end": (
        chat(response_format={"type": "json_object"}, ignore_eos=True),
        "ignore_eos",
        "structured output",
    ),
    "two forms": (
        chat(response_format={"type": "json_object"}, guided_regex="a"),
        "guided_regex",
        "give one of them",
    ),
    "no form": (chat(structured_outputs={}), "structured_outputs", "one of json"),
    "a form that is off": (
        chat(structured_outputs={"json_object": False}),
        "structured_outputs",
        "one of json",
    ),
    "two forms in one": (
        chat(structured_outputs={"regex": "a", "choice": ["b"]}),
        "structured_outputs.choice",
        "give one of them",
    ),
    "an unknown form": (
        chat(structured_outputs={"structural_tag": "x"}),
        "structured_outputs.structural_tag",
        "not a field",
    ),
    "no choice": (chat(structured_outputs={"choice": []}), "structured_outputs.choice", "length >= 1"),
    "an empty choice": (chat(guided_choice=[""]), "guided_choice[0]", "length >= 1"),
    "a regular expression of the wrong type": (chat(guided_regex=1), "guided_regex", "`int`"),
    "a huge regular expression": (chat(guided_regex="a" * 65_537), "guided_regex", "length <= 65536"),
    "a schema of the wrong type": (chat(guided_json=1), "guided_json", "`int`"),
    "a grammar of the wrong type": (chat(guided_grammar=[]), "guided_grammar", "`array`"),
    "a huge schema": (chat(guided_json={"enum": ["a" * 70_000]}), "guided_json", "at most 65536"),
    "rivals without logprobs": (chat(top_logprobs=2), "top_logprobs", "logprobs is true"),
    "too many rivals": (chat(logprobs=True, top_logprobs=21), "top_logprobs", "at most 20"),
    "two lengths": (chat(max_tokens=1, max_completion_tokens=2), "max_tokens", "differ"),
    "a prompt": (chat(prompt="x"), "prompt", "not a field"),
    "echo": (chat(echo=True), "echo", "not a field"),
}


def check_refused(served: Served, path: str, body: object, param: str | None, text: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = served.http.post(path, content=content, headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert text in error["message"], error["message"]
    assert len(error["message"]) < 500


def test_every_bad_body_is_refused_by_name_and_nothing_is_lost(served: Served) -> None:
    for path, table in (("/v1/completions", BAD_COMPLETIONS), ("/v1/chat/completions", BAD_CHATS)):
        for name, (body, param, text) in table.items():
            try:
                check_refused(served, path, body, param, text)
            except AssertionError as error:
                raise AssertionError(f"{path}, {name}: {error}") from error
            assert served.service.generations.taken == 0, name
    assert served.engine.submitted == []
    assert served.client().completions.create(model=MODEL, prompt="x").usage.completion_tokens == 16


def test_a_prompt_that_fails_in_the_middle_of_many_cancels_those_before_it(served: Served) -> None:
    served.engine.hold()
    reply = served.http.post("/v1/completions", json=completion(["good", "", "good"]))
    assert reply.status_code == 400
    assert len(served.engine.submitted) <= 1
    served.assert_idle()


def test_tokenize_refuses_what_it_does_not_know(served: Served) -> None:
    for body, param in [
        ({}, "prompt"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "x", "extra": 1}, "extra"),
        ({"messages": []}, "messages"),
    ]:
        check_refused(served, "/tokenize", body, param, "")


def test_a_model_without_a_chat_template_says_so(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(served.engine.tokenizer), "has_chat_template", False)
    check_refused(served, "/v1/chat/completions", chat(), "messages", "chat template")


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
    for method, path, status in [
        ("GET", "/v1/completions", 405),
        ("PUT", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/metrics", 405),
        ("GET", "/cache/reset", 405),
        ("POST", "/health", 405),
        ("POST", "/", 405),
        ("GET", "/?x=1", 400),
        ("GET", "/version?x=1", 400),
        ("GET", "/openapi.json?x=1", 400),
        ("GET", "/v1/models/", 404),
        ("POST", "/v1/completions/", 404),
        ("GET", "/cache/flush", 405),
        ("POST", "/cache/clear", 404),
        ("POST", "/v1/load_lora_adapter", 403),
        ("GET", "/v1/unload_lora_adapter", 405),
        ("GET", "/v1/%ff%fe", 404),
        ("POST", "/cache/reset?tier=host", 400),
        ("POST", "/cache/reset?tier=device&tier=all", 400),
        ("POST", "/cache/reset?level=1", 400),
        ("GET", "/cache/stats?x=1", 400),
        ("POST", "/v1/completions?x=1", 400),
        ("GET", "/v1/models?x=1", 400),
        ("GET", f"/v1/models/{MODEL}?x=1", 400),
        ("GET", "/health?x=1", 400),
        ("GET", "/live?x=1", 400),
        ("GET", "/metrics?x=1", 400),
    ]:
        reply = served.http.request(method, path)
        assert reply.status_code == status, path
        assert reply.json()["error"]["message"], path
        assert ("allow" in reply.headers) == (status == 405), path


def test_a_tier_or_level_in_a_body_is_refused_and_not_taken_for_the_default(served: Served) -> None:
    """Somebody who writes the query's parameter into a body would reset every tier instead of one."""
    for path, field, value in (("/cache/reset", "tier", "device"), ("/cache/flush", "level", "captured")):
        check_refused(served, path, {field: value}, field, "not a field")
        check_refused(served, path, b"device", None, "valid JSON")
        for empty in (b"", b"{}"):
            assert served.http.post(path, content=empty).status_code == 200


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
