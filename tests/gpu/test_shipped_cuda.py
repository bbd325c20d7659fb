"""The draft head of a checkpoint once more on CUDA: drafts of several passes are in one replay."""

from __future__ import annotations

import pytest
from tests.cpu.engine.conftest import prompts
from tests.cpu.engine.test_shipped_heads import (
    make,
    test_a_random_head_changes_no_answer,
    test_it_drafts_what_a_plain_reference_drafts,
    test_its_kv_is_found_again_on_the_device_and_in_host_memory,
    test_of_a_head_that_equals_its_target_all_is_kept,
)

pytestmark = pytest.mark.gpu
__all__ = [
    "make",
    "prompts",
    "test_a_random_head_changes_no_answer",
    "test_it_drafts_what_a_plain_reference_drafts",
    "test_its_kv_is_found_again_on_the_device_and_in_host_memory",
    "test_of_a_head_that_equals_its_target_all_is_kept",
]


@pytest.fixture
def device() -> str:
    return "cuda"
