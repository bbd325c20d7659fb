"""A tiny engine that measurements can drive, with and without a host tier."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.config import Config, EngineConfig, KvConfig, ModelSource, OffloadConfig
from penstock.engine.build import build


@pytest.fixture
def config() -> Config:
    """The device alone."""
    return Config(
        ModelSource("tiny-llama", "dummy", "cpu"),
        KvConfig(device_blocks=64),
        EngineConfig(max_batch=8, prefill_chunk=64),
        OffloadConfig(enabled=False),
    )


@pytest.fixture
def engine(config):
    engine = build(config)
    yield engine
    engine.close(timeout_s=20.0)


@pytest.fixture
def tiered_config(config: Config) -> Config:
    return dataclasses.replace(config, offload=OffloadConfig(host_gib=0.05, load_always=True))


@pytest.fixture
def tiered_engine(tiered_config):
    engine = build(tiered_config)
    yield engine
    engine.close(timeout_s=20.0)
