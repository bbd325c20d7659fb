"""Going on from an answer of `/v1/responses` by its id: what the model is told, who may, and for how long."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import ResponseMissing
from penstock.server.kept import KeptResponse, KeptResponses
from tests.cpu.server.served import MODEL, Served, serving
from tests.cpu.server.test_server_tools import KNOWS_TOOLS, saying

ASK, THEN = "How warm is it in Bern?", "And in Basel?"


def ask(served: Served, key: str = "mine", **fields: Any) -> Any:
    headers = {"authorization": f"Bearer {key}"}
    return served.http.post(
        "/v1/responses",
        json={"model": MODEL, "input": ASK, "max_output_tokens": 200, **fields},
        headers=headers,
    )


def prompt_of(served: Served) -> str:
    return bytes(served.engine.submitted[-1][0]).decode()


def is_missing(reply: Any, param: str | None = "previous_response_id") -> bool:
    error = reply.json()["error"]
    return (reply.status_code, error["code"], error["param"]) == (404, "response_not_found", param)


@pytest.mark.parametrize("stream", [False, True])
def test_the_model_is_told_the_whole_conversation_as_if_all_of_it_had_been_sent(stream: bool) -> None:
    with serving(saying("Warm.", KNOWS_TOOLS)) as served:
        first = ask(served, instructions="Be brief.").json()
        reply = ask(
            served, input=THEN, previous_response_id=first["id"], instructions="Be kind.", stream=stream
        )
        assert reply.status_code == 200, reply.text
        told = prompt_of(served)
        turns = [{"role": "user", "content": ASK}, *first["output"], {"role": "user", "content": THEN}]
        ask(served, input=turns, instructions="Be kind.")
        assert told == prompt_of(served) and "Be brief." not in told  # instructions are of one request


def test_every_answer_can_be_gone_on_from_also_a_streamed_one_and_an_earlier_one_again() -> None:
    with serving(saying("Warm.", KNOWS_TOOLS)) as served:
        with served.client("mine").responses.stream(model=MODEL, input=ASK) as events:
            first = list(events)[-1].response
        second = ask(served, input=THEN, previous_response_id=first.id).json()
        third = ask(served, input="Why?", previous_response_id=second["id"])
        assert prompt_of(served).count("Warm.") == 2 and third.json()["previous_response_id"] == second["id"]
        ask(served, input="Sure?", previous_response_id=first.id)  # another branch
        assert prompt_of(served).count("Warm.") == 1 and "Why?" not in prompt_of(served)


def test_an_answer_that_was_not_to_be_stored_or_has_failed_is_not_there() -> None:
    with serving() as served:
        unstored = ask(served, store=False).json()
        assert unstored["store"] is False and is_missing(ask(served, previous_response_id=unstored["id"]))
        assert is_missing(ask(served, previous_response_id="resp_none"))
        assert served.http.get("/v1/responses/resp_none").status_code == 404
        assert len(served.engine.submitted) == 1


def test_another_key_or_another_cache_salt_does_not_find_an_answer() -> None:
    with serving() as served:
        mine = ask(served, cache_salt="a").json()["id"]
        for key, salt in (("other", "a"), ("mine", "b"), ("mine", None)):
            assert is_missing(ask(served, key, cache_salt=salt, previous_response_id=mine))
            headers = {"authorization": f"Bearer {key}"}
            query = {} if salt is None else {"cache_salt": salt}
            for method in ("GET", "DELETE"):
                assert is_missing(
                    served.http.request(method, f"/v1/responses/{mine}", headers=headers, params=query), None
                )
        assert ask(served, cache_salt="a", previous_response_id=mine).status_code == 200


def test_an_answer_is_read_and_deleted_by_its_id() -> None:
    with serving() as served:
        whole, headers = ask(served).json(), {"authorization": "Bearer mine"}
        assert served.http.get(f"/v1/responses/{whole['id']}", headers=headers).json() == whole
        gone = served.http.delete(f"/v1/responses/{whole['id']}", headers=headers)
        assert gone.json() == {"id": whole["id"], "object": "response", "deleted": True}
        assert is_missing(served.http.get(f"/v1/responses/{whole['id']}", headers=headers), None)
        assert is_missing(ask(served, previous_response_id=whole["id"]))


# -------------------------------------------------------------------------------------------------- the store


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def has(store: KeptResponses, id: str, owner: str = "me") -> bool:
    try:
        store.find(id, owner)
    except ResponseMissing:
        return False
    return True


def test_answers_expire_after_their_last_use() -> None:
    clock = Clock()
    store = KeptResponses(lasts_s=10.0, clock=clock)
    store.keep("a", "me", KeptResponse(b"1", b"2"))
    store.keep("b", "me", KeptResponse(b"1", b"2"))
    clock.now_s = 9.0
    assert has(store, "a")
    clock.now_s = 11.0
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
