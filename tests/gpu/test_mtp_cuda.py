"""A head that makes drafts once more on CUDA."""

from __future__ import annotations

import pytest
from tests.cpu.engine.conftest import prompts
from tests.cpu.engine.test_mtp_engine import *  # noqa: F403

pytestmark = pytest.mark.gpu
__all__ = ["device", "prompts"]


@pytest.fixture
def device() -> str:
    return "cuda"
