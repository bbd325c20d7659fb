"""The engine's whole suite once more on CUDA, and its agreement with the CPU and with `transformers` on the
same weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cpu.engine.conftest import prompts
from tests.cpu.engine.test_engine import *  # noqa: F403
from tests.cpu.engine.test_combined_requests import (
    test_a_row_with_fewer_biases_has_none_of_the_request_before,
    test_requests_beside_a_biased_one_are_as_they_are_alone,
    test_tokens_that_the_model_does_not_have_are_refused,
)
from tests.cpu.engine.test_engine import MakeEngine, Prompts
from tests.cpu.engine.test_stress import (
    test_every_request_of_a_random_crowd_gets_the_tokens_it_would_get_alone,
)

import penstock.engine.build
from penstock.config import Config, EngineConfig, KvConfig, ModelSource
from penstock.engine.build import build
from penstock.engine.engine import Engine
from tests.support.driving import generate, run_all, submit, tiny_config
from penstock.sanitizer.sanitizer import Sanitizer
from penstock.testing.sanitized import build_sanitized, check_silent
from tests.support.logits import Logits, largest_error
from penstock.testing.tiny_models import write_tiny_model
from penstock.models.registry import BUILT_IN

pytestmark = pytest.mark.gpu
__all__ = [
    "prompts",
    "test_a_row_with_fewer_biases_has_none_of_the_request_before",
    "test_every_request_of_a_random_crowd_gets_the_tokens_it_would_get_alone",
    "test_requests_beside_a_biased_one_are_as_they_are_alone",
    "test_tokens_that_the_model_does_not_have_are_refused",
]


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    made: list[tuple[Engine, Sanitizer]] = []

    def make(model: str = "tiny-qwen3", **settings: Any) -> Engine:
        made.append(build_sanitized(tiny_config(model, **{"device": "cuda", **settings})))
        return made[-1][0]

    yield make
    for engine, sanitizer in made:
        engine.close(timeout_s=20.0)
        check_silent(sanitizer)


def real(directory: Path, device: str, dtype: str = "float32") -> Engine:
    source = ModelSource(model=str(directory), device=device, dtype=dtype)  # type: ignore[arg-type]
    return build(Config(source, KvConfig(device_blocks=512), EngineConfig(max_batch=8, prefill_chunk=48)))


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_cuda_and_transformers_agree_on_a_random_tiny_model(
    architecture: str, tmp_path: Path, prompts: Prompts, monkeypatch: Any
) -> None:
    from transformers import AutoModelForCausalLM

    directory = write_tiny_model(tmp_path / architecture, BUILT_IN[f"tiny-{architecture}"])
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    engine = real(directory, "cuda")
    logits = Logits(engine, monkeypatch)
    given = [prompts(n, seed=n) for n in (3, 16, 50, 120)]
    found = [submit(engine, prompt, max_tokens=8) for prompt in given]
    run_all(engine)
    assert largest_error(reference, logits, given, found) < 1e-4
    engine.close(timeout_s=20.0)


def test_cuda_and_transformers_agree_on_smollm2(monkeypatch: Any) -> None:
    from transformers import AutoModelForCausalLM

    directory = os.environ.get("PENSTOCK_SMOLLM2")
    if directory is None:
        pytest.skip("PENSTOCK_SMOLLM2 does not name a directory with the converted weights of SmolLM2")
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    engine = real(Path(directory), "cuda")
    logits = Logits(engine, monkeypatch)
    texts = [
        "The capital of France is",
        "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
        "A long road. " * 60,
    ]
    given = [engine.tokenizer.encode(text) for text in texts]
    found = [submit(engine, prompt, max_tokens=12) for prompt in given]
    run_all(engine)
    assert largest_error(reference, logits, given, found) < 1e-4
    assert "Paris" in engine.tokenizer.decode(found[0].tokens)
    engine.close(timeout_s=20.0)


def test_bfloat16_stays_close_to_float32(tmp_path: Path, prompts: Prompts, monkeypatch: Any) -> None:
    from transformers import AutoModelForCausalLM

    directory = write_tiny_model(tmp_path / "qwen3", BUILT_IN["tiny-qwen3"])
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    engine = real(directory, "cuda", "bfloat16")
    logits = Logits(engine, monkeypatch)
    given = [prompts(n, seed=n) for n in (3, 50, 120)]
    found = [submit(engine, prompt, max_tokens=8) for prompt in given]
    run_all(engine)
    assert largest_error(reference, logits, given, found, same_tokens=False) < 3e-2
    engine.close(timeout_s=20.0)


def test_sampled_tokens_are_those_of_the_cpu(tmp_path: Path, prompts: Prompts) -> None:
    directory = write_tiny_model(tmp_path / "llama", BUILT_IN["tiny-llama"])
    hot: dict[str, Any] = {
        "temperature": 0.9,
        "top_p": 0.9,
        "top_k": 50,
        "frequency_penalty": 0.5,
        "seed": 3,
        "max_tokens": 24,
    }
    engines = [real(directory, device) for device in ("cpu", "cuda")]
    runs = [generate(engine, prompts(30), **hot).tokens for engine in engines]
    assert runs[0] == runs[1]
    for engine in engines:
        engine.close(timeout_s=20.0)


def test_a_replay_pads_to_its_bucket_without_touching_anything_else(
    make_engine: MakeEngine, prompts: Prompts
) -> None:
    engine = make_engine()
    # runs in a bucket of four
    found = [submit(engine, prompts(20, seed), max_tokens=12) for seed in range(3)]
    run_all(engine)
    alone = make_engine(prefix_cache=False, capture=False)
    assert [c.tokens for c in found] == [
        generate(alone, prompts(20, seed), max_tokens=12).tokens for seed in range(3)
    ]


@pytest.mark.parametrize("capture", [True, False])
def test_what_is_set_up_outside_lanes_is_there_when_the_engine_is(capture: bool, monkeypatch: Any) -> None:
    """Lanes do not wait for the default stream, on which weights, arena and the sampler's state are made."""
    whole = penstock.engine.build._executor

    def slowly(*parts: Any) -> Any:
        made = whole(*parts)
        # cycles; what was set up before is long there, and what comes behind it is not
        torch.cuda._sleep(400_000_000)
        return made

    monkeypatch.setattr(penstock.engine.build, "_executor", slowly)
    engine = build(tiny_config(device="cuda", capture=capture))
    assert torch.cuda.current_stream().query(), "nothing of the set-up is still under way"
    engine.close(timeout_s=20.0)
