"""Kept states once more on CUDA: the compute stream copies them to and from pinned memory, in the order of
its steps."""

from __future__ import annotations

import functools

import pytest
from tests.cpu.engine.conftest import prompts
from tests.cpu.engine.test_kept_states import (
    MakeEngine,
    make,
    test_a_conversation_computes_its_newest_answer_and_question_alone,
    test_a_kept_state_that_is_not_copied_to_the_row_is_noticed,
    test_a_prompt_that_comes_back_begins_at_its_last_boundary,
    test_a_retracted_request_resumes_at_the_last_state_that_was_kept,
    test_a_state_that_is_kept_before_its_chunk_has_run_is_noticed,
    test_prompts_that_come_together_share_their_beginning,
    test_with_states_at_intervals_a_shared_beginning_and_an_answer_come_back,
)
from tests.gpu.test_engine_cuda import make_engine as cuda_engine

pytestmark = pytest.mark.gpu
__all__ = [
    "cuda_engine",
    "make",
    "prompts",
    "test_a_conversation_computes_its_newest_answer_and_question_alone",
    "test_a_kept_state_that_is_not_copied_to_the_row_is_noticed",
    "test_a_prompt_that_comes_back_begins_at_its_last_boundary",
    "test_a_retracted_request_resumes_at_the_last_state_that_was_kept",
    "test_a_state_that_is_kept_before_its_chunk_has_run_is_noticed",
    "test_prompts_that_come_together_share_their_beginning",
    "test_with_states_at_intervals_a_shared_beginning_and_an_answer_come_back",
]


@pytest.fixture
def make_engine(cuda_engine: MakeEngine) -> MakeEngine:
    """With so few states that all of them are pinned when the engine is there."""
    return functools.partial(cuda_engine, states_gib=0.01)
