"""The trace once more on CUDA, where lanes report launches and no starts."""

from __future__ import annotations

import pytest
from tests.cpu.engine.conftest import prompts
from tests.cpu.engine.test_trace import *  # noqa: F403

from tests.gpu.test_engine_cuda import make_engine

pytestmark = pytest.mark.gpu
__all__ = ["make_engine", "prompts"]
