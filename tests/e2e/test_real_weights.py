"""Larger real weights, which `make real-weights` fetches: Qwen2.5-Coder with 0.5 and 1.5 billion parameters,
and Gemma 3 with 270 million. Owns no tolerance of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from penstock.config import Config, EngineConfig, KvConfig, ModelSource, OffloadConfig, SpeculationConfig
from penstock.engine.build import build
from penstock.models.loader import LoadedModel
from tests.e2e.test_parity_smollm2 import PROMPTS, TEXTS, TOLERANCE, error, reference_logits
from tests.support.contiguous_kv import ContiguousKv, forward, generate, logits_of
from tests.support.driving import run_all, submit
from tests.support.loading import load_on_cpu
from tests.support.reference import reference_model, reference_tokenizer

FOLDER = os.environ.get("PENSTOCK_REAL_WEIGHTS")
pytestmark = pytest.mark.skipif(not FOLDER, reason="NOT TESTED: run `make real-weights` (1.9 GB)")
SMALL, LARGE, GEMMA = (
    Path(FOLDER or ".") / f"{name}.gguf"
    for name in ("qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "gemma-3-270m")
)
ASKED = (
    "Write a Python function that merges two sorted lists.",
    "Rename total to amount in: def add(a, b):\n    total = a + b\n    return total\n",
    "Why is a hash table fast?",
)


@pytest.fixture(scope="module")
def small() -> LoadedModel:
    return load_on_cpu(SMALL)


@torch.inference_mode()
def test_logits_of_quantised_real_weights_agree_with_transformers(small: LoadedModel) -> None:
    for prompt in PROMPTS.values():
        ids = small.tokenizer.encode(prompt)
        expected = reference_logits(reference_model(SMALL), ids)
        assert error(logits_of(small.model, ids), expected) < TOLERANCE
        kv = ContiguousKv(small.model.config, small.model.rope)
        pieces = [forward(small.model, kv, ids[at : at + 7]) for at in range(0, len(ids), 7)]
        assert error(torch.cat(pieces), expected) < TOLERANCE


def test_ids_are_those_of_transformers_for_composed_text(small: LoadedModel) -> None:
    """Qwen composes characters first, which `transformers` leaves out for a GGUF file."""
    composed = [text for text in TEXTS if "\u0301" not in text and "Å" not in text]
    assert len(composed) > 15
    for text in composed:
        assert small.tokenizer.encode(text) == reference_tokenizer(SMALL)(text)["input_ids"]
    assert small.tokenizer.encode("e\u0301") == small.tokenizer.encode("\u00e9")


@torch.inference_mode()
def test_a_gemma_computes_and_writes_what_transformers_does() -> None:
    """Windows of 512 tokens and a longer text among them; `transformers` leaves out the first token of
    prompts, which the file asks for."""
    gemma, reference = load_on_cpu(GEMMA), reference_model(GEMMA)
    encode, theirs = gemma.tokenizer.encode, reference_tokenizer(GEMMA)
    for text in TEXTS:
        assert encode(text) == [2, *theirs(text)["input_ids"]]
    long = encode(" ".join(TEXTS) * 2)
    assert len(long) > 700
    for ids in (long, *(encode(prompt) for prompt in PROMPTS.values())):
        assert error(logits_of(gemma.model, ids), reference_logits(reference, ids)) < TOLERANCE
    prompt = encode("The history of hydroelectric power began")
    asked = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    expected = reference.generate(torch.tensor([prompt]), **asked)[0].tolist()
    assert prompt + generate(gemma.model, prompt, 24) == expected


def answers(proposer: str | None) -> tuple[list[list[int]], tuple[int, int]]:
    config = Config(
        ModelSource(str(LARGE), device="cpu", weights="int4"),
        KvConfig(device_blocks=64),
        EngineConfig(1024, max_batch=2, overcommit=2.0),
        OffloadConfig(enabled=True, host_gib=0.25, load_always=True),
        speculation=SpeculationConfig(proposer),
    )
    engine = build(config)
    found = []
    for text in ASKED:
        prompt = engine.tokenizer.encode_chat([{"role": "user", "content": text}])
        found.append(submit(engine, prompt, max_tokens=48, ignore_eos=False))
    run_all(engine, 100_000)
    stats = engine.stats()
    engine.close(timeout_s=60.0)
    assert all(one.error is None for one in found)
    return [one.tokens for one in found], (sum(stats.drafted), sum(stats.accepted))


def test_a_smaller_model_of_the_family_drafts_and_changes_no_token() -> None:
    right, _ = answers(None)
    found, (num_drafted, num_kept) = answers(f"draft:{SMALL}")
    assert found == right
    assert num_drafted > 40 and num_kept > num_drafted / 3
    print(f"{num_kept} of {num_drafted} drafts kept")
