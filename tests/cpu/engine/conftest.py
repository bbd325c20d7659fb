from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.engine import Engine
from penstock.observe import Observers
from penstock.sanitizer.sanitizer import Sanitizer
from penstock.testing.sanitized import build_sanitized, check_silent
from tests.support.driving import tiny_config


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    """Builds tiny engines under the sanitizer. Closing them at the end proves that nothing leaked, since
    `close` raises where a slot is still held, and that nothing was touched out of order."""
    made: list[tuple[Engine, Sanitizer]] = []

    def make(model: str = "tiny-qwen3", observers: Observers | None = None, **settings: Any) -> Engine:
        made.append(build_sanitized(tiny_config(model, **settings), observers))
        return made[-1][0]

    yield make
    for engine, sanitizer in made:
        engine.close(timeout_s=20.0)
        check_silent(sanitizer)


@pytest.fixture
def prompts() -> Callable[..., list[int]]:
    """Random prompts of a given length, the same for the same seed."""

    def make(num_tokens: int, seed: int = 0) -> list[int]:
        return np.random.default_rng(seed).integers(1, 500, num_tokens).tolist()

    return make
