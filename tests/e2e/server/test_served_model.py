"""The embedded model behind HTTP, through the `openai` client: text, scores, reuse, cancellation, bad input,
shutdown."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import time
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

DEADLINE_S = 120.0
MODEL = "smollm2-135m"
FRANCE = "The capital of France is"
STORY = "Once upon a time, in a village by the sea, there lived a clockmaker who had never been late. " * 4


@pytest.fixture
def client(server_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)


@pytest.fixture
def http(server_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server_url, timeout=DEADLINE_S) as session:
        yield session


def samples(http: httpx.Client, name: str) -> dict[str, float]:
    """One metric by the values of its labels."""
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {
        " ".join(s.labels.values()): s.value for family in families for s in family.samples if s.name == name
    }


def wait_idle(http: httpx.Client) -> None:
    """No open request and no block in use: polled, because a cancelled request ends at the engine's next
    step."""
    by_s = time.monotonic() + DEADLINE_S
    while True:
        busy = sum(samples(http, "penstock_requests").values())
        blocks = samples(http, "penstock_kv_blocks")
        held = sum(count for labels, count in blocks.items() if not {"free", "idle"} & set(labels.split()))
        if not busy and not held:
            return
        assert time.monotonic() < by_s, f"still busy: {busy} requests, blocks {blocks}"
        time.sleep(0.02)


def test_a_greedy_completion_is_the_same_whole_streamed_and_again(client: openai.OpenAI) -> None:
    ask = {"model": MODEL, "prompt": FRANCE, "temperature": 0, "max_tokens": 12}
    whole = client.completions.create(**ask)
    assert "Paris" in whole.choices[0].text
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 12)
    assert (
        "".join(chunk.choices[0].text for chunk in client.completions.create(**ask, stream=True))
        == whole.choices[0].text
    )
    assert client.completions.create(**ask).choices[0].text == whole.choices[0].text


def test_a_chat_answers_and_ends_by_itself(client: openai.OpenAI) -> None:
    ask = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the capital of France? One sentence."}],
        "temperature": 0,
    }
    whole = client.chat.completions.create(**ask, max_tokens=60)
    choice = whole.choices[0]
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
    assert "Paris" in choice.message.content
    assert "<|im_end|>" not in choice.message.content
    chunks = list(
        client.chat.completions.create(
            **ask, max_tokens=60, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == choice.message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_no_forced_call_has_an_argument_that_its_tool_does_not_have(client: openai.OpenAI) -> None:
    """The schema says nothing of other properties, as most do; were it open, this model would invent some in
    half of its calls."""
    fields = {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}}
    parameters = {"type": "object", "properties": fields, "required": list(fields)}
    ask = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "How warm is it in Bern, in Celsius?"}],
        "tools": [
            {
                "type": "function",
                "function": {"name": "weather", "description": "How warm it is", "parameters": parameters},
            }
        ],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    }
    for seed in range(2):
        for choice in client.chat.completions.create(
            **ask, temperature=1, max_tokens=64, n=12, seed=seed
        ).choices:
            (call,) = choice.message.tool_calls
            assert (
                choice.finish_reason == "tool_calls"
                and json.loads(call.function.arguments).keys() == fields.keys()
            )


def test_a_returning_prefix_comes_from_the_cache_and_changes_nothing(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    wait_idle(http)
    assert http.post("/cache/reset?tier=all").status_code == 200
    ask = {"model": MODEL, "prompt": STORY, "temperature": 0, "max_tokens": 8}
    cold, warm = client.completions.create(**ask), client.completions.create(**ask)
    assert warm.choices[0].text == cold.choices[0].text
    for reply, cached in ((cold, False), (warm, True)):
        details = reply.usage.model_dump()["prompt_tokens_details"]
        assert (details["cached_tokens"] > 0) == cached
        assert sum(details["kv_source"].values()) == reply.usage.prompt_tokens
        assert details["kv_source"]["device"] == details["cached_tokens"]
    assert warm.usage.prompt_tokens_details.cached_tokens >= warm.usage.prompt_tokens - 16
    other = client.completions.create(**ask, extra_body={"cache_salt": "someone else"})
    assert other.usage.prompt_tokens_details.cached_tokens == 0
    assert http.post("/cache/flush").json() == {"level": "visible"}
    assert http.post("/cache/reset?tier=device").json()["evicted_blocks"] > 0
    restored = client.completions.create(**ask)
    assert restored.choices[0].text == cold.choices[0].text
    details = restored.usage.model_dump()["prompt_tokens_details"]
    assert details["kv_source"]["device"] == 0
    assert (
        details["kv_source"]["host"]
        == details["cached_tokens"]
        == warm.usage.prompt_tokens_details.cached_tokens
    )
    wait_idle(http)
    assert min(http.post("/cache/reset?tier=all").json()["by_tier"].values()) > 0
    assert client.completions.create(**ask).usage.prompt_tokens_details.cached_tokens == 0


def test_echo_scores_the_prompt_as_generation_scored_it(client: openai.OpenAI) -> None:
    """What greedy decoding chose, scored as a prompt: the same tokens, nearly the same log-probabilities."""
    made = client.completions.create(model=MODEL, prompt=FRANCE, temperature=0, max_tokens=6, logprobs=3)
    text = FRANCE + made.choices[0].text
    read = client.completions.create(
        model=MODEL, prompt=text, temperature=0, max_tokens=0, echo=True, logprobs=3
    ).choices[0]
    assert read.text == text
    scores = read.logprobs
    assert "".join(scores.tokens) == text
    assert scores.token_logprobs[0] is None
    assert scores.top_logprobs[0] is None
    assert [
        text[at : at + len(token)] for at, token in zip(scores.text_offset, scores.tokens, strict=True)
    ] == scores.tokens
    assert all(value <= 0 and math.isfinite(value) for value in scores.token_logprobs[1:])
    assert scores.tokens[-6:] == made.choices[0].logprobs.tokens
    assert scores.token_logprobs[-6:] == pytest.approx(made.choices[0].logprobs.token_logprobs, abs=2e-3)
    assert all(
        max(top.values()) == pytest.approx(value)
        for top, value in zip(scores.top_logprobs[-6:], scores.token_logprobs[-6:], strict=True)
    )


@pytest.mark.parametrize("stream", [True, False])
def test_a_hang_up_frees_blocks_and_rows(server_url: str, http: httpx.Client, stream: bool) -> None:
    async def leave() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server_url.rsplit(":", 1)[1]))
        body = json.dumps(
            {"model": MODEL, "prompt": STORY, "max_tokens": 1500, "ignore_eos": True, "stream": stream}
        ).encode()
        writer.write(
            (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n") % len(body) + body
        )
        await writer.drain()
        if stream:
            await reader.readuntil(b"data: {")
        while not sum(samples(http, "penstock_requests").values()):
            await asyncio.sleep(0.01)
        writer.close()

    generated = samples(http, "penstock_generated_tokens_total")[""]
    asyncio.run(leave())
    wait_idle(http)
    assert samples(http, "penstock_generated_tokens_total")[""] - generated < 1000


def test_a_signal_lets_a_stream_end_and_the_process_with_it(start_server: Callable[..., tuple]) -> None:
    process, url = start_server(
        "--model", "tiny-llama", "--load-format", "dummy", "--device", "cpu", "--api-key", "k"
    )
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0, timeout=DEADLINE_S)
    name = client.models.list().data[0].id
    stream = client.completions.create(
        model=name, prompt="x", max_tokens=100, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    process.send_signal(signal.SIGTERM)
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
    assert process.wait(DEADLINE_S) == 0
    with pytest.raises(openai.APIConnectionError):
        client.models.list()
