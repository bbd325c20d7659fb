"""Draft lengths: where they pay, and that no request loses more than 3 % however its drafts fare."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import pytest

from penstock.speculation import length
from penstock.speculation.drafter import LOOK_SHARE
from penstock.speculation.length import (
    FIRST_PLAIN_STEPS,
    LEAST_GAIN,
    MAX_LOSS,
    RETRY_STEPS,
    STALE_STEPS,
    SURE,
    Books,
    DraftRecord,
    Row,
    StepCosts,
    choose,
)
from tests.support.drafted_run import Kept, Prices, Run

MAX_DRAFTS = 8
FAR = 1e9  # room for anything
# As measured on two cores: a step of two tokens costs nearly two; four to six cost 1.7.
CPU = StepCosts((1, 2, 4, 8, 16, 32, 64), (46.0, 87.0, 78.0, 104.0, 133.0, 166.0, 300.0))
GPU = StepCosts((1, 2, 4, 8, 16, 32, 64), (2.00, 2.01, 2.02, 2.05, 2.1, 2.2, 2.5))
CLIFF = StepCosts((1, 2, 4, 8, 64), (10.0, 10.0, 10.0, 10.0, 400.0))


def geometric(rate: float) -> list[float]:
    return [rate ** (n + 1) for n in range(MAX_DRAFTS)]


def books(costs: StepCosts, extra_s: float = 0.0, num_requests: int = 1, on_device: bool = False) -> Books:
    """Plain steps take what the table says, and drafting `extra_s`."""
    made = Books(costs, on_device)
    plain_s = costs.of(num_requests)
    for _ in range(FIRST_PLAIN_STEPS):
        made.took(num_requests, num_requests, plain_s, 0)
    made.took(
        num_requests,
        num_requests + (not on_device),
        plain_s + made.rows_s(num_requests, 1) * (not on_device) + extra_s,
        int(on_device),
    )
    made.took(num_requests, num_requests, plain_s, 0)
    return made


# ---------------------------------------------------------------------------------------------------- records


def test_survival_is_learned_by_place() -> None:
    record = DraftRecord(4)
    for _ in range(80):
        record.saw(4, 1)  # the first is always kept, the second never
    survival = record.survival(0.6)
    assert survival[0] > 0.95 and survival[1] < 0.08
    assert survival == sorted(survival, reverse=True)


def test_places_behind_the_first_rejection_say_nothing() -> None:
    record = DraftRecord(4)
    record.saw(4, 1)
    assert record.tries == [1, 1, 0, 0] and record.hits == [1, 0, 0, 0]
    record = DraftRecord(4)
    record.saw(2, 2)
    assert record.tries == [1, 1, 0, 0] and record.hits == [1, 1, 0, 0]


def test_what_nobody_has_seen_is_taken_to_be_as_usual() -> None:
    assert DraftRecord(2).survival(0.5) == [0.5, 0.25] and DraftRecord(2).survival(0.1) == pytest.approx(
        [0.1, 0.01]
    )


def test_a_place_that_was_never_reached_is_taken_to_be_like_the_average_of_all() -> None:
    record = DraftRecord(2)
    for _ in range(80):
        record.saw(2, 0)
    first, both = record.survival(0.6)
    assert both / first == pytest.approx(record.rate(0.6)) and record.rate(0.6) < 0.1


def test_what_was_seen_long_ago_counts_less() -> None:
    record = DraftRecord(1)
    for _ in range(60):
        record.saw(1, 0)
    for _ in range(60):
        record.saw(1, 1)
    assert record.survival(0.6)[0] > 0.8


# ----------------------------------------------------------------------------------------------------- choice


def test_drafts_go_where_they_survive() -> None:
    rows = [Row(geometric(rate), MAX_DRAFTS) for rate in (0.95, 0.05, 0.6)]
    chosen = choose(rows, books(GPU, num_requests=3), 8, FAR)
    assert sum(chosen) <= 8 and chosen[0] > chosen[2] >= chosen[1]


def test_rows_up_to_the_padded_size_are_filled_and_a_larger_one_must_pay() -> None:
    assert choose([Row(geometric(0.9), MAX_DRAFTS)], books(CLIFF), 64, FAR) == [7]
    assert choose([Row(geometric(0.9), MAX_DRAFTS)], books(CPU), 64, FAR)[0] in (3, 7)


def test_where_speculation_loses_there_is_none() -> None:
    assert choose([Row(geometric(0.1), MAX_DRAFTS)], books(CPU), 64, FAR) == [0]
    assert choose([Row(geometric(0.9), 0)], books(CPU), 64, FAR) == [0]
    assert choose([Row(geometric(0.9), 8)], books(CPU), 0, FAR) == [0]
    assert choose([], books(CPU), 8, FAR) == []


def test_what_drafting_takes_must_be_won_and_what_is_spent_already_need_not() -> None:
    row = [Row([0.3], 1)]
    assert choose(row, books(GPU, extra_s=0.2), 64, FAR) == [1]
    assert choose(row, books(GPU, extra_s=0.8), 64, FAR) == [0]
    assert choose(row, books(GPU, extra_s=0.8, on_device=True), 64, FAR, is_paid=True) == [1]


def test_a_small_gain_is_taken_where_it_costs_nothing_more() -> None:
    row = [Row([0.03], 1)]  # three more tokens in a hundred, and a step that takes half a percent longer
    assert choose(row, books(GPU), 64, FAR) == [0]
    assert choose(row, books(GPU, on_device=True), 64, FAR, is_paid=True) == [1]


def test_a_step_takes_no_longer_than_accounts_can_pay() -> None:
    row, known = [Row(geometric(0.9), MAX_DRAFTS)], books(CPU, extra_s=5.0)
    need_s = SURE * (5.0 + known.rows_s(1, 3))
    assert choose(row, known, 64, need_s + 0.01) == [3], "more would pay, and be too dear"
    assert choose(row, known, 64, need_s - 0.01) == [0]


@pytest.mark.parametrize("costs", [CPU, GPU, CLIFF], ids=["cpu", "gpu", "cliff"])
def test_the_choice_is_the_best_of_all_that_could_be_made(costs: StepCosts) -> None:
    """Against every choice there is, for two rows."""
    rows = [Row(geometric(0.8), 3), Row(geometric(0.5), 3)]
    known = books(costs, extra_s=0.1, num_requests=2)

    def rate(nums: Sequence[int]) -> float:
        gain = sum(sum(row.survival[:num]) for row, num in zip(rows, nums, strict=True))
        return (2 + gain) / (costs.of(2) + 0.1 + known.rows_s(2, sum(nums)))

    every = ((first, second) for first in range(4) for second in range(4) if 0 < first + second <= 5)
    best, found = max(map(rate, every)), choose(rows, known, 5, FAR)
    assert (rate(found) if any(found) else LEAST_GAIN * 2 / costs.of(2)) == pytest.approx(
        max(best, LEAST_GAIN * 2 / costs.of(2))
    )


def test_a_step_beyond_the_table_grows_with_its_tokens() -> None:
    assert [CLIFF.of(num) for num in (8, 9, 64, 96, 128)] == [10.0, 400.0, 400.0, 600.0, 800.0]


def test_a_table_without_order_is_refused() -> None:
    for sizes, seconds in (((), ()), ((1, 2), (1.0,)), ((2, 1), (1.0, 2.0)), ((1, 1), (1.0, 2.0))):
        with pytest.raises(ValueError, match="ascending"):
            StepCosts(sizes, seconds)


# ------------------------------------------------------------------------------------------------------ books


def test_an_account_earns_a_share_of_its_time_and_pays_what_drafts_take() -> None:
    known = books(GPU)
    account = known.opened()
    assert known.balance_s(account, 0.0) == 0.0
    for _ in range(10):
        known.took(1, 1, 2.0, 0)
    assert known.balance_s(account, 0.0) == pytest.approx(MAX_LOSS * 20.0)
    known.took(1, 4, 2.5, 0)
    assert known.balance_s(account, 0.0) == pytest.approx(MAX_LOSS * 22.0 - 0.5)
    known.charge(0.25)
    assert known.balance_s(account, 6.0) == pytest.approx(MAX_LOSS * 22.0 - 0.75 + 6.0)
    assert known.balance_s(known.opened(), 0.0) == 0.0, "who comes now has no part in that"


def test_the_first_step_after_drafts_is_paid_for_as_they_are() -> None:
    """It has to fill the pipe again: it says nothing about plain ones."""
    known = books(GPU)
    account = known.opened()
    known.took(1, 4, 2.02, 0)
    known.took(1, 1, 3.0, 0)
    assert known.plain_step_s(1) == pytest.approx(2.0)
    assert known.balance_s(account, 0.0) == pytest.approx(MAX_LOSS * 4.0 - 1.02)
    assert known.estimate(1).extra_s == pytest.approx(0.5), "the middle of what was measured: nothing, and 1"


def test_what_drafting_takes_includes_the_time_in_which_it_is_launched() -> None:
    """Where steps wait for the host, it is all in the time of the step before."""
    known = books(GPU)
    account = known.opened()
    known.took(1, 1, 2.4, 0, leads=True)
    known.took(1, 4, 2.02, 0)
    known.took(1, 1, 2.0, 0)
    assert known.plain_step_s(1) == pytest.approx(2.0), "it says nothing about plain ones"
    assert known.balance_s(account, 0.0) == pytest.approx(MAX_LOSS * 6.0 - 0.42)
    assert known._batch(1).extras[-1] == pytest.approx(0.4, abs=0.03)


def test_nothing_is_known_of_a_batch_before_some_of_its_steps_were_seen() -> None:
    known = Books(GPU, on_device=False)
    for num in range(FIRST_PLAIN_STEPS):
        assert not known.is_known(8)
        known.took(8, 8, 9.0 if num == 0 else 2.0, 0)
    assert known.is_known(8) and not known.is_known(9) and known.plain_step_s(8) == 2.0, (
        "of the first the least counts"
    )


def test_what_plain_steps_take_is_measured_again_behind_many_with_drafts() -> None:
    known = books(GPU)
    for _ in range(STALE_STEPS - 2):
        known.took(1, 4, 2.5, 0)
    assert known.is_known(1)
    known.took(1, 4, 2.5, 0)
    assert not known.is_known(1)
    for _ in range(1 + FIRST_PLAIN_STEPS):
        assert not known.is_known(1)
        known.took(1, 1, 4.0, 0)
    assert known.is_known(1) and known.plain_step_s(1) > 3.0


def test_what_drafting_takes_is_expected_by_what_warming_up_has_measured_or_the_worst() -> None:
    warm = Books(StepCosts(GPU.sizes, GPU.seconds, ahead_s=0.5, ahead_row_s=0.1), on_device=True)
    assert warm.estimate(3) == (2.02, 0.7, SURE * 0.7)
    assert Books(GPU, on_device=False).estimate(3) == (2.02, 0.0, 2.02), (
        "to read first takes as long again at most"
    )


def test_a_step_that_took_very_long_had_another_reason() -> None:
    known = books(GPU)
    account = known.opened()
    known.took(1, 1, 1000.0, 0)
    assert known.plain_step_s(1) < 2.5
    assert known.balance_s(account, 0.0) == pytest.approx(MAX_LOSS * 2 * known.plain_step_s(1)), (
        "nor may drafts lose a share of it"
    )


# ------------------------------------------------------------------------------------------------------ bound


def never(request: int, step: int, drafts: int) -> int:
    return 0


def trap(request: int, step: int, drafts: int) -> int:
    """All is kept until the request is trusted, then nothing."""
    return drafts if step % 100 < 60 else 0


def all_but_the_first(request: int, step: int, drafts: int) -> int:
    return 0 if request == 0 else drafts


def only_short(request: int, step: int, drafts: int) -> int:
    return drafts if drafts < 3 else 0


def coin(request: int, step: int, drafts: int) -> int:
    chooser, kept = random.Random(request * 10_000 + step), 0
    while kept < drafts and chooser.random() < 0.3:
        kept += 1
    return kept


ADVERSARIES: Sequence[Kept] = (never, trap, all_but_the_first, only_short, coin)


@pytest.mark.parametrize("adversary", ADVERSARIES, ids=lambda kept: kept.__name__)
@pytest.mark.parametrize("num_requests", [1, 3, 32])
@pytest.mark.parametrize(
    ("drafting", "following"),
    [(0.02, 0.0), (0.35, 0.0), (1.0, 0.0), (0.35, 0.05), (0.35, 0.3), (1.0, 0.4), (1.5, 0.35), (1.5, 0.6)],
)
def test_no_request_is_more_than_three_percent_slower_however_its_drafts_fare(
    adversary: Kept, num_requests: int, drafting: float, following: float
) -> None:
    """At any time of its life, the first 128 tokens of an engine's life included. Passes over what is decoded
    count as drafts do."""
    run = Run(Prices(drafting=drafting, following=following), num_requests, adversary)
    for num_tokens in (128, 40, 200, 600):
        ran = run.go(num_tokens)
        assert ran.worst <= MAX_LOSS + 1e-9, ran


@pytest.mark.parametrize("adversary", ADVERSARIES, ids=lambda kept: kept.__name__)
@pytest.mark.parametrize("num_requests", [1, 3, 32])
@pytest.mark.parametrize(("drafting", "following"), [(0.1, 0.0), (0.35, 0.05), (1.0, 0.4)])
def test_where_steps_wait_for_the_host_no_request_is_more_than_three_percent_slower_either(
    adversary: Kept, num_requests: int, drafting: float, following: float
) -> None:
    """What a step with drafts takes longer is then in the time of the step before it. The first token comes a
    step late, here as without speculation: what counts is an answer as a whole."""
    run = Run(Prices(drafting=drafting, following=following), num_requests, adversary, host_bound=True)
    for num_tokens in (128, 40, 200, 600):
        ran = run.go(num_tokens)
        assert ran.slowest <= 1 + MAX_LOSS + 1e-9, ran


@pytest.mark.parametrize("adversary", ADVERSARIES, ids=lambda kept: kept.__name__)
@pytest.mark.parametrize("bookkeeping", [0.005, 0.015, 0.024])
def test_what_speculation_takes_in_every_step_is_paid_first(adversary: Kept, bookkeeping: float) -> None:
    """Where steps are short it is most of what a request may lose, and less is left for drafts that fail."""
    run = Run(Prices(bookkeeping=bookkeeping, following=0.05), 3, adversary)
    for num_tokens in (128, 40, 200, 600):
        assert run.go(num_tokens).worst <= MAX_LOSS * (1 + bookkeeping) + 1e-9


def test_where_speculation_takes_more_than_may_be_lost_nothing_is_drafted() -> None:
    run = Run(Prices(bookkeeping=0.03), 1, lambda request, step, drafts: drafts)
    assert not any(run.go(600).with_drafts for _ in range(3)) and run.speculation.leaves_out


def test_drafts_that_fail_cost_a_run_of_32_requests_less_than_one_percent() -> None:
    """128 tokens, where a step that makes drafts takes a third longer. They are tried, and left for hundreds
    of steps."""
    run = Run(Prices(drafting=0.35), 32, never)
    first, *later = (run.go(128) for _ in range(3))
    assert 1 <= len(first.with_drafts) <= 4 and first.slowest < 1.01
    assert not any(ran.with_drafts for ran in later)


@pytest.mark.parametrize("num_requests", [1, 8, 32])
def test_drafts_that_are_kept_are_found_within_tens_of_steps(num_requests: int) -> None:
    ran = Run(Prices(drafting=0.35), num_requests, lambda request, step, drafts: min(drafts, 3)).go(128)
    assert ran.with_drafts[0] <= 24 and ran.slowest < 0.65


@pytest.mark.parametrize(("following", "most"), [(0.05, 130), (0.35, 170), (0.6, 210)])
def test_a_draft_model_that_is_kept_pays_though_its_passes_are_dear(following: float, most: int) -> None:
    """As Qwen3-0.6B beside Qwen3-4B on an H200: making four drafts takes one and a half steps."""
    run = Run(Prices(drafting=1.5, following=following), 1, lambda request, step, drafts: min(drafts, 3))
    run.go(300)
    ran = run.go(600)
    assert ran.with_drafts[0] <= most and ran.slowest < 0.8


def test_what_failed_is_tried_again_ever_more_seldom_and_what_pays_now_is_found() -> None:
    fate = [0]
    run = Run(Prices(drafting=0.35), 1, lambda request, step, drafts: min(drafts, fate[0]))
    tried = [len(run.go(RETRY_STEPS).with_drafts) for _ in range(16)]
    assert 3 <= sum(map(bool, tried)) <= 6 and sum(tried) < 40
    fate[0] = 3
    assert min(run.go(1024).slowest for _ in range(20)) < 0.6


@pytest.mark.parametrize("drafting", [0.05, 0.35, 1.0])
@pytest.mark.parametrize("num_requests", [1, 8, 32])
@pytest.mark.parametrize("kind", ["never", "loops", "copies"])
def test_lookups_and_what_they_find_make_no_request_three_percent_slower(
    kind: str, num_requests: int, drafting: float
) -> None:
    """A lookup takes 20 us of a step of a millisecond."""
    answers = {"never": lambda n: range(n * 10**6, n * 10**6 + 999), "loops": loop, "copies": copies}[kind]
    run = Run(Prices(drafting=drafting, lookup=0.02), num_requests, answers=answers)
    for num_tokens in (128, 200):
        ran = run.go(num_tokens)
        assert ran.slowest <= 1 + MAX_LOSS + LOOK_SHARE
        if kind == "never":
            assert not ran.with_drafts and ran.slowest <= 1 + LOOK_SHARE + 1e-4


@functools.cache
def loop(number: int) -> Sequence[int]:
    return [number * 100 + place % 11 for place in range(999)]


@functools.cache
def copies(number: int) -> Sequence[int]:
    """Pieces of one text, with other tokens in between."""
    chooser, found = random.Random(number), list[int]()
    while len(found) < 999:
        at = chooser.randrange(150)
        found += range(5000 + at, 5000 + at + chooser.randrange(4, 40))
        found += [chooser.randrange(10**6) for _ in range(chooser.randrange(1, 6))]
    return found


def test_a_text_that_repeats_itself_is_found_by_lookups_within_tens_of_steps() -> None:
    """The first time it has to be paid that reading first may take as long as the step. After that it is
    known what it takes."""
    run = Run(Prices(drafting=0.35, lookup=0.02), 8, answers=loop)
    assert run.go(128).slowest < 0.6
    ran = run.go(128)
    assert ran.with_drafts[0] <= 40 and ran.slowest < 0.5


def test_without_accounts_an_adversary_makes_requests_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length.Books, "balance_s", lambda books, account, gained_s: FAR)
    assert Run(Prices(drafting=1.0), 1, never).go(40).worst > 0.03
