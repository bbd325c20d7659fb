"""Deep sequences once more on CUDA: pieces are gathered from pinned memory on a stream of their own."""

from __future__ import annotations

import pytest
from cpu.engine.conftest import prompts
from cpu.engine.test_deep import *  # noqa: F403

from gpu.test_engine_cuda import make_engine

pytestmark = pytest.mark.gpu
__all__ = ["make_engine", "prompts"]
