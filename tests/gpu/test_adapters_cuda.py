"""Adapters once more on CUDA: alone and in one batch, reloaded while requests run, and never on another
content's KV."""

from __future__ import annotations

import pytest
from tests.cpu.engine.conftest import prompts
from tests.cpu.engine.test_adapters_engine import (
    expected,
    load,
    test_a_request_finishes_on_the_content_it_began_with,
    test_a_retracted_request_resumes_on_its_own_content,
    test_an_adapter_reloaded_under_the_same_name_never_hits_stale_kv,
    test_base_and_adapters_in_one_batch_get_the_tokens_they_get_alone,
    test_salts_adapters_and_their_names_never_collide,
    test_weights_go_when_the_last_step_that_reads_them_has_been_read,
)
from tests.gpu.test_engine_cuda import make_engine

pytestmark = pytest.mark.gpu
__all__ = [
    "expected",
    "load",
    "make_engine",
    "prompts",
    "test_a_request_finishes_on_the_content_it_began_with",
    "test_a_retracted_request_resumes_on_its_own_content",
    "test_an_adapter_reloaded_under_the_same_name_never_hits_stale_kv",
    "test_base_and_adapters_in_one_batch_get_the_tokens_they_get_alone",
    "test_salts_adapters_and_their_names_never_collide",
    "test_weights_go_when_the_last_step_that_reads_them_has_been_read",
]
