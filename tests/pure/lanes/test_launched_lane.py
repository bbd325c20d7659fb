"""A lane behind a launcher keeps the rules of all lanes, and its work may wait while no other thread does."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from penstock.errors import InvariantBroken
from penstock.lanes.cpu import CpuLane
from penstock.lanes.lane import Lane, Ticket
from penstock.lanes.launched import LaunchedFence, LaunchedLane, LaunchedWork
from penstock.observe import LaneObserver
from tests.pure.lanes.lane_rules import LaneRules
from tests.pure.lanes.test_cpu_lane import CpuRig


class LaunchedRig(CpuRig):
    """All lanes share a launcher."""

    def __init__(self) -> None:
        super().__init__()
        self.launcher = CpuLane("launcher")
        self.launched: list[LaunchedLane] = []

    def lane(self, name: str, observer: LaneObserver | None = None) -> LaunchedLane:  # type: ignore[override]
        inner = CpuLane(f"{name}, launched")
        self.launched.append(LaunchedLane(name, inner, self.launcher, observer))
        return self.launched[-1]

    def close(self) -> None:
        super().close()
        for lane in self.launched:
            lane.close(10.0)
        self.launcher.close(10.0)


@pytest.fixture
def rig() -> Iterator[LaunchedRig]:
    made = LaunchedRig()
    yield made
    made.close()


class InParts:
    """Two ops, and a wait between them."""

    def __init__(self, first: threading.Event, cell: list[int]) -> None:
        self.first, self.cell = first, cell

    def __call__(self) -> None:
        raise AssertionError("it is launched")

    def launch(self, inner: Lane, after: Ticket | None) -> Ticket:
        op = inner.submit(lambda: self.cell.append(1), label="first", after=after)
        op.wait_done(10.0)
        self.first.wait(10.0)
        return inner.submit(lambda: self.cell.append(2), label="second", after=op)


class TestLaunchedLane(LaneRules):
    def test_work_in_parts_waits_on_the_launcher_and_what_follows_is_behind_all_of_it(
        self, rig: LaunchedRig
    ) -> None:
        lane, found, gate = rig.lane("a"), list[int](), threading.Event()
        work = InParts(gate, found)
        assert isinstance(work, LaunchedWork) and not isinstance(found.append, LaunchedWork)
        ticket = lane.submit(work, label="in parts")
        lane.submit(lambda: found.append(3), label="behind", after=ticket)
        fence = lane.record()
        assert not fence.passed() and not ticket.done(), "the submitter did not wait"
        gate.set()
        fence.wait_passed(rig.patience_s)
        assert found == [1, 2, 3] and ticket.done() and ticket.error() is None

    def test_a_lane_of_another_kind_waits_for_work_that_is_not_launched_yet(self, rig: LaunchedRig) -> None:
        lane, found, gate = rig.lane("a"), list[int](), threading.Event()
        other = CpuLane("other")
        lane.submit(InParts(gate, found), label="in parts")
        other.wait(lane.record())
        ticket = other.submit(lambda: found.append(3), label="behind")
        assert not ticket.done()
        gate.set()
        ticket.wait_done(rig.patience_s)
        other.close(10.0)
        assert found == [1, 2, 3]

    def test_an_error_of_launching_is_that_of_the_work(self, rig: LaunchedRig) -> None:
        lane, found = rig.lane("a"), list[int]()

        class Fails(InParts):
            def launch(self, inner: Lane, after: Ticket | None) -> Ticket:
                raise ZeroDivisionError("on purpose")

        failed = lane.submit(Fails(threading.Event(), found), label="fails")
        skipped = lane.submit(lambda: found.append(1), label="skipped", after=failed)
        lane.submit(lambda: found.append(2), label="unrelated").wait_done(rig.patience_s)
        assert isinstance(failed.error(), ZeroDivisionError) and skipped.error() is failed.error()
        assert found == [2]

    def test_work_behind_a_wait_that_failed_does_not_run(self, rig: LaunchedRig) -> None:
        lane, other, found = rig.lane("a"), rig.lane("b"), list[int]()
        fence = LaunchedFence(other, 1)
        fence.bound.bind(None, InvariantBroken("there is no such point"))
        lane.wait(fence)
        ticket = lane.submit(lambda: found.append(1), label="behind")
        with pytest.raises(InvariantBroken, match="no such point"):
            ticket.wait_done(rig.patience_s)
        assert found == []
