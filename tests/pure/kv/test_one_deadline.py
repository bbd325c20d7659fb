"""A drain of several things has one time limit for all of them: what one takes the next does not have. The
clock is a test's."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from penstock.kv import transfer as mover_module
from penstock.kv.tiers import cold
from penstock.kv.transfer import Layers, Mover, Slots, Transfer
from penstock.lanes.cpu import CpuLane
from tests.pure.kv.cold_rig import Rig


def ticking() -> SimpleNamespace:
    """Stands for the module `time`. Each look at the clock takes a second."""
    return SimpleNamespace(monotonic=itertools.count(1000.0, 1.0).__next__)


class _Nothing:
    def copy(self, source_slots: Slots, dest_slots: Slots, layers: Layers) -> None:
        """There is nothing to copy."""


class _Waited(Transfer):
    """Without a block; notes until when it is waited for."""

    def __init__(self) -> None:
        super().__init__("waited", [])
        self.until_s: list[float] = []

    def wait_over(self, deadline_s: float) -> None:
        self.until_s.append(deadline_s)


def test_all_transfers_of_a_drain_have_the_same_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    mover = Mover(("here", "there"), _Nothing(), CpuLane("copies"), CpuLane("launcher"))
    transfers = [_Waited() for _ in range(3)]
    for transfer in transfers:
        mover.submit(transfer)
    with monkeypatch.context() as patch:
        patch.setattr(mover_module, "time", ticking())
        mover.drain(60.0)
    mover.close(None)
    assert [transfer.until_s for transfer in transfers] == [[1060.0]] * 3


def test_each_lane_of_a_drain_has_what_those_before_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    given_s: list[float] = []
    for lane in (*rig.readers, *rig.writers, rig.asker):
        monkeypatch.setattr(lane, "drain", given_s.append)
    with monkeypatch.context() as patch:
        patch.setattr(cold, "time", ticking())
        rig.tier.drain(3.5)
    rig.tier.close(None)
    assert given_s == [2.5, 1.5, 0.5, 0.0, 0.0]
