"""An EAGLE-3 head once more on CUDA: drafts of several passes are chained inside one replay."""

from __future__ import annotations

import pytest
from tests.cpu.engine.conftest import prompts
from tests.cpu.engine.test_eagle_engine import *  # noqa: F403

pytestmark = pytest.mark.gpu
__all__ = ["device", "prompts"]


@pytest.fixture
def device() -> str:
    return "cuda"
