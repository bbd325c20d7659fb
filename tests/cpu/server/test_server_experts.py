"""Experts off the device over HTTP: a conversation whose context does not fit either, three turns, restored
from host memory, with the tokens of a server that has everything on the device; and what a reply says of
them."""

from __future__ import annotations

from typing import Any

from penstock.config import ExpertsConfig
from tests.cpu.server.tiered_server import tiered

FIRST, QUESTION = [7 + 3 * i % 450 for i in range(300)], [11 + 5 * i % 450 for i in range(20)]
MODEL = "tiny-qwen3-moe"


def conversation(**settings: Any) -> tuple[list[list[str]], list[int], dict[Any, float]]:
    """Of three turns: tokens, and how many of the prompt came from host memory; and the figures after it."""
    found, from_host, prompt = list[list[str]](), list[int](), FIRST
    with tiered(model=MODEL, max_model_len=600, **settings) as server:
        for _ in range(3):
            tokens, details = server.ask(prompt, max_tokens=8)
            found.append(tokens)
            from_host.append(details["kv_source"].get("host", 0))
            server.forget_the_device()
            prompt = [*prompt, *QUESTION]
        return found, from_host, server.scrape()


def test_a_conversation_goes_on_from_host_memory_with_a_quarter_of_the_experts() -> None:
    whole, *_ = conversation(blocks=200)
    experts = ExpertsConfig("25%")
    small, from_host, figures = conversation(blocks=24, host_blocks=128, resident_tokens=128, experts=experts)
    assert small == whole
    assert from_host[0] == 0 and from_host[1] >= 288 and from_host[2] >= 304
    assert figures["penstock_expert_slots", ()] == 6 and figures["penstock_experts", ()] == 24
    wanted = [figures["penstock_experts_wanted_total", (("found", found),)] for found in ("yes", "no")]
    assert all(num > 0 for num in wanted)
    assert figures["penstock_expert_copy_bytes_total", ()] > 0
    assert figures["penstock_host_read_steps_total", ()] > 0


ROUTES = {
    "/v1/completions": {"prompt": FIRST, "max_tokens": 8},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "n": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 8},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8},
}


def test_a_reply_says_how_long_its_steps_waited_for_experts() -> None:
    """In each of the four forms; all together, one at a time, no more than all steps waited."""
    with tiered(model=MODEL, experts=ExpertsConfig("9%", guesses=False)) as server:
        waits_ms = list[float]()
        for route, body in ROUTES.items():
            usage = server.http.post(route, json={"model": MODEL, **body}).raise_for_status().json()["usage"]
            waits_ms.append(usage["expert_wait_ms"])
        assert all(wait_ms > 0 for wait_ms in waits_ms)
        assert sum(waits_ms) / 1e3 <= server.scrape()["penstock_expert_wait_seconds_total", ()] + 1e-5
    with tiered(model=MODEL) as server:
        for route, body in ROUTES.items():
            usage = server.http.post(route, json={"model": MODEL, **body}).raise_for_status().json()["usage"]
            assert "expert_wait_ms" not in usage
