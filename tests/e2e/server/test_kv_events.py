"""A real server that publishes KV events: what a router works out from them is what its requests find."""

from __future__ import annotations

import random
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil

from tests.cpu.server.served import until
from tests.support.kv_router import Router
from tests.support.kv_wire import replayed
from tests.support.servers import free_port

BLOCK = 16
ALL = ("GPU", "CPU", "STORAGE")
TINY = ("--model", "tiny-llama", "--load-format", "dummy", "--device", "cpu", "--max-model-len", "512")
TIERS = ("--device-kv-blocks", "40", "--kv-offload-host-gib", "0.0015", "--kv-offload-ssd-gib", "0.002")
Start = Callable[..., tuple[subprocess.Popen[str], str]]


class Listening:
    """A router that reads all events anew whenever it is asked."""

    def __init__(self, start: Start, folder: Path, *more: str) -> None:
        live, self.replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        flags = (*TINY, *TIERS, "--kv-offload-ssd-dir", str(folder), *more)
        self.process, url = start(
            *flags, "--kv-events", live, "--kv-events-replay", self.replay, "--kv-events-topic", "kv"
        )
        self.http = httpx.Client(base_url=url, timeout=120)
        (source,) = self.http.get("/kv_event_sources").json()
        assert source == {
            "data_parallel_rank": 0,
            "endpoint": live,
            "replay_endpoint": self.replay,
            "topic": "kv",
        }

    def ask(self, prompt: list[int], **fields: object) -> dict[str, int]:
        body = {"model": "tiny-llama", "prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
        reply = self.http.post("/v1/completions", json=body)
        source: dict[str, int] = reply.json()["usage"]["prompt_tokens_details"]["kv_source"]
        return source

    def heard(self) -> Router:
        router = Router()
        for topic, sequence, payload in replayed(self.replay, 0):
            assert topic == b"kv"
            router.hear(sequence, payload)
        return router

    def settled(self) -> Router:
        """When all is saved, and two looks are the same."""
        self.http.post("/cache/flush?level=persisted").raise_for_status()
        seen = [-1]

        def is_same() -> bool:
            seen.append(self.heard().next_sequence)
            return seen[-1] == seen[-2]

        until(is_same, "the events have come to rest")
        return self.heard()


def num_known(router: Router, prompt: list[int], *media: str) -> int:
    """Tokens of the longest prefix of `prompt` that these tiers have. The last token is always computed."""
    by_content = {
        (router.parents[one], tokens): one
        for medium in media
        for one, tokens in router.blocks.get(medium, {}).items()
    }
    parent, num = None, 0
    while num + BLOCK <= len(prompt):
        parent = by_content.get((parent, tuple(prompt[num : num + BLOCK])))
        if parent is None:
            break
        num += BLOCK
    return min(num, len(prompt) - 1)


def test_requests_find_what_the_events_say(start_server: Start, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    told, r = Listening(start_server, tmp_path, "--sanitize=strict"), random.Random(7)
    prompts = [[r.randrange(5, 200) for _ in range(r.randint(40, 150))] for _ in range(24)]
    secret = [r.randrange(210, 250) for _ in range(100)]
    for prompt in prompts:
        told.ask(prompt)
    told.ask(secret, cache_salt="a tenant's")
    router = told.settled()
    assert all(router.held(medium) for medium in ALL), "every tier has been used"
    assert router.kinds.count("BlockRemoved") > 5, "every tier has been full"
    assert not router.tokens & set(range(210, 250)), "a tenant's tokens were published"
    seen = []
    for prompt in r.sample(prompts, 8):
        router = told.settled()
        on_device, known = num_known(router, prompt, "GPU"), num_known(router, prompt, *ALL)
        found = told.ask(prompt)
        num_found = sum(found.values()) - found["computed"]  # a load may take longer than computing
        assert on_device <= num_found <= known, f"{known} were promised, and {found} came"
        seen.append(num_found == known)
    assert any(seen)

    told.ask(secret, cache_salt="a tenant's")  # from a colder tier, or computed if that is faster
    assert told.ask(secret, cache_salt="a tenant's")["computed"] < len(secret), "it is cached all the same"
    info = told.http.get("/get_server_info").json()
    assert (info["block_size"], info["served_model_name"]) == (BLOCK, "tiny-llama")
    metrics = told.http.get("/metrics").text
    assert 'penstock_kv_events_total{type="stored"}' in metrics
    assert "penstock_kv_events_dropped_total 0.0" in metrics
    told.http.post("/cache/reset").raise_for_status()
    router = told.settled()
    assert router.kinds[-1] == "AllBlocksCleared" and not router.tokens
    told.http.close()
    told.process.send_signal(signal.SIGTERM)
    assert told.process.wait(60) == 0


def test_after_a_kill_the_next_server_tells_of_the_disk_at_start(start_server: Start, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    told, r = Listening(start_server, tmp_path), random.Random(8)
    prompts = [[r.randrange(5, 200) for _ in range(100)] for _ in range(3)]
    for prompt in prompts:
        told.ask(prompt)
    told.ask([240] * 60, cache_salt="a tenant's")
    before = told.settled().held("STORAGE")
    for child in psutil.Process(told.process.pid).children():
        child.kill()
    told.process.wait(60)
    told.http.close()

    told = Listening(start_server, tmp_path, "--api-processes", "0")
    until(lambda: told.heard().held("STORAGE"), "the disk is told of before any request")
    router = told.settled()
    assert router.held("STORAGE") == before and not router.held("GPU") | router.held("CPU")
    assert 240 not in router.tokens
    known = num_known(router, prompts[0], "STORAGE")
    fetched = told.http.post("/cache/prefetch", json={"prompt": prompts[0]}).json()
    assert fetched["blocks"] * BLOCK == known >= 96
    told.http.close()


def test_a_server_without_events_has_no_sources(server_url: str) -> None:
    assert httpx.get(f"{server_url}/kv_event_sources").json() == []
    assert "penstock_kv_events" not in httpx.get(f"{server_url}/metrics").text
