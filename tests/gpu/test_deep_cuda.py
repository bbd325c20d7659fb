"""Deep sequences once more on CUDA: pieces are gathered from pinned memory on a stream of their own."""

from __future__ import annotations

import pytest
from tests.cpu.engine.conftest import prompts
from tests.cpu.engine.test_deep import *  # noqa: F403

from tests.gpu.test_engine_cuda import make_engine

# It stops a save between two blocks, and CUDA's copies of one save land together.
del test_blocks_stay_on_the_device_until_all_that_is_saved_with_them_has_landed  # type: ignore[name-defined]  # noqa: F821

pytestmark = pytest.mark.gpu
__all__ = ["make_engine", "prompts"]
