"""Drafts of sequences that do not fit, and under grammars, once more on CUDA."""

from __future__ import annotations

import pytest
from tests.cpu.engine.conftest import prompts
from tests.cpu.engine.test_deep_drafts import (
    test_a_sequence_that_is_paged_out_gets_what_it_gets_without_drafts,
    test_its_steps_read_host_memory_once_for_several_tokens,
    test_under_retraction_and_cancels_it_leaves_nothing_behind,
)
from tests.cpu.engine.test_structured_drafts import (
    test_an_answer_with_a_grammar_is_that_of_plain_decoding,
    test_requests_with_and_without_grammars_share_steps_with_drafts,
)

from tests.gpu.test_engine_cuda import make_engine

pytestmark = pytest.mark.gpu
__all__ = [
    "make_engine",
    "prompts",
    "test_a_sequence_that_is_paged_out_gets_what_it_gets_without_drafts",
    "test_an_answer_with_a_grammar_is_that_of_plain_decoding",
    "test_its_steps_read_host_memory_once_for_several_tokens",
    "test_requests_with_and_without_grammars_share_steps_with_drafts",
    "test_under_retraction_and_cancels_it_leaves_nothing_behind",
]
