"""How much of a hit to load, tier by tier, and rates that have not been measured for long."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kv.tiers import policy
from penstock.kv.tiers.policy import HOPE, STALE_S, LinkRate, TierRun
from penstock.testing.stores import HandClock

PIECES = st.lists(
    st.builds(TierRun, st.integers(1, 5), st.none() | st.integers(0, 40).map(float)), max_size=5
)


def worth_loading(load_s: float | None, compute_s: float | None) -> bool:
    """One piece by itself: what was never measured is tried."""
    return load_s is None or compute_s is None or load_s <= compute_s


def cheapest(pieces: list[TierRun], block_s: list[float] | None) -> int:
    """By trying every number of blocks: unknown loads cost nothing, an unknown computation is never over."""
    num_blocks = sum(piece.num_blocks for piece in pieces)
    costs: dict[int, float] = {}
    for num in range(num_blocks + 1):
        left, load_s = num, 0.0
        for piece in pieces:
            if left <= 0:
                break
            left -= piece.num_blocks
            load_s += 0.0 if piece.load_s is None else piece.load_s
        if left != 0:
            continue  # in the middle of a piece
        rest = range(num, num_blocks)
        costs[num] = load_s + (
            math.inf if block_s is None and rest else sum(block_s[block] for block in rest if block_s)
        )
    return max(num for num, cost in costs.items() if cost == min(costs.values()))


def always_the_cheapest(data: st.DataObject) -> None:
    pieces = data.draw(PIECES)
    num_blocks = sum(piece.num_blocks for piece in pieces)
    per_block = st.lists(st.integers(0, 10).map(float), min_size=num_blocks, max_size=num_blocks)
    block_s = data.draw(st.none() | per_block)
    compute = lambda first, num: None if block_s is None else sum(block_s[first : first + num])  # noqa: E731
    assert policy.choose(pieces, compute) == cheapest(pieces, block_s)


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_what_is_chosen_takes_the_least_time(data: st.DataObject) -> None:
    always_the_cheapest(data)


# ------------------------------------------------------------------------------------------------ stale rates


def tries_again(link: LinkRate, clock: HandClock) -> None:
    """A link that was slow once, behind a computation that takes a second."""
    link.add(100, 3.0)
    assert not worth_loading(link.seconds(100), 1.0)
    clock.advance(STALE_S - 1.0)
    assert not worth_loading(link.seconds(100), 1.0), "it is known to be slow"
    clock.advance(2.0)
    assert worth_loading(link.seconds(100), 1.0), "it may have become faster"
    assert not worth_loading(link.seconds(200), 1.0), "it would have to be more than four times as fast"
    link.note_try()
    assert not worth_loading(link.seconds(100), 1.0), "one finds out for all"
    link.add(1000, 1.0)
    assert link.seconds(1000) == 1.0, "what he met replaces what was known"
    link.add(2000, 1.0)
    assert link.bytes_per_s == pytest.approx(1050.0)


def test_a_tier_that_was_slow_once_is_tried_again() -> None:
    clock = HandClock()
    tries_again(LinkRate(clock=clock), clock)


def test_a_try_whose_end_nobody_saw_leaves_the_next_measurement_to_replace_what_was_known() -> None:
    clock = HandClock()
    link = LinkRate(clock=clock)
    link.add(100, 10.0)
    clock.advance(STALE_S + 1.0)
    link.note_try()
    link.add(100, 10.0, unsure_s=9.0)
    link.add(1000, 1.0)
    assert link.bytes_per_s == 1000.0


def test_a_rate_that_is_measured_all_the_time_is_not_stale() -> None:
    clock = HandClock()
    link = LinkRate(clock=clock)
    assert not link.stale and link.seconds(100) is None
    for _ in range(10):
        link.add(100, 1.0)
        clock.advance(STALE_S / 2)
        assert not link.stale and link.seconds(100) == 1.0
    clock.advance(STALE_S)
    assert link.stale and link.seconds(100) == 1.0 / HOPE
