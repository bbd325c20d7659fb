"""Sliding windows once more on CUDA: tables begin behind the blocks that have left, in captured steps and in
prompts, and what comes back is copied by streams."""

from __future__ import annotations

import pytest
from tests.cpu.engine.conftest import prompts
from tests.cpu.engine.test_windows import (
    make,
    test_a_full_match_computes_its_last_token_over_a_whole_window,
    test_a_generation_longer_than_the_device_runs_in_a_window_of_it,
    test_a_prompt_of_several_windows_in_any_chunks_gives_the_tokens_of_all_its_kv,
    test_a_random_crowd_over_all_tiers_gets_the_tokens_of_each_request_alone,
    test_a_retracted_request_saves_and_resumes_with_its_window,
    test_a_second_turn_finds_its_window_on_the_device_though_the_blocks_before_are_gone,
    test_a_second_turn_loads_no_more_than_its_window_from_host_memory,
    test_drafts_of_an_ngram_are_verified_over_the_window,
    test_requests_that_share_a_prefix_part_without_taking_what_was_promised,
)
from tests.gpu.test_engine_cuda import make_engine

pytestmark = pytest.mark.gpu
__all__ = [
    "make",
    "make_engine",
    "prompts",
    "test_a_full_match_computes_its_last_token_over_a_whole_window",
    "test_a_generation_longer_than_the_device_runs_in_a_window_of_it",
    "test_a_prompt_of_several_windows_in_any_chunks_gives_the_tokens_of_all_its_kv",
    "test_a_random_crowd_over_all_tiers_gets_the_tokens_of_each_request_alone",
    "test_a_retracted_request_saves_and_resumes_with_its_window",
    "test_a_second_turn_finds_its_window_on_the_device_though_the_blocks_before_are_gone",
    "test_a_second_turn_loads_no_more_than_its_window_from_host_memory",
    "test_drafts_of_an_ngram_are_verified_over_the_window",
    "test_requests_that_share_a_prefix_part_without_taking_what_was_promised",
]
