"""Families and rotary schemes once more on CUDA, against `transformers` on the CPU: windows in the kernels,
biases, heads that turn in part, captured decode steps."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="NOT TESTED: the reference needs transformers")
from tests.e2e.test_parity_families import (
    FAMILIES,
    ROPES,
    assert_parity,
    save,
    served,
    their_model,
)
from penstock.models.registry import parse_config
from penstock.models.weights import read_json
from tests.support.adapters import adapter_tensors, merged_into, write_adapter

pytestmark = pytest.mark.gpu
TOLERANCE = 1e-3  # of a log-probability: products are summed in another order than on the CPU
TRIED = (
    "llama with biases",
    "mistral",
    "qwen2 with windows",
    "qwen3 with biases and windows",
    "phi3",
    "phi4-mini",
    "qwen3-moe",
    "mixtral with windows",
    "qwen2-moe",
    "gemma3",
    "gemma3, stretched",
    "glm4-moe",
    "glm4-moe with groups",
    "smollm3 with windows",
    "olmo2",
    "olmo3, stretched",
    "granite",
)


@pytest.mark.parametrize("family", TRIED)
def test_a_family_computes_on_cuda_what_transformers_computes(family: str, tmp_path: Path) -> None:
    name, fields = FAMILIES[family]
    reference = their_model(name, **fields)
    with served(save(reference, tmp_path), device="cuda") as engine:
        assert_parity(engine, reference, tolerance=TOLERANCE)


@pytest.mark.parametrize("scheme", ["dynamic", "llama3", "yarn", "longrope of a part of each head"])
def test_a_rotary_scheme_computes_on_cuda_what_transformers_computes(scheme: str, tmp_path: Path) -> None:
    name, rope, fields = ROPES[scheme]
    reference = their_model(name, rope, **fields)
    with served(save(reference, tmp_path), device="cuda") as engine:
        assert_parity(engine, reference, tolerance=TOLERANCE)


@pytest.mark.parametrize("family", ["qwen2 with windows", "phi4-mini"])
def test_an_adapter_on_cuda_changes_what_it_changes_on_the_cpu(family: str, tmp_path: Path) -> None:
    name, fields = FAMILIES[family]
    reference = their_model(name, **fields)
    directory = save(reference, tmp_path / "model")
    config = parse_config(read_json(directory / "config.json"), "config.json")
    tensors = adapter_tensors(
        config, seed=1, modules=("q_proj", "k_proj", "o_proj", "up_proj", "qkv_proj", "gate_up_proj")
    )
    adapter = write_adapter(tmp_path / "adapter", tensors)
    with served(directory, lora=adapter, device="cuda") as engine, merged_into(reference, tensors, scale=2.0):
        loaded = engine.adapters.find("tuned")
        assert loaded is not None
        assert_parity(engine, reference, loaded.adapter, TOLERANCE)
