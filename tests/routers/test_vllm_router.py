"""vllm-router, which guesses from the texts that it has sent: a proxy in front of two servers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.routers.fleet import (
    BLOCK,
    ENVIRONMENTS,
    Fleet,
    Process,
    completed,
    get,
    prompt_of,
    say,
    until,
)
from tests.routers.test_dynamo import MORE, NUM
from tests.support.servers import free_port


@pytest.fixture
def router_url(fleet: Fleet) -> Iterator[str]:
    port = free_port()
    command = [str(ENVIRONMENTS / "vllm-router" / "bin" / "vllm-router"), "--policy", "cache_aware"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--balance-abs-threshold", "1", "--balance-rel-threshold", "1.1"]
    command += ["--worker-startup-check-interval", "1", "--health-check-interval-secs", "2"]
    command += ["--health-failure-threshold", "1", "--cb-failure-threshold", "1", "--retry-max-retries", "2"]
    command += ["--worker-urls", *(worker.url for worker in fleet.workers)]
    say("starting vllm-router")
    router = Process("vllm-router", command, f"http://127.0.0.1:{port}/health")
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        router.kill()


def num_answered(fleet: Fleet) -> dict[int, int]:
    found = {}
    for worker in fleet.workers:
        lines = get(f"{worker.url}/metrics").decode().splitlines()
        counts = (line for line in lines if line.startswith("penstock_prompt_length_tokens_count"))
        found[worker.number] = int(sum(float(line.split()[-1]) for line in counts))
    return found


def answered(url: str, text: str) -> tuple[str, dict[str, int]]:
    """As a client that tries again: the router answers 500 until it has noticed that a server is gone."""
    answers: list[tuple[str, dict[str, int]]] = []

    def is_answered() -> bool:
        answers.append(completed(url, text))
        return True

    until(is_answered, "an answer")
    return answers[0]


def turn(fleet: Fleet, url: str, texts: list[str], at_once: int = 1) -> list[dict[str, int]]:
    """One turn of each conversation through the router. Changes `texts`; returns where the KV of each prompt
    came from."""
    with ThreadPoolExecutor(at_once) as threads:
        answers = [*threads.map(lambda text: answered(url, text), texts)]
    texts[:] = [text + MORE for text, _ in answers]
    fleet.settle()
    return [source for _, source in answers]


def num_with(sources: list[dict[str, int]], *tiers: str) -> int:
    """Prompts of which these tiers had eight blocks."""
    return sum(sum(source[tier] for tier in tiers) >= 8 * BLOCK for source in sources)


def test_conversations_stay_where_they_are_and_survive_a_killed_server(fleet: Fleet, router_url: str) -> None:
    texts = [prompt_of(number) for number in range(NUM)]
    say("first turns, eight at once: the router spreads by load")
    turn(fleet, router_url, texts, at_once=8)
    shares = num_answered(fleet)
    say("second turns")
    num_back = num_with(turn(fleet, router_url, texts), "device", "host")
    say(f"{num_back} of {NUM} second turns went to the server that had their KV; first turns: {shares}")
    assert num_back >= 0.95 * NUM and min(shares.values()) >= NUM // 8

    say("server 1 is killed")
    fleet.workers.pop(0).kill()
    sources = turn(fleet, router_url, texts)
    restored, at_home = num_with(sources, "remote"), num_with(sources, "device", "host")
    say(f"{restored} conversations came from the shared store, {at_home} were at the other server")
    assert restored >= 0.9 * shares[1] > 0 and restored + at_home >= 0.95 * NUM
