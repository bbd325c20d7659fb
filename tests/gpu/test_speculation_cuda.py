"""Drafts once more on CUDA: captured steps verify them, and the device works out where rows begin."""

from __future__ import annotations

import pytest
from cpu.engine.conftest import prompts
from cpu.engine.test_speculation import *  # noqa: F403

from gpu.test_engine_cuda import make_engine

pytestmark = pytest.mark.gpu
__all__ = ["make_engine", "prompts"]
