"""The `openai` client, unmodified, against the server on loopback."""

from __future__ import annotations

import openai
import pytest

from tests.cpu.server.served import MODEL, Served, completion, serving
from tests.support.scripted_engine import ScriptedEngine

WORDS = "choice 7: one two three four five six seven. "


def test_a_completion_has_text_reason_and_usage(served: Served) -> None:
    reply = served.client().completions.create(model=MODEL, prompt="hello", seed=7, max_tokens=9)
    assert reply.object == "text_completion"
    assert reply.id.startswith("cmpl-")
    assert [(c.index, c.text, c.finish_reason, c.logprobs) for c in reply.choices] == [
        (0, WORDS[:9], "length", None)
    ]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (5, 9, 14)
    assert reply.usage.model_dump(exclude_unset=True)["prompt_tokens_details"] == {
        "cached_tokens": 0,
        "kv_source": {"device": 0, "host": 0, "ssd": 0, "remote": 0, "computed": 5},
    }
    assert reply._request_id == reply.id.removeprefix("cmpl-")


def test_a_returning_prompt_says_which_of_its_tokens_were_cached(served: Served) -> None:
    client = served.client()
    for expected in (0, 32):
        usage = client.completions.create(model=MODEL, prompt="p" * 40, max_tokens=1).usage.model_dump()
        details = usage["prompt_tokens_details"]
        assert details["cached_tokens"] == expected
        assert details["kv_source"] == {
            "device": expected,
            "host": 0,
            "ssd": 0,
            "remote": 0,
            "computed": 40 - expected,
        }
    salted = client.completions.create(
        model=MODEL, prompt="p" * 40, max_tokens=1, extra_body={"cache_salt": "tenant"}
    )
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_max_tokens_is_16_unless_the_client_or_the_context_says_otherwise(served: Served) -> None:
    assert served.client().completions.create(model=MODEL, prompt="x").usage.completion_tokens == 16
    nearly_full = "x" * (served.engine.max_model_len - 3)
    assert served.client().completions.create(model=MODEL, prompt=nearly_full).usage.completion_tokens == 3


def test_several_choices_run_under_their_own_seeds_and_keep_their_index(served: Served) -> None:
    client = served.client()
    whole = client.completions.create(model=MODEL, prompt="hello", n=3, seed=7, max_tokens=9)
    assert [(c.index, c.text) for c in whole.choices] == [(i, f"choice {7 + i}:") for i in range(3)]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 27)
    texts = ["", "", ""]
    served.engine.hold()
    stream = client.completions.create(model=MODEL, prompt="hello", n=3, seed=7, max_tokens=9, stream=True)
    order: list[int] = []
    for number in range(9):
        served.engine.permit(1)
        for _ in range(3):
            choice = next(stream).choices[0]
            texts[choice.index] += choice.text
            order.append(choice.index)
            assert (choice.finish_reason == "length") == (number == 8)
    assert list(stream) == []
    assert texts == [f"choice {7 + i}:" for i in range(3)]
    assert order == [0, 1, 2] * 9


def test_prompts_may_be_texts_token_ids_or_lists_of_either(served: Served) -> None:
    client = served.client()
    for prompt, expected in [
        ("ab", ["ab"]),
        (["ab", "cd"], ["ab", "cd"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
    ]:
        reply = client.completions.create(model=MODEL, prompt=prompt, max_tokens=0, echo=True)
        assert [c.text for c in reply.choices] == expected
        assert reply.usage.prompt_tokens == sum(map(len, expected))
    two = client.completions.create(model=MODEL, prompt=["a", "b"], n=2, seed=1, max_tokens=9)
    assert [(c.index, c.text) for c in two.choices] == [
        (0, "choice 1:"),
        (1, "choice 2:"),
        (2, "choice 1:"),
        (3, "choice 2:"),
    ]
    assert two.usage.prompt_tokens == 2


def test_a_stop_string_ends_the_choice_before_it_and_cancels_the_engine_request(served: Served) -> None:
    client = served.client()
    for stop, text in [("three", WORDS[:18]), (["never", "o t"], WORDS[:16])]:
        reply = client.completions.create(model=MODEL, prompt="x", seed=7, max_tokens=90_000, stop=stop)
        assert (reply.choices[0].text, reply.choices[0].finish_reason) == (text, "stop")
        streamed = list(
            client.completions.create(
                model=MODEL, prompt="x", seed=7, max_tokens=90_000, stop=stop, stream=True
            )
        )
        assert "".join(c.choices[0].text for c in streamed) == text
        assert streamed[-1].choices[0].finish_reason == "stop"
        served.assert_idle()


def test_a_stop_string_counts_the_tokens_up_to_its_end_however_they_were_batched(served: Served) -> None:
    usages = set()
    for _ in range(5):
        reply = served.client().completions.create(
            model=MODEL, prompt="x", seed=7, max_tokens=90_000, stop="three"
        )
        usages.add(reply.usage.completion_tokens)
    assert usages == {len("choice 7: one two three")}


def test_logprobs_name_the_chosen_token_and_its_rivals(served: Served) -> None:
    reply = served.client().completions.create(model=MODEL, prompt="x", seed=7, max_tokens=3, logprobs=1)
    scores = reply.choices[0].logprobs
    assert scores.tokens == ["c", "h", "o"]
    assert scores.token_logprobs == [-0.5] * 3
    assert scores.text_offset == [0, 1, 2]
    assert scores.top_logprobs == [{"d": -0.25, "c": -0.5}, {"i": -0.25, "h": -0.5}, {"p": -0.25, "o": -0.5}]
    none = (
        served.client()
        .completions.create(model=MODEL, prompt="x", seed=7, max_tokens=2, logprobs=0)
        .choices[0]
        .logprobs
    )
    assert (none.tokens, none.top_logprobs) == (["c", "h"], None)


def test_streamed_logprobs_are_those_of_the_whole(served: Served) -> None:
    def ask(**more):
        return served.client().completions.create(
            model=MODEL, prompt="ab", seed=7, max_tokens=40, logprobs=2, echo=True, stop=["three"], **more
        )

    whole = ask().choices[0]
    parts = [c.choices[0] for c in ask(stream=True)]
    assert "".join(p.text for p in parts) == whole.text == "ab" + WORDS[:18]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [x for p in parts for x in getattr(p.logprobs, name)] == getattr(whole.logprobs, name)
    assert "".join(whole.logprobs.tokens) == whole.text
    assert whole.logprobs.text_offset == list(range(len(whole.text)))


def test_echo_with_logprobs_scores_the_prompt_and_its_first_token_has_none(served: Served) -> None:
    for max_tokens in (0, 2):
        reply = served.client().completions.create(
            model=MODEL, prompt="aé", seed=7, max_tokens=max_tokens, echo=True, logprobs=1
        )
        choice = reply.choices[0]
        assert choice.text == "aé" + "ch"[:max_tokens]
        assert choice.logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "c", "h"][: 3 + max_tokens]
        assert choice.logprobs.token_logprobs == [None, -0.5, -0.5, -0.5, -0.5][: 3 + max_tokens]
        assert choice.logprobs.top_logprobs[0] is None
        assert choice.logprobs.text_offset == [0, 1, 1, 2, 3][: 3 + max_tokens]
        assert reply.usage.completion_tokens == max_tokens
        sampling = served.engine.submitted[-1][1]
        assert (sampling.logprobs, sampling.prompt_logprobs) == (1, 1)


def test_sampling_fields_reach_the_engine(served: Served) -> None:
    extra = {
        "top_k": 5,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "ignore_eos": True,
        "stop_token_ids": [3, 4],
    }
    served.client().completions.create(
        model=MODEL,
        prompt="x",
        max_tokens=2,
        temperature=0.5,
        top_p=0.75,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        seed=-3,
        stop="zz",
        user="someone",
        extra_body=extra,
    )
    sampling = served.engine.submitted[-1][1]
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.75, 5, 0.25)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (
        0.5,
        -0.5,
        1.5,
    )
    assert (sampling.seed, sampling.stop, sampling.stop_token_ids, sampling.ignore_eos) == (
        -3,
        ("zz",),
        {3, 4},
        True,
    )


def test_null_means_absent(served: Served) -> None:
    fields = (
        "n",
        "stream",
        "stop",
        "seed",
        "temperature",
        "top_p",
        "logprobs",
        "echo",
        "logit_bias",
        "stream_options",
        "user",
    )
    reply = served.http.post("/v1/completions", json=completion(max_tokens=1) | dict.fromkeys(fields))
    assert reply.status_code == 200


# ------------------------------------------------------------------------------------------------------- chat


def test_a_chat_reply_is_an_assistants_message(served: Served) -> None:
    client = served.client()
    turns = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]},
    ]
    reply = client.chat.completions.create(model=MODEL, messages=turns, seed=7, max_tokens=9)
    assert reply.object == "chat.completion"
    message = reply.choices[0].message
    assert (message.role, message.content, reply.choices[0].finish_reason) == (
        "assistant",
        WORDS[:9],
        "length",
    )
    assert bytes(served.engine.submitted[-1][0]).decode() == "system: be\nuser: hi\nyou\nassistant: "
    again = client.chat.completions.create(
        model=MODEL, messages=[*turns, message, {"role": "user", "content": "go on"}], max_tokens=1
    )
    assert again.usage.prompt_tokens > reply.usage.prompt_tokens


def test_a_chat_stream_begins_with_the_role(served: Served) -> None:
    stream = served.client().chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        seed=7,
        n=2,
        max_completion_tokens=9,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    for index in range(2):
        mine = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == index]
        assert (mine[0].delta.role, mine[0].delta.content) == ("assistant", "")
        assert "".join(c.delta.content or "" for c in mine) == f"choice {7 + index}:"
        assert [c.finish_reason for c in mine if c.finish_reason] == ["length"]
        assert all(c.delta.role is None for c in mine[1:])
    assert chunks[-1].usage.completion_tokens == 18


def test_chat_logprobs_have_bytes_and_rivals(served: Served) -> None:
    reply = served.client().chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        seed=7,
        max_tokens=2,
        logprobs=True,
        top_logprobs=2,
    )
    content = reply.choices[0].logprobs.content
    assert [(e.token, e.logprob, e.bytes) for e in content] == [("c", -0.5, [99]), ("h", -0.5, [104])]
    assert [(t.token, t.logprob, t.bytes) for t in content[0].top_logprobs] == [
        ("d", -0.25, [100]),
        ("c", -0.5, [99]),
    ]
    bare = served.client().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=1, logprobs=True
    )
    assert bare.choices[0].logprobs.content[0].top_logprobs == []


# ----------------------------------------------------------------------------------------------------- errors


def test_errors_are_those_that_the_client_knows(served: Served) -> None:
    client = served.client()
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    assert "temperature" in bad.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="x")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="audio is not supported"):
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "x"}],
            audio={"voice": "alloy", "format": "wav"},
        )
    with pytest.raises(openai.BadRequestError, match="maximum context length") as long:
        client.completions.create(model=MODEL, prompt="x" * served.engine.max_model_len, max_tokens=1)
    assert long.value.type == "invalid_request_error"


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
        assert served.client().completions.create(model=MODEL, prompt="x", n=2).usage.completion_tokens == 32
        with pytest.raises(openai.BadRequestError, match="2 generations at most"):
            served.client().completions.create(model=MODEL, prompt="x", n=3)
        served.assert_idle()


def test_a_failed_step_is_an_internal_server_error_or_an_event_of_the_stream() -> None:
    def script(prompt, sampling):
        return [97, 98, RuntimeError("the device is on fire")]

    with serving(ScriptedEngine(script)) as served:
        with pytest.raises(openai.InternalServerError, match="on fire"):
            served.client().completions.create(model=MODEL, prompt="x")
        stream = served.client().completions.create(model=MODEL, prompt="x", stream=True)
        seen: list[str] = []
        with pytest.raises(openai.APIError, match="on fire"):
            seen.extend(chunk.choices[0].text for chunk in stream)
        assert "".join(seen) == "ab"
        raw = served.http.post("/v1/completions", json=completion(stream=True)).text
        assert '"error"' in raw.split("\n\n")[-2]
        assert "[DONE]" not in raw
        served.assert_idle()
