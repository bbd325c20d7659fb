"""The engine's logits against `transformers` on the same weights, through the paged cache: prefill in chunks,
batched incremental decode, a cached prefix, and a page-aligned full match."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from penstock.config import Config, EngineConfig, KvConfig, ModelSource
from penstock.engine.engine import Engine
from penstock.testing.sanitized import build_sanitized, check_silent
from tests.support.driving import run_all, submit
from tests.support.logits import Logits, largest_error
from tests.support.reference import reference_model

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time, in a village at the foot of a mountain, there lived an old clockmaker who had "
    "forgotten how to sleep. " * 6,
    "Grüße aus Köln! 东京 is 日本の首都です. Прощай, ",
]
TOLERANCE = 1e-4  # relative to the largest logit


@pytest.fixture(scope="module")
def reference_smollm2() -> Any:
    return reference_model()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    torch.set_num_threads(1)
    source = ModelSource(dtype="float32", device="cpu")
    built, sanitizer = build_sanitized(
        Config(source, KvConfig(device_gib=0.3), EngineConfig(prefill_chunk=48, max_batch=8))
    )
    yield built
    built.close(timeout_s=20.0)
    check_silent(sanitizer)


def test_prefill_in_chunks_and_batched_decode_agree_with_transformers(
    engine: Engine, reference_smollm2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.parts.cache.reset()
    prompts = [engine.tokenizer.encode(text) for text in PROMPTS]
    logits = Logits(engine, monkeypatch)
    found = [submit(engine, prompt, max_tokens=6) for prompt in prompts]
    run_all(engine)
    assert all(c.source is not None and c.source.device == 0 for c in found)
    assert largest_error(reference_smollm2, logits, prompts, found) < TOLERANCE


def test_a_cached_prefix_and_a_full_match_agree_with_transformers(
    engine: Engine, reference_smollm2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.parts.cache.reset()
    tokens = engine.tokenizer.encode(PROMPTS[2])
    aligned = tokens[:64]
    submit(engine, tokens[:100])
    run_all(engine)
    for prompt, device in ((aligned, 63), (tokens, 96)):
        logits = Logits(engine, monkeypatch)
        found = submit(engine, prompt, max_tokens=3)
        run_all(engine)
        assert found.source is not None and found.source.device == device
        assert largest_error(reference_smollm2, logits, [prompt], [found]) < TOLERANCE
        monkeypatch.undo()
