"""What a CPU lane tells whoever listens: how long a host thread has waited, and of nothing that did not
happen."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import DeadlineExceeded, LaneClosed
from penstock.lanes import cpu as module
from penstock.lanes.cpu import CpuLane
from tests.pure.lanes.lane_rules import Heard


class Timed(Heard):
    """Keeps the seconds as well."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def host_waited(self, on_lane: str, fence: int, seconds: float) -> None:
        super().host_waited(on_lane, fence, seconds)
        self.seconds.append(seconds)


def until_asked_for_the_time(
    monkeypatch: pytest.MonkeyPatch, gate: threading.Event, now: float = 100.0
) -> None:
    """Work that waits at the gate is over once somebody has begun to wait for it. Every look at the clock
    takes two seconds and a half."""
    time = [now]

    def monotonic() -> float:
        gate.set()
        time[0] += 2.5
        return time[0]

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=monotonic))


@pytest.mark.parametrize("how", ["fence", "ticket", "drain"])
def test_a_wait_is_told_with_its_length(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    heard, gate = Timed(), threading.Event()
    lane = CpuLane("a", heard)
    ticket = lane.submit(lambda: gate.wait(30), label="work")
    fence = lane.record()
    until_asked_for_the_time(monkeypatch, gate)
    {"fence": fence.wait_passed, "ticket": ticket.wait_done, "drain": lane.drain}[how](30.0)
    assert heard.seconds == [2.5] and heard.of("host_waited") == [("host_waited", "a", 1)]
    assert fence.passed() and heard.seconds == [2.5, 0.0], "a look takes no time"
    lane.close()


def test_a_look_at_what_is_not_over_tells_nothing() -> None:
    heard, gate = Timed(), threading.Event()
    lane = CpuLane("a", heard)
    ticket, fence = lane.submit(lambda: gate.wait(30), label="work"), lane.record()
    assert not ticket.done() and not fence.passed() and heard.seconds == []
    with pytest.raises(DeadlineExceeded, match=r"item 1 was not over within 0\.0 s"):
        fence.wait_passed(0.0)
    assert heard.seconds == [], "nobody knows that it is over"
    gate.set()
    lane.close()


def test_a_lane_that_waits_tells_of_its_wait_and_of_no_host_that_did() -> None:
    heard, gate = Timed(), threading.Event()
    first, second = CpuLane("a", heard), CpuLane("b", heard)
    first.submit(lambda: gate.wait(30), label="work")
    second.wait(first.record())
    ran: list[int] = []
    ticket = second.submit(lambda: ran.append(1), label="behind")
    assert not ticket.done() and ran == []
    gate.set()
    ticket.wait_done(30.0)
    assert [event for event in heard.of("host_waited") if event[1] == "a"] == [] and ran == [1]
    for lane in (first, second):
        lane.close()


def test_an_observer_that_refuses_a_submission_leaves_no_number_that_is_never_over() -> None:
    class Refusing(Heard):
        def submitted(self, lane: str, ticket: int, label: str, accesses: Any) -> None:
            if label == "refused":
                raise ValueError(label)
            super().submitted(lane, ticket, label, accesses)

    lane = CpuLane("a", Refusing())
    with pytest.raises(ValueError, match="refused"):
        lane.submit(lambda: None, label="refused")
    ticket = lane.submit(lambda: None, label="work")
    lane.drain(30.0)
    assert ticket.done() and ticket.error() is None and lane.num_finished == 1
    lane.close()


def test_a_closed_lane_takes_nothing_and_tells_of_nothing() -> None:
    heard = Timed()
    lane, other = CpuLane("a", heard), CpuLane("b", heard)
    other.submit(lambda: None, label="work")
    fence = other.record()
    lane.close()
    before = list(heard.events)
    for use in (lambda: lane.submit(lambda: None, label="late"), lambda: lane.wait(fence)):
        with pytest.raises(LaneClosed):
            use()
    lane.close()
    assert [event for event in heard.events[len(before) :] if event[1] == "a"] == []
    assert lane.record().passed(), "all that there was is over"
    other.close()


def test_a_replay_behind_work_that_failed_is_skipped_and_says_why() -> None:
    ran: list[int] = []
    lane = CpuLane("a")
    with lane.capture("twice") as capture:
        lane.submit(lambda: ran.append(1), label="one")
        lane.submit(lambda: ran.append(2), label="two")

    def burst() -> None:
        raise ZeroDivisionError("no such block")

    failed = lane.submit(burst, label="upload")
    behind = lane.replay(capture.replay, after=failed)
    with pytest.raises(ZeroDivisionError, match="no such block"):
        behind.wait_done(30.0)
    assert ran == []
    good = lane.submit(lambda: None, label="upload")
    lane.replay(capture.replay, after=good).wait_done(30.0)
    assert ran == [1, 2]
    lane.close()


def test_a_capture_that_failed_records_nothing_more_and_has_no_replay() -> None:
    lane, ran = CpuLane("a"), list[int]()
    with pytest.raises(ZeroDivisionError), lane.capture("half") as capture:
        lane.submit(lambda: ran.append(1 // 0), label=str(1 // 0))
    with pytest.raises(module.InvariantBroken, match="it is still open, or it failed"):
        _ = capture.replay
    lane.submit(lambda: ran.append(2), label="two").wait_done(30.0)
    assert ran == [2], "what comes behind it runs at once"
    lane.close()


def test_lanes_that_hang_when_the_process_ends_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, given = 100.0, list[float]()

    def close(timeout_s: float) -> None:
        nonlocal now_s
        given.append(timeout_s)
        now_s += 4.0
        raise DeadlineExceeded("it hangs")

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(module, "_lanes", [SimpleNamespace(close=close) for _ in range(3)])
    module._end_all()
    assert given == [5.0, 1.0, 0.0]
