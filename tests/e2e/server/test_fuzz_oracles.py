"""The fuzzer's oracles can fail: answers of a real server are right, and the same ones with one thing changed
are not."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.server.fuzz_cases import BASES, Case, legal_case
from tests.e2e.server.fuzz_json import encode
from tests.e2e.server.fuzz_oracles import Answer, Finding, generated, judge, same
from tests.e2e.server.fuzz_target import Target

Change = Callable[[Any], object]
SCORED = {
    "model": "tiny",
    "prompt": "When the gate",
    "max_tokens": 5,
    "n": 2,
    "seed": 4,
    "logprobs": 3,
    "echo": True,
}
TALK = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 5,
    "seed": 4,
    "logprobs": True,
    "top_logprobs": 2,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with Target(tmp_path_factory.mktemp("oracles")) as started:
        yield started


def notices(check: Callable[..., object], *given: Any) -> bool:
    try:
        check(*given)
    except Finding:
        return True
    return False


def refused(case: Case, answer: Answer) -> None:
    assert notices(judge, case, answer)


def set_to(*path: Any) -> Change:
    """Replaces what is at the end of a path into the JSON; the last item is the new value."""
    *way, last, value = path

    def change(reply: Any) -> None:
        for step in way:
            reply = reply[step]
        reply[last] = value

    return change


def without(*path: Any) -> Change:
    *way, last = path

    def change(reply: Any) -> None:
        for step in way:
            reply = reply[step]
        del reply[last]

    return change


def check_changes(case: Case, answer: Answer, changes: dict[str, Change]) -> None:
    """`answer` is right, and none of the changes leaves it so."""
    judge(case, answer)
    for name, change in changes.items():
        reply = copy.deepcopy(json.loads(answer.body))
        change(reply)
        assert notices(judge, case, dataclasses.replace(answer, body=json.dumps(reply).encode())), (
            f"not noticed: {name}"
        )


def test_a_completion_with_one_thing_wrong_is_noticed(target: Target) -> None:
    case = legal_case("/v1/completions", SCORED)
    answer = target.ask(case)
    scores = ("choices", 1, "logprobs")
    check_changes(
        case,
        answer,
        {
            "a choice too few": without("choices", 1),
            "two of one index": set_to("choices", 1, "index", 0),
            "no reason": set_to("choices", 0, "finish_reason", None),
            "another prompt": set_to(
                "choices", 0, "text", "other text, long enough to hold all the offsets of it"
            ),
            "another model": set_to("model", "other"),
            "another object": set_to("object", "chat.completion"),
            "one key more": set_to("extra", 1),
            "scores that are not numbers": set_to(*scores, "token_logprobs", 2, float("nan")),
            "a score of null": set_to(*scores, "token_logprobs", 2, None),
            "a probability over one": set_to(*scores, "token_logprobs", 2, 0.1),
            "a score too few": without(*scores, "token_logprobs", 2),
            "an alternative too few": lambda reply: reply["choices"][1]["logprobs"]["top_logprobs"][
                2
            ].clear(),
            "offsets that go back": set_to(*scores, "text_offset", 2, 0),
            "no scores": set_to("choices", 1, "logprobs", None),
            "usage that does not add up": set_to("usage", "total_tokens", 3),
            "a source too many": set_to("usage", "prompt_tokens_details", "kv_source", "host", 1),
            "a source too few": without("usage", "prompt_tokens_details", "kv_source", "ssd"),
            "cached tokens that no source has": set_to("usage", "prompt_tokens_details", "cached_tokens", 1),
            "prompt tokens of another tokenizer": lambda reply: _shift(reply["usage"]),
            "more tokens than allowed": lambda reply: reply["usage"].update(
                completion_tokens=11, total_tokens=11 + reply["usage"]["prompt_tokens"]
            ),
        },
    )


def _shift(usage: dict[str, Any]) -> None:
    """One prompt token more, in everything that counts them."""
    usage["prompt_tokens"] += 1
    usage["total_tokens"] += 1
    usage["prompt_tokens_details"]["kv_source"]["computed"] += 1


def test_a_chat_with_one_thing_wrong_is_noticed(target: Target) -> None:
    case = legal_case("/v1/chat/completions", TALK)
    answer = target.ask(case)
    entry = ("choices", 0, "logprobs", "content", 0)
    check_changes(
        case,
        answer,
        {
            "no role": without("choices", 0, "message", "role"),
            "an alternative too few": without(*entry, "top_logprobs", 1),
            "alternatives in another order": lambda reply: reply["choices"][0]["logprobs"]["content"][0][
                "top_logprobs"
            ].reverse(),
            "bytes of another token": set_to(*entry, "bytes", [1, 2]),
            "no scores": set_to("choices", 0, "logprobs", None),
        },
    )
    stopped = dataclasses.replace(case, fields={**TALK, "stop": generated(case, answer).choices[0].text[:1]})
    refused(stopped, answer)


def test_a_stream_with_one_thing_wrong_is_noticed(target: Target) -> None:
    case = legal_case(
        "/v1/completions", {**SCORED, "stream": True, "stream_options": {"include_usage": True}}
    )
    answer = target.ask(case)
    judge(case, answer)
    events = answer.body.split(b"\n\n")[:-1]
    for wrong in (
        events[:-1],
        [*events[:-2], events[-1]],
        [b'data: {"error": {}}', *events],
        [b": comment", *events],
        [events[0].replace(b'"id":"', b'"id":"x'), *events[1:]],
        [*events[:-3], *events[-2:]],
        [*events[:-1], b"data: {"],
    ):
        body = b"".join(event + b"\n\n" for event in wrong)
        assert notices(judge, case, dataclasses.replace(answer, body=body)), f"not noticed: {wrong}"


def test_an_error_with_one_thing_wrong_is_noticed(target: Target) -> None:
    case = Case(
        "POST",
        "/v1/completions",
        encode({**BASES["/v1/completions"], "top_k": "x"}),
        fault="top_k",
        suspect="top_k",
    )
    answer = target.ask(case)
    changes: dict[str, Change] = {
        "no param": set_to("error", "param", None),
        "another param": set_to("error", "param", "top_p"),
        "no message": set_to("error", "message", ""),
        "no code": without("error", "code"),
        "a longer one": set_to("error", "message", "x" * 5000),
        "one key more": set_to("detail", 1),
    }
    check_changes(case, answer, changes)
    for status in (500, 502, 503, 499, 405, 429):
        refused(case, dataclasses.replace(answer, status=status))
    refused(case, dataclasses.replace(answer, status=200, body=b"{}"))
    refused(case, dataclasses.replace(answer, body=b"Internal Server Error"))
    refused(case, dataclasses.replace(answer, headers={"content-type": "text/plain"}))
    refused(dataclasses.replace(case, legal=True), answer)
    refused(Case("GET", "/health?x", odd=True), target.ask(Case("GET", "/health")))


def test_answers_that_differ_are_noticed(target: Target) -> None:
    case = legal_case("/v1/completions", SCORED)
    choices = generated(case, target.ask(case)).choices
    same(choices, choices)
    for other in (
        choices[:1],
        choices[::-1],
        [
            dataclasses.replace(choices[0], logprobs=(None, *[-1.0 for _ in choices[0].logprobs[1:]])),
            choices[1],
        ],
    ):
        assert notices(same, choices, other)


def test_what_is_left_behind_is_noticed(target: Target) -> None:
    """Each thing that the check between rounds looks at, spoiled in what it compares with, or held for
    real."""
    target.rest.check()
    for name, value in (
        ("totals", {"device": 1.0}),
        ("size", (-(1 << 40), 99)),
        ("size", (1 << 40, -99)),
        ("first_canary", []),
    ):
        before = getattr(target.rest, name)
        setattr(target.rest, name, value)
        assert notices(target.rest.check), f"not noticed: {name}"
        setattr(target.rest, name, before)
    with target.log.open("a") as log:
        log.write("2026-01-01 00:00:00 ERROR penstock.server: a stream ended early\n")
    assert notices(target.rest.check)
    target.log.write_text("")
    target.rest.check()


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", b'{"prompt":"x"}'), ("/v1/load_lora_adapter", b"{}")]
)
def test_a_seat_that_is_not_given_back_is_noticed(target: Target, path: str, body: bytes) -> None:
    with target.holding(path, len(body)):
        assert notices(target.rest.check)
    target.rest.check()
