"""Draft lengths: what is learned of drafts, and how many are worth their rows."""

from __future__ import annotations

import pytest

from penstock.speculation.length import DraftRecord, Row, StepCosts, choose

MAX_DRAFTS = 8
# As measured on two cores: a step of two tokens costs nearly two; four to six cost 1.7.
CPU = StepCosts((1, 2, 4, 8, 16, 32, 64), (46.0, 87.0, 78.0, 104.0, 133.0, 166.0, 300.0))
GPU = StepCosts((1, 2, 4, 8, 16, 32, 64), (2.00, 2.01, 2.02, 2.05, 2.1, 2.2, 2.5))
CLIFF = StepCosts((1, 2, 4, 8, 64), (10.0, 10.0, 10.0, 10.0, 400.0))


def geometric(rate: float) -> list[float]:
    return [rate ** (n + 1) for n in range(MAX_DRAFTS)]


def test_survival_is_learned_by_place_and_the_latest_counts_most() -> None:
    record = DraftRecord(4, 32)
    for _ in range(80):
        record.saw(4, 1)  # the first is always kept, the second never
    survival = record.survival(0.6)
    assert survival[0] > 0.9 and survival[1] < 0.1 and survival == sorted(survival, reverse=True)
    for _ in range(80):
        record.saw(4, 0)
    assert record.survival(0.6)[0] < 0.15


def test_places_behind_the_first_rejection_say_nothing_and_are_like_the_average() -> None:
    assert DraftRecord(2, 32).survival(0.5) == [0.5, 0.25]
    record = DraftRecord(2, 32)
    for _ in range(80):
        record.saw(2, 0)
    first, both = record.survival(0.6)
    assert both / first == pytest.approx(record.rate(0.6)) and record.rate(0.6) < 0.1


def test_drafts_go_where_they_survive() -> None:
    rows = [Row(geometric(rate), MAX_DRAFTS) for rate in (0.95, 0.05, 0.6)]
    chosen = choose(rows, 3, GPU, 8)
    assert sum(chosen) <= 8 and chosen[0] > chosen[2] >= chosen[1]


def test_rows_up_to_the_padded_size_are_filled_and_a_larger_one_must_pay() -> None:
    assert choose([Row(geometric(0.9), MAX_DRAFTS)], 1, CLIFF, 64) == [7]
    assert choose([Row(geometric(0.9), MAX_DRAFTS)], 1, CPU, 64)[0] in (3, 7)
    assert choose([Row(geometric(0.9), MAX_DRAFTS)], 5, CLIFF, 64) == [3], "others of the step have rows, too"


def test_where_drafts_lose_or_there_are_none_nothing_is_chosen() -> None:
    assert choose([Row(geometric(0.1), MAX_DRAFTS)], 1, CPU, 64) == [0]
    assert choose([Row(geometric(0.9), 0)], 1, CPU, 64) == [0]
    assert choose([Row(geometric(0.9), 8)], 1, CPU, 0) == [0]


def test_what_drafting_takes_must_be_won() -> None:
    row = [Row([0.3], 1)]
    assert [choose(row, 1, GPU, 64, extra_s) for extra_s in (0.0, 0.2, 0.8)] == [[1], [1], [0]]


@pytest.mark.parametrize(("sizes", "seconds"), [((), ()), ((1, 2), (1.0,)), ((2, 1), (1.0, 2.0))])
def test_costs_that_do_not_fit_their_sizes_are_refused(
    sizes: tuple[int, ...], seconds: tuple[float, ...]
) -> None:
    with pytest.raises(ValueError, match="ascending"):
        StepCosts(sizes, seconds)


def test_beyond_the_table_time_grows_with_rows_and_making_drafts_with_requests() -> None:
    costs = StepCosts((1, 4), (1.0, 2.0), making_s=0.5, making_row_s=0.1)
    assert [costs.of(num) for num in (1, 3, 4, 8)] == [1.0, 2.0, 2.0, 4.0]
    assert costs.making(1) == 0.5 and costs.making(3) == pytest.approx(0.7)
