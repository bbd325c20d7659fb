"""SmolLM2 with a host tier, on real prompts: the same tokens wherever the KV comes from, the same bytes after
a round trip, logits of a returning prompt beside those of a cold one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from penstock.config import Config, EngineConfig, KvConfig, ModelSource, OffloadConfig
from penstock.engine.engine import Engine
from penstock.sanitizer.sanitizer import Sanitizer
from penstock.testing.sanitized import build_sanitized, check_silent
from tests.support.driving import Collected, run_all, settle_all, submit
from tests.support.logits import Logits

TEXTS = [
    "Once upon a time, in a village at the foot of a mountain, there lived an old clockmaker who had "
    "forgotten how to sleep. " * 3,
    "def quicksort(items):\n    if len(items) < 2:\n        return items\n    pivot = items[0]\n" * 3,
    "The history of the canal begins in 1768, when engineers measured the valley for the first time and "
    "found it too steep. " * 3,
]
NUM_TOKENS = 18
NUM_PROMPT_BLOCKS = 18  # of all three


def make(device_blocks: int = 96, **settings: Any) -> tuple[Engine, Sanitizer]:
    torch.set_num_threads(1)
    engine = EngineConfig(prefill_chunk=64, max_batch=8, overcommit=settings.pop("overcommit", 1.0))
    kv = KvConfig(device_blocks=device_blocks, prefix_cache=settings.pop("prefix_cache", True))
    offload = OffloadConfig(
        enabled=settings.pop("enabled", True), host_gib=None if not settings.pop("sized", True) else 0.1
    )
    return build_sanitized(Config(ModelSource(dtype="float32", device="cpu"), kv, engine, offload))


def close(engine: Engine, sanitizer: Sanitizer) -> None:
    settle_all(engine)
    engine.parts.scheduler.check()
    engine.cache.check()
    engine.close(timeout_s=20.0)
    check_silent(sanitizer)


def answers(engine: Engine) -> list[Collected]:
    found = [submit(engine, engine.tokenizer.encode(text), max_tokens=NUM_TOKENS) for text in TEXTS]
    run_all(engine)
    return found


@pytest.fixture(scope="module")
def expected() -> Iterator[list[list[int]]]:
    engine, sanitizer = make(enabled=False, sized=False)
    yield [found.tokens for found in answers(engine)]
    close(engine, sanitizer)


def by_source(found: list[Collected], source: str) -> list[int]:
    return [getattr(one.source, source) for one in found]


def test_tiers_on_host_hit_and_split_hit_give_the_tokens_of_tiers_off(expected: list[list[int]]) -> None:
    engine, sanitizer = make()
    cold = answers(engine)
    assert [one.tokens for one in cold] == expected and by_source(cold, "host") == [0, 0, 0]
    settle_all(engine)
    engine.cache.reset(("device",))
    warm = answers(engine)
    assert [one.tokens for one in warm] == expected
    assert min(by_source(warm, "host")) >= 64 and by_source(warm, "device") == [0, 0, 0]
    settle_all(engine)
    engine.cache.reset(("device",))
    for text in TEXTS:
        submit(engine, engine.tokenizer.encode(text)[:40], max_tokens=1)
    run_all(engine)
    split = answers(engine)
    assert [one.tokens for one in split] == expected
    assert by_source(split, "device") == [32, 32, 32] and min(by_source(split, "host")) >= 32
    close(engine, sanitizer)


def test_restored_bytes_and_logits_are_those_of_a_cold_run(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sanitizer = make()
    prompt = engine.tokenizer.encode(TEXTS[0])
    prefix = engine.cache.prefix_of(prompt)
    assert prefix is not None
    arena, pool = engine.parts.arena.tensor, engine.cache._pool

    def run() -> tuple[dict[tuple[int, int], torch.Tensor], torch.Tensor]:
        logits = Logits(engine, monkeypatch)
        submit(engine, prompt, max_tokens=6)
        run_all(engine)
        settle_all(engine)
        monkeypatch.undo()
        return logits.seen, arena[pool.find(prefix.keys)].clone()

    cold, saved = run()
    engine.cache.reset(("device",))
    arena[: engine.cache.num_blocks].fill_(float("nan"))
    warm, restored = run()
    assert len(prefix.keys) == len(saved) and torch.equal(saved, restored), "bit by bit"
    assert warm.keys() == cold.keys()
    worst = max(float((warm[at] - cold[at]).abs().max() / cold[at].abs().max()) for at in cold)
    assert worst < 1e-4
    close(engine, sanitizer)
