"""A tiny engine that measurements can drive."""

from __future__ import annotations

import pytest

from penstock.config import Config, EngineConfig, KvConfig, ModelSource
from penstock.engine.build import build


@pytest.fixture
def config() -> Config:
    return Config(ModelSource("tiny-llama", "dummy", "cpu"), KvConfig(device_blocks=64), EngineConfig(max_batch=8, prefill_chunk=64))


@pytest.fixture
def engine(config):
    engine = build(config)
    yield engine
    engine.close(timeout_s=20.0)
