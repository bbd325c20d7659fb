"""The reduced search comes to the same ends as trying every schedule, in far fewer runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest

from penstock.contract import Access, Mode
from penstock.testing.sequencer import Program, Sequencer, explore, run
from tests.support import reduction
from tests.support.reduction import explore_all

LANES = ("a", "b", "c")
TOO_MANY = 1500  # schedules of a random program that is worth trying


class Touch(NamedTuple):
    lane: str
    slot: int
    writes: bool
    launched: bool  # through a launcher, while the program goes on
    declared: bool


class Wait(NamedTuple):
    lane: str
    on_lane: str


class Look(NamedTuple):
    lane: str
    blocks: bool


Instruction = Touch | Wait | Look
Outcomes = set[tuple[object, ...]]


def random_program(rng: random.Random) -> list[Instruction]:
    def instruction() -> Instruction:
        match rng.choice("tttttwwl"):
            case "t":
                return Touch(
                    rng.choice(LANES),
                    rng.randrange(2),
                    rng.random() < 0.5,
                    rng.random() < 0.2,
                    rng.random() < 0.9,
                )
            case "w":
                return Wait(rng.choice(LANES), rng.choice(LANES))
            case _:
                return Look(rng.choice(LANES), rng.random() < 0.5)

    return [instruction() for _ in range(rng.randrange(2, 6))]


def performed(instructions: list[Instruction], outcomes: Outcomes) -> Program:
    """A program that adds what it came to: what is in memory, what readers read, what looks saw."""

    def program(sequencer: Sequencer) -> None:
        lanes = {name: sequencer.lane(name) for name in LANES}
        launcher = sequencer.launcher("launcher")
        memory, read, looked = [0, 0], {}, {}

        def touch(number: int, slot: int, writes: bool) -> None:
            if writes:
                memory[slot] = memory[slot] * 10 + number + 1
            else:
                read[number] = memory[slot]

        def submit(number: int, t: Touch) -> None:
            accesses = (
                [Access("device", (t.slot,), (0, 1), Mode.WRITE if t.writes else Mode.READ)]
                if t.declared
                else []
            )
            lanes[t.lane].submit(lambda: touch(number, t.slot, t.writes), accesses, label=str(number))

        for number, instruction in enumerate(instructions):
            match instruction:
                case Touch(launched=True):
                    launcher.submit(lambda number=number, t=instruction: submit(number, t), label="launch")  # type: ignore[misc]
                case Touch():
                    submit(number, instruction)
                case Wait(lane, on_lane):
                    lanes[lane].wait(lanes[on_lane].record())
                case Look(lane, blocks=True):
                    lanes[lane].drain()
                case Look(lane):
                    looked[number] = lanes[lane].record().passed()
        sequencer.run_all()
        outcomes.add((*memory, *sorted(read.items()), *looked.items()))

    return program


def compare(seeds: range) -> tuple[int, int]:
    """Runs of the full and of the reduced search, over random programs; both must come to the same."""
    num_full = num_reduced = 0
    for seed in seeds:
        instructions = random_program(random.Random(seed))
        everything: Outcomes = set()
        found: Outcomes = set()
        full, failure = explore(performed(instructions, everything), max_preemptions=99, max_runs=TOO_MANY)
        if full == TOO_MANY:
            continue
        reduced, other = explore_all(performed(instructions, found))
        assert failure is None and other is None
        assert found == everything, f"seed {seed}: {instructions} comes to {everything - found} as well"
        num_full, num_reduced = num_full + full, num_reduced + reduced
    return num_full, num_reduced


def test_the_reduced_search_comes_to_every_end_that_the_full_one_does_in_a_tenth_of_the_runs() -> None:
    num_full, num_reduced = compare(range(25))
    assert num_full > 2000 and num_reduced * 10 < num_full


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("_conflict", lambda *_: False),  # accesses to the same bytes commute
        ("_enables", lambda first, second: first.chosen != second.chosen),  # everything keeps its order
    ],
)
def test_a_search_that_takes_too_much_to_commute_misses_ends(
    name: str, broken: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduction, name, broken)
    with pytest.raises(AssertionError, match="as well"):
        compare(range(25))


def test_a_failure_is_shrunk_and_replays() -> None:
    """A promotion in two halves, read after the first: it fails only where the reader comes between them."""

    def program(sequencer: Sequencer) -> None:
        load, compute, other = sequencer.lane("load"), sequencer.lane("compute"), sequencer.lane("other")
        block, seen = ["old", "old"], []
        access = Access("device", (1,), (0, 2), Mode.WRITE)
        for half in (0, 1):
            load.submit(lambda half=half: block.__setitem__(half, "new"), [access], label=f"half {half}")  # type: ignore[misc]
            other.submit(lambda: None, [access._replace(slots=(2,))], label="something else")
        compute.submit(lambda: seen.append(tuple(block)), [access._replace(mode=Mode.READ)], label="read")
        sequencer.run_all()
        assert seen != [("new", "old")], "half a block was read"

    num_full, _ = explore(program, max_preemptions=0)
    assert num_full == 1, "the default schedule is fine"
    num_runs, failure = explore_all(program)
    assert failure is not None and "half a block" in str(failure.error) and num_runs <= 5
    assert len(failure.schedule) <= 2
    again = run(program, failure.schedule)[1]
    assert again is not None and again.trace == failure.trace
