"""Tiers behind host memory once more on CUDA: blocks are read into pinned slots and promoted from there by
copy engines."""

from __future__ import annotations

import pytest
from tests.cpu.engine.conftest import prompts
from tests.cpu.engine.test_cold_tiers import *  # noqa: F403

from tests.gpu.test_engine_cuda import make_engine

pytestmark = pytest.mark.gpu
__all__ = ["make_engine", "prompts"]
