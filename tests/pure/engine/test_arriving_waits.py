"""Which fences a step's lane waits for, and when: its own loads', each before the first layer that reads what
it covers, and no earlier."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from penstock.contract import Arrival, Fence, Load
from penstock.engine.execution.arriving import Arriving
from penstock.errors import InvariantBroken, TransferFailed
from penstock.kv.transfer import Transfer
from tests.support.stepped import SteppedFence, SteppedLane, SteppedLanes


@dataclass
class WaitingLane:
    """A lane as far as it is made to wait."""

    name: str = "compute"
    on: list[int] = field(default_factory=list)  # numbers of fences

    def wait(self, fence: Fence) -> None:
        assert isinstance(fence, SteppedFence)
        self.on.append(fence.number)


def load(lane: SteppedLane, *groups: tuple[int, int]) -> Load:
    """Copies of layers, in order, each with its fence."""
    transfer = Transfer("promote", ())
    arrivals = []
    for layers in groups:
        lane.submit(lambda: None, label="copy")
        arrivals.append(Arrival(layers, lane.record()))
    transfer.launched(lane.record(), arrivals)
    return transfer


def waits_by_layer(arriving: Arriving, num_layers: int) -> list[list[int]]:
    """Fences that are waited for before each layer."""
    found = []
    for layer in range(num_layers):
        lane = WaitingLane()
        arriving.wait_on(lane, layer + 1)  # type: ignore[arg-type]
        found.append(lane.on)
    return found


@pytest.fixture
def lane() -> SteppedLane:
    return SteppedLanes().lane("load")


# Holds invariant 3: the wait stands before the first layer that reads.
# Holds invariant 4: no layer waits for the part of a later one.
def test_each_layer_waits_for_its_own_part_and_only_once(lane: SteppedLane) -> None:
    assert waits_by_layer(Arriving([load(lane, (0, 3), (3, 6))]), 6) == [[1], [], [], [2], [], []]


# Holds invariant 5: no fence of any load is left out.
def test_two_loads_of_one_step_are_both_waited_for(lane: SteppedLane) -> None:
    loads = [load(lane, (0, 2), (2, 4)), load(lane, (0, 4))]
    assert waits_by_layer(Arriving(loads), 4) == [[1, 3], [], [2], []]


# Holds invariant 3: a replay has no wait inside.
def test_a_replay_waits_for_all_parts_before_it(lane: SteppedLane) -> None:
    waits = WaitingLane()
    assert Arriving([load(lane, (0, 3), (3, 6))]).wait_on(waits, 6)  # type: ignore[arg-type]
    assert waits.on == [1, 2]


def test_a_step_without_loads_waits_for_nothing() -> None:
    waits = WaitingLane()
    assert not Arriving([]).wait_on(waits, 6)  # type: ignore[arg-type]
    assert waits.on == []


def test_a_load_that_is_not_launched_cannot_be_waited_for() -> None:
    with pytest.raises(InvariantBroken, match="not launched"):
        Arriving([Transfer("promote", ())])


def test_behind_its_waits_a_step_is_told_what_did_not_arrive(lane: SteppedLane) -> None:
    failed = load(lane, (0, 6))
    assert isinstance(failed, Transfer)
    arriving = Arriving([failed])
    arriving.check()
    failed.fail(OSError("gone"))
    with pytest.raises(TransferFailed, match="gone"):
        arriving.check()
