"""OpenAI's `/v1/responses`: the shapes that only it has, and going on from an answer by its id. What it
shares with the other APIs is in test_server_apis.py, and what it refuses in test_server_refusals.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.errors import ResponseMissing
from penstock.server.kept import KeptResponse, KeptResponses
from tests.cpu.server.apis import CALL, FUNCTIONS, KNOWS_TOOLS, QUESTION, RESPONSES, Speaking, events_of
from tests.cpu.server.served import MODEL, Served, serving

TEXT = [
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
    "output_item.done",
]
CALLED = [
    "output_item.added",
    "function_call_arguments.delta",
    "function_call_arguments.done",
    "output_item.done",
]
THEN = "And in Basel?"


@pytest.fixture(scope="module")
def model() -> Speaking:
    return Speaking()


@pytest.fixture(scope="module")
def served(model: Speaking) -> Iterator[Served]:
    with serving(model) as running:
        yield running


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """The types in their order, deltas in a row as one: how many tokens an event has is a matter of time."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [
        name for i, name in enumerate(names) if not (name.endswith(".delta") and i and names[i - 1] == name)
    ]


def test_an_answer_is_made_of_items_and_a_stream_of_numbered_events(served: Served, model: Speaking) -> None:
    model.says("It is warm.")
    fields = {"instructions": "Be brief", "metadata": {"k": "v"}, "reasoning": {"effort": "high"}}
    whole = RESPONSES.ask(served, **fields).raw
    (item,) = whole["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    part = {"type": "output_text", "text": "It is warm.", "annotations": [], "logprobs": []}
    assert item["content"] == [part] and whole["id"].startswith("resp_")
    found = whole["object"], whole["status"], whole["model"], whole["error"], whole["store"]
    assert found == ("response", "completed", MODEL, None, True)
    assert whole["metadata"] == {"k": "v"} and whole["reasoning"]["effort"] == "high"
    assert model.prompt == f"system: Be brief\nuser: {QUESTION}\nassistant: "
    events = events_of(RESPONSES.post(served, stream=True, **fields).text)
    assert kinds(events) == ["created", "in_progress", *TEXT, "completed"]
    assert events[0]["response"]["output"] == [] and events[0]["response"]["status"] == "in_progress"
    last = RESPONSES.joined(events)
    assert {event.get("item_id") or event["item"]["id"] for event in events[2:-1]} == {
        last["output"][0]["id"]
    }
    first, again = whole["usage"], last["usage"]
    cached = [usage["input_tokens_details"]["cached_tokens"] for usage in (first, again)]
    for details in ("input_tokens_details", "output_tokens_details"):
        # as the schemas of some clients have it
        assert all(type(value) is int for value in first[details].values())
    assert first["kv_source"]["computed"] == first["input_tokens"]
    assert cached == [0, 48] and first["input_tokens"] == again["input_tokens"] == len(model.prompt)
    assert again["output_tokens"] == len("It is warm.") + 1
    assert again["total_tokens"] == again["input_tokens"] + again["output_tokens"]
    model.says(CALL)
    tools = RESPONSES.tools(*FUNCTIONS)
    events = events_of(RESPONSES.post(served, stream=True, tools=tools).text)
    assert kinds(events) == ["created", "in_progress", *TEXT, *CALLED, *CALLED, "completed"]


def test_padded_events_do_not_tell_the_length_of_their_text(served: Served, model: Speaking) -> None:
    model.says("It is warm.")
    for pads in (True, False):
        text = RESPONSES.post(served, stream=True, stream_options={"include_obfuscation": pads}).text
        deltas = [event for event in events_of(text) if event["type"].endswith(".delta")]
        sizes = {len(json.dumps(event, separators=(",", ":"), ensure_ascii=False)) for event in deltas}
        assert sizes == {512} if pads else not any("obfuscation" in event for event in deltas)


def test_a_route_of_other_servers_is_a_404_that_says_what_is_here(served: Served) -> None:
    for path, why in (
        ("/v1/embeddings", "make no embeddings"),
        ("/v1/score", "score none"),
        ("/rerank", "score none"),
        ("/v1/audio/transcriptions", "text"),
        ("/v1/chat/completions/chatcmpl-1", "not stored"),
        ("/v1/files", "not stored"),
    ):
        for reply in (served.http.post(path, json={"model": MODEL, "input": "x"}), served.http.get(path)):
            error = reply.json()["error"]
            assert (reply.status_code, error["code"]) == (404, "not_found")
            assert why in error["message"] and "/v1/responses" in error["message"]
        assert served.http.get(f"/v9{path}").json()["error"]["message"] == "there is no such path"


# -------------------------------------------------------------------------------------- going on by its id


def ask(served: Served, key: str = "mine", **fields: Any) -> Any:
    headers = {"authorization": f"Bearer {key}"}
    return served.http.post(
        "/v1/responses", json={"model": MODEL, "input": QUESTION, **fields}, headers=headers
    )


def is_missing(reply: Any, param: str | None = "previous_response_id") -> bool:
    error = reply.json()["error"]
    return (reply.status_code, error["code"], error["param"]) == (404, "response_not_found", param)


def test_the_model_is_told_the_whole_conversation_as_if_all_of_it_had_been_sent(
    served: Served, model: Speaking
) -> None:
    model.says("Warm.", KNOWS_TOOLS)
    first = ask(served, instructions="Be brief.").json()
    turns = [{"role": "user", "content": QUESTION}, *first["output"], {"role": "user", "content": THEN}]
    for stream in (False, True):
        reply = ask(
            served, input=THEN, previous_response_id=first["id"], instructions="Be kind.", stream=stream
        )
        assert reply.status_code == 200, reply.text
        told = model.prompt
        ask(served, input=turns, instructions="Be kind.")
        assert told == model.prompt and "Be brief." not in told  # instructions are of one request


def test_every_answer_can_be_gone_on_from_also_a_streamed_one_and_an_earlier_one_again(
    served: Served, model: Speaking
) -> None:
    model.says("Warm.", KNOWS_TOOLS)
    with served.client("mine").responses.stream(model=MODEL, input=QUESTION) as events:
        first = list(events)[-1].response
    second = ask(served, input=THEN, previous_response_id=first.id).json()
    third = ask(served, input="Why?", previous_response_id=second["id"])
    assert model.prompt.count("Warm.") == 2 and third.json()["previous_response_id"] == second["id"]
    ask(served, input="Sure?", previous_response_id=first.id)  # another branch
    assert model.prompt.count("Warm.") == 1 and "Why?" not in model.prompt


def test_an_answer_is_read_and_deleted_by_its_id_and_one_that_is_not_to_be_stored_is_not_there(
    served: Served,
) -> None:
    unstored = ask(served, store=False).json()
    assert unstored["store"] is False
    for id in (unstored["id"], "resp_none"):
        assert is_missing(ask(served, previous_response_id=id))
    whole, headers = ask(served).json(), {"authorization": "Bearer mine"}
    path = f"/v1/responses/{whole['id']}"
    assert served.http.get(path, headers=headers).json() == whole
    gone = served.http.delete(path, headers=headers).json()
    assert gone == {"id": whole["id"], "object": "response", "deleted": True}
    assert is_missing(served.http.get(path, headers=headers), None)
    assert is_missing(ask(served, previous_response_id=whole["id"]))


def test_another_key_or_another_cache_salt_does_not_find_an_answer(served: Served) -> None:
    mine = ask(served, cache_salt="a").json()["id"]
    for key, salt in (("other", "a"), ("mine", "b"), ("mine", None)):
        assert is_missing(ask(served, key, cache_salt=salt, previous_response_id=mine))
        asked = {
            "headers": {"authorization": f"Bearer {key}"},
            "params": {"cache_salt": salt} if salt else {},
        }
        for method in ("GET", "DELETE"):
            assert is_missing(served.http.request(method, f"/v1/responses/{mine}", **asked), None)
    assert ask(served, cache_salt="a", previous_response_id=mine).status_code == 200


# ------------------------------------------------------------------------------------------------ the store


def has(store: KeptResponses, id: str, owner: str = "me") -> bool:
    try:
        store.find(id, owner)
    except ResponseMissing:
        return False
    return True


def test_answers_expire_after_their_last_use() -> None:
    now_s = 0.0
    store = KeptResponses(lasts_s=10.0, clock=lambda: now_s)
    for id in "ab":
        store.keep(id, "me", KeptResponse(b"1", b"2"))
    now_s = 9.0
    assert has(store, "a")
    now_s = 11.0
    assert has(store, "a") and not has(store, "b")
    with pytest.raises(ResponseMissing):
        store.delete("b", "me")


def test_the_least_recently_used_answers_make_room_and_one_that_is_too_large_is_not_kept() -> None:
    store = KeptResponses(most_bytes=10)
    for id in "abc":
        store.keep(id, "me", KeptResponse(b"12", b"3"))
    assert has(store, "a")
    store.keep("d", "me", KeptResponse(b"12", b"3"))
    assert [id for id in "abcd" if has(store, id)] == ["a", "c", "d"]
    store.keep("e", "me", KeptResponse(b"x" * 11, b""))
    assert not has(store, "e")
    store.keep("f", "me", KeptResponse(b"x" * 10, b""))
    assert has(store, "f") and not has(store, "f", "another")


# ----------------------------------------------------------------------------------------------------- scores


def spelled(scores: list[dict[str, Any]]) -> bytes:
    return b"".join(bytes(one["bytes"]) for one in scores)


@pytest.mark.parametrize("fields", [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}])
def test_a_message_has_the_scores_of_its_tokens(
    served: Served, model: Speaking, fields: dict[str, Any]
) -> None:
    num_top = fields.get("top_logprobs", 0)
    model.says("It is wärm.")
    whole = RESPONSES.ask(served, **fields).raw
    (part,) = whole["output"][0]["content"]
    assert spelled(part["logprobs"]).decode() == part["text"] == "It is wärm."
    assert {len(one["top_logprobs"]) for one in part["logprobs"]} == {num_top}
    assert whole["top_logprobs"] == num_top and part["logprobs"][0]["logprob"] < 0
    events = events_of(RESPONSES.post(served, stream=True, **fields).text)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [one for event in deltas for one in event["logprobs"]] == part["logprobs"]
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == part["logprobs"]
    assert events[-1]["response"]["output"][0]["content"] == [part]


def test_scores_of_reasoning_and_of_calls_are_no_part_of_a_message() -> None:
    said = f"<think>Hm. <b</think>\n\nSo < it is. {CALL}"
    with serving(model := Speaking(), reasoning_parser="think") as served:
        model.says(said, KNOWS_TOOLS)
        fields: dict[str, Any] = {"tools": RESPONSES.tools(*FUNCTIONS), "top_logprobs": 1}
        whole = RESPONSES.ask(served, **fields).raw
        reasoning, message, *calls = whole["output"]
        assert reasoning["type"] == "reasoning" and len(calls) == 2
        (part,) = message["content"]
        assert spelled(part["logprobs"]).decode().strip() == part["text"].strip() == "So < it is. Let me see."
        assert "logprobs" not in reasoning["content"][0]


@pytest.mark.parametrize("fields", [{"include": ["all"]}, {"top_logprobs": 21}, {"top_logprobs": -1}])
def test_scores_that_are_not_there_are_refused_by_name(served: Served, fields: dict[str, Any]) -> None:
    assert RESPONSES.refusal(served, **fields)["param"].removesuffix("[0]") in fields
