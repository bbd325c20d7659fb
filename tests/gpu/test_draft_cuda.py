"""A draft model once more on CUDA."""

from __future__ import annotations

import pytest
from tests.cpu.engine.conftest import prompts
from tests.cpu.engine.test_draft_engine import *  # noqa: F403

# It holds one layer's copy back while a step is launched over it, and a launch waits for an event of CUDA's
# to be recorded.
del test_a_step_launched_over_a_load_waits_for_the_drafts_layers_too  # type: ignore[name-defined]  # noqa: F821

pytestmark = pytest.mark.gpu
__all__ = ["device", "prompts"]


@pytest.fixture
def device() -> str:
    return "cuda"
