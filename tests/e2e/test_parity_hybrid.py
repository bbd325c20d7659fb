"""Hybrid models against `transformers`, whose layers run without compiled kernels: prompts in any chunks,
decode alone and beside prompts, files of the text part alone and of models that also take images."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.config import Config, EngineConfig, KvConfig, ModelSource, WeightsName
from penstock.engine.engine import Engine
from penstock.errors import ModelError
from penstock.models.loader import read_config
from penstock.testing.sanitized import build_sanitized, check_silent
from tests.e2e.test_parity_families import (
    DECODED,
    IDS,
    TOTAL,
    largest_error,
    save,
    their_logprobs,
    their_model,
)
from tests.support.driving import Collected, run_all, submit

TOLERANCE = 1e-4  # of a log-probability, absolute
PROMPT = 150
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
SIZES = {**DELTA, "num_hidden_layers": 5, "head_dim": 32, "linear_value_head_dim": 24}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
EXPERTS |= {"shared_expert_intermediate_size": 40}
MIXED = ["full_attention", "linear_attention", "linear_attention", "full_attention", "linear_attention"]
SECTIONS = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}  # positions of images
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3-next": ("Qwen3Next", {}, {**EXPERTS}),
    "qwen3-next with dense layers": ("Qwen3Next", {}, {**EXPERTS, "mlp_only_layers": [1, 3], "layer_types": MIXED}),
    "qwen3-next, choices as they are": ("Qwen3Next", {}, {**EXPERTS, "norm_topk_prob": False}),
    "qwen3.5": ("Qwen3_5Text", SECTIONS, {"tie_word_embeddings": True}),
    "qwen3.5 of other sizes": (
        "Qwen3_5Text",
        {**SECTIONS, "partial_rotary_factor": 0.5},
        {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 3, "layer_types": MIXED},
    ),
    "qwen3.5-moe": ("Qwen3_5MoeText", SECTIONS, EXPERTS),
}
MODELS = {"Qwen3_5Text": "Qwen3_5", "Qwen3_5MoeText": "Qwen3_5Moe"}  # by config, where names differ


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def reference_of(family: str) -> Any:
    """States last for tens of tokens, so that an old one shows."""
    name, rope, fields = FAMILIES[family]
    reference = their_model(name, rope, model=MODELS.get(name), **{**SIZES, **fields})
    with torch.no_grad():
        for parameter_name, parameter in reference.named_parameters():
            if parameter_name.endswith("A_log"):
                parameter.uniform_(-5.0, -2.0)
            if parameter_name.endswith("conv1d.weight"):
                parameter.normal_(0.0, 0.5)
    return reference


@contextlib.contextmanager
def served(directory: Path, chunk: int = 48, weights: WeightsName = "float32") -> Iterator[Engine]:
    config = Config(
        source=ModelSource(str(directory), device="cpu", dtype="float32", weights=weights),
        kv=KvConfig(device_blocks=64),
        engine=EngineConfig(TOTAL, max_batch=4, prefill_chunk=chunk),
    )
    engine, sanitizer = build_sanitized(config)
    try:
        yield engine
    finally:
        engine.close(timeout_s=20.0)
    check_silent(sanitizer)


def scored(engine: Engine, prompt: list[int], **more: Any) -> Collected:
    return submit(engine, prompt, max_tokens=DECODED, logprobs=0, prompt_logprobs=0, **more)


def error_of(reference: Any, prompt: list[int], found: Collected) -> float:
    expected = their_logprobs(reference, prompt + found.tokens)
    assert expected.std() > 0.5
    return largest_error(expected, prompt, found)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hybrid_model_computes_what_transformers_computes(family: str, tmp_path: Path) -> None:
    """A prompt in chunks of 48, and several requests in the same steps."""
    reference = reference_of(family)
    prompts = [IDS[:PROMPT], IDS[PROMPT : PROMPT + 70], IDS[30:31], IDS[40:104]]
    with served(save(reference, tmp_path)) as engine:
        found = [scored(engine, prompt) for prompt in prompts]
        run_all(engine)
        for prompt, one in zip(prompts, found, strict=True):
            assert error_of(reference, prompt, one) < TOLERANCE
        alone = scored(engine, prompts[0])
        run_all(engine)
    assert alone.source is not None and alone.source.computed == PROMPT, "no prefix is reused"
    assert error_of(reference, prompts[0], alone) < TOLERANCE


@pytest.mark.parametrize("chunk", [1, 2, 3, 16, 63, 64, 65, 150])
def test_a_prompt_in_any_chunks_gives_the_same(chunk: int, tmp_path: Path) -> None:
    reference = reference_of("qwen3.5")
    with served(save(reference, tmp_path), chunk) as engine:
        found = scored(engine, IDS[:PROMPT])
        run_all(engine)
    assert error_of(reference, IDS[:PROMPT], found) < TOLERANCE
