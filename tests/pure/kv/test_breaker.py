"""The breaker: opens on what the place as a whole does, looks ever more rarely, closes on an answer, and
believes no late news.

Holds invariant 22: a broken tier is fenced off and probed until it is back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kv.tiers.calls import MAX_FAILED, MAX_PROBE_S, Breaker, BreakerState
from penstock.kv.tiers.store import Outcome
from penstock.testing.stores import HandClock

FAILED, DONE = Outcome.FAILED, Outcome.DONE


def broken(clock: HandClock, probe_s: float = 1.0) -> Breaker:
    breaker = Breaker(probe_s, clock)
    entered = breaker.enter()
    assert entered is not None and breaker.fail(entered)
    return breaker


def test_blocks_open_it_when_so_many_fail_in_a_row_over_calls() -> None:
    breaker = Breaker(1.0, HandClock())
    for outcomes in (
        [FAILED] * (MAX_FAILED - 1) + [DONE],
        [FAILED] * (MAX_FAILED - 1),
        [Outcome.MISSING],
        [FAILED] * (MAX_FAILED - 1),
    ):
        assert not breaker.note(0, outcomes), "something else came between"
    assert breaker.note(0, [FAILED]) and breaker.state is BreakerState.OPEN


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome is not FAILED])
def test_a_store_that_is_full_or_has_nothing_of_ours_is_not_broken(outcome: Outcome) -> None:
    breaker = Breaker(1.0, HandClock())
    assert not breaker.note(0, [outcome] * (3 * MAX_FAILED)) and breaker.state is BreakerState.CLOSED


def waits(breaker: Breaker, clock: HandClock, num: int) -> list[float]:
    """Seconds before each of `num` probes, none of which is answered."""
    found = []
    for _ in range(num):
        before = clock.now_s
        while not breaker.try_probe():
            clock.advance(0.5)
            assert clock.now_s - before < 1000, "nobody ever looks"
        breaker.probed(False)
        found.append(clock.now_s - before)
    return found


def test_looks_become_rarer_up_to_a_limit_and_frequent_again_after_an_answer() -> None:
    clock = HandClock()
    breaker = broken(clock)
    assert waits(breaker, clock, 7) == [1.0, 2.0, 4.0, 8.0, 16.0, MAX_PROBE_S, MAX_PROBE_S]
    clock.advance(MAX_PROBE_S)
    assert breaker.try_probe()
    breaker.probed(True)
    clock.advance(1.5)
    assert breaker.fail(1) and waits(breaker, clock, 2) == [1.0, 2.0]


def test_a_store_that_answers_probes_and_nothing_else_is_left_alone_for_longer_and_longer() -> None:
    """A disk that can only be read, or a replica: each time that it counts as back, all of host memory is
    offered to it."""
    clock = HandClock()
    breaker = broken(clock)
    found = []
    for _ in range(7):
        before = clock.now_s
        while not breaker.try_probe():
            clock.advance(0.5)
        breaker.probed(True)
        found.append(clock.now_s - before)
        entered = breaker.enter()
        assert entered is not None and breaker.fail(entered)
    assert found == [1.0, 2.0, 4.0, 8.0, 16.0, MAX_PROBE_S, MAX_PROBE_S]
    clock.advance(MAX_PROBE_S)
    assert breaker.try_probe()
    breaker.probed(True)
    clock.advance(MAX_PROBE_S + 0.5)
    entered = breaker.enter()
    assert entered is not None and breaker.fail(entered) and waits(breaker, clock, 2) == [1.0, 2.0], (
        "it has done its work meanwhile"
    )


def test_blocks_that_failed_before_it_opened_do_not_count_after() -> None:
    clock = HandClock()
    breaker = Breaker(1.0, clock)
    assert breaker.note(0, [FAILED] * (2 * MAX_FAILED))
    clock.advance(1.0)
    assert breaker.try_probe()
    breaker.probed(True)
    assert not breaker.note(1, [FAILED]), "a new row begins"
    assert not breaker.note(0, [FAILED] * (MAX_FAILED - 2)) and not breaker.note(1, [FAILED]), (
        "late ones are not in it"
    )
    assert breaker.note(1, [FAILED] * (MAX_FAILED - 2))


def any_life(breaker: Breaker, clock: HandClock, events: list[tuple[str, int]]) -> None:
    """Whatever happens: it is in use exactly while the newest news of its time is good, and is always looked
    at again."""
    entered: list[int] = []
    probing = False
    for event, number in events:
        before, num_openings = breaker.state, breaker.num_openings
        if event == "enter" and (token := breaker.enter()) is not None:
            entered.append(token)
        elif event == "fail" and entered:
            token = entered.pop(number % len(entered))
            assert breaker.fail(token) == (before is BreakerState.CLOSED and token == num_openings)
        elif event == "done" and entered:
            assert not breaker.note(entered.pop(number % len(entered)), [DONE])
        elif event == "tick":
            clock.advance(float(number))
            probing = breaker.try_probe() or probing
        elif event in ("answer", "silence") and probing:
            probing = False
            breaker.probed(event == "answer")
        assert (breaker.enter() is not None) == (breaker.state is BreakerState.CLOSED)
        assert probing == (breaker.state is BreakerState.HALF_OPEN)
        assert breaker.num_openings - num_openings == (
            before is BreakerState.CLOSED and breaker.state is BreakerState.OPEN
        )
    clock.advance(MAX_PROBE_S)
    if breaker.try_probe() or probing:
        breaker.probed(True)
    assert breaker.state is BreakerState.CLOSED, "it comes back"


EVENTS = st.lists(
    st.tuples(st.sampled_from(["enter", "fail", "done", "tick", "answer", "silence"]), st.integers(0, 5)),
    max_size=40,
)


@settings(deadline=None, max_examples=200)
@given(events=EVENTS)
def test_any_life_of_it(events: list[tuple[str, int]]) -> None:
    clock = HandClock()
    any_life(Breaker(1.0, clock), clock, events)
