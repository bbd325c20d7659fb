"""Dynamo's selection service and standalone indexer, which know where blocks are by the events alone."""

from __future__ import annotations

import urllib.request
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.routers.fleet import (
    BLOCK,
    ENVIRONMENTS,
    MODEL,
    Fleet,
    Process,
    Turns,
    Worker,
    post,
    prompt_of,
    say,
)
from tests.support.servers import free_port

PYTHON = str(ENVIRONMENTS / "dynamo" / "bin" / "python")
NUM = 64
MORE = " What came before that? Tell me more about it, and keep to the facts."


class Selector(Process):
    def __init__(self, workers: list[Worker]) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        command = [PYTHON, "-m", "dynamo.select_service", "--port", str(port)]
        super().__init__("the selection service", command, f"{self.url}/health")
        for worker in workers:
            known = {"worker_id": worker.number, "model_name": MODEL, "endpoint": worker.url}
            events = {"kv_events_endpoint": worker.events, "replay_endpoint": worker.replay}
            post(f"{self.url}/workers", {**known, **events, "block_size": BLOCK})

    def reserve(self, name: str, tokens: list[int]) -> int:
        asked = {"token_ids": tokens, "model_name": MODEL, "selection_id": name}
        found: int = post(f"{self.url}/select_and_reserve", asked)["worker_id"]
        return found

    def delete(self, path: str) -> None:
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/{path}", method="DELETE")).close()


class Indexer(Process):
    def __init__(self, workers: list[Worker]) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        command = [PYTHON, "-m", "dynamo.indexer", "--block-size", str(BLOCK), "--port", str(port)]
        command += ["--workers", ",".join(f"{worker.number}={worker.events}" for worker in workers)]
        super().__init__("the indexer", command, f"{self.url}/health")

    def matched(self, tokens: list[int]) -> dict[int, int]:
        """Tokens that each server has in its own memory or on its disk."""
        found = post(f"{self.url}/query", {"token_ids": tokens, "model_name": "default"})["instances"]
        return {int(number): one["longest_matched"] for number, one in found.items()}


@pytest.fixture
def routers(fleet: Fleet) -> Iterator[tuple[Selector, Indexer]]:
    say("starting Dynamo's selection service and indexer")
    indexer = Indexer(fleet.workers)
    try:
        selector = Selector(fleet.workers)
        try:
            yield selector, indexer
        finally:
            selector.kill()
    finally:
        indexer.kill()


def turn(fleet: Fleet, selector: Selector, texts: list[str], owners: list[int]) -> Turns:
    """One turn of each conversation, at the server that Dynamo selects. Changes `texts`."""
    by_number = {worker.number: worker for worker in fleet.workers}
    chosen, sources = [], []
    for number, text in enumerate(texts):
        chosen.append(selector.reserve(f"{number}", fleet.tokens(text)))
        texts[number], source = by_number[chosen[-1]].complete(text)
        sources.append(source)
        if number % 16 == 15:
            say(f"{number + 1} of {len(texts)} conversations")
    for number in range(len(texts)):
        selector.delete(f"reservations/{number}")
    fleet.settle()
    return Turns(owners, chosen, sources)


def test_a_second_turn_goes_to_the_server_that_has_its_kv_and_survives_it(
    fleet: Fleet, routers: tuple[Selector, Indexer]
) -> None:
    selector, indexer = routers
    texts = [prompt_of(number) for number in range(NUM)]
    say("first turns")
    first = turn(fleet, selector, texts, [0] * NUM)
    shares = Counter(first.chosen)
    assert min(shares[1], shares[2]) >= NUM // 4, f"one server has nearly all: {shares}"

    texts = [text + MORE for text in texts]
    known = [indexer.matched(fleet.tokens(text)) for text in texts]
    is_best = [
        max(one, key=one.__getitem__, default=0) == owner
        for one, owner in zip(known, first.chosen, strict=True)
    ]
    say("second turns")
    second = turn(fleet, selector, texts, first.chosen)
    say(
        f"{second.num_returned} of {NUM} second turns went to the server that had their KV; "
        f"the indexer named it for {sum(is_best)}; first turns by server: {dict(shares)}"
    )
    assert second.num_returned >= 0.95 * NUM and sum(is_best) >= 0.95 * NUM

    say("server 1 is killed")
    dead = fleet.workers.pop(0)
    dead.kill()
    selector.delete(f"workers/{dead.number}")
    texts = [text + MORE for text in texts]
    third = turn(fleet, selector, texts, second.chosen)
    orphans = [
        source for owner, source in zip(second.chosen, third.sources, strict=True) if owner == dead.number
    ]
    restored = sum(source["remote"] >= 8 * BLOCK for source in orphans)
    say(f"{restored} of {len(orphans)} conversations of the killed server came from the shared store")
    assert set(third.chosen) == {2} and restored >= 0.95 * len(orphans) > 0


def test_a_router_that_comes_late_replays_what_it_missed(fleet: Fleet) -> None:
    """The selection service asks for a replay; it then knows blocks from before its start."""
    text, _ = fleet.workers[1].complete(prompt_of(1))
    fleet.settle()
    selector = Selector(fleet.workers)
    try:
        fleet.workers[1].complete(prompt_of(2))  # what comes live shows the service that earlier ones miss
        fleet.settle()
        asked = {"token_ids": fleet.tokens(text), "model_name": MODEL}
        found = post(f"{selector.url}/overlap_scores", asked)["workers"]
        num_blocks = {one["worker_id"]: one["device_blocks"] for one in found}
        assert num_blocks[2] >= 9 and num_blocks[1] == 0
    finally:
        selector.kill()
