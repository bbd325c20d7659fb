"""vllm-router, which guesses from the texts that it has sent: a proxy in front of two servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.routers.fleet import (
    BLOCK,
    ENVIRONMENTS,
    Fleet,
    Process,
    Turns,
    completed,
    get,
    prompt_of,
    say,
)
from tests.routers.test_dynamo import MORE, NUM
from tests.support.servers import free_port


@pytest.fixture
def router_url(fleet: Fleet) -> Iterator[str]:
    port = free_port()
    command = [str(ENVIRONMENTS / "vllm-router" / "bin" / "vllm-router"), "--policy", "cache_aware"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--worker-startup-check-interval", "1", "--health-check-interval-secs", "2"]
    command += ["--worker-urls", *(worker.url for worker in fleet.workers)]
    say("starting vllm-router")
    router = Process("vllm-router", command, f"http://127.0.0.1:{port}/health")
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        router.kill()


def num_answered(fleet: Fleet) -> dict[int, float]:
    found = {}
    for worker in fleet.workers:
        lines = get(f"{worker.url}/metrics").decode().splitlines()
        (line,) = (line for line in lines if line.startswith("penstock_prompt_length_tokens_count"))
        found[worker.number] = float(line.split()[-1])
    return found


def turn(fleet: Fleet, url: str, texts: list[str], owners: list[int]) -> Turns:
    """One turn of each conversation through the router. Changes `texts`."""
    chosen, sources = [], []
    for number, text in enumerate(texts):
        before = num_answered(fleet)
        texts[number], source = completed(url, text)
        (one,) = (name for name, num in num_answered(fleet).items() if num > before[name])
        chosen.append(one)
        sources.append(source)
        if number % 16 == 15:
            say(f"{number + 1} of {len(texts)} conversations")
    fleet.settle()
    return Turns(owners, chosen, sources)


def test_conversations_stay_where_they_are_and_survive_a_killed_server(fleet: Fleet, router_url: str) -> None:
    texts = [prompt_of(number) for number in range(NUM)]
    say("first turns")
    first = turn(fleet, router_url, texts, [0] * NUM)
    texts = [text + MORE for text in texts]
    say("second turns")
    second = turn(fleet, router_url, texts, first.chosen)
    shares = {number: first.chosen.count(number) for number in (1, 2)}
    say(f"{second.num_returned} of {NUM} second turns came back; first turns by server: {shares}")
    assert second.num_returned >= 0.95 * NUM and min(shares.values()) >= NUM // 4

    say("server 1 is killed")
    dead = fleet.workers.pop(0)
    dead.kill()
    texts = [text + MORE for text in texts]
    third = turn(fleet, router_url, texts, second.chosen)
    orphans = [
        source for owner, source in zip(second.chosen, third.sources, strict=True) if owner == dead.number
    ]
    restored = sum(source["remote"] >= 8 * BLOCK for source in orphans)
    say(f"{restored} of {len(orphans)} conversations of the killed server came from the shared store")
    assert restored >= 0.95 * len(orphans) > 0
