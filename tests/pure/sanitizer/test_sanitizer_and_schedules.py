"""The sanitizer against the truth: it reports two accesses exactly where some schedule runs them the other way round."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.contract import Access, Mode
from penstock.sanitizer.clock import Clocks
from penstock.sanitizer.report import Kind
from penstock.sanitizer.sanitizer import Sanitizer
from penstock.testing.sequencer import Sequencer, run

LANES = ("a", "b", "c")


class Touch(NamedTuple):
    lane: str
    slot: int
    writes: bool
    layer: int


class Wait(NamedTuple):
    lane: str
    on_lane: str  # for a fence recorded there just now


class See(NamedTuple):
    on_lane: str  # the host blocks until all of that lane's work so far is over


Instruction = Touch | Wait | See

touches = st.builds(Touch, st.sampled_from(LANES), st.integers(0, 1), st.booleans(), st.integers(0, 1))
programs = st.lists(
    st.one_of(
        touches, touches, touches, st.builds(Wait, st.sampled_from(LANES), st.sampled_from(LANES)), st.builds(See, st.sampled_from(LANES))
    ),
    min_size=2,
    max_size=8,
)


def perform(program: list[Instruction], sequencer: Sequencer, ran: list[int]) -> None:
    lanes = {name: sequencer.lane(name) for name in LANES}
    for number, instruction in enumerate(program):
        match instruction:
            case Touch(lane, slot, writes, layer):
                access = Access("device", (slot,), (layer, layer + 1), Mode.WRITE if writes else Mode.READ)
                lanes[lane].submit(lambda number=number: ran.append(number), [access], label=str(number))  # type: ignore[misc]
            case Wait(lane, on_lane):
                lanes[lane].wait(lanes[on_lane].record())
            case See(on_lane):
                lanes[on_lane].drain()
    sequencer.run_all()


def reported(program: list[Instruction]) -> set[tuple[int, int]]:
    sanitizer = Sanitizer()
    perform(program, Sequencer(observer=sanitizer), [])
    return {(int(r.deeds[0].label), int(r.deeds[1].label)) for r in sanitizer.reports if r.kind is Kind.RACE}


class Delaying(Sequencer):
    """Holds back one piece of work, and so everything that depends on it, until nothing else can run."""

    def __init__(self, lane: str, label: str) -> None:
        super().__init__()
        self._held = (lane, label)

    def _choose(self, number: int, options: tuple[str, ...], default: str) -> str:
        lanes = self._lanes
        others = [
            name for name in options if name not in lanes or lanes[name].accesses is not None or (name, lanes[name].head) != self._held
        ]
        return (others or options)[0]


def can_be_reversed(program: list[Instruction], first: int, second: int) -> bool:
    """What still comes after a piece of work that is held back as long as possible comes after it in every schedule."""
    touch = program[first]
    assert isinstance(touch, Touch)
    ran: list[int] = []
    perform(program, Delaying(touch.lane, str(first)), ran)
    return ran.index(second) < ran.index(first)


def conflicts(program: list[Instruction]) -> list[tuple[int, int]]:
    found = [(n, i) for n, i in enumerate(program) if isinstance(i, Touch)]
    return [(m, n) for m, x in found for n, y in found if m < n and (x.slot, x.layer) == (y.slot, y.layer) and (x.writes or y.writes)]


def check_against_all_schedules(program: list[Instruction]) -> None:
    """A pair that is covered by a reported one in between need not be told again, so: no false alarm, and none missed altogether."""
    told = reported(program)
    true = {pair for pair in conflicts(program) if can_be_reversed(program, *pair)}
    assert told <= true, f"false alarm: {sorted(told - true)} in {program}"
    assert bool(told) == bool(true), f"missed: {sorted(true)} in {program}"


@settings(max_examples=400, deadline=None, derandomize=True)
@given(programs)
def test_a_race_is_reported_exactly_where_a_schedule_reverses_two_accesses(program: list[Instruction]) -> None:
    check_against_all_schedules(program)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(programs, st.randoms(use_true_random=False))
def test_accesses_that_cannot_be_reversed_never_are(program: list[Instruction], rng: random.Random) -> None:
    """The truth above, doubted: random schedules never run a pair the other way round that delaying says is fixed."""
    fixed = [pair for pair in conflicts(program) if not can_be_reversed(program, *pair)]
    for _ in range(5):
        ran: list[int] = []
        assert run(lambda sequencer, ran=ran: perform(program, sequencer, ran), rng=rng)[1] is None  # type: ignore[misc]
        assert all(ran.index(first) < ran.index(second) for first, second in fixed)


def test_clocks_that_forget_waits_raise_false_alarms(monkeypatch: pytest.MonkeyPatch) -> None:
    program: list[Instruction] = [Touch("a", 0, True, 0), Wait("b", "a"), Touch("b", 0, False, 0)]
    check_against_all_schedules(program)
    monkeypatch.setattr(Clocks, "wait", lambda *_: None)
    with pytest.raises(AssertionError, match="false alarm"):
        check_against_all_schedules(program)


def test_clocks_that_know_too_much_miss_races(monkeypatch: pytest.MonkeyPatch) -> None:
    program: list[Instruction] = [Touch("a", 0, True, 0), Touch("b", 0, False, 0)]
    check_against_all_schedules(program)
    monkeypatch.setattr(Clocks, "submit", lambda *_: dict.fromkeys(LANES, 1000))
    with pytest.raises(AssertionError, match="missed"):
        check_against_all_schedules(program)
