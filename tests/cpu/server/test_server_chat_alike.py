"""What a chat says as a completion does: the same numbers mean the same on both routes."""

from __future__ import annotations

import pytest

from penstock.contract import TokenLogprob
from penstock.server.replies import ChatReply, Heading
from penstock.server.schema import ChatBody
from penstock.text.answer import ChoiceDelta, ScoredToken
from tests.cpu.server.served import MODEL, Served, serving
from tests.support.scripted_engine import ScriptedEngine, ScriptedTokenizer


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
