"""What is kept of keys by part, and what queries make of it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from penstock.contract import Scoring
from penstock.engine.execution.scoring import KeyBounds, KeySizes, Recency, _parts, _sum_up

SIZES = KeySizes(num_layers=2, num_parts=5, num_kv_heads=2, head_dim=8)
SCORING = Scoring(part_blocks=4, most_parts=5, first=0, slots=np.empty(0, np.int32), paged=False, num_parts=5)


def random_blocks(num: int = 20) -> torch.Tensor:
    return torch.randn(num, 16, 2, 8, generator=torch.Generator().manual_seed(num))


@pytest.mark.parametrize("cuts", [(), (4,), (1, 2, 3), (3, 9, 14), (7, 8, 9), (19,)])
def test_blocks_may_come_in_any_pieces(cuts: tuple[int, ...]) -> None:
    blocks, whole, cut = random_blocks(), KeyBounds(SIZES, torch.empty(0)), KeyBounds(SIZES, torch.empty(0))
    _sum_up(whole, 1, SCORING, 0, blocks)
    for first, end in reversed(list(itertools.pairwise((0, *cuts, 20)))):
        _sum_up(cut, 1, SCORING, first, blocks[first:end])
    assert torch.equal(whole._bounds[1], cut._bounds[1])
    assert torch.equal(whole._bounds[1][:, :, 0], blocks.view(5, 64, 2, 8).amin(1))
    assert torch.isinf(whole._bounds[0]).all(), "of the other layer nothing has come"


def test_every_block_is_in_one_piece() -> None:
    for first, num, size in itertools.product(range(9), range(13), (1, 3, 4)):
        runs = list(_parts(first, num, size))
        covered = [(first + at) for _, start, end, _ in runs for at in range(start, end)]
        assert covered == list(range(first, first + num))
        for part, start, end, num_parts in runs:
            assert part == (first + start) // size and -(-(end - start) // num_parts) <= size
            assert (first + end - 1) // size == part + num_parts - 1


def test_the_part_with_the_best_key_gets_the_vote() -> None:
    """Also where the average of its keys says nothing."""
    blocks = random_blocks() * 0.1
    query = torch.zeros(4, 8)
    query[:, 3] = 4.0
    blocks[9, 5, :, 3], blocks[9, 6, :, 3] = 20.0, -20.0
    bounds, scores = KeyBounds(SIZES, torch.empty(0)), torch.zeros(5)
    for layer in range(2):
        _sum_up(bounds, layer, SCORING, 0, blocks)
        bounds.add_scores(layer, query, scores)
    assert int(scores.argmax()) == 9 // 4
    assert float(scores.sum()) == pytest.approx(2 * 4), "each head of each layer has one vote"


def test_bounds_are_never_below_any_key() -> None:
    blocks, query = random_blocks(), torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    bounds = KeyBounds(SIZES, torch.empty(0))
    _sum_up(bounds, 0, SCORING, 0, blocks)
    low, high = bounds._bounds[0].unbind(2)
    heads = query.view(2, 2, 8)
    best = torch.einsum("kgd,pkd->kgp", heads.clamp(min=0), high) + torch.einsum("kgd,pkd->kgp", heads.clamp(max=0), low)
    scores = torch.zeros(5)
    bounds.add_scores(0, query, scores)
    expected = torch.softmax(best * 8**-0.5 / 2, -1).sum((0, 1))
    assert torch.allclose(scores, expected)
    true = torch.einsum("kgd,ptkd->kgpt", heads, blocks.view(5, 64, 2, 8)).amax(-1)
    assert (best >= true - 1e-4).all()


def test_recency_looks_at_nothing() -> None:
    recency, scores = Recency(SIZES, torch.empty(0)), torch.zeros(5)
    for layer in range(2):
        recency.add_scores(layer, torch.randn(4, 8), scores)
    assert scores.tolist() == [1, 2, 3, 4, 5]
