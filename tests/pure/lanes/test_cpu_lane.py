"""The CPU lane keeps the rules of all lanes, and some that only threads have."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

import penstock
from penstock.contract import Access
from penstock.errors import InvariantBroken, LaneClosed
from penstock.lanes import cpu as module
from penstock.lanes.cpu import CpuLane, CpuTicket
from penstock.lanes.lane import Lane, Op, Ticket
from penstock.observe import LaneObserver
from tests.pure.lanes.lane_rules import Heard, LaneRules

Cell = list[int]


class CpuRig:
    """Cells are lists of one number; a lane is held by an op that waits at a gate."""

    patience_s = 10.0

    def __init__(self) -> None:
        self._lanes: list[CpuLane] = []
        self._gates: list[threading.Event] = []

    def lane(self, name: str, observer: LaneObserver | None = None) -> CpuLane:
        self._lanes.append(CpuLane(name, observer))
        return self._lanes[-1]

    def cell(self) -> Cell:
        return [0]

    def write(self, cell: Cell, value: int) -> Op:
        return lambda: cell.__setitem__(0, value)

    def push(self, cell: Cell, digit: int) -> Op:
        return lambda: cell.__setitem__(0, cell[0] * 10 + digit)

    def copy(self, source: Cell, target: Cell) -> Op:
        return lambda: target.__setitem__(0, source[0])

    def read(self, cell: Cell) -> int:
        return cell[0]

    def hold(self, lane: Lane) -> Callable[[], None]:
        gate, reached = threading.Event(), threading.Event()
        self._gates.append(gate)

        def stand() -> None:
            reached.set()
            gate.wait()

        lane.submit(stand, label="hold")
        reached.wait(self.patience_s)
        return gate.set

    def close(self) -> None:
        for gate in self._gates:
            gate.set()
        for lane in self._lanes:
            lane.close(10.0)


@pytest.fixture
def rig() -> Iterator[CpuRig]:
    made = CpuRig()
    yield made
    made.close()


class TestCpuLane(LaneRules):
    def test_all_work_runs_on_one_thread_inside_what_was_put_around_it(self) -> None:
        entered: list[int] = []

        @contextmanager
        def around() -> Iterator[None]:
            entered.append(threading.get_ident())
            yield
            entered.append(-1)

        ran_on: list[int] = []
        lane = CpuLane("a", around=around)
        for _ in range(3):
            lane.submit(lambda: ran_on.append(threading.get_ident()), label="who")
        lane.close(10.0)
        assert len(set(ran_on)) == 1 and len(ran_on) == 3
        assert entered == [ran_on[0], -1] and ran_on[0] != threading.get_ident()

    def test_an_observer_hears_that_work_begins_on_the_thread_that_runs_it(self, rig: CpuRig) -> None:
        heard = Heard()
        lane, other = rig.lane("a", heard), rig.lane("b")
        ran: list[tuple[int, list[tuple[str, int, int]]]] = []
        lane.wait(other.record())
        failed = lane.submit(
            lambda: ran.append((threading.get_ident(), list(heard.starts))) or 1 / 0, label="fails"
        )
        lane.submit(lambda: None, label="skipped", after=failed)
        lane.drain(rig.patience_s)
        ((thread, known_then),) = ran
        assert known_then == heard.starts == [("a", 2, thread)], (
            "told before the op, not for a wait, not for what is skipped"
        )
        assert len(heard.of("finished")) == 2

    def test_an_op_that_fails_inside_a_replay_fails_the_replay_and_ends_it_there(self, rig: CpuRig) -> None:
        lane, cell = rig.lane("a"), rig.cell()
        with lane.capture("broken") as capture:
            lane.submit(rig.push(cell, 1), label="push")
            lane.submit(lambda: cell[99], label="broken")
            lane.submit(rig.push(cell, 2), label="push")
        with pytest.raises(IndexError):
            lane.replay(capture.replay).wait_done(rig.patience_s)
        assert cell == [1]

    def test_a_lane_that_nobody_refers_to_ends_with_its_thread(self) -> None:
        """An engine that was dropped without `close` gives its memory back."""
        lane, gate, ran = CpuLane("dropped"), threading.Event(), []
        for work in (gate.wait, lambda: ran.append(1)):
            lane.submit(work, label="work")
        thread, gone = lane._thread, weakref.ref(lane)
        del lane
        assert gone() is not None, "what was submitted still has to run"
        gate.set()
        thread.join(10.0)
        assert not thread.is_alive() and ran == [1] and gone() is None
        idle = CpuLane("idle")
        idle.submit(gate.wait, label="work").wait_done(10.0)
        thread = idle._thread
        del idle
        thread.join(10.0)
        assert not thread.is_alive(), "it waits for work that nobody can submit"

    def test_a_process_that_ends_lets_its_lanes_finish(self) -> None:
        """The interpreter would stop the thread wherever it is, and a library of C++ around it ends the
        process with an abort."""
        program = """
import time, torch
from penstock.lanes.cpu import CpuLane

def work():
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        torch.add(ones, ones)
    print("done", flush=True)

ones, lane = torch.ones(4), CpuLane("left open")
lane.submit(work, label="work")
"""
        env = {**os.environ, "PYTHONPATH": str(Path(penstock.__file__).parents[1])}
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False, env=env
        )
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr

    def test_work_that_counts_as_over_has_its_error_already(self, rig: CpuRig) -> None:
        """Whoever polls looks at the number without the lock, and asks for the error behind that."""
        tickets: list[Ticket] = []
        told: list[BaseException | None] = []

        class Watched(CpuLane):
            @property
            def num_finished(self) -> int:  # type: ignore[override]
                return self._number

            @num_finished.setter
            def num_finished(self, number: int) -> None:
                told.extend(ticket.error() for ticket in tickets if ticket.label == "fail" and number == 2)
                self._number = number

        def fail() -> None:
            raise ValueError("no")

        lane = Watched("a")
        gate = threading.Event()
        lane.submit(gate.wait, label="hold")
        tickets.append(lane.submit(fail, label="fail"))
        gate.set()
        lane.close(rig.patience_s)
        assert [str(error) for error in told] == ["no"]

    def test_a_lane_whose_thread_cannot_be_set_up_fails_everything_and_ends(self) -> None:
        begun = threading.Event()

        def refuses() -> AbstractContextManager[None]:
            assert begun.wait(10.0)
            raise RuntimeError("no such mode")

        heard, cell = Heard(), [0]
        lane = CpuLane("a", heard, around=refuses)
        before = lane.submit(lambda: cell.append(1), label="before")
        begun.set()
        with pytest.raises(RuntimeError, match="no such mode"):
            before.wait_done(10.0)
        after = lane.submit(lambda: cell.append(2), label="after")
        other = CpuLane("b")
        lane.wait(other.record())
        other.wait(lane.record())
        behind = other.submit(lambda: cell.append(3), label="behind", after=after)
        lane.drain(10.0)
        for ticket in (after, behind):
            with pytest.raises(RuntimeError, match="no such mode"):
                ticket.wait_done(10.0)
        assert cell == [0] and len(heard.of("finished")) == 2, "who watches hears of each that it is over"
        for one in (lane, other):
            one.close(10.0)

    def test_what_comes_behind_a_wait_that_failed_does_not_run(self, rig: CpuRig) -> None:
        class Lost:
            lane, number = "elsewhere", 1

            def passed(self) -> bool:
                return False

            def wait_passed(self, timeout_s: float | None = None) -> None:
                raise RuntimeError("the device is gone")

        lane, cell = rig.lane("a"), rig.cell()
        lane.submit(rig.push(cell, 1), label="before").wait_done(rig.patience_s)
        lane.wait(Lost())
        for number in (2, 3):
            with pytest.raises(RuntimeError, match="the device is gone"):
                lane.submit(rig.push(cell, number), label="behind").wait_done(rig.patience_s)
        lane.drain(rig.patience_s)
        assert cell == [1]

    def test_an_observer_that_refuses_work_leaves_the_lane_as_it_was(self, rig: CpuRig) -> None:
        class Strict(Heard):
            def submitted(self, lane: str, ticket: int, label: str, accesses: Sequence[Access]) -> None:
                if label == "refused":
                    raise InvariantBroken("a race")
                super().submitted(lane, ticket, label, accesses)

        lane, cell = rig.lane("a", Strict()), rig.cell()
        with pytest.raises(InvariantBroken, match="a race"):
            lane.submit(rig.push(cell, 9), label="refused")
        lane.submit(rig.push(cell, 1), label="push").wait_done(rig.patience_s)
        lane.drain(rig.patience_s)
        assert cell == [1]

    def test_an_observer_that_fails_on_the_lanes_thread_surfaces_at_the_ticket(self, rig: CpuRig) -> None:
        class Broken(Heard):
            def finished(self, lane: str, ticket: int, error: BaseException | None) -> None:
                if not self.of("finished"):
                    super().finished(lane, ticket, error)
                    raise InvariantBroken("the observer broke")

        lane, cell = rig.lane("a", Broken()), rig.cell()
        ticket = lane.submit(rig.push(cell, 1), label="push")
        lane.submit(rig.push(cell, 2), label="push").wait_done(rig.patience_s)
        with pytest.raises(InvariantBroken, match="the observer broke"):
            ticket.wait_done(rig.patience_s)
        assert cell == [12]
        failed = rig.lane("b", Broken()).submit(lambda: 1 / 0, label="fails")
        with pytest.raises(ZeroDivisionError):  # why work failed comes before what is said of it
            failed.wait_done(rig.patience_s)

    def test_many_threads_submit_in_one_order_that_their_tickets_their_observer_and_their_work_agree_on(
        self, rig: CpuRig
    ) -> None:
        class Numbers(Heard):
            def submitted(self, lane: str, ticket: int, label: str, accesses: Sequence[Access]) -> None:
                order.append((ticket, label))

        order, tickets = list[tuple[int, str]](), list[tuple[int, str]]()
        heard, ran = Numbers(), list[str]()
        lane, start = rig.lane("a", heard), threading.Barrier(6)

        def submit(who: int) -> None:
            start.wait()
            for number in range(50):
                label = f"{who}-{number}"
                ticket: CpuTicket = lane.submit(lambda label=label: ran.append(label), label=label)  # type: ignore[assignment,misc]
                tickets.append((ticket.number, label))

        together(submit, 6)
        lane.drain(rig.patience_s)
        assert [ticket for ticket, _ in order] == list(range(1, 301))
        assert sorted(tickets) == order and ran == [label for _, label in order]
        assert lane.num_finished == 300

    def test_a_close_among_many_submissions_runs_what_was_taken_and_refuses_the_rest(
        self, rig: CpuRig
    ) -> None:
        lane, ran, taken = rig.lane("a"), list[object](), list[object]()
        start, refused = threading.Barrier(5), threading.Semaphore(0)

        def submit(who: int) -> None:
            start.wait()
            if who == 0:
                lane.close(rig.patience_s)
                return
            while True:
                mine = object()
                try:
                    lane.submit(lambda mine=mine: ran.append(mine), label="work")  # type: ignore[misc]
                except LaneClosed:
                    refused.release()
                    return
                taken.append(mine)

        together(submit, 5)
        assert not lane._thread.is_alive() and all(refused.acquire(blocking=False) for _ in range(4))
        assert sorted(map(id, ran)) == sorted(map(id, taken)), "what has a ticket has run, once"
        lane.close(rig.patience_s)


class Timed(Heard):
    """Keeps the seconds as well."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def host_waited(self, on_lane: str, fence: int, seconds: float) -> None:
        super().host_waited(on_lane, fence, seconds)
        self.seconds.append(seconds)


@pytest.mark.parametrize("how", ["fence", "ticket", "drain"])
def test_a_wait_is_told_with_its_length(rig: CpuRig, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    heard, gate, now_s = Timed(), threading.Event(), 100.0

    def monotonic() -> float:
        """Every look takes 2.5 s. The work is over once the wait for it has begun."""
        nonlocal now_s
        gate.set()
        now_s += 2.5
        return now_s

    lane = rig.lane("a", heard)
    ticket = lane.submit(lambda: gate.wait(30), label="work")
    fence = lane.record()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=monotonic))
    {"fence": fence.wait_passed, "ticket": ticket.wait_done, "drain": lane.drain}[how](30.0)
    assert heard.seconds == [2.5] and heard.of("host_waited") == [("host_waited", "a", 1)]
    assert fence.passed() and heard.seconds == [2.5, 0.0], "a look takes no time"


def together(work: Callable[[int], None], num: int) -> None:
    """On so many threads at once."""
    threads = [threading.Thread(target=work, args=(who,)) for who in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
        assert not thread.is_alive()
