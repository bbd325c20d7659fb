"""A deadline ends a wait for transfers, never a transfer: a drain that runs out of time says so, whichever
part is late.

Holds invariant 7: a deadline ends a wait and gives no slot back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from penstock.contract import Fence
from penstock.errors import DeadlineExceeded, InvariantBroken
from penstock.kv.transfer import Group, Layers, Mover, Slots, Transfer
from penstock.lanes.cpu import CpuLane

PATIENCE_S = 30.0


@dataclass
class Gate:
    """Stops whoever comes until it is opened."""

    opened: threading.Event = field(default_factory=threading.Event)

    def pass_through(self) -> None:
        assert self.opened.wait(PATIENCE_S), "nobody opened the gate"


class Gated(Transfer):
    """Two blocks, whose launch stops at a gate."""

    def __init__(self, launch: Gate) -> None:
        super().__init__("gated", [Group((0, 1))])
        self.source_slots = self.dest_slots = np.arange(2)
        self._gate = launch

    def prepare(self) -> bool:
        self._gate.pass_through()
        return True


class GatedCopier:
    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def copy(self, source_slots: Slots, dest_slots: Slots, layers: Layers) -> None:
        self._gate.pass_through()


@dataclass
class Rig:
    launch: Gate = field(default_factory=Gate)
    copy: Gate = field(default_factory=Gate)

    def __post_init__(self) -> None:
        self.mover = Mover(("here", "there"), GatedCopier(self.copy), CpuLane("copies"), CpuLane("launcher"))


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.launch.opened.set()
    rig.copy.opened.set()
    rig.mover.close(PATIENCE_S)


@pytest.mark.parametrize("late", ["launch", "copy"])
def test_a_drain_that_runs_out_of_time_says_so_and_loses_nothing(rig: Rig, late: str) -> None:
    gates = {"launch": rig.launch, "copy": rig.copy}
    transfer = Gated(rig.launch)
    rig.mover.submit(transfer)
    for name, gate in gates.items():
        if name != late:
            gate.opened.set()
    with pytest.raises(DeadlineExceeded):
        rig.mover.drain(0.01)
    assert rig.mover.settle() == [] and len(rig.mover.flying) == 1
    gates[late].opened.set()
    rig.mover.drain(PATIENCE_S)
    assert rig.mover.settle() == [transfer] and transfer.error() is None


# ----------------------------------------------------------------------------------------- launches that fail


class Burst(Transfer):
    """Two blocks whose launch raises before anything is copied."""

    def __init__(self, error: BaseException) -> None:
        super().__init__("burst", [Group((0, 1))])
        self.source_slots = self.dest_slots = np.arange(2)
        self._raised = error

    def prepare(self) -> bool:
        raise self._raised


@pytest.mark.parametrize("error", [OSError("no"), SystemExit("no")])
def test_a_transfer_whose_launch_raised_has_not_landed(rig: Rig, error: BaseException) -> None:
    transfer = Burst(error)
    rig.mover.submit(transfer)
    for lane in (rig.mover._launcher, rig.mover.lane):  # nobody looks at the launch itself
        lane.drain(PATIENCE_S)
    assert rig.mover.settle() == [transfer] and transfer.settled and transfer.error() is error


class DeafLane(CpuLane):
    """A lane that cannot say any more where it is, as after an error of the device."""

    broken = False

    def record(self) -> Fence:
        if self.broken:
            raise RuntimeError("the device is gone")
        return super().record()


def test_a_launch_that_leaves_nothing_to_wait_for_is_neither_lost_nor_taken_for_over() -> None:
    lane = DeafLane("copies")
    mover = Mover(("here", "there"), GatedCopier(opened()), lane, CpuLane("launcher"))
    lane.broken = True
    transfer = Gated(opened())
    mover.submit(transfer)
    with pytest.raises(InvariantBroken, match="the device is gone"):
        mover.drain(PATIENCE_S)
    with pytest.raises(InvariantBroken, match="the device is gone"):
        mover.settle()
    assert len(mover.flying) == 1 and not transfer.settled, "its slots stay with it"
    lane.broken = False
    mover.close(PATIENCE_S)


def opened() -> Gate:
    gate = Gate()
    gate.opened.set()
    return gate


def test_what_is_still_being_launched_when_a_mover_closes_has_a_lane_to_go_to(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = Gated(rig.launch)
    rig.copy.opened.set()
    rig.mover.submit(transfer)
    close = rig.mover._launcher.close

    def closing(timeout_s: float | None) -> None:
        rig.launch.opened.set()
        close(timeout_s)

    monkeypatch.setattr(rig.mover._launcher, "close", closing)
    rig.mover.close(PATIENCE_S)
    assert rig.mover.settle() == [transfer]
    assert transfer.error() is None and transfer.num_blocks == 2
