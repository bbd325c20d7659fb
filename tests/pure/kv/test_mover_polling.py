"""When a mover's transfers are worth a look: told by a wake until they are launched, and by their age from
then on."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.kv.transfer import Group, Layers, Mover, Slots, Transfer
from penstock.lanes.cpu import CpuLane
from penstock.lanes.lane import POLL_MOST_S, POLL_S

PATIENCE_S = 30.0


class Rig:
    """A mover whose launches and copies stop at gates."""

    def __init__(self) -> None:
        self.launch, self.copy_gate, self.woken = threading.Event(), threading.Event(), threading.Event()
        self.mover = Mover(("here", "there"), self, CpuLane("copies"), CpuLane("launcher"))
        self.mover.wake = self.woken.set

    def copy(self, source_slots: Slots, dest_slots: Slots, layers: Layers) -> None:
        assert self.copy_gate.wait(PATIENCE_S)

    def submit(self) -> Transfer:
        transfer = Transfer("some", [Group((0, 1))])
        transfer.source_slots = transfer.dest_slots = np.arange(2)
        transfer.prepare = lambda: self.launch.wait(PATIENCE_S)  # type: ignore[method-assign]
        self.mover.submit(transfer)
        return transfer


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.launch.set()
    rig.copy_gate.set()
    rig.mover.close(PATIENCE_S)


def test_a_launcher_at_work_is_left_alone_until_it_wakes_whoever_waits(rig: Rig) -> None:
    transfer = rig.submit()
    assert rig.mover.look_again_s() == POLL_MOST_S and not rig.woken.is_set()
    rig.launch.set()
    assert rig.woken.wait(PATIENCE_S)
    transfer.times.submitted_s += PATIENCE_S  # it is young
    assert rig.mover.look_again_s() == POLL_S


def test_the_longer_it_has_been_the_next_to_end_the_rarer_are_the_looks(rig: Rig) -> None:
    first, second = rig.submit(), rig.submit()
    rig.launch.set()
    for transfer in (first, second):
        transfer.ticket.wait_done(PATIENCE_S)  # type: ignore[union-attr]
        transfer.times.submitted_s -= 3600.0
    assert rig.mover.look_again_s() == POLL_MOST_S
    rig.copy_gate.set()
    rig.mover.drain(PATIENCE_S)
    assert rig.mover.settle() == [first, second]
    third = rig.submit()
    rig.mover.drain(PATIENCE_S)
    third.times.submitted_s -= 3600.0
    rig.mover._last_settled_s += 3600.0
    assert rig.mover.look_again_s() == POLL_S, "before the one in front of it had ended it was not the next"
