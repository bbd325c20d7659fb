"""`--deterministic`: answers are the same bits, whether a prompt was computed or reused, alone or in a batch;
and what it does not take."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from penstock.config import Config, KvConfig, LoraConfig, ModelSource, SpeculationConfig, WeightsName
from penstock.engine.build import build
from penstock.errors import ConfigError
from penstock.models.model import ModelConfig
from penstock.models.registry import BUILT_IN
from penstock.testing.tiny_models import (
    TINY_GEMMA3,
    TINY_GLM4_MOE,
    TINY_GRANITE,
    TINY_OLMO2,
    TINY_QWEN2_MOE,
    write_tiny_model,
)
from tests.support.driving import generate, tiny_config
from tests.support.steadiness import differing
from tests.support.tiny_gguf import write_tiny_gguf

TINY = ("tiny-llama", "tiny-qwen3", "tiny-qwen3-moe")


def config_of(model: str, weights: WeightsName, deterministic: bool = True, host_blocks: int = 256) -> Config:
    config = tiny_config(model if model in TINY else "tiny-llama", host_blocks=host_blocks, max_model_len=400)
    source = dataclasses.replace(config.source, model=model, weights=weights, deterministic=deterministic)
    return dataclasses.replace(
        config, source=source if model in TINY else dataclasses.replace(source, load_format="auto")
    )


@pytest.mark.parametrize(
    ("model", "weights"), [("tiny-llama", "float32"), ("tiny-qwen3", "bfloat16"), ("tiny-qwen3", "int8")]
)
def test_answers_are_the_same_bits_wherever_kv_comes_from(
    tmp_path: Path, model: str, weights: WeightsName
) -> None:
    assert differing(config_of(model, weights), tmp_path) == []


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_answers_of_a_model_with_a_shared_expert_are_the_same_bits(
    tmp_path: Path, weights: WeightsName
) -> None:
    model = write_tiny_model(tmp_path / "model", TINY_QWEN2_MOE)
    assert differing(config_of(str(model), weights), tmp_path / "disk") == []


@pytest.mark.parametrize("model", [TINY_GEMMA3, TINY_GLM4_MOE, TINY_GRANITE, TINY_OLMO2])
def test_answers_of_models_with_layers_of_their_own_are_the_same_bits(
    tmp_path: Path, model: ModelConfig
) -> None:
    folder = write_tiny_model(tmp_path / "model", model)
    assert differing(config_of(str(folder), "int8"), tmp_path / "disk") == []


def in_4_bits(folder: Path, model: str = "tiny-llama") -> str:
    encodings = {True: "Q4_1", False: "Q8_0"}
    path, dims = folder / "tiny.gguf", BUILT_IN[model]
    return str(write_tiny_gguf(path, dims, encoding_of=lambda name: encodings[".layers." in name]))


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3-moe"])
def test_answers_of_a_file_in_4_bits_are_the_same_bits(tmp_path: Path, model: str) -> None:
    assert differing(config_of(in_4_bits(tmp_path, model), "int4"), tmp_path / "disk") == []


def test_without_the_flag_the_check_above_fails(tmp_path: Path) -> None:
    assert differing(config_of(in_4_bits(tmp_path), "int4", deterministic=False), tmp_path / "disk") != []


def test_kv_of_both_modes_has_keys_of_its_own(tmp_path: Path) -> None:
    """A store may be shared by engines of both."""
    prompt, folder = list(range(3, 100)), str(tmp_path)
    for deterministic in (True, False):
        config = config_of("tiny-llama", "int8", deterministic)
        engine = build(
            dataclasses.replace(
                config, offload=dataclasses.replace(config.offload, ssd_dir=folder, ssd_gib=0.1)
            )
        )
        found = generate(engine, prompt, max_tokens=2)
        assert found.source is not None and found.source.computed == len(prompt)
        engine.cache.persist()
        engine.close(timeout_s=20.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"source": ModelSource("tiny-llama", "dummy", "cpu", "bfloat16", deterministic=True)},
            "needs --device cpu and --dtype float32",
        ),
        ({"lora": LoraConfig((("a", "/nowhere"),))}, "adapters are not covered"),
        ({"speculation": SpeculationConfig("mtp")}, "--speculate mtp is not covered"),
        ({"speculation": SpeculationConfig("eagle:x")}, "--speculate eagle is not covered"),
        ({"kv": KvConfig(device_blocks=64, resident_tokens=256)}, "fit on the device"),
        ({"kv": KvConfig(device_blocks=9)}, "fit on the device"),
    ],
)
def test_what_would_not_be_the_same_bits_is_refused(change: dict[str, object], message: str) -> None:
    config = dataclasses.replace(config_of("tiny-llama", "int8"), **change)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        build(config)


def test_the_number_of_threads_changes_no_bit(tmp_path: Path) -> None:
    """An engine has more threads or fewer as others use the cores."""
    found = []
    for threads in (1, 2):
        engine = build(config_of("tiny-qwen3", "int8"))
        engine.parts.lanes[0].submit(lambda num=threads: torch.set_num_threads(num), label="threads")  # type: ignore[misc]
        answer = generate(
            engine, [7 * i % 500 + 3 for i in range(300)], max_tokens=20, logprobs=4, ignore_eos=True
        )
        found.append((answer.tokens, answer.logprobs))
        engine.close(timeout_s=20.0)
    assert found[0] == found[1]
