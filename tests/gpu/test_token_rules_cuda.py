"""Allowed tokens and bad words on CUDA: the same tests as on the CPU, with captured steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cpu.engine.conftest import prompts  # noqa: F401
from tests.cpu.engine.test_token_rules import *  # noqa: F403

from penstock.engine.engine import Engine
from penstock.testing.sanitized import build_sanitized, check_silent
from tests.support.driving import tiny_config

pytestmark = pytest.mark.gpu


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    made: list[Any] = []

    def make(model: str = "tiny-qwen3", **settings: Any) -> Engine:
        made.append(build_sanitized(tiny_config(model, device="cuda", **settings)))
        made[-1][0].warm()
        return made[-1][0]

    yield make
    for engine, sanitizer in made:
        engine.close(timeout_s=20.0)
        check_silent(sanitizer)
