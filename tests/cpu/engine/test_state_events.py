"""What a router expects of a hybrid engine is what the next request of a conversation finds, from every tier,
also after a restart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.server.kv_events import EventBatch, block_hash, on_wire
from tests.support.driving import generate, settle_all, tiny_config, wait_scanned
from tests.support.kv_router import Router

Prompts = Callable[..., list[int]]


class Heard:
    def __init__(self, path: Path) -> None:
        settings: dict[str, Any] = {"blocks": 128, "host_blocks": 256, "states_gib": 0.001, "ssd_gib": 0.05}
        config = tiny_config("tiny-qwen3.5", ssd_dir=str(path), **settings)
        self.engine = build(dataclasses.replace(config, kv=dataclasses.replace(config.kv, events=True)))
        self.router = Router()

    def expected(self, prompt: list[int]) -> int:
        """Leading tokens of which the router knows the blocks, in any tier."""
        assert self.engine.cache.events is not None
        settle_all(self.engine)
        while events := self.engine.cache.events.take():
            batch = EventBatch(0.0, [on_wire(event, 16) for event in events])
            self.router.hear(self.router.next_sequence, msgspec.msgpack.encode(batch))
        prefix = self.engine.cache.prefix_of(prompt)
        assert prefix is not None
        known = {one for held in self.router.blocks.values() for one in held}
        return 16 * next(
            (n for n, key in enumerate(prefix.keys) if block_hash(key) not in known), len(prefix.keys)
        )


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Heard]]:
    made: list[Engine] = []

    def start() -> Heard:
        if made:
            made[-1].close(timeout_s=60.0)
        made.append((heard := Heard(tmp_path)).engine)
        wait_scanned(heard.engine)
        return heard

    yield start
    made[-1].close(timeout_s=60.0)


def test_a_router_expects_what_the_next_turn_finds(start: Callable[[], Heard], prompts: Prompts) -> None:
    heard, prompt = start(), prompts(200)
    for turn, lost in enumerate([(), (), ("device",), ("device", "host")]):
        heard.engine.cache.reset(lost)
        num_expected = heard.expected(prompt)
        found = generate(heard.engine, prompt, max_tokens=40)
        assert found.source is not None
        assert len(prompt) - found.source.computed == num_expected
        assert num_expected > 150 or not turn
        prompt = [*prompt, *found.tokens, *prompts(20, seed=turn + 1)]
    num_expected = heard.expected(prompt)
    assert num_expected == 368 and heard.engine.cache.events is not None
    heard.engine.cache.events.close()
    again = start()
    assert again.expected(prompt) == num_expected
    found = generate(again.engine, prompt)
    assert found.source is not None and found.source.ssd == num_expected
