"""The engine's loop under the sanitizer: a wait where none belongs is a stall, and books that do not add up
between turns are found."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest

from penstock.errors import SanitizerStop
from penstock.kv.blocks.pool import BlockPool
from penstock.lanes.cpu import CpuLane
from penstock.sanitizer.report import Kind
from penstock.sanitizer.sanitizer import Sanitizer
from penstock.testing.sequencer import Sequencer


# Holds invariant 6: the sanitizer reports where it is broken.
def test_a_wait_inside_a_turn_is_a_stall_and_says_how_long_and_where() -> None:
    sanitizer = Sanitizer()
    with sanitizer.turns.turn():
        sanitizer.host_waited("load", 3, 0.25)
    (report,) = sanitizer.reports
    assert report.kind is Kind.STALL
    assert report.sentence == (
        "the engine thread waited 250.0 ms for item 3 of lane load, where it may not wait"
    )
    assert "test_a_wait_inside_a_turn_is_a_stall_and_says_how_long_and_where" in str(report)
    assert sanitizer.num_by_kind[Kind.STALL] == 1


def test_the_places_that_may_wait_may(monkeypatch: pytest.MonkeyPatch) -> None:
    sanitizer = Sanitizer()
    sanitizer.host_waited("load", 3, 0.25)  # between turns
    with sanitizer.turns.turn():
        with sanitizer.turns.may_wait("result"):
            sanitizer.host_waited("compute", 3, 0.25)
            with sanitizer.turns.may_wait("inner"):
                pass
            sanitizer.host_waited("compute", 4, 0.25)
        sanitizer.host_waited("load", 3, 0.0)  # a look
        sanitizer.host_waited("load", 4, 0.0009)  # what a lock costs
        # somebody else's time
        other = threading.Thread(target=lambda: sanitizer.host_waited("load", 5, 0.25))
        other.start()
        other.join()
    sanitizer.host_waited("load", 6, 0.25)
    assert sanitizer.reports == []
    with sanitizer.turns.turn():
        sanitizer.host_waited("load", 7, 0.25)
    assert len(sanitizer.reports) == 1, "permission ends with its block"


def test_a_wait_on_a_real_lane_is_measured() -> None:
    sanitizer = Sanitizer(stall_s=0.0)
    lane = CpuLane("save", sanitizer)
    gate = threading.Event()
    lane.submit(gate.wait, label="held")
    threading.Timer(0.01, gate.set).start()
    with sanitizer.turns.turn():
        lane.drain(10.0)
    lane.close(10.0)
    (report,) = sanitizer.reports
    assert report.kind is Kind.STALL and "item 1 of lane save" in report.sentence


def test_exploring_finds_a_wait_that_blocks_in_some_schedules_only() -> None:
    def blocked(schedule: dict[int, str]) -> int:
        sanitizer = Sanitizer()
        with closing(Sequencer(schedule, observer=sanitizer)) as sequencer:
            lane = sequencer.lane("save")
            ticket = lane.submit(lambda: None, label="copy")
            with sanitizer.turns.turn():
                ticket.wait_done()
        return sanitizer.num_by_kind[Kind.STALL]

    assert blocked({}) == 1
    assert blocked({0: "save"}) == 0, "it was over when it was waited for"


def test_a_strict_sanitizer_stops_a_turn_that_stalls() -> None:
    sanitizer = Sanitizer(strict=True)
    with pytest.raises(SanitizerStop, match="waited"), sanitizer.turns.turn():
        sanitizer.host_waited("load", 1, 1.0)


def test_a_pool_whose_counts_follow_from_its_changes_balances() -> None:
    sanitizer = Sanitizer()
    pool = BlockPool(8, "device", sanitizer)
    handles = []
    for number in (3, 2):
        reservation = pool.try_reserve(number, "r")
        assert reservation is not None
        handles.append(pool.hold("r"))
        reservation.commit(handles[-1])
        sanitizer.turns.balanced("device", pool.counts._asdict())
    pool.seal(handles[0].slots, [bytes([n]) * 16 for n in range(3)])
    pin = pool.pin(handles[0].slots[:1], "save")
    for handle in handles:
        handle.end()
        sanitizer.turns.balanced("device", pool.counts._asdict())
    pin.end()
    pool.evict(2)
    sanitizer.turns.balanced("device", pool.counts._asdict())
    assert sanitizer.reports == [] and pool.counts.idle == 1


# Holds invariant 16: the sanitizer compares the counts of a pool at every step boundary.
def test_a_pool_that_loses_a_slot_does_not_balance() -> None:
    sanitizer = Sanitizer()
    pool = BlockPool(8, "device", sanitizer)
    pool.book.num_in[0] -= 1
    sanitizer.turns.balanced("device", pool.counts._asdict())
    (report,) = sanitizer.reports
    assert report.kind is Kind.ACCOUNTING
    assert report.sentence == (
        "the pool of device says that it has {'free': 7} at a step boundary, and its changes add up to "
        "{'free': 8}"
    )


def test_nobody_is_asked_to_balance_a_pool_that_was_never_opened() -> None:
    sanitizer = Sanitizer()
    sanitizer.turns.balanced("ssd", {"free": 3})
    assert sanitizer.reports == []
