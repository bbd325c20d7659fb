"""Drafts of sequences that do not fit, once more on CUDA."""

from __future__ import annotations

import pytest
from tests.cpu.engine.conftest import prompts
from tests.cpu.engine.test_deep_drafts import (
    test_a_sequence_that_is_paged_out_gets_what_it_gets_without_drafts,
    test_its_steps_read_host_memory_once_for_several_tokens,
    test_under_retraction_and_cancels_it_leaves_nothing_behind,
)

from tests.gpu.test_engine_cuda import make_engine

pytestmark = pytest.mark.gpu
__all__ = [
    "make_engine",
    "prompts",
    "test_a_sequence_that_is_paged_out_gets_what_it_gets_without_drafts",
    "test_its_steps_read_host_memory_once_for_several_tokens",
    "test_under_retraction_and_cancels_it_leaves_nothing_behind",
]
