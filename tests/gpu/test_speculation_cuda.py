"""Drafts once more on CUDA: captured steps verify them, and the device works out where rows begin."""

from __future__ import annotations

import pytest
from tests.cpu.engine.conftest import prompts
from tests.cpu.engine.test_speculation import *  # noqa: F403

from tests.gpu.test_engine_cuda import make_engine

pytestmark = pytest.mark.gpu
__all__ = ["make_engine", "prompts"]
