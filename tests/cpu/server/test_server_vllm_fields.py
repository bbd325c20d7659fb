"""Fields that clients bring from vLLM, before a real engine with random weights: scores of prompts, allowed
tokens, bad words, truncated prompts. One engine for all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cpu.server.tiered_server import MODEL, Tiered, error_of, tiered

SAY = [{"role": "user", "content": "Say it."}]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
PROMPT = [7, 300, 31, 5, 6, 7, 300, 12]
ALLOWED = list(b"abcdefgh")
BOTH = pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@pytest.fixture(scope="module")
def server() -> Iterator[Tiered]:
    with tiered(host_blocks=0, blocks=1024) as running:
        yield running


def post(server: Tiered, path: str, **fields: Any) -> Any:
    asked = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": SAY}
    options = {"model": MODEL, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **asked}
    return server.http.post(path, json={**options, **fields})


def events(reply: Any) -> list[Any]:
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def token_ids(server: Tiered, path: str, num: int = 1, **fields: Any) -> list[list[int]]:
    """Of each choice; streamed or not."""
    reply = post(server, path, n=num, return_token_ids=True, **fields)
    if not fields.get("stream"):
        assert reply.status_code == 200, reply.text
        return [choice["token_ids"] for choice in reply.json()["choices"]]
    found: list[list[int]] = [[] for _ in range(num)]
    for event in events(reply):
        for choice in event["choices"]:
            found[choice["index"]] += choice.get("token_ids", [])
    return found


# ------------------------------------------------------------------------------------------ what may be said


@BOTH
@STREAMED
def test_every_choice_has_only_allowed_tokens(server: Tiered, path: str, stream: bool) -> None:
    fields: dict[str, Any] = {"stream": stream, "temperature": 1.3, "seed": 1}
    free = token_ids(server, path, 3, **fields)
    found = token_ids(server, path, 3, allowed_token_ids=[*ALLOWED, ALLOWED[0]], **fields)
    assert len(set(map(tuple, found))) == 3 and all(set(some) <= set(ALLOWED) for some in found)
    assert not any(set(some) <= set(ALLOWED) for some in free)


@BOTH
@STREAMED
def test_no_choice_has_a_bad_word(server: Tiered, path: str, stream: bool) -> None:
    """Tokens of this model are bytes: words are sequences, and their beginnings may come."""
    fields: dict[str, Any] = {"stream": stream, "temperature": 1.3, "allowed_token_ids": ALLOWED, "seed": 1}
    free = [bytes(some).decode() for some in token_ids(server, path, 2, **fields)]
    words = [text[at : at + 2] for text in free for at in range(0, 10, 3)]
    found = [bytes(some).decode() for some in token_ids(server, path, 2, bad_words=words, **fields)]
    assert all(len(text) == 12 and not any(word in text for word in words) for text in found)
    assert all(ours[0] == theirs[0] for ours, theirs in zip(found, free, strict=True))
    assert token_ids(server, path, 2, bad_words=[], **fields) == [list(text.encode()) for text in free]


@BOTH
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [99_999]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": [97, 98], "bad_words": ["a", "b"]}, "bad_words"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["a"] * 300}, "bad_words"),
        ({"bad_words": "a"}, "bad_words"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 4, "snapshot": "a"}, "truncate_prompt_tokens"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(
    server: Tiered, path: str, fields: dict[str, Any], param: str
) -> None:
    reply = post(server, path, **fields)
    assert reply.status_code == 400 and error_of(reply)["param"] == param, reply.text


def test_rules_hold_beside_a_schema_and_a_bias(server: Tiered) -> None:
    pytest.importorskip("llguidance", reason="structured output is an extra")
    fields: dict[str, Any] = {"ignore_eos": False, "guided_regex": "[a-p]{8}", "logit_bias": {str(97): 100}}
    (found,) = token_ids(server, CHATS, bad_words=["aa"], allowed_token_ids=list(b"abcxyz"), **fields)
    assert bytes(found).startswith(b"a") and len(found) == 8 and set(found) <= set(b"abc")
    assert b"aa" not in bytes(found) and found.count(97) == 4


# ------------------------------------------------------------------------------------------ scores of prompts


def check_scores(scores: Any, ids: list[int], num: int) -> None:
    """In vLLM's shape."""
    assert scores[0] is None and len(scores) == len(ids)
    for token, entries in zip(ids[1:], scores[1:], strict=True):
        assert next(iter(entries)) == str(token) and len(entries) in (num, num + 1)
        assert {"logprob", "rank", "decoded_token"} == set(entries[str(token)])
        ranks = sorted(one["rank"] for one in entries.values())
        assert ranks[:num] == list(range(1, num + 1))
        best = min(entries.values(), key=lambda one: one["rank"])
        assert all(one["logprob"] <= best["logprob"] for one in entries.values())


def test_a_completion_has_scores_of_its_prompt_in_each_choice(server: Tiered) -> None:
    for num in (0, 3):
        reply = post(server, COMPLETIONS, n=2, prompt_logprobs=num, prompt=[PROMPT, PROMPT[:3]]).json()
        assert [choice["logprobs"] for choice in reply["choices"]] == [None] * 4
        for choice in reply["choices"]:
            check_scores(choice["prompt_logprobs"], PROMPT if choice["index"] < 2 else PROMPT[:3], num)
    echoed = post(
        server, COMPLETIONS, echo=True, logprobs=1, prompt_logprobs=3, prompt="ab", return_token_ids=True
    ).json()["choices"][0]
    check_scores(echoed["prompt_logprobs"], echoed["prompt_token_ids"], 3)
    assert all(len(top) <= 2 for top in echoed["logprobs"]["top_logprobs"][1:])
    score = echoed["prompt_logprobs"][1][str(ord("b"))]
    assert score["decoded_token"] == "b" and score["logprob"] == echoed["logprobs"]["token_logprobs"][1]


def test_scores_are_computed_also_for_a_cached_prompt_and_reuse_goes_on(server: Tiered) -> None:
    prompt = [11 + 5 * i % 400 for i in range(70)]
    plain = [post(server, COMPLETIONS, prompt=prompt).json() for _ in range(2)]
    scored = [post(server, COMPLETIONS, prompt=prompt, prompt_logprobs=1).json() for _ in range(2)]
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (*plain, *scored)]
    assert cached[1] >= 64 and cached[2:] == [0, 0]
    assert scored[0]["choices"][0] == scored[1]["choices"][0]
    assert {one["choices"][0]["text"] for one in (*plain, *scored)} == {plain[0]["choices"][0]["text"]}


def test_a_chat_has_scores_of_its_prompt_once(server: Tiered) -> None:
    reply = post(server, CHATS, n=3, prompt_logprobs=2, return_token_ids=True).json()
    check_scores(reply["prompt_logprobs"], reply["prompt_token_ids"], 2)
    assert not any("prompt_logprobs" in choice for choice in reply["choices"])
    details = reply["usage"]["prompt_tokens_details"]
    assert details["kv_source"]["computed"] == len(reply["prompt_token_ids"])


@BOTH
def test_a_stream_has_scores_of_the_prompt_in_the_first_event_of_the_choice(
    server: Tiered, path: str
) -> None:
    whole = post(server, path, prompt_logprobs=2, return_token_ids=True).json()
    holder = whole if path == CHATS else whole["choices"][0]
    found = events(post(server, path, prompt_logprobs=2, return_token_ids=True, stream=True))
    told = [event if path == CHATS else event["choices"][0] for event in found]
    assert ["prompt_logprobs" in one for one in told] == [True] + [False] * (len(told) - 1)
    assert told[0]["prompt_logprobs"] == holder["prompt_logprobs"]
    check_scores(holder["prompt_logprobs"], holder["prompt_token_ids"], 2)


# ----------------------------------------------------------------------------------------- truncated prompts


@STREAMED
def test_the_last_tokens_of_a_prompt_are_kept(server: Tiered, stream: bool) -> None:
    for num, kept in ((3, PROMPT[-3:]), (8, PROMPT), (100, PROMPT), (-1, PROMPT)):
        assert token_ids(server, COMPLETIONS, truncate_prompt_tokens=num, stream=stream) == token_ids(
            server, COMPLETIONS, prompt=kept, stream=stream
        )
    asked = {"truncate_prompt_tokens": 3, "echo": True, "return_token_ids": True, "logprobs": 0}
    for prompts, kept in ((["one two", "xy"], [b"two", b"xy"]), ([PROMPT[:4], [97]], [PROMPT[1:4], [97]])):
        reply = post(server, COMPLETIONS, prompt=prompts, max_tokens=1, **asked).json()
        assert [one["prompt_token_ids"] for one in reply["choices"]] == list(map(list, kept))
        assert reply["usage"]["prompt_tokens"] == sum(map(len, kept))
        if isinstance(kept[0], bytes):
            assert reply["choices"][0]["text"].startswith("two")
            assert reply["choices"][0]["logprobs"]["text_offset"][:3] == [0, 1, 2]


def test_a_prompt_that_is_too_long_is_truncated_to_what_fits(server: Tiered) -> None:
    most = server.engine.max_model_len
    long = {"prompt": "x" * (most + 50)}, {"messages": [{"role": "user", "content": "x" * (most + 50)}]}
    for path, fields in zip((COMPLETIONS, CHATS), long, strict=True):
        for asked, kept in (({"max_tokens": 9}, most - 9), ({"max_tokens": None}, most - 16)):
            refused = post(server, path, **fields, **asked)
            assert error_of(refused)["code"] == "context_length_exceeded"
            reply = post(server, path, **fields, **asked, truncate_prompt_tokens=-1)
            assert reply.status_code == 200, reply.text
            assert reply.json()["usage"]["prompt_tokens"] == kept
    reply = post(server, COMPLETIONS, prompt="x" * 200_000, truncate_prompt_tokens=-1)
    assert reply.status_code == 400 and "131072" in error_of(reply)["message"]


def test_a_chat_keeps_the_end_of_its_rendered_conversation(server: Tiered) -> None:
    whole = post(server, CHATS, return_token_ids=True).json()
    ids = whole["prompt_token_ids"]
    found = post(server, CHATS, return_token_ids=True, truncate_prompt_tokens=10).json()
    assert found["prompt_token_ids"] == ids[-10:] and found["usage"]["prompt_tokens"] == 10
