"""`/v1/completions` and `/v1/chat/completions`: what the `openai` client gets, unmodified, and what fields of
OpenAI and vLLM do."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import openai
import pytest

from penstock.contract import SamplingParams, TokenLogprob
from penstock.server.replies import ChatReply, Heading
from penstock.server.schema import ChatBody
from penstock.text.answer import ChoiceDelta, ScoredToken
from tests.cpu.server.apis import CHAT, events_of
from tests.cpu.server.served import MODEL, Served, completion, read_until, serving
from tests.support.embedded import embedded_tokenizer
from tests.support.scripted_engine import EOS, ScriptedEngine, ScriptedTokenizer

WORDS = "choice 7: one two three four five six seven. "
HI: list[Any] = [{"role": "user", "content": "hi"}]
NOWHERE = {"device": 0, "host": 0, "ssd": 0, "remote": 0}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": "hi"},
    CHAT.path: {"model": MODEL, "messages": HI},
}


def post(served: Served, path: str, **fields: Any) -> Any:
    reply = served.http.post(path, json={**ROUTES[path], **fields})
    assert reply.status_code == 200, reply.text
    return reply


def choices(served: Served, **fields: Any) -> Any:
    return post(served, "/v1/completions", **fields).json()["choices"]


# ---------------------------------------------------------------------------------------------- completions


def test_a_completion_has_text_reason_and_usage_and_names_its_request(served: Served) -> None:
    reply = served.client().completions.create(model=MODEL, prompt="hello", seed=7, max_tokens=9)
    assert reply.object == "text_completion" and reply.id == f"cmpl-{reply._request_id}"
    (choice,) = reply.choices
    found = choice.index, choice.text, choice.finish_reason, choice.logprobs
    assert found == (0, WORDS[:9], "length", None)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (5, 9, 14)


def test_a_returning_prompt_says_which_of_its_tokens_were_cached(served: Served) -> None:
    for salt, expected in ((None, 0), (None, 32), ("tenant", 0)):
        usage = post(served, "/v1/completions", prompt="p" * 40, max_tokens=1, cache_salt=salt).json()[
            "usage"
        ]
        sources = {**NOWHERE, "device": expected, "computed": 40 - expected}
        assert usage["prompt_tokens_details"] == {"cached_tokens": expected, "kv_source": sources}


def test_several_choices_run_under_their_own_seeds_and_keep_their_index(served: Served) -> None:
    create = served.client().completions.create
    asked: Any = {"model": MODEL, "prompt": "hello", "n": 3, "seed": 7, "max_tokens": 9}
    whole = create(**asked)
    assert [(c.index, c.text) for c in whole.choices] == [(i, f"choice {7 + i}:") for i in range(3)]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 27)
    texts, order = ["", "", ""], list[int]()
    served.engine.hold()
    stream = create(**asked, stream=True)
    for number in range(9):
        served.engine.permit(1)
        for _ in range(3):
            choice = next(stream).choices[0]
            texts[choice.index] += choice.text
            order.append(choice.index)
            assert (choice.finish_reason == "length") == (number == 8)
    assert list(stream) == [] and order == [0, 1, 2] * 9
    assert texts == [choice.text for choice in whole.choices]


def test_prompts_may_be_texts_token_ids_or_lists_of_either(served: Served) -> None:
    for prompt, expected in (
        ("ab", ["ab"]),
        (["ab", "cd"], ["ab", "cd"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
    ):
        reply = post(served, "/v1/completions", prompt=prompt, max_tokens=0, echo=True).json()
        assert [choice["text"] for choice in reply["choices"]] == expected
        assert reply["usage"]["prompt_tokens"] == sum(map(len, expected))
    two = choices(served, prompt=["a", "b"], n=2, seed=1, max_tokens=9)
    assert [(c["index"], c["text"]) for c in two] == [(i, f"choice {1 + i % 2}:") for i in range(4)]


def test_a_stop_string_ends_the_choice_before_it_and_cancels_the_engine_request(served: Served) -> None:
    for stop, text in (("three", WORDS[:18]), (["never", "o t"], WORDS[:16])):
        for stream in (False, True):
            reply = post(served, "/v1/completions", seed=7, max_tokens=90_000, stop=stop, stream=stream)
            parts = [event["choices"][0] for event in events_of(reply.text)] if stream else []
            parts = parts or reply.json()["choices"]
            assert "".join(part["text"] for part in parts) == text
            assert parts[-1]["finish_reason"] == "stop"
            served.assert_idle()


def test_logprobs_name_the_chosen_token_and_its_rivals(served: Served) -> None:
    """The chosen one is the second likeliest of the scripted engine: it comes on top of a list of one."""
    (choice,) = choices(served, seed=7, max_tokens=2, logprobs=1)
    assert choice["logprobs"] == {
        "tokens": ["c", "h"],
        "token_logprobs": [-0.5] * 2,
        "top_logprobs": [{"d": -0.25, "c": -0.5}, {"i": -0.25, "h": -0.5}],
        "text_offset": [0, 1],
    }
    (choice,) = choices(served, seed=7, max_tokens=2, logprobs=0)
    assert (choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"]) == (["c", "h"], None)
    for max_tokens in (0, 2):
        (choice,) = choices(served, prompt="aé", seed=7, max_tokens=max_tokens, echo=True, logprobs=1)
        scores, num = choice["logprobs"], 3 + max_tokens
        assert choice["text"] == "aé" + "ch"[:max_tokens]
        assert scores["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "c", "h"][:num]
        assert scores["token_logprobs"] == [None, *[-0.5] * 4][:num] and scores["top_logprobs"][0] is None
        assert scores["text_offset"] == [0, 1, 1, 2, 3][:num]


STATED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
ZEROS: dict[str, Any] = {"temperature": 0.0, "seed": 0, "max_tokens": 0, "top_k": 0, "min_p": 0.0}
GIVEN: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.75,
    "top_k": 5,
    "min_p": 0.25,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "seed": -3,
    "ignore_eos": True,
    "max_tokens": 7,
    "min_tokens": 2,
}


def test_sampling_fields_reach_the_engine(served: Served) -> None:
    """Zero and false are not absent, null is, and what the model's own file states counts where a field is
    left out."""

    def sampling(path: str, **fields: Any) -> SamplingParams:
        post(served, path, **fields)
        return served.engine.submitted[-1][1]

    plain = SamplingParams(max_tokens=16)
    for path in ROUTES:
        served.service.engine.facts.sampling = {}
        for fields in (GIVEN, ZEROS):
            found = sampling(path, **fields)
            assert {name: getattr(found, name) for name in fields} == fields
        other = {"stop": "zz", "stop_token_ids": [3, 4], "logit_bias": {"5": 1, "70": -100.0, "6": 0}}
        found = sampling(path, max_tokens=1, **other)
        assert (found.stop, found.stop_token_ids) == (("zz",), {3, 4})
        assert found.logit_bias == ((5, 1.0), (70, -100.0), (6, 0.0))
        nulls = dict.fromkeys((*GIVEN, *other, "n", "stream", "logprobs", "stream_options", "user"))
        left_out = sampling(path, **{**nulls, "max_tokens": 16})
        assert left_out == plain
        served.service.engine.facts.sampling = dict(STATED)
        for own in ({}, {"temperature": 0.0, "top_k": -1}):
            found = sampling(path, max_tokens=1, top_p=None, **own)
            assert {name: getattr(found, name) for name in STATED} == {**STATED, **own}
            assert found.presence_penalty == 0.0
    served.service.engine.facts.sampling = {}
    assert post(served, "/v1/completions").json()["usage"]["completion_tokens"] == 16
    nearly_full = "x" * (served.engine.max_model_len - 3)
    assert post(served, "/v1/completions", prompt=nearly_full).json()["usage"]["completion_tokens"] == 3


# ------------------------------------------------------------------------------------------------------ chat


def test_a_chat_reply_is_an_assistants_message(served: Served) -> None:
    create = served.client().chat.completions.create
    parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]
    turns: list[Any] = [{"role": "system", "content": "be"}, {"role": "user", "content": parts}]
    reply = create(model=MODEL, messages=turns, seed=7, max_tokens=9)
    choice, message = reply.choices[0], reply.choices[0].message
    assert reply.object == "chat.completion" and reply.id == f"chatcmpl-{reply._request_id}"
    assert (message.role, message.content, choice.finish_reason) == ("assistant", WORDS[:9], "length")
    assert bytes(served.engine.submitted[-1][0]).decode() == "system: be\nuser: hi\nyou\nassistant: "
    again = create(model=MODEL, messages=[*turns, message, *HI], max_tokens=1)
    assert again.usage.prompt_tokens > reply.usage.prompt_tokens


def test_a_chat_has_as_many_tokens_as_were_asked_for_or_fills_the_context() -> None:
    with serving(ScriptedEngine(max_model_len=60)) as served:
        for fields, num in (
            ({"max_tokens": 0}, 0),
            ({"max_tokens": 7}, 7),
            ({"max_completion_tokens": 1}, 1),
            ({"max_tokens": None, "max_completion_tokens": None}, None),
            ({}, None),
        ):
            usage = post(served, CHAT.path, **fields).json()["usage"]
            assert num in (None, usage["completion_tokens"])
            assert num is not None or usage["total_tokens"] == 60


def test_only_the_first_choice_of_a_chat_computes_scores_of_the_prompt(served: Served) -> None:
    """A request with them reuses no cached KV."""
    reply = post(served, CHAT.path, n=3, max_tokens=2, prompt_logprobs=2).json()
    assert [one[1].prompt_logprobs for one in served.engine.submitted[-3:]] == [2, None, None]
    assert reply["prompt_logprobs"][0] is None and len(reply["choices"]) == 3


def test_chat_logprobs_have_bytes_and_as_many_rivals_as_were_asked_for(served: Served) -> None:
    for fields, num in (
        ({"logprobs": True, "top_logprobs": 2}, 2),
        ({"logprobs": True}, 0),
        ({"logprobs": False}, None),
    ):
        scores = post(served, CHAT.path, seed=7, max_tokens=2, **fields).json()["choices"][0]["logprobs"]
        assert served.engine.submitted[-1][1].logprobs == num
        if num is None:
            assert scores is None
            continue
        first, second = scores["content"]
        assert (first["token"], first["logprob"], first["bytes"]) == ("c", -0.5, [99])
        rivals = [(top["token"], top["logprob"], top["bytes"]) for top in first["top_logprobs"]]
        assert rivals == [("d", -0.25, [100]), ("c", -0.5, [99])][:num]
        assert len(second["top_logprobs"]) == num


def test_impossible_tokens_of_a_chat_have_a_score_that_json_can_say() -> None:
    body = ChatBody(model="m", messages=[], logprobs=True, top_logprobs=1)
    reply = ChatReply(ScriptedTokenizer(), body, Heading("chatcmplx", "m"))
    never = TokenLogprob(97, float("-inf"), 9, ((98, 0.0), (99, float("-inf"))))
    (scored,) = reply.choice(0, ChoiceDelta("a", (ScoredToken(97, never, 0),), None))["logprobs"]["content"]
    assert scored["logprob"] == -9999.0
    assert [entry["logprob"] for entry in scored["top_logprobs"]] == [0.0, -9999.0]


# --------------------------------------------------------------------------------------------------- streams


def test_usage_comes_where_it_is_asked_for_and_padded_chunks_are_of_one_size(served: Served) -> None:
    for path in ROUTES:

        def chunks(path: str = path, n: int = 1, **options: Any) -> list[Any]:
            reply = post(served, path, seed=7, max_tokens=5, n=n, stream=True, stream_options=options or None)
            assert reply.headers["content-type"].startswith("text/event-stream")
            assert reply.text.endswith("data: [DONE]\n\n")
            return events_of(reply.text)

        assert not any("usage" in chunk for chunk in chunks())
        often = chunks(n=2, include_usage=True, continuous_usage_stats=True)
        counts = [chunk["usage"]["completion_tokens"] for chunk in often]
        assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 10
        assert often[-1]["choices"] == [] and all(chunk["choices"] for chunk in often[:-1])
        alone = chunks(continuous_usage_stats=True)
        assert alone[-1]["usage"]["completion_tokens"] == 5 and all(chunk["choices"] for chunk in alone)
        *bare, last = chunks(include_usage=True)
        assert all(chunk["usage"] is None for chunk in bare) and last["usage"]["completion_tokens"] == 5
        assert {len(msgspec.json.encode(chunk)) for chunk in chunks(include_obfuscation=True)} == {512}


def test_the_role_comes_with_the_first_token_and_not_before(served: Served) -> None:
    """The engine is held, so whatever a client sees of the answer before `permit` has come before any
    token."""
    served.engine.hold()
    asked = {**ROUTES[CHAT.path], "stream": True, "max_tokens": 3, "seed": 7, "n": 2}
    with served.send(CHAT.path, asked) as connection:
        assert read_until(connection, b"\r\n\r\n").endswith(b"\r\n\r\n")
        # A second request that is answered in full: the server has had every chance to write to the first.
        assert served.http.get("/health").status_code == 200
        connection.setblocking(False)
        with pytest.raises(BlockingIOError):
            connection.recv(1)
        connection.setblocking(True)
        served.engine.permit(1)
        first = b""
        while first.count(b'"content":"c"') < 2:
            first += connection.recv(65536)
        assert first.index(b'"role":"assistant"') < first.index(b'"content":"c"')
        assert first.count(b'"role"') == 2
        served.engine.release()
        assert b'"role"' not in read_until(connection, b"[DONE]")


# ------------------------------------------------------------------------------------------------ vLLM's own


def test_token_ids_are_in_the_answer_whole_and_streamed() -> None:
    """Of every token that is counted, the one that ended the answer too; those of the prompt once."""
    engine = ScriptedEngine(lambda prompt, sampling: [*"Zür <x".encode(), EOS])
    with serving(engine) as served:
        ids, asked = [*"Zür <x".encode(), EOS], {"return_token_ids": True, "n": 2, "stop": "<y"}
        text = post(served, "/v1/completions", prompt=["ab", "c"], **asked).json()
        assert [choice["prompt_token_ids"] for choice in text["choices"]] == [[97, 98]] * 2 + [[99]] * 2
        assert [choice["token_ids"] for choice in text["choices"]] == [ids] * 4
        assert text["usage"]["completion_tokens"] == 4 * len(ids)
        whole, prompt = post(served, CHAT.path, **asked).json(), list(engine.submitted[-1][0])
        assert whole["prompt_token_ids"] == prompt
        assert [choice["token_ids"] for choice in whole["choices"]] == [ids] * 2
        for path, first in (("/v1/completions", [104, 105]), (CHAT.path, prompt)):
            streamed: dict[int, list[int]] = {0: [], 1: []}
            prompts = []
            for chunk in events_of(post(served, path, stream=True, **asked).text):
                (choice,) = chunk["choices"]
                streamed[choice["index"]] += choice.get("token_ids", [])
                prompts += [one["prompt_token_ids"] for one in (chunk, choice) if "prompt_token_ids" in one]
            assert streamed == {0: ids, 1: ids} and prompts == [first] * 2


def test_a_stop_string_ends_the_token_ids_and_may_stay_in_the_text() -> None:
    with serving(ScriptedEngine(lambda prompt, sampling: [*b"one two three", EOS])) as served:
        asked = {"stop": "two", "return_token_ids": True}
        (choice,) = choices(served, **asked)
        assert choice["text"] == "one " and bytes(choice["token_ids"]) == b"one two"
        (choice,) = choices(served, **asked, include_stop_str_in_output=True)
        assert choice["text"] == "one two"


def test_no_stop_string_ends_an_answer_that_is_too_short() -> None:
    with serving(ScriptedEngine(lambda prompt, sampling: [*b"stop, and stop again", EOS])) as served:
        for least, text in ((3, ""), (4, "stop, and "), (13, "stop, and "), (14, "stop, and stop again")):
            (choice,) = choices(served, stop="stop", min_tokens=least, max_tokens=40)
            assert choice["text"] == text, least


def test_special_tokens_have_text_where_a_client_wants_it_and_logprobs_may_name_ids() -> None:
    special = 300
    engine = ScriptedEngine(lambda prompt, sampling: [97, special, 98, EOS])
    engine.tokenizer.vocab_size = special + 1
    engine.tokenizer.is_special = lambda id: id >= EOS  # type: ignore[method-assign]
    with serving(engine) as served:
        texts = [choices(served, skip_special_tokens=skip)[0]["text"] for skip in (True, False)]
        assert texts == ["ab", "a<300>b"]
        asked = {"return_tokens_as_token_ids": True}
        (choice,) = choices(served, logprobs=1, **asked)
        assert choice["logprobs"]["tokens"][0] == "token_id:97"
        reply = post(served, CHAT.path, logprobs=True, **asked).json()
        entry = reply["choices"][0]["logprobs"]["content"][0]
        assert (entry["token"], entry["bytes"]) == ("token_id:97", [97])


def test_special_tokens_are_added_to_prompts_as_asked_and_shown_where_tokens_are_turned_back(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[bool] = []
    encode = served.engine.tokenizer.encode

    def noting(text: str, add_special: bool = True, most: int | None = None) -> list[int]:
        added.append(add_special)
        return encode(text, add_special, most)

    monkeypatch.setattr(served.engine.tokenizer, "encode", noting)
    for path, body, expected in (
        ("/tokenize", {"prompt": "x"}, True),
        ("/tokenize", {"prompt": "x", "add_special_tokens": False}, False),
        ("/tokenize", {"messages": HI}, False),
        ("/v1/completions", completion(max_tokens=1), True),
        (CHAT.path, {"model": MODEL, "messages": HI, "max_tokens": 1}, False),
    ):
        assert served.http.post(path, json=body).status_code == 200
        assert added.pop() is expected and not added
    served.service.engine.tokenizer = tokenizer = embedded_tokenizer()
    special = next(id for id in range(100) if tokenizer.is_special(id))
    ids = [*tokenizer.encode("hi"), special]
    found = served.http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert found == "hi" + tokenizer.token_bytes(special).decode(errors="replace") and len(found) > 2
    beyond = served.http.post("/detokenize", json={"tokens": [tokenizer.vocab_size]})
    assert beyond.json()["error"]["param"] == "tokens"


# ---------------------------------------------------------------------------------------------------- errors


def test_errors_are_those_that_the_client_knows(served: Served) -> None:
    client = served.client()
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert bad.value.param == "temperature" and "temperature" in bad.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="x")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="audio is not supported"):
        client.chat.completions.create(model=MODEL, messages=HI, audio={"voice": "alloy", "format": "wav"})


def test_overload_is_a_rate_limit_error_that_says_when_to_come_back() -> None:
    with serving(max_concurrent=2) as served:
        served.engine.hold()
        first = served.client().completions.create(model=MODEL, prompt="x", n=2, stream=True)
        num_encoded = served.engine.tokenizer.num_encoded
        with pytest.raises(openai.RateLimitError) as full:
            served.client().completions.create(model=MODEL, prompt="x")
        assert full.value.response.headers["retry-after"] == "1"
        assert served.engine.tokenizer.num_encoded == num_encoded, "a refused prompt was tokenised"
        first.close()
        served.assert_idle()
        served.engine.release()
        assert post(served, "/v1/completions", prompt=["a", "b"]).json()["usage"]["completion_tokens"] == 32
        for asked in ({"n": 3}, {"prompt": ["a", "b"], "n": 2}):
            reply = served.http.post("/v1/completions", json=completion(**asked))
            assert reply.status_code == 400 and json.loads(reply.text)["error"]["param"] == "n"
        served.assert_idle()
