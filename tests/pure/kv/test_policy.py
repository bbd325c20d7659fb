"""Load or recompute: the rates that are measured, and that a choice by them costs at most 5 % over
computing."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.kv.tiers import policy
from penstock.kv.tiers.policy import HOPE, STALE_S, LinkRate, PrefillRate, TierRun
from penstock.testing.stores import HandClock

DEEP = 32768
BYTES_PER_TOKEN = 4096


def is_loaded(load_s: float | None, compute_s: float | None) -> bool:
    """A hit of one block in one tier."""
    return policy.choose([TierRun(1, load_s)], lambda first, num: compute_s) == 1


def never_slower(data: st.DataObject) -> None:
    """Any machine, any steps measured on it at two depths or more, any hit, any link from ten times as fast
    as computing to ten times as slow."""
    per_token = data.draw(st.floats(1e-6, 1e-3))
    # the deepest token is up to twenty times as dear
    per_depth = data.draw(st.floats(0.0, 20.0)) * per_token / DEEP
    seen = data.draw(
        st.lists(st.tuples(st.integers(32, 8192), st.integers(0, DEEP)), min_size=2, max_size=20)
    )
    depths = [depth for _, depth in seen]
    assume(max(depths) - min(depths) > 0.05 * max(depths))
    num_tokens, depth = data.draw(st.tuples(st.integers(1, 2048), st.integers(0, DEEP)))
    compute_s = num_tokens * (per_token + per_depth * depth)
    load_s = compute_s * data.draw(st.floats(0.1, 10.0))
    rate, link = measured(per_token, per_depth, seen), LinkRate()
    link.add(1 << 20, load_s * (1 << 20) / (num_tokens * BYTES_PER_TOKEN))
    loads = is_loaded(link.seconds(num_tokens * BYTES_PER_TOKEN), rate.seconds(num_tokens, depth))
    assert not loads or load_s <= 1.05 * compute_s, "it took longer than computing"
    assert loads or load_s >= 0.95 * compute_s, "it would have been faster"


def measured(per_token: float, per_depth: float, seen: list[tuple[int, int]]) -> PrefillRate:
    rate = PrefillRate()
    for num_tokens, depth in seen:
        rate.add(num_tokens, depth, num_tokens * (per_token + per_depth * depth))
    return rate


@settings(deadline=None)
@given(data=st.data())
def test_a_choice_by_measured_rates_is_never_slower_than_computing_by_more_than_five_percent(
    data: st.DataObject,
) -> None:
    never_slower(data)


def test_what_was_never_measured_is_tried() -> None:
    assert PrefillRate().seconds(16, 0) is None and LinkRate().seconds(16) is None
    assert is_loaded(None, 1.0) and is_loaded(1.0, None) and is_loaded(1.0, 1.0) and not is_loaded(1.1, 1.0)


def test_what_rounding_leaves_between_steps_of_one_depth_is_no_line() -> None:
    for depth in (1000.3, 4096.7, 30_000.7):
        rate = PrefillRate()
        for num_tokens in (512, 333, 777, 100, 64) * 8:
            rate.add(num_tokens, depth, num_tokens * 2e-5)
            assert rate.seconds(100, 0) == rate.seconds(100, 90_000) == pytest.approx(100 * 2e-5)


def test_deep_steps_that_were_held_up_do_not_make_early_tokens_cost_less_than_nothing() -> None:
    rate = PrefillRate()
    for depth, seconds in ((1000, 1.0), (3000, 10.0)):  # a line through both is below zero at depth 0
        rate.add(100, depth, seconds)
    assert (rate.seconds(100, 0) or 0.0) > 0.0
    assert (rate.tokens(1.0, 0) or 0) > 0


def test_newer_measurements_count_more() -> None:
    link, rate = LinkRate(), measured(1e-5, 0.0, [(512, 256), (512, 4096)])
    link.add(1000, 1.0)
    for _ in range(100):
        link.add(2000, 1.0)
        rate.add(512, 256, 512 * 2e-5)
        rate.add(512, 4096, 512 * 2e-5)
    assert link.bytes_per_s == pytest.approx(2000, rel=0.01)
    assert rate.seconds(100, 1000) == pytest.approx(100 * 2e-5, rel=0.01)


@settings(deadline=None)
@given(
    line=st.tuples(st.floats(1e-6, 1e-3), st.floats(0.0, 1e-7)),
    start=st.integers(0, 200_000),
    target=st.floats(1e-3, 10.0),
)
def test_so_many_tokens_fit_into_a_time_and_one_more_does_not(
    line: tuple[float, float], start: int, target: float
) -> None:
    rate = measured(*line, [(512, 256), (2048, 60_000), (1024, 20_000)])
    num = rate.tokens(target, start)
    assert num is not None
    taken_s, longer_s = (rate.seconds(n, start + n / 2) for n in (num, num + 1))
    assert taken_s is not None and longer_s is not None
    assert taken_s <= target * (1 + 1e-9) and longer_s >= target * (1 - 1e-9)


def test_a_step_with_much_else_in_it_counts_where_nothing_is_known_or_it_was_faster_than_expected() -> None:
    rate = PrefillRate()
    rate.add(100, 50, 2.0, at_most=True)
    assert rate.seconds(100, 50) == pytest.approx(2.0), "better than nothing"
    rate.add(100, 50, 4.0, at_most=True)
    assert rate.seconds(100, 50) == pytest.approx(2.0), "the others took it"
    rate.add(100, 50, 1.5, at_most=True)
    assert rate.seconds(100, 50) == pytest.approx((0.95 * 2.0 + 1.5) / 1.95), "so it took no more than that"


def test_a_step_that_was_held_up_once_is_soon_forgotten() -> None:
    """It took twenty times as long as it should. Chunks are small then, and a small one counts little beside
    a large one: without more weight for what was fast it would take a hundred of them."""
    rate = PrefillRate()
    rate.add(8192, 4096, 8192 * 2e-4)
    num_steps = 0
    while (rate.seconds(100, 4096) or 0.0) > 100 * 2e-5:
        num = rate.tokens(0.15, 4096)
        assert num is not None and num_steps < 8
        rate.add(num, 4096, num * 1e-5)
        num_steps += 1
    for _ in range(3):
        rate.add(8192, 4096, 8192 * 1e-5)
    assert rate.seconds(100, 4096) == pytest.approx(100 * 1e-5, rel=0.05)


def test_a_fast_step_takes_nothing_from_what_is_known_of_depth() -> None:
    rate = measured(1e-5, 1e-9, [(8192, 50_000)])
    rate.add(8192, 4096, 8192 * (1e-5 + 4096e-9))  # less than half of the mean that was known
    assert rate.seconds(100, 50_000) == pytest.approx(100 * 6e-5) and rate.seconds(100, 0) == pytest.approx(
        100 * 1e-5
    )


def test_an_instant_transfer_divides_by_nothing() -> None:
    link = LinkRate()
    link.add(1000, 0.0)
    assert link.seconds(1000) == pytest.approx(1e-6)


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
