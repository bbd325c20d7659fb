from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.testing.driving import tiny_config


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    """Builds tiny engines; closing them at the end also proves that nothing leaked: `close` raises where a slot is still held."""
    engines: list[Engine] = []

    def make(model: str = "tiny-qwen3", **settings: Any) -> Engine:
        engines.append(build(tiny_config(model, **settings)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close(timeout_s=20.0)


@pytest.fixture
def prompts() -> Callable[..., list[int]]:
    """Random prompts of a given length, the same for the same seed."""

    def make(num_tokens: int, seed: int = 0) -> list[int]:
        return np.random.default_rng(seed).integers(1, 500, num_tokens).tolist()

    return make
