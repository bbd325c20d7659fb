"""Structured output on CUDA: the same tests as on the CPU, with captured steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("llguidance", reason="structured output is an extra")

from tests.cpu.engine.test_structured import *  # noqa: F403

from penstock.engine.engine import Engine
from penstock.testing.sanitized import build_sanitized, check_silent
from tests.support.driving import tiny_config

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine, sanitizer = build_sanitized(tiny_config(blocks=1024, max_batch=32, device="cuda"))
    engine.warm()
    yield engine
    engine.close(timeout_s=20.0)
    check_silent(sanitizer)
