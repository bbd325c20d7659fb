"""What an engine with drafts samples has the target's distribution, for every sampling option: over 100,000
tokens in all, against the exact one. Target and draft are tables here, over five tokens: the next token
depends on the last one, and on what penalties count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.config import SpeculationConfig
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.engine.execution.ahead import DraftPass, ModelGuesser
from tests.support.driving import pass_of, run_all, submit, tiny_config
from tests.support.forced import forced

VOCAB, PROMPT = 5, (3, 1)
REQUESTS, TOKENS = 20, 320  # as many drafts as a step may have, at most
_GENERATOR = torch.Generator().manual_seed(3)
TARGET = torch.randn((VOCAB, VOCAB), generator=_GENERATOR) * 1.5
DRAFT = TARGET + torch.randn((VOCAB, VOCAB), generator=_GENERATOR) * 0.7  # near the target, and wrong

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "a high temperature": {"temperature": 2.5},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "penalties": {"repetition_penalty": 1.7, "frequency_penalty": 0.02, "presence_penalty": 0.5},
    "all": {
        "temperature": 1.3,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.01,
    },
}


class _Table:
    """Stands in for the passes of a model: its logits are a row of a table, whatever is in the cache."""

    def __init__(self, table: torch.Tensor, vocab: int) -> None:
        self._rows = torch.full((vocab, vocab), -1e4)
        self._rows[:VOCAB, :VOCAB] = table

    def put_into(self, model: Any) -> None:
        model.embed = lambda tokens: self._rows[tokens.long()]
        model.layer = lambda index, hidden, residual, kv, lora=None: (hidden, torch.zeros_like(hidden))
        model.head = lambda hidden, residual: hidden


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = tiny_config(blocks=1200, max_batch=REQUESTS, max_model_len=704, prefix_cache=False)
    made = build(replace(config, speculation=SpeculationConfig("draft:tiny-llama", 3)))
    executor, guesser = made.parts.executor, pass_of(made, DraftPass).drafts.guesser
    assert isinstance(guesser, ModelGuesser) and made.parts.speculation is not None
    _Table(TARGET, 512).put_into(executor.target.model)
    _Table(DRAFT, 512).put_into(guesser._draft.model)
    forced(made)
    yield made
    made.close(timeout_s=20.0)


def probabilities(before: Sequence[int], options: dict[str, Any]) -> NDArray[np.float64]:
    """Of the next token, written down from what the options mean."""
    logits, output = TARGET[before[-1]].double().numpy().copy(), before[len(PROMPT) :]
    counts = np.bincount(output, minlength=VOCAB)
    if (penalty := options.get("repetition_penalty", 1.0)) != 1.0:
        seen = np.bincount(before, minlength=VOCAB) > 0
        logits = np.where(seen, np.where(logits > 0, logits / penalty, logits * penalty), logits)
    logits -= options.get("frequency_penalty", 0.0) * counts + options.get("presence_penalty", 0.0) * (
        counts > 0
    )
    p = np.exp(logits / options.get("temperature", 1.0))
    order = np.argsort(-p, kind="stable")
    kept = [
        token
        for token in order[: options.get("top_k", VOCAB)]
        if p[token] >= options.get("min_p", 0.0) * p.max()
    ]
    total, mass, found = p[kept].sum(), 0.0, np.zeros(VOCAB)
    for token in kept:
        if mass < options.get("top_p", 1.0) * total:
            found[token] = p[token]
        mass += p[token]
    return found / found.sum()


@pytest.mark.parametrize("option", OPTIONS)
def test_tokens_follow_the_targets_distribution(option: str, engine: Engine) -> None:
    """A G-test of which token follows which; its expectation is exact, also where penalties count all that
    came before."""
    options = {"temperature": 1.0, **OPTIONS[option]}
    found = [submit(engine, PROMPT, max_tokens=TOKENS, seed=1000 + n, **options) for n in range(REQUESTS)]
    run_all(engine, 100_000)
    seen, expected = np.zeros((VOCAB, VOCAB)), np.zeros((VOCAB, VOCAB))
    for one in found:
        whole = [*PROMPT, *one.tokens]
        assert one.error is None and len(one.tokens) == TOKENS
        for at in range(len(PROMPT), len(whole)):
            seen[whole[at - 1], whole[at]] += 1
            expected[whole[at - 1]] += probabilities(whole[:at], options)
    assert seen.sum() == REQUESTS * TOKENS >= 50_000 / len(OPTIONS)
    assert not seen[expected == 0].any(), "a token that the options rule out"
    both = seen > 0
    g = 2 * float((seen[both] * np.log(seen[both] / expected[both])).sum())
    freedom = int((expected > 0).sum() - (expected.sum(axis=1) > 0).sum())
    assert g < freedom + 5 * (2 * freedom) ** 0.5 + 5, f"G {g:.1f} with {freedom} degrees of freedom"
    accepted, drafted = (
        sum(event.accepted for one in found for event in one.events),
        sum(e.drafted for one in found for e in one.events),
    )
    assert 0.2 * drafted < accepted < drafted, "some drafts were kept, and some not"
