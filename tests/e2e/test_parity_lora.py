"""SmolLM2 with random adapters against `transformers` with the update merged into its weights by hand: the
same greedy tokens, in one batch with the base model, from a cached prefix, and through a real server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from penstock.config import Config, EngineConfig, KvConfig, LoraConfig, ModelSource, OffloadConfig
from penstock.engine.engine import Engine
from penstock.models.llama import SMOLLM2_135M
from penstock.testing.sanitized import build_sanitized, check_silent
from tests.support.adapters import ALL_MODULES, adapter_tensors, merged_into, write_adapter
from tests.support.driving import run_all, submit
from tests.support.logits import Logits, largest_error
from tests.support.reference import reference_model

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village at the foot of a mountain, there lived an old clockmaker who had "
    "forgotten how to sleep. " * 3,
]
TOLERANCE = 1e-4  # relative to the largest logit
RANK, ALPHA = 8, 12
NUM_TOKENS = 8


def tensors_of(seed: int) -> dict[str, torch.Tensor]:
    """Small enough that the model still writes text, large enough that it writes another."""
    modules = ALL_MODULES if seed == 1 else ("q_proj", "v_proj", "up_proj")
    tensors = adapter_tensors(SMOLLM2_135M, seed, RANK, modules)
    return {name: tensor * 0.5 if ".lora_B." in name else tensor for name, tensor in tensors.items()}


@torch.inference_mode()
def greedy(model: Any, prompt: list[int]) -> list[int]:
    step = model(torch.tensor([prompt]), use_cache=True)
    tokens = [int(step.logits[0, -1].argmax())]
    while len(tokens) < NUM_TOKENS:
        step = model(torch.tensor([tokens[-1:]]), past_key_values=step.past_key_values, use_cache=True)
        tokens.append(int(step.logits[0, -1].argmax()))
    return tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed in (1, 2):
        write_adapter(folder / f"a{seed}", tensors_of(seed), lora_alpha=ALPHA)
    return folder


@pytest.fixture(scope="module")
def reference() -> Any:
    return reference_model()


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    torch.set_num_threads(1)
    source = ModelSource(dtype="float32", device="cpu")
    kv, steps = KvConfig(device_gib=0.3), EngineConfig(prefill_chunk=48, max_batch=8)
    lora = LoraConfig(tuple((f"a{seed}", str(folder / f"a{seed}")) for seed in (1, 2)))
    built, sanitizer = build_sanitized(Config(source, kv, steps, OffloadConfig(enabled=False), lora=lora))
    yield built
    built.close(timeout_s=20.0)
    check_silent(sanitizer)


def test_base_and_adapters_in_one_batch_write_what_transformers_writes_with_merged_weights(
    engine: Engine, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [engine.tokenizer.encode(text) for text in PROMPTS]
    right = {None: [greedy(reference, prompt) for prompt in prompts]}
    for seed in (1, 2):
        with merged_into(reference, tensors_of(seed), ALPHA / RANK):
            right[seed] = [greedy(reference, prompt) for prompt in prompts]
    assert len({tuple(tokens) for each in right.values() for tokens in each}) == 6, (
        "an adapter that changes nothing proves nothing"
    )
    work = [(seed, i) for i in range(len(prompts)) for seed in (1, None, 2)]
    adapters = {None: None, **{seed: engine.adapters.find(f"a{seed}").adapter for seed in (1, 2)}}  # type: ignore[union-attr]
    for cached in (False, True):
        logits = Logits(engine, monkeypatch)
        found = [
            submit(engine, prompts[i], adapter=adapters[seed], max_tokens=NUM_TOKENS) for seed, i in work
        ]
        run_all(engine)
        assert [c.tokens for c in found] == [right[seed][i] for seed, i in work]
        assert all(
            bool(c.source and c.source.device) == (cached and len(prompts[i]) > 16)
            for c, (_, i) in zip(found, work, strict=True)
        )
        monkeypatch.undo()
    with merged_into(reference, tensors_of(1), ALPHA / RANK):
        row = work.index((1, 1))
        alone = {(0, at): seen for (at_row, at), seen in logits.seen.items() if at_row == row}
        logits.seen = alone
        assert largest_error(reference, logits, [prompts[1]], [found[row]]) < TOLERANCE


def test_a_served_adapter_writes_what_the_engine_writes(
    engine: Engine, folder: Path, start_server: Callable[..., tuple[Any, str]]
) -> None:
    prompt = engine.tokenizer.encode(PROMPTS[0])
    adapter = engine.adapters.find("a1").adapter  # type: ignore[union-attr]
    right = [submit(engine, prompt, adapter=which, max_tokens=NUM_TOKENS) for which in (adapter, None)]
    run_all(engine)
    flags = ("--device", "cpu", "--max-model-len", "512", "--device-kv-blocks", "128", "--sanitize=strict")
    _, url = start_server(*flags, "--lora-dir", str(folder))
    body = {"lora_name": "tuned", "lora_path": "a1"}
    assert httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=60).status_code == 200
    for model, expected in (("tuned", right[0]), ("smollm2-135m", right[1])):
        body = {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
        body |= {"ignore_eos": True}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()
        assert reply["model"] == model
        assert reply["choices"][0]["text"] == engine.tokenizer.decode(expected.tokens, skip_special=True)
