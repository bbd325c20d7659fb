"""Sampling parameters together: each still does what it does alone, in a stated order, against an exact
distribution."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from penstock.contract import MAX_SEED, Request, SamplingParams, Start
from penstock.engine.execution.sampler import Rows, draw_keys
from tests.cpu.engine.execution.sampler_on_lane import OnLane

VOCAB = 9
LOGITS = torch.tensor([2.0, 1.6, 1.1, 0.6, 0.0, -0.5, -1.0, 3.0, -4.0])
PROMPT, OUTPUT = (7, 0), (7, 7, 2)
NUM_DRAWS = 3000

TEMPERATURES = ({}, {"temperature": 0.5}, {"temperature": 2.0})
FILTERS = ({}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.8}, {"top_k": 5,
"min_p": 0.3},
           {"top_p": 0.9, "min_p": 0.25}, {"top_k": 6, "top_p": 0.85, "min_p": 0.1})  # fmt: skip
PENALTIES = (
    {},
    {"repetition_penalty": 1.6, "frequency_penalty": 0.5, "presence_penalty": 0.4},
    {"repetition_penalty": 0.7},
    {"frequency_penalty": -1.0, "presence_penalty": -0.5},
)


def expected(settings: dict[str, float]) -> torch.Tensor:
    """By definition, one step after the other: penalties, temperature, then top-k, min-p and top-p of what
    those leave."""
    logits = LOGITS.double().tolist()
    seen = {*PROMPT, *OUTPUT}
    for token, repeated in ((token, OUTPUT.count(token)) for token in range(VOCAB)):
        if token in seen:
            factor = settings.get("repetition_penalty", 1.0)
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        logits[token] -= settings.get("frequency_penalty", 0.0) * repeated + settings.get(
            "presence_penalty", 0.0
        ) * (repeated > 0)
    scores = torch.tensor(logits, dtype=torch.float64) / settings.get("temperature", 1.0)
    order = scores.argsort(descending=True).tolist()
    kept = order[: int(settings.get("top_k", VOCAB))]
    likeliest = scores[order[0]]
    kept = [token for token in kept if (scores[token] - likeliest).exp() >= settings.get("min_p", 0.0)]
    shares, total, enough = scores[kept].softmax(-1).tolist(), 0.0, []
    for token, share in zip(kept, shares, strict=True):
        if total < settings.get("top_p", 1.0):
            enough.append(token)
        total += share
    probabilities = torch.zeros(VOCAB, dtype=torch.float64)
    probabilities[enough] = scores[enough].softmax(-1)
    return probabilities


def drawn(settings: dict[str, Any]) -> torch.Tensor:
    rows, sampler = Rows(1), OnLane(1, VOCAB)
    start = Start.of(0, Request("r", PROMPT, SamplingParams(max_tokens=1, seed=5, **settings)), OUTPUT)
    rows.start(start)
    sampler.start(start)
    plan = rows.sample_plan(np.zeros(NUM_DRAWS, np.int32), np.arange(NUM_DRAWS, dtype=np.int32))
    assert plan.params is not None
    found = sampler.sample(
        LOGITS.expand(NUM_DRAWS, -1),
        torch.zeros(NUM_DRAWS, dtype=torch.int32),
        plan,
        torch.from_numpy(plan.params),
    )
    return torch.bincount(found.tokens.long(), minlength=VOCAB)


def agrees(counts: torch.Tensor, wanted: torch.Tensor) -> bool:
    """What cannot happen never does, and what can is within five standard deviations."""
    deviations = (counts - NUM_DRAWS * wanted).abs() / (NUM_DRAWS * wanted * (1 - wanted)).sqrt().clamp(
        min=1e-9
    )
    return bool((counts[wanted == 0] == 0).all() and (deviations[(wanted > 0) & (wanted < 1)] < 5).all())


@pytest.mark.parametrize(
    "settings",
    [{**t, **f, **p} for t, f, p in itertools.product(TEMPERATURES, FILTERS, PENALTIES)],
    ids=lambda settings: ", ".join(f"{name} {value}" for name, value in settings.items()) or "plain",
)
def test_any_parameters_together_give_the_distribution_that_each_of_them_says(
    settings: dict[str, float],
) -> None:
    assert agrees(drawn(settings), expected(settings))


def test_a_parameter_that_is_left_out_is_noticed_whatever_stands_beside_it() -> None:
    """The check above can fail: it does wherever leaving one out changes a probability by a tenth or more."""
    num_noticed = 0
    for t, f, p in itertools.product(TEMPERATURES[1:], FILTERS[1:], PENALTIES[1:]):
        settings = {**t, **f, **p}
        for left_out in settings:
            without = expected({name: value for name, value in settings.items() if name != left_out})
            if (without - expected(settings)).abs().max() > 0.1:
                assert not agrees(drawn(settings), without), (settings, left_out)
                num_noticed += 1
    assert num_noticed > 50


def next_token(sampler: OnLane, rows: Rows, row: int, logits: torch.Tensor, position: int = 3) -> int:
    plan = rows.sample_plan(np.array([row], np.int32), np.array([position], np.int32))
    params = None if plan.params is None else torch.from_numpy(plan.params)
    return int(sampler.sample(logits[None], torch.tensor([row], dtype=torch.int32), plan, params).tokens)


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 4.0}, {"frequency_penalty": 2.0}, {"presence_penalty": 2.0}]
)
def test_a_row_knows_nothing_of_the_request_that_had_it_before(penalty: dict[str, float]) -> None:
    """Neither its prompt, nor what it generated, nor its parameters."""
    rows, sampler = Rows(1), OnLane(1, VOCAB)
    logits = torch.zeros(VOCAB)
    logits[3], logits[4] = 1.0, 0.9
    for prompt, output in (((3, 3), (3, 3)), ((8,), ())):
        start = Start.of(
            0, Request("r", prompt, SamplingParams(max_tokens=9, temperature=0.0, **penalty)), output
        )
        rows.start(start)
        sampler.start(start)
        found = next_token(sampler, rows, 0, logits)
        assert found == (4 if 3 in prompt else 3)


def test_parameters_of_a_row_are_all_replaced_by_those_of_its_next_request() -> None:
    rows = Rows(1)
    plain = SamplingParams(max_tokens=1, temperature=0.0)
    everything = SamplingParams(
        max_tokens=1, temperature=0.5, top_p=0.5, top_k=3, min_p=0.1, presence_penalty=1.0,
        repetition_penalty=2.0, logprobs=4,
        prompt_logprobs=2, seed=9,
    )  # fmt: skip
    plans = []
    for sampling in (plain, everything, plain):
        rows.start(Start.of(0, Request("r", (1, 2), sampling), ()))
        plans.append(rows.sample_plan(np.zeros(1, np.int32), np.zeros(1, np.int32)))
    before, between, after = plans
    assert (before.greedy, before.penalties, before.filters, before.num_logprobs) == (
        True,
        False,
        False,
        [-1],
    )
    assert (between.greedy, between.penalties, between.filters, between.num_logprobs) == (
        False,
        True,
        True,
        [4],
    )
    assert (after.greedy, after.penalties, after.filters, after.num_logprobs, after.params) == (
        True,
        False,
        False,
        [-1],
        None,
    )


def test_the_row_of_padding_asks_for_nothing() -> None:
    """A step that is padded costs no more than its own requests do, whatever they ask for."""
    rows = Rows(2)
    padding = np.array([2], np.int32)
    plan = rows.sample_plan(padding, np.zeros(1, np.int32))
    assert (plan.greedy, plan.penalties, plan.filters, plan.num_logprobs, plan.params) == (
        True,
        False,
        False,
        [-1],
        None,
    )
    rows.start(Start.of(0, Request("r", (1,), SamplingParams(max_tokens=1, seed=1)), ()))
    mixed = rows.sample_plan(np.array([0, 2], np.int32), np.zeros(2, np.int32))
    assert mixed.params is not None and mixed.num_logprobs == [-1, -1]
    repetition = mixed.params[:6].view(np.float32)[5]
    assert repetition.tolist() == [1.0, 1.0], "a factor of 0 would divide by it"


def test_a_negative_top_k_is_off() -> None:
    assert drawn({"top_k": -1, "top_p": 0.999999}).tolist() == drawn({"top_k": 0, "top_p": 0.999999}).tolist()
    assert drawn({"top_k": VOCAB}).tolist() == drawn({"top_k": VOCAB + 1}).tolist() == drawn({}).tolist()


def test_every_seed_and_every_position_draws_for_itself() -> None:
    """Seeds that agree in their low or high words, or in their absolute value, and positions a power of two
    apart."""
    seeds = [0, 1, -1, 2, -2, 2**31, 2**32, 2**32 + 1, -(2**32), 2**63 - 1, -MAX_SEED, MAX_SEED - 2**32]
    rows = Rows(len(seeds))
    for row, seed in enumerate(seeds):
        rows.start(Start.of(row, Request(str(row), (1,), SamplingParams(max_tokens=1, seed=seed)), ()))
    positions = [0, 1, 63, 64, 128, 2**16, 2**16 + 1, 2**20, 2**22]
    keys = set()
    for position in positions:
        plan = rows.sample_plan(
            np.arange(len(seeds), dtype=np.int32), np.full(len(seeds), position, np.int32)
        )
        assert plan.params is not None
        keys |= {tuple(words) for words in plan.params[-2:].T.tolist()}
    assert len(keys) == len(set(seeds)) * len(positions)
    same = draw_keys(np.array([7, 7], np.uint64), np.array([5, 5], np.int32))
    assert (same[:, 0] == same[:, 1]).all()
