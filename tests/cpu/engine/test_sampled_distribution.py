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
from penstock.engine.execution import rejection
from penstock.engine.execution.ahead import DraftPass, ModelGuesser
from penstock.engine.execution.rejection import verified
from tests.support.driving import generate, pass_of, run_all, submit, tiny_config
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


def made_with(speculation: SpeculationConfig) -> Engine:
    config = tiny_config(blocks=1200, max_batch=REQUESTS, max_model_len=704, prefix_cache=False)
    made = build(replace(config, speculation=speculation))
    _Table(TARGET, 512).put_into(made.parts.executor.target.model)
    if speculation.kind == "draft":
        guesser = pass_of(made, DraftPass).drafts.guesser
        assert isinstance(guesser, ModelGuesser) and made.parts.speculation is not None
        _Table(DRAFT, 512).put_into(guesser._draft.model)
    forced(made)
    return made


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = made_with(SpeculationConfig("draft:tiny-llama", 3))
    yield made
    made.close(timeout_s=20.0)


@pytest.fixture(scope="module", params=["draft:tiny-llama", "ngram"])
def rejecting(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = made_with(SpeculationConfig(request.param, 3, "rejection"))
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
    check(engine, {"temperature": 1.0, **OPTIONS[option]}, seeds=range(1000, 1000 + REQUESTS))


@pytest.mark.parametrize("option", ["top_k", "all"])
def test_with_rejection_sampling_tokens_follow_it_too(option: str, rejecting: Engine) -> None:
    check(rejecting, {"temperature": 1.0, **OPTIONS[option]}, seeds=[None] * REQUESTS)


def test_rejection_sampling_keeps_more_drafts(engine: Engine) -> None:
    """And what a request with a seed gets is what it gets without drafts."""
    made = made_with(SpeculationConfig("draft:tiny-llama", 3, "rejection"))
    options = {"temperature": 1.0}
    coupled = check(engine, options, seeds=range(REQUESTS))
    assert check(made, options, seeds=[None] * REQUESTS) > coupled + 0.03
    found = [generate(one, PROMPT, max_tokens=100, seed=5, **options).tokens for one in (made, engine)]
    assert found[0] == found[1]
    made.close(timeout_s=20.0)


def test_tokens_drawn_from_the_target_in_place_of_rejected_drafts_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fault: a draft that was rejected may be drawn again."""
    monkeypatch.setattr(rejection, "verified", lambda target, *given: (verified(target, *given)[0], target))
    made = made_with(SpeculationConfig("draft:tiny-llama", 3, "rejection"))
    with pytest.raises(AssertionError, match="degrees of freedom"):
        check(made, {"temperature": 1.0}, seeds=[None] * REQUESTS)
    made.close(timeout_s=20.0)


def test_tokens_have_the_targets_distribution_by_enumeration() -> None:
    """Over all drafts, and all chances in steps of a ten-thousandth."""
    generator = torch.Generator().manual_seed(1)
    chances = (torch.arange(10_000) + 0.5) / 10_000
    for vocab in (2, 3, 4, 6):
        target, drawn = torch.rand((2, vocab), generator=generator).pow(2).double()
        target, drawn = target / target.sum(), drawn / drawn.sum()
        for q in (drawn, torch.nn.functional.one_hot(torch.tensor(1), vocab).double(), target):
            found = torch.zeros(vocab, dtype=torch.float64)
            for draft in range(vocab):
                drafts = torch.full((len(chances),), draft)
                p_of, q_of = (one.expand(len(chances), -1) for one in (target, q))
                is_kept, rest = verified(p_of, q_of, drafts, chances.double())
                found[draft] += q[draft] * is_kept.double().mean()
                found += q[draft] * (~is_kept).double().mean() * rest[0] / rest[0].sum()
            assert (found - target).abs().max() < 2e-4


def check(engine: Engine, options: dict[str, Any], seeds: Sequence[int | None]) -> float:
    """Returns the share of drafts that were kept."""
    found = [submit(engine, PROMPT, max_tokens=TOKENS, seed=seed, **options) for seed in seeds]
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
    assert 0.1 * drafted < accepted < drafted, "some drafts were kept, and some not"
    return accepted / drafted
