"""Scored requests of hybrid models once more on CUDA: parts come over the link, states are in rows."""

from __future__ import annotations

import pytest
from tests.cpu.engine.conftest import prompts
from tests.cpu.engine.test_scored_states import *  # noqa: F403
from tests.cpu.engine.test_scored_states import _figures_decide_nothing

from tests.gpu.test_engine_cuda import make_engine

pytestmark = pytest.mark.gpu
__all__ = ["_figures_decide_nothing", "make_engine", "prompts"]
