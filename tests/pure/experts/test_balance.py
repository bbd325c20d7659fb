"""The spread of experts over ranks: never far from brute force, and even for skewed loads."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvariantBroken
from penstock.experts.balance import placed


def zipf(num: int, exponent: float, seed: int = 0) -> list[float]:
    loads = 1e4 / np.arange(1, num + 1) ** exponent
    return np.random.default_rng(seed).permutation(loads).tolist()


def least_load(tokens: tuple[float, ...], num_ranks: int, num_slots: int) -> float:
    """The heaviest rank of the best way, where the copies of an expert share its tokens evenly."""
    best = float("inf")
    choices = [[c for c in product((0, 1), repeat=num_ranks) if any(c)] for _ in tokens]
    for chosen in product(*choices):
        used = [sum(c[r] for c in chosen) for r in range(num_ranks)]
        if max(used) > num_slots:
            continue
        loads = [
            sum(t * c[r] / sum(c) for t, c in zip(tokens, chosen, strict=True)) for r in range(num_ranks)
        ]
        best = min(best, max(loads))
    return best


best_of = cache(least_load)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 20), min_size=2, max_size=4).map(tuple),
    st.integers(2, 3),
    st.integers(0, 1),
)
def test_small_cases_are_close_to_brute_force(tokens: tuple[int, ...], num_ranks: int, more: int) -> None:
    num_slots = -(-len(tokens) // num_ranks) + more
    found = max(placed(tokens, num_ranks, num_slots).loads(tokens))
    best = best_of(tokens, num_ranks, num_slots)
    # a list that takes the heaviest first is at most 4/3 of the best; copies are chosen before
    assert best - 1e-9 <= found <= best * 4 / 3 + max(tokens) / 2 + 1e-9


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.integers(1, 6), st.integers(0, 5))
def test_every_expert_has_a_slot_and_every_slot_an_expert(
    tokens: list[float], num_ranks: int, more: int
) -> None:
    num_slots = -(-len(tokens) // num_ranks) + more
    spread = placed(tokens, num_ranks, num_slots)
    assert all(len(rank) == num_slots for rank in spread.ranks)
    counts = [sum(rank.count(e) for rank in spread.ranks) for e in range(len(tokens))]
    assert counts == list(spread.num_copies) and min(counts) >= 1
    assert sum(spread.loads(tokens)) == pytest.approx(sum(tokens))


@pytest.mark.parametrize("num_ranks", [4, 8])
@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0, 1.3])
def test_skewed_loads_are_even_with_a_few_copies(num_ranks: int, exponent: float) -> None:
    tokens = zipf(128, exponent)
    plain = placed(tokens, num_ranks, 128 // num_ranks)
    copied = placed(tokens, num_ranks, 128 // num_ranks + 2)
    in_order = max(sum(tokens[r::num_ranks]) for r in range(num_ranks)) / (sum(tokens) / num_ranks)
    assert copied.imbalance(tokens) <= 1.05
    assert copied.imbalance(tokens) <= plain.imbalance(tokens) + 1e-3 <= in_order + 2e-3


def test_copies_of_one_expert_are_on_different_ranks() -> None:
    spread = placed([100.0, 1.0, 1.0, 1.0], num_ranks=4, num_slots=2)
    assert all(len(set(rank)) == len(rank) for rank in spread.ranks)
    assert spread.num_copies[0] == 4


def test_too_few_slots_are_refused() -> None:
    with pytest.raises(InvariantBroken, match="2 ranks of 3 slots cannot hold 7 experts"):
        placed([1.0] * 7, 2, 3)
