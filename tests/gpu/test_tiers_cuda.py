"""The host tier's engine tests once more on CUDA: real copies over the link, captured graphs, streams and
events."""

from __future__ import annotations

import pytest
from tests.cpu.engine.conftest import prompts
from tests.cpu.engine.test_tiers import *  # noqa: F403

from tests.gpu.test_engine_cuda import make_engine

pytestmark = pytest.mark.gpu
__all__ = ["make_engine", "prompts"]
