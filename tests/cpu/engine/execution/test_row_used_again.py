"""A row that is set up for another request holds nothing of the one before; and a draw as unlikely as there
is leaves a filter in force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.contract import Request, SamplingParams, Start
from penstock.engine.execution.sampler import Rows, SamplePlan
from tests.cpu.engine.execution.sampler_on_lane import OnLane

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.2},
    "presence": {"presence_penalty": 0.5},
    "frequency": {"frequency_penalty": -0.5},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.3},
    "biases": {"temperature": 0.0, "logit_bias": ((3, 1.5), (0, -2.0))},
    "scores": {"logprobs": 4},
    "seed": {"seed": -7},
}


def planned(rows: Rows) -> SamplePlan:
    return rows.sample_plan(np.zeros(1, np.int32), np.full(1, 9, np.int32))


def started(rows: Rows, **sampling: Any) -> None:
    rows.start(Start.of(0, Request("r", [1, 2], SamplingParams(max_tokens=1, **{"seed": 5, **sampling})), ()))


@pytest.mark.parametrize("after", SAMPLINGS)
def test_a_row_that_is_used_again_is_as_one_that_is_new(after: str) -> None:
    new = Rows(1)
    started(new, **SAMPLINGS[after])
    expected = told(planned(new))
    for before in SAMPLINGS.values():
        used = Rows(1)
        started(used, **before)
        started(used, **SAMPLINGS[after])
        assert told(planned(used)) == expected, before


def told(plan: SamplePlan) -> tuple[object, ...]:
    return (
        plan.greedy,
        plan.penalties,
        plan.filters,
        plan.biases,
        plan.num_logprobs,
        None if plan.params is None else plan.params.tolist(),
    )


@pytest.mark.parametrize(
    "others", [{}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_p": 0.7, "frequency_penalty": 1.0}], ids=str
)
def test_a_top_k_below_zero_is_one_that_is_off(others: dict[str, float]) -> None:
    plans = []
    for top_k in (0, -1):
        rows = Rows(1)
        started(rows, top_k=top_k, **others)
        plans.append(told(planned(rows)))
    assert plans[0] == plans[1]


@pytest.mark.parametrize("sampling", [{"min_p": 1.0}, {"min_p": 1.0, "top_p": 0.5}, {"top_k": 1}])
def test_the_only_token_that_a_filter_leaves_is_chosen_whatever_its_draw(sampling: dict[str, float]) -> None:
    """A uniform number that is rounded up to 1 makes noise of minus infinity, as all tokens have that are
    left out."""
    rows, sampler, vocab = Rows(1), OnLane(1, 12), 12
    sampler.sampler._noise = lambda keys, num: torch.full((keys.shape[1], num), -torch.inf)
    started(rows, **sampling)
    plan = planned(rows)
    assert plan.params is not None
    logits = torch.arange(vocab, dtype=torch.float32)[None]
    found = sampler.sample(logits, torch.zeros(1, dtype=torch.int32), plan, torch.from_numpy(plan.params))
    assert found.tokens.tolist() == [vocab - 1]
