"""Fields that change nothing are taken, fields that would change the answer and are not supported are refused
with a reason.

Holds invariant 26: a field that is unknown or not supported is a 400."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import openai
import pytest

from penstock.server import schema
from tests.cpu.server.served import MODEL, Served, completion, read_until, serving
from tests.support.scripted_engine import EOS, ScriptedEngine

HI = [{"role": "user", "content": "hi"}]
BODIES = {"/v1/completions": schema.CompletionBody, "/v1/chat/completions": schema.ChatBody}
HARMLESS: dict[str, list[Any]] = {
    "prompt_cache_key": ["k"],
    "logit_bias": [{}],
    "tools": [[]],
    "tool_choice": ["none", "auto"],
    "parallel_tool_calls": [True, False],
    "min_tokens": [0],
    "skip_special_tokens": [True],
    "include_stop_str_in_output": [False],
    "return_token_ids": [False],
    "return_tokens_as_token_ids": [False],
    "add_generation_prompt": [True],
    "continue_final_message": [False],
    "chat_template_kwargs": [{}, {"enable_thinking": False}],
    "reasoning_effort": ["none", "high"],
    "thinking_token_budget": [0, 100],
}
WRONG = ["NaN", "1e999", "-Infinity", '{"a": [[]]}', "[[1]]", "-7", "9" * 400, '"\\ud800"']


def ask(served: Served, path: str, field: str, value: str) -> Any:
    base = (
        completion(max_tokens=1)
        if path == "/v1/completions"
        else {"model": MODEL, "messages": HI, "max_tokens": 1}
    )
    content = json.dumps(base)[:-1] + f', "{field}": {value}}}'
    return served.http.post(path, content=content)


def having(field: str) -> list[str]:
    return [path for path, body in BODIES.items() if field in body.__struct_fields__]


@pytest.mark.parametrize("field", sorted(HARMLESS))
def test_wrong_types_and_wild_values_of_such_a_field_are_refused_by_name(served: Served, field: str) -> None:
    for path in having(field):
        for value in WRONG:
            if field == "chat_template_kwargs" and value.startswith("{"):
                continue  # any JSON
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
    for bad in (
        '{"5": 100.5}',
        '{"5": -101}',
        '{"5": 1e999}',
        '{"5": NaN}',
        '{"-5": 1}',
        '{"x": 1}',
        '{"5.5": 1}',
        '{"": 1}',
        many,
    ):
        reply = ask(served, path, "logit_bias", bad)
        assert reply.status_code == 400, f"{bad}: {reply.text}"
        assert (reply.json()["error"]["param"] or "logit_bias").startswith("logit_bias"), reply.text
    for bad in ('{"5": "1"}', '{"5": null}', '{"5": [1]}', '{"9999999999": 1}', "[1]", '"5"'):
        assert ask(served, path, "logit_bias", bad).json()["error"]["param"].startswith("logit_bias"), bad


# ---------------------------------------------------------------------------------------------------- streams


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


def test_the_role_comes_with_the_first_token_and_not_before(served: Served) -> None:
    """The engine is held, so whatever a client sees of the answer before `permit` has come before any
    token."""
    served.engine.hold()
    connection = served.send(
        "/v1/chat/completions", {"model": MODEL, "messages": HI, "stream": True, "max_tokens": 3, "seed": 7}
    )
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


# ---------------------------------------------------------------------------------------------------- context


def test_a_prompt_that_does_not_fit_is_refused_in_the_words_that_clients_look_for() -> None:
    with serving(ScriptedEngine(max_model_len=64)) as served:
        for call, param in (
            (lambda client: client.completions.create(model=MODEL, prompt="x" * 65), "prompt"),
            (lambda client: client.completions.create(model=MODEL, prompt=[1] * 65), "prompt"),
            (
                lambda client: client.completions.create(model=MODEL, prompt="x" * 60, max_tokens=5),
                "max_tokens",
            ),
            (
                lambda client: client.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": "x" * 65}]
                ),
                "prompt",
            ),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                call(served.client())
            assert (refused.value.code, refused.value.param) == ("context_length_exceeded", param)
            assert "This model's maximum context length is 64 tokens. However, you" in refused.value.message
        side = served.http.post("/detokenize", json={"tokens": [1] * ((1 << 17) + 1)}).json()["error"]
        # a limit of that route, and not the model's
        assert (side["code"], "context" in side["message"]) == (None, False)


# ------------------------------------------------------------------------------------------------- vLLM's own


def test_token_ids_are_in_the_answer_whole_and_streamed() -> None:
    """Of every token that is counted, the one that ended the answer too; those of the prompt once."""
    engine = ScriptedEngine(lambda prompt, sampling: [*"Zür <x".encode(), EOS])
    with serving(engine) as served:
        ids = [*"Zür <x".encode(), EOS]
        asked = {"return_token_ids": True, "n": 2, "stop": "<y"}
        text = served.http.post("/v1/completions", json=completion(prompt=["ab", "c"], **asked)).json()
        assert [choice["prompt_token_ids"] for choice in text["choices"]] == [[97, 98]] * 2 + [[99]] * 2
        assert [choice["token_ids"] for choice in text["choices"]] == [ids] * 4 and text["usage"][
            "completion_tokens"
        ] == 4 * len(ids)
        chat = {"model": MODEL, "messages": HI, **asked}
        whole = served.http.post("/v1/chat/completions", json=chat).json()
        prompt = list(engine.submitted[-1][0])
        assert (
            whole["prompt_token_ids"] == prompt
            and [choice["token_ids"] for choice in whole["choices"]] == [ids] * 2
        )
        for path, body in (
            ("/v1/completions", completion(prompt="ab", **asked)),
            ("/v1/chat/completions", chat),
        ):
            lines = served.http.post(path, json={**body, "stream": True}).text.splitlines()
            chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
            streamed: dict[int, list[int]] = {0: [], 1: []}
            prompts = []
            for chunk in chunks:
                (choice,) = chunk["choices"]
                streamed[choice["index"]] += choice.get("token_ids", [])
                prompts += [one["prompt_token_ids"] for one in (chunk, choice) if "prompt_token_ids" in one]
            assert streamed == {0: ids, 1: ids} and prompts == [[97, 98] if "prompt" in body else prompt] * 2


def test_a_stop_string_ends_the_token_ids_and_may_stay_in_the_text() -> None:
    with serving(ScriptedEngine(lambda prompt, sampling: [*b"one two three", EOS])) as served:
        asked = completion(stop="two", return_token_ids=True)
        (choice,) = served.http.post("/v1/completions", json=asked).json()["choices"]
        assert choice["text"] == "one " and bytes(choice["token_ids"]) == b"one two"
        for stream in (False, True):
            reply = served.http.post(
                "/v1/completions", json={**asked, "include_stop_str_in_output": True, "stream": stream}
            ).text
            found = [
                json.loads(line.removeprefix("data: "))
                for line in reply.splitlines()
                if line.startswith(("data: {", "{"))
            ]
            assert "".join(one["choices"][0]["text"] for one in found) == "one two"


def test_special_tokens_have_text_where_a_client_wants_it_and_logprobs_may_name_ids() -> None:
    special = 300
    engine = ScriptedEngine(lambda prompt, sampling: [97, special, 98, EOS])
    engine.tokenizer.vocab_size = special + 1
    engine.tokenizer.is_special = lambda id: id >= EOS  # type: ignore[method-assign]
    with serving(engine) as served:
        texts = [
            served.http.post("/v1/completions", json=completion(skip_special_tokens=skip)).json()["choices"][
                0
            ]["text"]
            for skip in (True, False)
        ]
        assert texts == ["ab", "a<300>b"]
        asked = completion(logprobs=1, return_tokens_as_token_ids=True)
        assert (
            served.http.post("/v1/completions", json=asked).json()["choices"][0]["logprobs"]["tokens"][0]
            == "token_id:97"
        )
        chat = {"model": MODEL, "messages": HI, "logprobs": True, "return_tokens_as_token_ids": True}
        entry = served.http.post("/v1/chat/completions", json=chat).json()["choices"][0]["logprobs"][
            "content"
        ][0]
        assert (entry["token"], entry["bytes"]) == ("token_id:97", [97])


def test_no_stop_string_ends_an_answer_that_is_too_short_and_least_is_at_most_most() -> None:
    with serving(ScriptedEngine(lambda prompt, sampling: [*b"stop, and stop again", EOS])) as served:
        for least, text in (
            (0, ""),
            (3, ""),
            (4, "stop, and "),
            (13, "stop, and "),
            (14, "stop, and stop again"),
        ):
            (choice,) = served.http.post(
                "/v1/completions", json=completion(stop="stop", min_tokens=least, max_tokens=40)
            ).json()["choices"]
            assert choice["text"] == text, least
        for fields in (
            {"max_tokens": 4, "min_tokens": 5},
            {"min_tokens": 1 << 30, "max_tokens": None},
            {"min_tokens": -1},
        ):
            reply = served.http.post("/v1/completions", json=completion(**fields))
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "min_tokens")
