"""A real server in front of a real engine with colder tiers, under the sanitizer. Owns nothing that ships."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from penstock.config import ExpertsConfig, ServerConfig
from penstock.engine.engine import Engine
from penstock.engine.loop import EngineLoop
from penstock.server.run import HttpServer, server_here
from penstock.testing.sanitized import build_sanitized, check_silent
from tests.cpu.server.served import DEADLINE_S, until
from tests.support.driving import tiny_config

MODEL = "tiny-qwen3"
NUM_HOST = 64
PROMPT = [7 + 3 * i % 450 for i in range(70)]  # four full blocks, and six tokens that are always computed


class Tiered:
    """A server in front of a real engine, under the sanitizer."""

    def __init__(self, server: HttpServer, engine: Engine) -> None:
        self.engine = engine
        self.service = server.service
        self.model = engine.name
        self.http = httpx.Client(base_url=server.url, timeout=DEADLINE_S)
        self.client = openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S
        )

    def ask(self, prompt: list[int] = PROMPT, **fields: Any) -> tuple[list[str], dict[str, Any]]:
        """Tokens, and the usage's details of the prompt."""
        options = {"max_tokens": 4, "temperature": 0, "logprobs": 0, "extra_body": {"ignore_eos": True}}
        reply = self.client.completions.create(model=self.model, prompt=prompt, **{**options, **fields})
        details = reply.usage.model_dump(exclude_unset=True)["prompt_tokens_details"]
        assert sum(details["kv_source"].values()) == reply.usage.prompt_tokens == len(prompt)
        return reply.choices[0].logprobs.tokens, details

    def forget_the_device(self) -> None:
        """What was asked before is in host memory alone."""
        assert self.http.post("/cache/flush").json() == {"level": "visible"}
        assert self.http.post("/cache/reset?tier=device").status_code == 200

    def scrape(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        return {
            (s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples
        }


@contextlib.contextmanager
def tiered(server: dict[str, Any] | None = None, **settings: Any) -> Iterator[Tiered]:
    experts = settings.pop("experts", ExpertsConfig())
    config = tiny_config(settings.pop("model", MODEL), **{"host_blocks": NUM_HOST, **settings})
    engine, sanitizer = build_sanitized(dataclasses.replace(config, experts=experts))
    served = server_here(engine, EngineLoop(engine), ServerConfig(port=0, shutdown_s=5.0, **(server or {})))
    thread = threading.Thread(target=served.run, daemon=True)
    thread.start()
    until(lambda: served.started, "the server is up")
    running = Tiered(served, engine)
    try:
        yield running
    finally:
        running.http.close()
        served.should_exit = True
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    check_silent(sanitizer)


def error_of(reply: httpx.Response) -> dict[str, Any]:
    found = reply.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found
