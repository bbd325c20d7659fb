"""Which drafts are kept, what penalties count before each, and how drafts are drawn: the parts, one by
one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.execution.batch import DraftedInputs
from penstock.engine.execution.draws import DrawKind, RowDraws, draw_keys
from penstock.engine.execution.sampler import NUM_FLOATS, Rows, Sampler, counts_before, kept_tokens
from penstock.engine.execution.sampler import draw_keys as host_keys
from penstock.engine.execution.staging import Uploads
from penstock.lanes.cpu import CpuLane
from tests.cpu.engine.execution.sampler_on_lane import OnLane, start_of

# Four requests with 3, 1, 2 and 0 drafts. A draft behind a rejected one may be right: it is not kept.
TOKENS = [7, 4, 5, 6, 7, 9, 7, 7, 8, 7]
CHOSEN = [4, 1, 6, 2, 9, 3, 7, 2, 8, 6]
STARTS, LENGTHS, ROWS = [0, 4, 6, 9], [3, 1, 2, 0], [5, 5, 5, 5, 2, 2, 3, 3, 3, 0]


def test_drafts_are_kept_up_to_the_first_that_differs() -> None:
    pending, rejected = torch.zeros((6, 4), dtype=torch.int32), torch.full((6,), 9, dtype=torch.int32)
    starts, lengths, step, chosen, rows = (
        torch.tensor(one, dtype=torch.int32) for one in (STARTS, LENGTHS, TOKENS, CHOSEN, ROWS)
    )
    drafting = DraftedInputs(rows, rows, starts, lengths, step, num_drafts=3, num_unsure=0)
    tokens, lasts = kept_tokens(drafting, chosen.long(), rows, pending, rejected)
    assert tokens.tolist() == [4, 1, -1, -1, 9, 3, 7, 2, -1, 6] and lasts.tolist() == [1, 5, 7, 9]
    assert pending[:, 0].tolist() == [6, 0, 3, 2, 0, 1] and rejected.tolist() == [0, 9, 0, 1, 9, 2]


def test_counts_before_a_draft_hold_the_drafts_before_it() -> None:
    found = counts_before(torch.tensor([[1, 1, 2]], dtype=torch.int32), 3)
    assert found.tolist() == [[[0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 2, 1]]]


@pytest.mark.parametrize("num_right", [0, 1, 2])
def test_places_behind_a_rejected_draft_count_for_no_token(num_right: int) -> None:
    """A step verifies two drafts; of the three tokens some are none. The next step is penalised for what was
    kept, and nothing else: not for the first token of the vocabulary either, which is where no token would be
    written down."""
    on = OnLane(1, 6)
    on.begin(0, (5,), temperature=0.0, frequency_penalty=1.0)

    def sampled(logits: torch.Tensor, first: int, *more: DraftedInputs | None) -> list[int]:
        num = len(logits)
        return on.draw(logits, [0] * num, range(first, first + num), *more).tokens.tolist()

    step = [5, *[1, 2][:num_right], *[4, 4][num_right:]]  # the last token and two drafts
    zero, two = torch.zeros(3, dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    drafting = DraftedInputs(
        zero, zero, zero[:1], two, torch.tensor(step, dtype=torch.int32), num_drafts=2, num_unsure=0
    )
    kept = [1, 2, 3][: num_right + 1]
    assert sampled(torch.eye(6)[[1, 2, 3]] * 9, 0, None, drafting) == kept + [-1] * (2 - num_right)
    level = torch.full((1, 6), 3.0) - torch.arange(6) / 10  # the lowest of equals in what they were counted
    assert sampled(level, 3) == [0], "it was never chosen"
    assert sampled(level, 4) == [min({1, 2, 3, 4} - set(kept))]


def test_the_device_makes_the_keys_that_the_host_makes() -> None:
    seeds = np.array([0, 1, 2**63 + 5, 2**64 - 1, 123456789012345], np.uint64)
    positions = np.array([0, 7, 131071, 2**30, 5], np.int32)
    found = draw_keys(torch.from_numpy(seeds.view(np.int64)), torch.from_numpy(positions))
    assert np.array_equal(found.numpy(), host_keys(seeds, positions))


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "a tiny top_p": {"top_p": 0.01},
    "min_p": {"min_p": 0.2},
    "all": {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
}


@pytest.mark.parametrize("vocab", [12, 900], ids=["all are candidates", "some are"])
@pytest.mark.parametrize("option", OPTIONS)
def test_a_draft_is_drawn_as_the_sampler_draws(option: str, vocab: int) -> None:
    """From the same scores the same token, for every draw."""
    num = 300
    logits = torch.randn((num, vocab), generator=torch.Generator().manual_seed(1)) * 3
    rows = Rows(1)
    rows.start(start_of(0, (1, 2), **{"seed": -7, **OPTIONS[option]}))
    plan = rows.sample_plan(np.zeros(num, np.int32), np.arange(num, dtype=np.int32))
    lane = CpuLane("compute", around=torch.inference_mode)
    uploads = Uploads(torch.device("cpu"), lane)
    sampler, draws = Sampler(1, vocab, lane, uploads), RowDraws(2, vocab, uploads)
    at, found = torch.zeros(num, dtype=torch.int32), []

    def both() -> None:
        draws.load(rows.draw_words())
        params = None if plan.params is None else torch.from_numpy(plan.params)
        found.append(sampler.sample(logits, at, plan, params).tokens)
        for choice in (DrawKind.DRAWN, DrawKind.FILTERED)[plan.filters :]:
            found.append(
                draws.choose(logits, None, at, torch.arange(num, dtype=torch.int32), choice).to(torch.int32)
            )

    lane.submit(both, label="both").wait_done(30)
    lane.close(30)
    assert len(found) >= 2 and all(torch.equal(one, found[0]) for one in found[1:])
    assert plan.params is None or plan.params.shape[0] >= NUM_FLOATS
