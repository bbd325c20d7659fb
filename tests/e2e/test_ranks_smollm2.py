"""SmolLM2 on two ranks: three KV heads, which two do not divide. The tokens and logprobs of one rank."""

from __future__ import annotations

from dataclasses import replace

import torch

from penstock.config import Config, EngineConfig, KvConfig, ModelSource, OffloadConfig, RanksConfig
from penstock.engine.build import build
from tests.support.driving import assert_same, run_all, submit
from tests.support.ranks import other_ranks

TEXTS = (
    "The history of the canal begins in 1768, when engineers measured the valley for the first time.",
    "def quicksort(items):\n    if len(items) < 2:\n        return items\n",
)
SAMPLINGS = ({"logprobs": 2}, {"temperature": 0.8, "seed": 7, "top_p": 0.9})


def test_two_ranks_give_the_tokens_of_one() -> None:
    torch.set_num_threads(1)
    alone = Config(
        ModelSource(device="cpu", dtype="float32", weights="float32"),
        KvConfig(device_blocks=64),
        EngineConfig(prefill_chunk=64, max_batch=4, max_model_len=256),
        OffloadConfig(enabled=False),
    )
    answers = []
    for config in (alone, replace(alone, ranks=RanksConfig(2, 60.0))):
        engine = build(config)
        asked = [
            submit(engine, engine.tokenizer.encode(text), max_tokens=10, **sampling)
            for text, sampling in zip(TEXTS, SAMPLINGS, strict=True)
        ]
        run_all(engine)
        engine.close(timeout_s=20.0)
        answers.append(asked)
    for right, found in zip(*answers, strict=True):
        assert_same(found, right)
    assert not other_ranks()
