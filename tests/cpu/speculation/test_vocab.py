"""A draft vocabulary: which tokens, and what of the target's choices can be drafted with it."""

from __future__ import annotations

import pytest
import torch

from penstock.engine.execution.draws import DrawKind, RowDraws
from penstock.engine.execution.staging import Uploads
from penstock.errors import ModelError
from penstock.lanes.cpu import CpuLane
from penstock.speculation.vocab import DraftVocab
from train_mtp.command import most_frequent


def test_the_most_frequent_tokens_are_covered_and_of_equals_the_lower() -> None:
    counts = torch.tensor([1, 5, 0, 5, 2, 2])
    assert most_frequent(counts, 3).target_ids.tolist() == [1, 3, 4]


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        (torch.tensor([0, 6]), "token 6; the target's go from 0 to 5"),
        (torch.tensor([-1, 2]), "token -1"),
        (torch.tensor([1, 1]), "token 1 more than once"),
        (torch.tensor([0.0, 1.0]), "whole numbers"),
        (torch.zeros(7, dtype=torch.int64), "7 entries; the target has 6"),
        (torch.zeros(0, dtype=torch.int64), "0 entries"),
        (torch.zeros((2, 2), dtype=torch.int64), "shape [2, 2]"),
    ],
)
def test_what_is_no_map_is_refused(ids: torch.Tensor, reason: str) -> None:
    with pytest.raises(ModelError) as refused:
        DraftVocab(ids, 6, "here")
    assert reason in str(refused.value)


def test_offsets_that_leave_the_vocabulary_are_refused() -> None:
    with pytest.raises(ModelError, match="token 6"):
        DraftVocab(torch.tensor([0, 5]), 6, "here", offsets=True)


def test_the_target_over_a_part_of_its_vocabulary_is_kept_exactly_where_it_chooses_within() -> None:
    """The control of a pruned head: with the same scores and the same noise, what is drafted is the target's
    choice wherever that is in the draft vocabulary. So the share that is kept is what the vocabulary
    covers."""
    num, vocab = 20_000, 12
    lane = CpuLane("compute", around=torch.inference_mode)
    draws = RowDraws(num, vocab, Uploads(torch.device("cpu"), lane))
    draws._floats[:] = torch.tensor([0.9, 1.0, 0.0])[:, None]
    draws._seeds[:] = torch.arange(num)
    lane.close(30)
    rows, positions = torch.arange(num), torch.arange(num, dtype=torch.int32) % 50
    logits = (torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 1.5).expand(num, -1)
    part = DraftVocab(torch.tensor([9, 1, 3, 4, 6, 11]), vocab, "here").target_ids
    choice = draws.choose(logits, None, rows, positions, DrawKind.DRAWN)
    drafts = part[draws.choose(logits[:, part], part, rows, positions, DrawKind.DRAWN)]
    inside = torch.isin(choice, part)
    assert torch.equal(drafts[inside], choice[inside]) and not torch.isin(choice[~inside], part).any()
    coverage = float((logits[0] / 0.9).softmax(-1)[part].sum())
    assert 0.2 < coverage < 0.9
    assert float((drafts == choice).double().mean()) == pytest.approx(
        coverage, abs=4 * (coverage * (1 - coverage) / num) ** 0.5
    )
