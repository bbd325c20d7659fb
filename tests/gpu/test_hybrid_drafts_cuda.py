"""Drafts over recurrent states once more on CUDA: steps with drafts are captured apart from plain ones, and
kernels take the rows of a request together. Faults that a capture would not see are left out."""

from __future__ import annotations

import functools

import pytest
from tests.cpu.engine.conftest import prompts
from tests.cpu.engine.test_hybrid_drafts import (
    MODEL,
    MakeEngine,
    test_a_proposer_changes_no_answer_of_a_hybrid_model,
    test_a_request_gets_the_tokens_and_scores_of_plain_decoding,
    test_it_ends_where_plain_decoding_ends,
    test_many_requests_share_steps,
    test_random_crowds_with_drafts_tiers_and_kept_states,
    test_states_kept_in_an_answer_with_drafts_are_those_of_plain_decoding,
)

from tests.gpu.test_engine_cuda import make_engine as cuda_engine

pytestmark = pytest.mark.gpu
__all__ = [
    "cuda_engine",
    "prompts",
    "test_a_proposer_changes_no_answer_of_a_hybrid_model",
    "test_a_request_gets_the_tokens_and_scores_of_plain_decoding",
    "test_it_ends_where_plain_decoding_ends",
    "test_many_requests_share_steps",
    "test_random_crowds_with_drafts_tiers_and_kept_states",
    "test_states_kept_in_an_answer_with_drafts_are_those_of_plain_decoding",
]


@pytest.fixture
def device() -> str:
    return "cuda"


@pytest.fixture
def make_engine(cuda_engine: MakeEngine) -> MakeEngine:
    return functools.partial(cuda_engine, MODEL)
