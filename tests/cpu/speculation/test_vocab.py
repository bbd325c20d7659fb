"""A draft vocabulary: which tokens, and a proposal over them as one over the target's."""

from __future__ import annotations

import pytest
import torch

from penstock.contract import SamplingParams
from penstock.engine.execution.sampler import gumbel_noise
from penstock.errors import ModelError
from penstock.speculation.accept import DRAFT_DRAW, Drafts, accept, draw, salted
from penstock.speculation.vocab import DraftVocab
from support.toy_target import VOCAB, keys_of, verified


def test_the_most_frequent_tokens_are_covered_and_of_equals_the_lower() -> None:
    counts = torch.tensor([1, 5, 0, 5, 2, 2])
    assert DraftVocab.most_frequent(counts, 3).target_ids.tolist() == [1, 3, 4]
    assert DraftVocab.most_frequent(counts, 3, always=[2]).target_ids.tolist() == [1, 2, 3]
    assert DraftVocab.most_frequent(counts, 3).coverage(counts) == 12 / 15


def test_a_proposal_is_the_same_distribution_over_the_targets_tokens() -> None:
    vocab = DraftVocab(torch.tensor([4, 0, 2]), 6, "here")
    assert vocab.scatter(torch.tensor([[0.5, 0.2, 0.3]])).tolist() == [pytest.approx([0.2, 0, 0.3, 0, 0.5, 0])]
    assert vocab.to_target(torch.tensor([2, 0])).tolist() == [2, 4]


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
        DraftVocab.of_offsets(torch.tensor([0, 5]), 6, "here")


def test_the_target_over_a_part_of_its_vocabulary_is_accepted_as_often_as_that_part_covers() -> None:
    """The control of a pruned head: q is p, cut to the draft vocabulary. A draft is kept with the share of p that is in it."""
    num, sampling = 50_000, SamplingParams(max_tokens=4, temperature=1.0)
    vocab = DraftVocab(torch.tensor([4, 1, 3]), VOCAB, "here")
    empty = Drafts(torch.zeros((num, 0), dtype=torch.int32), torch.zeros(num, dtype=torch.int32))
    p = verified(empty, sampling).probs
    assert p is not None
    inside = p[:, vocab.target_ids]
    q = inside / inside.sum(dim=-1, keepdim=True)
    token = vocab.to_target(draw(q, salted(keys_of(num, 0), DRAFT_DRAW), gumbel_noise))
    drafts = Drafts(token[:, None].to(torch.int32), torch.ones(num, dtype=torch.int32), vocab.scatter(q)[:, None])
    found = accept(drafts, verified(drafts, sampling), gumbel_noise)
    coverage = float(inside[0].sum())
    assert 0.3 < coverage < 0.95
    assert float((found.counts == 2).double().mean()) == pytest.approx(coverage, abs=4 * (coverage * (1 - coverage) / num) ** 0.5)
