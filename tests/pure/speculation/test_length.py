"""Draft lengths: where they pay, and that no request loses more than 3 % however its drafts fare."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from penstock.speculation import length
from penstock.speculation.length import (
    KEPT_STEPS,
    LOOK_STEPS,
    MAX_LOSS,
    MOST_KEPT_STEPS,
    SETTLING_STEPS,
    DraftChoice,
    DraftTrack,
    Row,
    StepCosts,
    Trial,
    begin,
    choose,
    settle,
)

MAX_DRAFTS = 8
# As measured on two cores: a step of two tokens costs nearly two; four to six cost 1.7.
CPU = StepCosts((1, 2, 4, 8, 16, 32, 64), (46.0, 87.0, 78.0, 104.0, 133.0, 166.0, 300.0))
GPU = StepCosts((1, 2, 4, 8, 16, 32, 64), (2.00, 2.01, 2.02, 2.05, 2.1, 2.2, 2.5), draft_s=0.1)
CLIFF = StepCosts((1, 2, 4, 8, 64), (10.0, 10.0, 10.0, 10.0, 400.0))


def seasoned(rate: float, steps: int = 60) -> DraftTrack:
    """A request whose drafts are kept with about this rate, and which is well ahead."""
    track, chooser = DraftTrack(MAX_DRAFTS, spent_s=0.0, plain_s=1e6), random.Random(1)
    for _ in range(steps):
        kept = 0
        while kept < MAX_DRAFTS and chooser.random() < rate:
            kept += 1
        track.saw(MAX_DRAFTS, kept)
    return track


def test_survival_is_learned_by_place() -> None:
    track = DraftTrack(4)
    for _ in range(80):
        track.saw(4, 1)  # the first is always kept, the second never
    survival = track.survival()
    assert survival[0] > 0.95 and survival[1] < 0.08
    assert list(survival) == sorted(survival, reverse=True)


def test_places_behind_the_first_rejection_say_nothing() -> None:
    track = DraftTrack(4)
    track.saw(4, 1)
    assert track.tries.tolist() == [1, 1, 0, 0] and track.hits.tolist() == [1, 0, 0, 0]
    track = DraftTrack(4)
    track.saw(2, 2)
    assert track.tries.tolist() == [1, 1, 0, 0] and track.hits.tolist() == [1, 1, 0, 0]


def test_a_request_that_has_changed_is_tried_again() -> None:
    track = DraftTrack(4)
    for _ in range(60):
        track.saw(4, 0)
    low = track.survival()[0]
    for _ in range(200):
        track.saw(0, 0)
    assert low < 0.1 and track.survival()[0] > 0.5


def test_drafts_go_where_they_survive() -> None:
    rows = [Row(seasoned(rate), MAX_DRAFTS) for rate in (0.95, 0.05, 0.6)]
    chosen = choose(rows, GPU, budget=8).drafts
    assert sum(chosen) <= 8 and chosen[0] > chosen[2] >= chosen[1]


def test_rows_up_to_the_padded_size_are_filled_and_a_larger_one_must_pay() -> None:
    chosen = choose([Row(seasoned(0.9), MAX_DRAFTS)], CLIFF, budget=64)
    assert chosen.drafts == [7] and chosen.step_s == 10.0
    chosen = choose([Row(seasoned(0.9), MAX_DRAFTS)], CPU, budget=64)
    assert chosen.drafts[0] in (3, 7)


def test_where_speculation_loses_there_is_none() -> None:
    assert choose([Row(seasoned(0.1), MAX_DRAFTS)], CPU, budget=64).drafts == [0]
    assert choose([Row(seasoned(0.9), 0)], CPU, budget=64).drafts == [0]
    assert choose([Row(seasoned(0.9), 8)], CPU, budget=0).drafts == [0]
    assert choose([], CPU, budget=8) == DraftChoice([], CPU.of(0), CPU.of(0))


def test_drafting_costs_by_its_depth() -> None:
    """Two drafts deep for the whole batch, or eight: what a deep one adds must pay for its steps."""
    free, dear = (StepCosts(GPU.sizes, GPU.seconds, draft_s) for draft_s in (0.0, 1.5))
    row = [Row(seasoned(0.7), MAX_DRAFTS)]
    assert choose(row, free, 64).drafts[0] > choose(row, dear, 64).drafts[0] >= 0
    assert choose(row, StepCosts(GPU.sizes, GPU.seconds, 50.0), 64).drafts == [0]


def test_the_choice_is_the_best_of_all_that_could_be_made() -> None:
    """Against every choice there is, for two rows."""
    rows = [Row(seasoned(0.8), 3), Row(seasoned(0.5), 3)]
    for costs in (CPU, GPU, CLIFF):
        found = choose(rows, costs, budget=5)
        best = 0.0
        for first in range(4):
            for second in range(4):
                if first + second <= 5:
                    gain = sum(float(row.track.survival()[:n].sum()) for row, n in zip(rows, (first, second), strict=True))
                    best = max(best, (2 + gain) / (costs.of(2 + first + second) + costs.draft_s * max(first, second)))
        gain = sum(float(row.track.survival()[:n].sum()) for row, n in zip(rows, found.drafts, strict=True))
        assert (2 + gain) / found.step_s == pytest.approx(best)


def test_a_table_without_order_is_refused() -> None:
    for sizes, seconds in (((), ()), ((1, 2), (1.0,)), ((2, 1), (1.0, 2.0)), ((1, 1), (1.0, 2.0))):
        with pytest.raises(ValueError, match="ascending"):
            StepCosts(sizes, seconds)


# --------------------------------------------------------------------------------------------------------------- simulation

Kept = Callable[[int, int, int], int]  # row, step, drafts -> how many are kept


def simulate(costs: StepCosts, kept: Kept, num_rows: int, book: Callable[..., None] = begin) -> list[DraftTrack]:
    """400 steps of a batch whose results are read one step later. After each, no request may have lost more than MAX_LOSS."""
    tracks = [DraftTrack(MAX_DRAFTS) for _ in range(num_rows)]
    rows = [Row(track, MAX_DRAFTS) for track in tracks]
    spent, tokens_s = [0.0] * num_rows, [0.0] * num_rows
    unread: list[tuple[DraftChoice, list[int]]] = []
    for step in range(400):
        choice = choose(rows, costs, budget=64)
        book(rows, choice)
        outcome = [kept(row, step, drafts) for row, drafts in enumerate(choice.drafts)]
        for row in range(num_rows):
            spent[row] += choice.step_s
            tokens_s[row] += (1 + outcome[row]) * choice.plain_s
            assert spent[row] <= (1 + MAX_LOSS) * tokens_s[row] + 1e-9, f"row {row} after step {step}"
        unread.append((choice, outcome))
        if len(unread) > 1:
            read, found = unread.pop(0)
            for track, drafts, num in zip(tracks, read.drafts, found, strict=True):
                settle(track, drafts, num, read.plain_s)
    return tracks


def never(row: int, step: int, drafts: int) -> int:
    return 0


def always(row: int, step: int, drafts: int) -> int:
    return drafts


def trap(row: int, step: int, drafts: int) -> int:
    """All is kept until the request is trusted, then nothing."""
    return drafts if step % 100 < 40 else 0


def all_but_the_first(row: int, step: int, drafts: int) -> int:
    return 0 if row == 0 else drafts


def only_short(row: int, step: int, drafts: int) -> int:
    return drafts if drafts < 3 else 0


def coin(row: int, step: int, drafts: int) -> int:
    chooser, kept = random.Random(row * 10_000 + step), 0
    while kept < drafts and chooser.random() < 0.45:
        kept += 1
    return kept


ADVERSARIES: Sequence[Kept] = (never, trap, all_but_the_first, only_short, coin)


@pytest.mark.parametrize("costs", [CPU, GPU, CLIFF], ids=["cpu", "gpu", "cliff"])
@pytest.mark.parametrize("adversary", ADVERSARIES, ids=lambda kept: kept.__name__)
@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_no_request_is_more_than_three_percent_slower_however_its_drafts_fare(costs: StepCosts, adversary: Kept, num_rows: int) -> None:
    simulate(costs, adversary, num_rows)


def speed_up(costs: StepCosts, kept: Kept, num_rows: int = 1) -> float:
    tracks = simulate(costs, kept, num_rows)
    return min(track.plain_s / track.spent_s for track in tracks)


def test_where_drafts_are_kept_requests_are_faster() -> None:
    assert speed_up(CPU, always) > 2.0
    assert speed_up(GPU, always) > 3.0
    assert speed_up(GPU, lambda row, step, drafts: min(drafts, 2)) > 1.8


def test_without_the_account_an_adversary_makes_requests_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length, "_room_s", lambda rows, plain_s: float("inf"))
    with pytest.raises(AssertionError, match="row 0 after step"):
        simulate(CPU, never, 1)


def test_an_account_that_hopes_for_results_that_are_not_read_yet_is_not_enough() -> None:
    """A step is booked when it is launched: by the time its result is read, the next one runs already."""
    booked: list[tuple[Sequence[Row], DraftChoice]] = []

    def begin_late(rows: Sequence[Row], choice: DraftChoice) -> None:
        booked.append((rows, choice))
        if len(booked) > 1:
            begin(*booked.pop(0))

    with pytest.raises(AssertionError, match="row 0 after step"):
        simulate(CPU, never, 1, begin_late)


# ------------------------------------------------------------------------------------------------------- whether it pays


def run_trial(trial: Trial, num_steps: int, on_rate: float, off_rate: float) -> tuple[int, float]:
    """Steps with proposals, and seconds, where each step gives one token."""
    num_on, seconds = 0, 0.0
    for _ in range(num_steps):
        took = 1.0 / (on_rate if trial.is_on else off_rate)
        num_on += trial.is_on
        seconds += took
        trial.add(took, 1)
    return num_on, seconds


def test_where_proposing_is_slower_it_is_hardly_ever_tried() -> None:
    """However much slower: what looking costs is bounded, and falls."""
    trial = Trial()
    num_on, seconds = run_trial(trial, 20_000, on_rate=0.25, off_rate=1.0)
    assert num_on <= 6 * (LOOK_STEPS + SETTLING_STEPS)
    assert seconds < 1.01 * 20_000
    num_on, _ = run_trial(trial, 20_000, on_rate=0.25, off_rate=1.0)
    assert num_on <= 4 * (LOOK_STEPS + SETTLING_STEPS)


def test_where_proposing_is_faster_it_goes_on() -> None:
    num_on, _ = run_trial(Trial(), 20_000, on_rate=1.5, off_rate=1.0)
    assert num_on > 0.98 * 20_000


def test_what_changes_is_noticed() -> None:
    trial = Trial()
    run_trial(trial, 1_000, on_rate=2.0, off_rate=1.0)
    assert trial.is_on
    run_trial(trial, 2 * MOST_KEPT_STEPS, on_rate=0.5, off_rate=1.0)
    assert not trial.is_on
    run_trial(trial, 2 * MOST_KEPT_STEPS, on_rate=2.0, off_rate=1.0)
    assert trial.is_on


def test_steps_planned_before_a_change_do_not_count_for_what_follows() -> None:
    """They are as slow as what was before: the other one would seem to be no better."""
    trial = Trial()
    for _ in range(SETTLING_STEPS + LOOK_STEPS):
        trial.add(1.0, 1)
    assert trial.is_on
    for _ in range(SETTLING_STEPS):
        trial.add(1000.0, 1)
    for _ in range(LOOK_STEPS):
        trial.add(0.5, 1)
    assert trial.is_on, "it was twice as fast"


def test_after_a_change_the_other_way_is_looked_at_as_soon_as_at_the_beginning() -> None:
    """What was long the worse one and is now the better is not trusted for as long as the one before it was."""
    trial = Trial()
    run_trial(trial, 3 * MOST_KEPT_STEPS, on_rate=0.5, off_rate=1.0)
    while not trial.is_on or trial.is_look:
        run_trial(trial, 1, on_rate=2.0, off_rate=1.0)
    num_on, _ = run_trial(trial, 2 * KEPT_STEPS, on_rate=0.5, off_rate=1.0)
    assert num_on < KEPT_STEPS + 2 * (LOOK_STEPS + SETTLING_STEPS)
