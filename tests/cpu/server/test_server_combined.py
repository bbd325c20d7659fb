"""Fields of a request together, at their limits, and with values that are false without being absent."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from penstock.contract import MAX_LOGPROBS, MAX_STOPS, SamplingParams, TokenLogprob
from penstock.server.replies import ChatReply, Heading
from penstock.server.schema import ChatBody
from penstock.text.answer import ChoiceDelta, ScoredToken
from tests.cpu.server.served import MODEL, Served, completion, serving, until
from tests.support.embedded import embedded_tokenizer
from tests.support.scripted_engine import ScriptedEngine, ScriptedTokenizer


def chat(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


def asked_of_the_engine(served: Served, path: str, body: dict[str, Any]) -> SamplingParams:
    reply = served.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return served.engine.submitted[-1][1]


def test_values_that_are_zero_or_false_are_not_absent(served: Served) -> None:
    """Where the default is another one, leaving the field out does something else."""
    zeros = {
        "temperature": 0,
        "seed": 0,
        "max_tokens": 0,
        "logprobs": 0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
    }
    found = asked_of_the_engine(
        served, "/v1/completions", completion(**zeros, ignore_eos=False, stop=[], stop_token_ids=[])
    )
    assert (found.temperature, found.seed, found.max_tokens, found.logprobs) == (0.0, 0, 0, 0)
    assert (found.stop, found.stop_token_ids, found.ignore_eos, found.prompt_logprobs) == (
        (),
        frozenset(),
        False,
        None,
    )
    left_out = asked_of_the_engine(served, "/v1/completions", completion())
    assert (left_out.temperature, left_out.seed, left_out.max_tokens, left_out.logprobs) == (
        1.0,
        None,
        16,
        None,
    )


RIVALS: list[tuple[dict[str, Any], int | None]] = [
    ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 0}, 0), ({"logprobs": True,
    "top_logprobs": 2}, 2),
    ({"logprobs": False}, None), ({}, None),
]  # fmt: skip


def test_a_chat_has_as_many_rivals_as_it_asked_for(served: Served) -> None:
    for fields, expected in RIVALS:
        reply = served.http.post("/v1/chat/completions", json=chat(max_tokens=2, **fields)).json()
        assert served.engine.submitted[-1][1].logprobs == expected
        scores = reply["choices"][0]["logprobs"]
        assert (scores is None) == (expected is None)
        if scores is not None:
            assert [len(entry["top_logprobs"]) for entry in scores["content"]] == [expected] * 2


def test_a_completion_names_the_chosen_token_beside_its_rivals(served: Served) -> None:
    """The chosen one is the second likeliest of the scripted engine: it comes on top of a list of one."""
    for logprobs, num in ((0, None), (1, 2), (2, 2), (3, 3)):
        scores = served.http.post("/v1/completions", json=completion(max_tokens=2, logprobs=logprobs)).json()[
            "choices"
        ][0]["logprobs"]
        assert scores["token_logprobs"] == [-0.5, -0.5]
        if num is None:
            assert scores["top_logprobs"] is None
        else:
            assert [len(top) for top in scores["top_logprobs"]] == [num] * 2
            assert all(
                token in top for token, top in zip(scores["tokens"], scores["top_logprobs"], strict=True)
            )


def test_a_prompt_is_scored_where_it_is_echoed_and_scores_are_asked_for(served: Served) -> None:
    for echo, logprobs in itertools.product((True, False, None), (None, 0, 2)):
        found = asked_of_the_engine(
            served, "/v1/completions", completion("ab", echo=echo, logprobs=logprobs, max_tokens=1)
        )
        assert (found.logprobs, found.prompt_logprobs) == (logprobs, logprobs if echo else None)


LIMITS: list[tuple[dict[str, Any], str | None]] = [
    ({"stop": ["x"] * MAX_STOPS}, None), ({"stop": ["x"] * (MAX_STOPS + 1)}, "stop"), ({"stop": [""]},
    "stop"),
    ({"logprobs": MAX_LOGPROBS}, None), ({"logprobs": MAX_LOGPROBS + 1}, "logprobs"), ({"logprobs": -1},
    "logprobs"),
    ({"temperature": 100}, None), ({"temperature": 100.5}, "temperature"), ({"temperature": -0.1},
    "temperature"),
    ({"top_p": 1}, None), ({"top_p": 1.01}, "top_p"), ({"top_p": 0}, "top_p"), ({"top_p": 1e-9}, None),
    ({"min_p": 1}, None), ({"min_p": 1.01}, "min_p"), ({"top_k": -1}, None), ({"top_k": -2}, "top_k"),
    ({"presence_penalty": -2}, None), ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"), ({"repetition_penalty": 100}, None), ({"n": 128},
    None), ({"n": 129}, "n"),
    ({"seed": 2**63 - 1}, None), ({"seed": 2**63}, "seed"), ({"seed": -(2**63)}, "seed"),
    ({"seed": -(2**63) + 1}, None),
]  # fmt: skip


def test_every_field_is_taken_to_its_limit_and_refused_beyond_it(served: Served) -> None:
    for fields, param in LIMITS:
        reply = served.http.post("/v1/completions", json=completion(max_tokens=1, **fields))
        assert reply.status_code == (200 if param is None else 400), (fields, reply.text)
        if param is not None:
            assert reply.json()["error"]["param"] == param


def test_as_many_generations_run_as_there_are_seats_and_one_request_may_take_them_all() -> None:
    with serving(max_concurrent=4) as served:
        assert (
            served.http.post("/v1/completions", json=completion(["a", "b"], n=2, max_tokens=1)).status_code
            == 200
        )
        refused = served.http.post("/v1/completions", json=completion(["a"], n=5, max_tokens=1))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
        served.engine.hold()
        held = served.send("/v1/completions", completion(n=3))
        until(lambda: served.engine.num_open == 3, "three run")
        assert served.http.post("/v1/completions", json=completion(n=2)).status_code == 429
        other = served.send("/v1/completions", completion(n=1, max_tokens=1))
        until(lambda: served.engine.num_open == 4, "and a fourth")
        served.engine.release()
        assert b"200 OK" in other.recv(100)
        held.close()
        served.assert_idle()


def test_an_echoed_prompt_of_several_bytes_a_character_shifts_offsets_by_characters(served: Served) -> None:
    body = completion("\u00e9\u00e9", echo=True, logprobs=0, max_tokens=3, seed=7)
    choice = served.http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] == "\u00e9\u00e9cho"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 2, 3, 4]


def test_special_tokens_are_text_where_tokens_are_turned_back(served: Served) -> None:
    tokenizer = embedded_tokenizer()
    special = next(id for id in range(100) if tokenizer.is_special(id))
    served.service.engine.tokenizer = tokenizer
    ids = [*tokenizer.encode("hi"), special]
    found = served.http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert found == "hi" + tokenizer.token_bytes(special).decode(errors="replace") and len(found) > 2
    last, beyond = tokenizer.vocab_size - 1, tokenizer.vocab_size
    assert served.http.post("/detokenize", json={"tokens": [last]}).status_code == 200
    assert served.http.post("/detokenize", json={"tokens": [beyond]}).json()["error"]["param"] == "tokens"


def test_special_tokens_are_added_to_prompts_as_asked_and_never_to_a_chat(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[bool] = []
    encode = served.engine.tokenizer.encode

    def noting(text: str, add_special: bool = True, most: int | None = None) -> list[int]:
        added.append(add_special)
        return encode(text, add_special, most)

    monkeypatch.setattr(served.engine.tokenizer, "encode", noting)
    messages = [{"role": "user", "content": "hi"}]
    for path, body, expected in (
        ("/tokenize", {"prompt": "x"}, True),
        ("/tokenize", {"prompt": "x", "add_special_tokens": False}, False),
        ("/tokenize", {"messages": messages}, False),
        ("/v1/completions", completion(max_tokens=1), True),
        ("/v1/chat/completions", chat(max_tokens=1), False),
    ):
        assert served.http.post(path, json=body).status_code == 200
        assert added.pop() is expected and not added


def test_a_stream_says_null_usage_in_every_chunk_but_the_last_where_usage_was_asked_for(
    served: Served,
) -> None:
    routes = (("/v1/completions", completion(max_tokens=2)), ("/v1/chat/completions", chat(max_tokens=2)))
    for asked, (path, body) in itertools.product((True, False, None), routes):
        options = None if asked is None else {"include_usage": asked}
        reply = served.http.post(path, json={**body, "stream": True, "stream_options": options})
        chunks = [
            line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")
        ]
        assert chunks.pop() == "[DONE]"
        if not asked:
            assert not any('"usage"' in chunk for chunk in chunks)
        else:
            assert (
                all('"usage":null' in chunk for chunk in chunks[:-1])
                and '"completion_tokens":2' in chunks[-1]
            )


# ------------------------------------------------------------------------------------------------------ chats


def test_impossible_tokens_of_a_chat_have_a_score_that_json_can_say() -> None:
    body = ChatBody(model="m", messages=[], logprobs=True, top_logprobs=1)
    reply = ChatReply(ScriptedTokenizer(), body, Heading("chatcmplx", "m"))
    never = TokenLogprob(97, float("-inf"), 9, ((98, 0.0), (99, float("-inf"))))
    (scored,) = reply.choice(0, ChoiceDelta("a", (ScoredToken(97, never, 0),), None))["logprobs"]["content"]
    assert scored["logprob"] == -9999.0
    assert [entry["logprob"] for entry in scored["top_logprobs"]] == [0.0, -9999.0]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("num", [0, 1, 7])
def test_a_chat_has_as_many_tokens_as_were_asked_for_and_none_where_none_were(
    served: Served, name: str, num: int
) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], name: num}
    reply = served.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200
    assert [sampling.max_tokens for _, sampling, _ in served.engine.submitted] == [num]
    assert reply.json()["usage"]["completion_tokens"] == num


@pytest.mark.parametrize(
    "given", [{}, {"max_tokens": None}, {"max_tokens": None, "max_completion_tokens": None}]
)
def test_a_chat_that_asks_for_no_number_may_fill_the_context(given: dict) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **given}
    with serving(ScriptedEngine(max_model_len=60)) as served:
        usage = served.http.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["total_tokens"] == 60


# ---------------------------------------------------------------------------------------- parts of characters


TEXT = "é東🙂"


def test_the_bytes_of_all_tokens_are_those_of_the_text() -> None:
    """A client puts characters together from them."""
    with serving(ScriptedEngine(script=lambda prompt, sampling: iter(TEXT.encode()))) as served:
        asked = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": len(TEXT.encode()),
            "logprobs": True,
        }
        choice = served.http.post("/v1/chat/completions", json=asked).json()["choices"][0]
    assert choice["message"]["content"] == TEXT
    entries = choice["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[byte] for byte in TEXT.encode()]
