"""What every lane must do, as tests that both backends run. Owns the rules; a rig says how work is made, held
and read on a backend.

Work acts on cells, numbers that live where the lane's work runs. Pushing a digit shows the order of what ran:
0, then 1, then 12.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import pytest

from penstock.contract import Access, Mode
from penstock.errors import DeadlineExceeded, InvariantBroken, LaneClosed
from penstock.lanes.lane import Lane, Op
from penstock.observe import LaneObserver

SOON_S = 0.005  # a deadline that is meant to pass
READ_3 = Access("device", (3,), (0, 2), Mode.READ)
WRITE_5 = Access("device", (5, 6), (1, 2), Mode.WRITE)


class Heard:
    """A lane observer that keeps what it hears, in order; how long a host thread waited is nobody's business
    here."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        # not among the events: a CUDA lane has nothing to say about it
        self.starts: list[tuple[str, int, int]] = []

    def submitted(self, lane: str, ticket: int, label: str, accesses: Sequence[Access]) -> None:
        self.events.append(("submitted", lane, label, tuple(accesses)))

    def waited(self, lane: str, on_lane: str, fence: int) -> None:
        self.events.append(("waited", lane, on_lane, fence))

    def host_waited(self, on_lane: str, fence: int, seconds: float) -> None:
        self.events.append(("host_waited", on_lane, fence))

    def touched(self, label: str, accesses: Sequence[Access]) -> None:
        self.events.append(("touched", label, tuple(accesses)))

    def started(self, lane: str, ticket: int) -> None:
        self.starts.append((lane, ticket, threading.get_ident()))

    def finished(self, lane: str, ticket: int, error: BaseException | None) -> None:
        self.events.append(("finished", lane, type(error).__name__))

    def of(self, *kinds: str) -> list[tuple[Any, ...]]:
        return [event for event in self.events if event[0] in kinds]


class Rig(Protocol):
    """One backend under test."""

    patience_s: float  # how long a wait that must succeed may take before the test gives up

    def lane(self, name: str, observer: LaneObserver | None = None) -> Lane: ...

    def cell(self) -> Any:
        """A number, 0 at first. Made before anything is held."""

    def write(self, cell: Any, value: int) -> Op: ...

    def push(self, cell: Any, digit: int) -> Op: ...

    def copy(self, source: Any, target: Any) -> Op: ...

    def read(self, cell: Any) -> int:
        """The number as the host sees it; the test has waited for whoever writes it."""

    def hold(self, lane: Lane) -> Callable[[], None]:
        """Keep the lane busy from here on until the returned call."""


def fail() -> None:
    raise ZeroDivisionError("on purpose")


class LaneRules:
    """Inherited by one class per backend, which provides the fixture `rig`."""

    # -------------------------------------------------------------------------------------------------- order

    def test_work_on_one_lane_runs_in_the_order_it_was_submitted(self, rig: Rig) -> None:
        lane, cell = rig.lane("a"), rig.cell()
        release = rig.hold(lane)
        for digit in (1, 2, 3, 4, 5):
            lane.submit(rig.push(cell, digit), label="push")
        release()
        lane.drain(rig.patience_s)
        assert rig.read(cell) == 12345

    def test_submit_returns_while_earlier_work_still_runs(self, rig: Rig) -> None:
        lane, cell = rig.lane("a"), rig.cell()
        release = rig.hold(lane)
        ticket = lane.submit(rig.write(cell, 7), label="write")
        fence = lane.record()
        assert not fence.passed() and not ticket.done()
        release()
        ticket.wait_done(rig.patience_s)
        assert ticket.done() and ticket.error() is None and rig.read(cell) == 7

    def test_a_wait_orders_what_follows_behind_the_other_lane(self, rig: Rig) -> None:
        writer, reader, source, target = rig.lane("a"), rig.lane("b"), rig.cell(), rig.cell()
        release = rig.hold(writer)
        writer.submit(rig.write(source, 7), label="write")
        reader.wait(writer.record())
        reader.submit(rig.copy(source, target), label="copy")
        release()
        reader.drain(rig.patience_s)
        assert rig.read(target) == 7

    def test_a_wait_does_not_block_the_submitter(self, rig: Rig) -> None:
        held, waiting = rig.lane("a"), rig.lane("b")
        release = rig.hold(held)
        fence = held.record()
        waiting.wait(fence)
        behind = waiting.record()
        assert not fence.passed(), "the call came back only when the fence had passed"
        assert not behind.passed()
        release()
        behind.wait_passed(rig.patience_s)

    def test_a_wait_covers_nothing_submitted_to_the_other_lane_afterwards(self, rig: Rig) -> None:
        first, second, cell = rig.lane("a"), rig.lane("b"), rig.cell()
        first.submit(rig.write(cell, 7), label="write")
        fence = first.record()
        release = rig.hold(first)
        second.wait(fence)
        second.drain(rig.patience_s)
        assert rig.read(cell) == 7 and not first.record().passed()
        release()

    def test_waiting_for_a_fence_of_the_same_lane_changes_nothing(self, rig: Rig) -> None:
        heard = Heard()
        lane, cell = rig.lane("a", heard), rig.cell()
        lane.submit(rig.push(cell, 1), label="push")
        lane.wait(lane.record())
        lane.submit(rig.push(cell, 2), label="push").wait_done(rig.patience_s)
        assert rig.read(cell) == 12 and heard.of("waited") == []

    # ------------------------------------------------------------------------------------------------- fences

    def test_a_fence_passes_only_when_everything_before_it_is_over(self, rig: Rig) -> None:
        lane, cell = rig.lane("a"), rig.cell()
        empty = lane.record()
        empty.wait_passed(rig.patience_s)
        release = rig.hold(lane)
        held = lane.record()
        lane.submit(rig.write(cell, 7), label="write")
        fence = lane.record()
        assert empty.passed() and not held.passed() and not fence.passed() and fence.lane == "a"
        release()
        fence.wait_passed(rig.patience_s)
        assert fence.passed() and rig.read(cell) == 7

    def test_a_deadline_ends_the_wait_and_not_the_work(self, rig: Rig) -> None:
        lane, cell = rig.lane("a"), rig.cell()
        release = rig.hold(lane)
        ticket = lane.submit(rig.write(cell, 7), label="write")
        fence = lane.record()
        for wait in (fence.wait_passed, ticket.wait_done, lane.drain):
            with pytest.raises(DeadlineExceeded, match="lane a"):
                wait(SOON_S)
        release()
        fence.wait_passed(rig.patience_s)
        assert rig.read(cell) == 7

    # ------------------------------------------------------------------------------------------------- errors

    # Holds invariant 25: an exception stays in its ticket and the lane goes on.
    def test_an_error_surfaces_at_its_own_ticket_and_nowhere_else(self, rig: Rig) -> None:
        lane, cell = rig.lane("a"), rig.cell()
        before = lane.submit(rig.push(cell, 1), label="before")
        failed = lane.submit(fail, label="fail")
        after = lane.submit(rig.push(cell, 2), label="after")
        lane.record().wait_passed(rig.patience_s)
        before.wait_done(rig.patience_s)
        after.wait_done(rig.patience_s)
        lane.drain(rig.patience_s)
        assert rig.read(cell) == 12
        assert failed.done() and isinstance(failed.error(), ZeroDivisionError)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError, match="on purpose"):
                failed.wait_done(rig.patience_s)

    def test_work_after_a_failed_ticket_is_skipped_and_fails_the_same_way(self, rig: Rig) -> None:
        lane, cell = rig.lane("a"), rig.cell()
        first = lane.submit(fail, label="fail")
        second = lane.submit(rig.push(cell, 1), label="second", after=first)
        third = lane.submit(rig.push(cell, 2), label="third", after=second)
        unrelated = lane.submit(rig.push(cell, 3), label="unrelated")
        lane.drain(rig.patience_s)
        assert third.error() is first.error() is second.error()
        with pytest.raises(ZeroDivisionError):
            third.wait_done(rig.patience_s)
        unrelated.wait_done(rig.patience_s)
        assert rig.read(cell) == 3

    # -------------------------------------------------------------------------------------------------- close

    def test_nothing_is_taken_after_close_and_what_is_over_stays_known(self, rig: Rig) -> None:
        lane, cell = rig.lane("a"), rig.cell()
        ticket = lane.submit(rig.write(cell, 7), label="write")
        fence = lane.record()
        lane.close(rig.patience_s)
        with pytest.raises(LaneClosed, match="late"):
            lane.submit(rig.write(cell, 8), label="late")
        ticket.wait_done(rig.patience_s)
        fence.wait_passed(rig.patience_s)
        assert rig.read(cell) == 7

    def test_a_close_that_runs_out_of_time_refuses_new_work_and_loses_none(self, rig: Rig) -> None:
        lane, cell = rig.lane("a"), rig.cell()
        release = rig.hold(lane)
        lane.submit(rig.write(cell, 7), label="write")
        with pytest.raises(DeadlineExceeded, match="lane a"):
            lane.close(SOON_S)
        with pytest.raises(LaneClosed):
            lane.submit(rig.write(cell, 8), label="late")
        release()
        lane.close(rig.patience_s)
        assert rig.read(cell) == 7

    # ------------------------------------------------------------------------------------------------ capture

    def test_a_replay_is_one_unit_between_what_was_submitted_around_it(self, rig: Rig) -> None:
        heard = Heard()
        lane, cell = rig.lane("a", heard), rig.cell()
        with lane.capture("decode") as capture:
            lane.submit(rig.push(cell, 2), [READ_3], label="inner")
            lane.submit(rig.push(cell, 3), label="inner")
        lane.submit(rig.push(cell, 1), label="before")
        lane.replay(capture.replay, [READ_3, WRITE_5])
        lane.submit(rig.push(cell, 4), label="after")
        lane.drain(rig.patience_s)
        assert rig.read(cell) == 1234
        assert heard.of("submitted") == [
            ("submitted", "a", "before", ()),
            ("submitted", "a", "decode", (READ_3, WRITE_5)),
            ("submitted", "a", "after", ()),
        ]

    def test_a_wait_inside_a_capture_is_not_honoured_by_the_replay(self, rig: Rig) -> None:
        heard = Heard()
        writer, reader, source, target = rig.lane("a"), rig.lane("b", heard), rig.cell(), rig.cell()
        with reader.capture("copy") as capture:
            release = rig.hold(writer)
            writer.submit(rig.write(source, 7), label="write")
            fence = writer.record()
            reader.wait(fence)
            reader.submit(rig.copy(source, target), label="copy")
        assert not heard.events
        reader.replay(capture.replay).wait_done(rig.patience_s)
        assert not fence.passed(), "the race needs a writer that is still held"
        assert rig.read(target) == 0, "the reader came before the writer, and so it must look here too"
        assert heard.of("waited") == []
        release()
        writer.drain(rig.patience_s)

    def test_a_wait_before_a_replay_is_honoured(self, rig: Rig) -> None:
        writer, reader, source, target = rig.lane("a"), rig.lane("b"), rig.cell(), rig.cell()
        with reader.capture("copy") as capture:
            reader.submit(rig.copy(source, target), label="copy")
        release = rig.hold(writer)
        writer.submit(rig.write(source, 7), label="write")
        reader.wait(writer.record())
        reader.replay(capture.replay)
        release()
        reader.drain(rig.patience_s)
        assert rig.read(target) == 7

    def test_a_capture_refuses_a_fence_and_a_second_capture(self, rig: Rig) -> None:
        lane, cell = rig.lane("a"), rig.cell()
        with lane.capture("outer") as capture:
            lane.submit(rig.push(cell, 1), label="push")
            with pytest.raises(InvariantBroken, match="fence"):
                lane.record()
            with pytest.raises(InvariantBroken, match=r"inner.*outer"), lane.capture("inner"):
                pytest.fail("a capture opened inside another")
            with pytest.raises(InvariantBroken, match="outer"):
                _ = capture.replay
        lane.replay(capture.replay).wait_done(rig.patience_s)
        assert rig.read(cell) == 1

    def test_another_thread_can_neither_submit_nor_wait_inside_a_capture(self, rig: Rig) -> None:
        lane, cell = rig.lane("a"), rig.cell()
        fence = rig.lane("b").record()
        refused: list[BaseException] = []

        def intrude() -> None:
            for call in (lambda: lane.submit(rig.push(cell, 9), label="intruder"), lambda: lane.wait(fence)):
                try:
                    call()
                except BaseException as error:
                    refused.append(error)

        with lane.capture("push") as capture:
            lane.submit(rig.push(cell, 1), label="push")
            thread = threading.Thread(target=intrude)
            thread.start()
            thread.join()
        assert [type(error) for error in refused] == [InvariantBroken] * 2 and "intruder" in str(refused[0])
        lane.replay(capture.replay).wait_done(rig.patience_s)
        assert rig.read(cell) == 1

    def test_a_capture_that_raises_leaves_no_replay_and_a_working_lane(self, rig: Rig) -> None:
        lane, cell = rig.lane("a"), rig.cell()
        captures: list[Any] = []

        def give_up_half_way() -> None:
            with lane.capture("half") as capture:
                captures.append(capture)
                lane.submit(rig.push(cell, 1), label="push")
                fail()

        with pytest.raises(ZeroDivisionError):
            give_up_half_way()
        with pytest.raises(InvariantBroken, match="half"):
            _ = captures[0].replay
        lane.submit(rig.push(cell, 2), label="push").wait_done(rig.patience_s)
        assert rig.read(cell) == 2

    def test_a_lane_refuses_what_another_backend_captured(self, rig: Rig) -> None:
        class Foreign:
            label = "foreign"

        with pytest.raises(InvariantBroken, match="another backend"):
            rig.lane("a").replay(Foreign())

    # ----------------------------------------------------------------------------------------------- observer

    def test_an_observer_hears_submits_and_waits_in_order(self, rig: Rig) -> None:
        heard = Heard()
        first, second, cell = rig.lane("a", heard), rig.lane("b", heard), rig.cell()
        release = rig.hold(first)
        first.submit(rig.push(cell, 1), [WRITE_5], label="write")
        fence: Any = first.record()
        second.wait(fence)
        second.submit(rig.push(cell, 2), [READ_3, WRITE_5], label="read")
        told = heard.of("submitted", "waited")
        assert told == [
            ("submitted", "a", "hold", ()),
            ("submitted", "a", "write", (WRITE_5,)),
            ("waited", "b", "a", fence.number),
            ("submitted", "b", "read", (READ_3, WRITE_5)),
        ]
        assert not fence.passed(), "all of that was said before the work ran"
        release()
        second.drain(rig.patience_s)

    def test_work_knows_whether_it_is_work_of_a_lane(self, rig: Rig) -> None:
        lane, other, found = rig.lane("a"), rig.lane("b"), []
        lane.submit(lambda: found.append((lane.is_current(), other.is_current())), label="asks").wait_done(
            rig.patience_s
        )
        assert found == [(True, False)] and not lane.is_current()

    def test_an_observer_hears_of_work_before_it_can_run(self, rig: Rig) -> None:
        heard = Heard()
        lane = rig.lane("a", heard)
        known_then: list[tuple[Any, ...]] = []
        lane.submit(lambda: known_then.extend(heard.events), [READ_3], label="look").wait_done(rig.patience_s)
        assert known_then == [("submitted", "a", "look", (READ_3,))]

    def test_an_observer_hears_how_work_ended(self, rig: Rig) -> None:
        heard = Heard()
        lane, cell = rig.lane("a", heard), rig.cell()
        failed = lane.submit(fail, label="fail")
        lane.submit(rig.push(cell, 1), label="skipped", after=failed)
        lane.submit(rig.push(cell, 2), label="push").wait_done(rig.patience_s)
        assert heard.of("finished") == [
            ("finished", "a", name) for name in ("ZeroDivisionError", "ZeroDivisionError", "NoneType")
        ]

    def test_a_wait_that_ends_early_is_not_reported_as_one_that_saw_the_fence_pass(self, rig: Rig) -> None:
        heard = Heard()
        lane = rig.lane("a", heard)
        release = rig.hold(lane)
        with pytest.raises(DeadlineExceeded):
            lane.record().wait_passed(SOON_S)
        assert heard.of("host_waited") == []
        release()

    def test_a_wait_between_lanes_is_no_wait_of_the_host(self, rig: Rig) -> None:
        heard = Heard()
        first, second = rig.lane("a", heard), rig.lane("b", heard)
        release = rig.hold(first)
        second.wait(first.record())
        behind = second.record()
        release()
        behind.wait_passed(rig.patience_s)
        assert [event for event in heard.of("host_waited") if event[1] == "a"] == []
