"""The sanitizer's own books against plain ones that forget nothing: which accesses race, and who knows what
to be over."""

from __future__ import annotations

import random

import pytest

from penstock.sanitizer import clock as clock_module
from penstock.sanitizer.clock import Clocks
from penstock.sanitizer.history import Histories
from penstock.sanitizer.report import Deed

LANES, NUM_SLOTS, NUM_LAYERS = "abc", 5, 4


def deed_of(lane: str, number: int, label: str, layers: tuple[int, int], writes: bool) -> Deed:
    return Deed(lane, number, label, writes, layers, stack=())


def conflicts(earlier: Deed, deed: Deed, known: dict[str, int]) -> bool:
    """By definition: one of them writes, they share a layer, and nothing puts them in order."""
    shares = earlier.layers[0] < deed.layers[1] and deed.layers[0] < earlier.layers[1]
    ordered = earlier.lane == deed.lane or known.get(earlier.lane, 0) >= earlier.number
    return (earlier.writes or deed.writes) and shares and not ordered


class Program:
    """Random accesses and waits on a few lanes; what a lane knows is what it has waited for, and all that was
    known there."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.known: dict[str, dict[str, int]] = {lane: {} for lane in LANES}
        self.number = dict.fromkeys(LANES, 0)
        self.histories = Histories()
        self.past: list[tuple[Deed, set[int]]] = []
        self.num_races = 0

    def wait(self, lane: str, on: str) -> None:
        for other, number in {**self.known[on], on: self.number[on]}.items():
            self.known[lane][other] = max(number, self.known[lane].get(other, 0))

    def access(self, lane: str) -> None:
        first = self.random.randrange(NUM_LAYERS)
        layers = first, self.random.randint(first + 1, NUM_LAYERS)
        slots = sorted(self.random.sample(range(NUM_SLOTS), self.random.randint(1, NUM_SLOTS)))
        self.number[lane] += 1
        deed = deed_of(
            lane, self.number[lane], f"{lane} {self.number[lane]}", layers, self.random.random() < 0.5
        )
        expected = {
            slot
            for earlier, touched in self.past
            if conflicts(earlier, deed, self.known[lane])
            for slot in touched & set(slots)
        }
        found = self.histories.take(deed, slots, self.known[lane])
        assert {slot for race in found for slot in race.slots} == expected
        for race in found:
            named = next(touched for earlier, touched in self.past if earlier == race.earlier)
            assert set(race.slots) & named and conflicts(race.earlier, deed, self.known[lane])
        self.num_races += bool(found)
        self.past.append((deed, set(slots)))


@pytest.mark.parametrize("seed", range(40))
def test_a_race_is_found_exactly_where_two_accesses_share_a_slot_and_a_layer_out_of_order(seed: int) -> None:
    program = Program(seed)
    for _ in range(60):
        lane = program.random.choice(LANES)
        if program.random.random() < 0.6:
            program.wait(lane, program.random.choice([other for other in LANES if other != lane]))
        else:
            program.access(lane)
    assert 0 < program.num_races < 30


def test_what_was_covered_in_some_of_its_layers_still_races_in_the_others() -> None:
    histories = Histories()
    histories.take(deed_of("a", 1, "wide write", (0, 4), True), [7], {})
    assert not histories.take(deed_of("b", 1, "covers two layers", (0, 2), True), [7], {"a": 1})
    assert not histories.take(deed_of("c", 1, "knows the second", (0, 2), True), [7], {"a": 1, "b": 1})
    (race,) = histories.take(deed_of("b", 2, "read", (3, 4), False), [7], {})
    assert race.earlier.label == "wide write" and race.slots == (7,)


# ----------------------------------------------------------------------------------------------------- clocks


@pytest.mark.parametrize("num_changes", [3, 4, 5, 20])
def test_a_fence_older_than_what_is_remembered_knows_as_much_as_the_oldest_that_is(
    num_changes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too much knowledge hides a race; but none at all would report one at every look at an old fence."""
    monkeypatch.setattr(clock_module, "_KEPT", 4)
    clocks = Clocks()
    for number in range(1, num_changes + 1):
        clocks.submit("b", number)
        clocks.wait("a", "b", number)
    oldest = max(1, num_changes - 3)
    for fence in range(1, num_changes + 1):
        assert clocks.covered("a", fence)["b"] == max(fence, oldest)
