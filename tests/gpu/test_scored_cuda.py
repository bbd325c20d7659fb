"""Scored residency once more on CUDA: bounds of keys are kept there, and parts come over the link."""

from __future__ import annotations

import pytest
from tests.cpu.engine.conftest import prompts
from tests.cpu.engine.test_scored import *  # noqa: F403

from tests.gpu.test_engine_cuda import make_engine

pytestmark = pytest.mark.gpu
__all__ = ["make_engine", "prompts"]


@pytest.fixture
def device() -> str:
    return "cuda"
