"""The embedded model behind HTTP, through the `openai` client: text, scores, reuse, cancellation, bad input,
shutdown."""

from __future__ import annotations

import time
from collections.abc import Iterator

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
