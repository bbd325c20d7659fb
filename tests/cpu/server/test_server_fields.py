"""Fields that change nothing are taken, fields that would change the answer and are not supported are refused with a reason.

Holds invariant 26: a field that is unknown or not supported is a 400."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import openai
import pytest
from served import MODEL, Served, completion, read_until, serving

from penstock.server import schema
from support.scripted_engine import ScriptedEngine

HI = [{"role": "user", "content": "hi"}]
BODIES = {"/v1/completions": schema.CompletionBody, "/v1/chat/completions": schema.ChatBody}
HARMLESS: dict[str, list[Any]] = {
    **{name: list(neutral.values) for name, neutral in schema.NEUTRAL.items()},
    "prompt_cache_key": ["k"],
    "logit_bias": [{}],
    "tools": [[]],
    "tool_choice": ["none", "auto"],
    "parallel_tool_calls": [True, False],
}
# Values that mean something which this server does not do. Raw JSON, so that what JSON cannot say can be sent.
MEANINGFUL: dict[str, list[str]] = {
    "min_tokens": ["1", "2147483647"],
    "return_token_ids": ["true"],
    "add_generation_prompt": ["false"],
    "continue_final_message": ["true"],
    "chat_template_kwargs": ['{"enable_thinking": false}'],
}
WRONG = ["NaN", "1e999", "-Infinity", '{"a": [[]]}', "[[1]]", "-7", "9" * 400, '"\\ud800"']


def ask(served: Served, path: str, field: str, value: str) -> Any:
    base = completion(max_tokens=1) if path == "/v1/completions" else {"model": MODEL, "messages": HI, "max_tokens": 1}
    content = json.dumps(base)[:-1] + f', "{field}": {value}}}'
    return served.http.post(path, content=content)


def having(field: str) -> list[str]:
    return [path for path, body in BODIES.items() if field in body.__struct_fields__]


def test_values_that_mean_nothing_are_taken_and_change_nothing(served: Served) -> None:
    plain = {path: ask(served, path, "seed", "7").json()["choices"] for path in BODIES}
    for field, values in HARMLESS.items():
        assert having(field), field
        for path in having(field):
            for value in values:
                reply = ask(served, path, "seed", f'7, "{field}": {json.dumps(value)}')
                assert (reply.status_code, reply.json().get("choices")) == (200, plain[path]), f"{path} {field}={value}: {reply.text}"


def test_values_that_would_change_the_answer_are_refused_with_a_reason(served: Served) -> None:
    assert MEANINGFUL.keys() == schema.NEUTRAL.keys()
    for field, values in MEANINGFUL.items():
        for path in having(field):
            for value in values:
                reply = ask(served, path, field, value)
                error = reply.json()["error"]
                assert (reply.status_code, error["param"]) == (400, field), f"{path} {field}={value}: {reply.text}"
                assert schema.NEUTRAL[field].why in error["message"] and len(error["message"]) < 600, error
    assert served.engine.submitted == []


@pytest.mark.parametrize("field", sorted(HARMLESS))
def test_wrong_types_and_wild_values_of_such_a_field_are_refused_by_name(served: Served, field: str) -> None:
    for path in having(field):
        for value in WRONG:
            reply = ask(served, path, field, value)
            assert reply.status_code == 400, f"{path} {field}={value}: {reply.text}"
            param = reply.json()["error"]["param"]
            assert param is None or param.startswith(field), reply.text
    assert served.engine.submitted == []


def test_labels_are_bounded(served: Served) -> None:
    for field, value in {
        "user": "x" * 1025,
        "safety_identifier": "x" * 1025,
        "metadata": {"k": "v" * 513},
        "prompt_cache_key": "",
    }.items():
        for path in BODIES:
            assert ask(served, path, field, json.dumps(value)).json()["error"]["param"].startswith(field)
    for metadata in ({"k" * 65: "v"}, {str(i): "v" for i in range(17)}, {"k": 1}):
        assert ask(served, "/v1/completions", "metadata", json.dumps(metadata)).status_code == 400


@pytest.mark.parametrize("path", BODIES)
def test_biases_reach_the_engine_and_bad_ones_are_refused_by_name(served: Served, path: str) -> None:
    assert ask(served, path, "logit_bias", '{"5": 1, "70": -100.0, "6": 0}').status_code == 200
    assert served.engine.submitted[-1][1].logit_bias == ((5, 1.0), (70, -100.0), (6, 0.0))
    many = json.dumps({str(token): 1 for token in range(513)})
    for bad in ('{"5": 100.5}', '{"5": -101}', '{"5": 1e999}', '{"5": NaN}', '{"-5": 1}', '{"x": 1}', '{"5.5": 1}', '{"": 1}', many):
        reply = ask(served, path, "logit_bias", bad)
        assert reply.status_code == 400, f"{bad}: {reply.text}"
        assert (reply.json()["error"]["param"] or "logit_bias").startswith("logit_bias"), reply.text
    for bad in ('{"5": "1"}', '{"5": null}', '{"5": [1]}', '{"9999999999": 1}', "[1]", '"5"'):
        assert ask(served, path, "logit_bias", bad).json()["error"]["param"].startswith("logit_bias"), bad


def test_a_developers_message_is_a_system_message_and_names_change_nothing(served: Served) -> None:
    turns = [{"role": "developer", "content": "be", "name": "boss"}, {"role": "user", "content": "hi", "name": "me"}]
    assert served.http.post("/v1/chat/completions", json={"model": MODEL, "messages": turns, "max_tokens": 1}).status_code == 200
    assert bytes(served.engine.submitted[-1][0]).decode() == "system: be\nuser: hi\nassistant: "


# --------------------------------------------------------------------------------------------------------------- streams


def chunks_of(served: Served, path: str, **fields: Any) -> list[Any]:
    base = completion() if path == "/v1/completions" else {"model": MODEL, "messages": HI}
    text = served.http.post(path, json={**base, "seed": 7, "max_tokens": 5, "stream": True, **fields}).text
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


@pytest.mark.parametrize("path", BODIES)
def test_usage_so_far_comes_with_every_chunk_where_it_is_asked_for(served: Served, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chunks_of(served, path, stream_options=options, n=2)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 10
    assert chunks[-1]["choices"] == [] and all(chunk["choices"] for chunk in chunks[:-1])
    assert all(chunk["usage"]["prompt_tokens"] == chunks[-1]["usage"]["prompt_tokens"] for chunk in chunks)
    alone = chunks_of(served, path, stream_options={"continuous_usage_stats": True})
    assert alone[-1]["usage"]["completion_tokens"] == 5 and all(chunk["choices"] for chunk in alone)
    bare = chunks_of(served, path, stream_options={"include_usage": True, "continuous_usage_stats": False})
    assert all(chunk["usage"] is None for chunk in bare[:-1])


@pytest.mark.parametrize("path", BODIES)
def test_obfuscated_chunks_are_of_one_size(served: Served, path: str) -> None:
    padded = chunks_of(served, path, stream_options={"include_obfuscation": True})
    assert {len(msgspec.json.encode(chunk)) for chunk in padded} == {512}
    plain = chunks_of(served, path, stream_options={"include_obfuscation": False})
    assert not any("obfuscation" in chunk for chunk in plain)


def test_unknown_or_wrong_stream_options_are_refused(served: Served) -> None:
    for name in ("include_usage", "continuous_usage_stats", "include_obfuscation"):
        for value in (1, "true", [], {}, -1):
            reply = served.http.post("/v1/completions", json=completion(stream=True, stream_options={name: value}))
            assert reply.json()["error"]["param"] == f"stream_options.{name}"


def test_the_role_comes_with_the_first_token_and_not_before(served: Served) -> None:
    """The engine is held, so whatever a client sees of the answer before `permit` has come before any token."""
    served.engine.hold()
    connection = served.send("/v1/chat/completions", {"model": MODEL, "messages": HI, "stream": True, "max_tokens": 3, "seed": 7})
    with connection:
        head = read_until(connection, b"\r\n\r\n")
        served.engine.permit(0)
        # A second request that is answered in full: the server has had every chance to write to the first.
        assert served.http.get("/health").status_code == 200
        connection.setblocking(False)
        with pytest.raises(BlockingIOError):
            connection.recv(1)
        assert head.endswith(b"\r\n\r\n")
        connection.setblocking(True)
        served.engine.permit(1)
        first = read_until(connection, b'"content":"c"')
        assert first.index(b'"role":"assistant"') < first.index(b'"content":"c"')
        served.engine.release()
        assert b'"role"' not in read_until(connection, b"[DONE]")


# --------------------------------------------------------------------------------------------------------------- context


def test_a_prompt_that_does_not_fit_is_refused_in_the_words_that_clients_look_for() -> None:
    with serving(ScriptedEngine(max_model_len=64)) as served:
        for call, param in (
            (lambda client: client.completions.create(model=MODEL, prompt="x" * 65), "prompt"),
            (lambda client: client.completions.create(model=MODEL, prompt=[1] * 65), "prompt"),
            (lambda client: client.completions.create(model=MODEL, prompt="x" * 60, max_tokens=5), "max_tokens"),
            (lambda client: client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * 65}]), "prompt"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                call(served.client())
            assert (refused.value.code, refused.value.param) == ("context_length_exceeded", param)
            assert "This model's maximum context length is 64 tokens. However, you" in refused.value.message
        side = served.http.post("/detokenize", json={"tokens": [1] * ((1 << 17) + 1)}).json()["error"]
        assert (side["code"], "context" in side["message"]) == (None, False)  # a limit of that route, and not the model's
