"""Recall on CUDA at lengths that take a CPU too long."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config import Config, EngineConfig, KvConfig, ModelSource
from penstock.engine.build import build
from retrieval import Retrieval, haystack, write_retrieval_model
from tests.support.driving import generate

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("num_tokens", "dtype"), [(1 << 17, "float32"), (1 << 17, "bfloat16"), (1 << 20, "bfloat16")]
)
def test_every_needle_is_found_at_any_length(tmp_path: Path, num_tokens: int, dtype: str) -> None:
    model = Retrieval(max_position=num_tokens + 1024)
    stack = haystack(num_tokens, seed=num_tokens, model=model)
    source = ModelSource(str(write_retrieval_model(tmp_path, model)), device="cuda", dtype=dtype)  # type: ignore[arg-type]
    engine = build(
        Config(
            source,
            KvConfig(device_blocks=model.max_position // 16 + 1),
            EngineConfig(max_batch=4, prefill_chunk=8192),
        )
    )
    asked = generate(engine, stack.all_questions(), max_tokens=len(stack.output))
    engine.close(timeout_s=60.0)
    assert asked.tokens == stack.output
