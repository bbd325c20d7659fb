"""A draft model once more on CUDA."""

from __future__ import annotations

import pytest
from cpu.engine.conftest import prompts
from cpu.engine.test_draft_engine import *  # noqa: F403

pytestmark = pytest.mark.gpu
__all__ = ["device", "prompts"]


@pytest.fixture
def device() -> str:
    return "cuda"
