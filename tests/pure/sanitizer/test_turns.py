"""The engine's loop under the sanitizer: a wait where none belongs is a stall, and books that do not add up
between turns are found."""

from __future__ import annotations

import threading

import pytest

from penstock.kv.blocks.pool import BlockPool
from penstock.sanitizer.report import Kind
from penstock.sanitizer.sanitizer import Sanitizer


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


def test_a_wait_is_a_stall_only_inside_a_turn_from_the_limit_on_and_without_permission() -> None:
    sanitizer = Sanitizer(stall_s=0.1)

    def waits(seconds: float) -> int:
        sanitizer.host_waited("load", 3, seconds)
        return sanitizer.num_by_kind[Kind.STALL]

    with sanitizer.turns.turn(), sanitizer.turns.may_wait("result"):
        with sanitizer.turns.may_wait("inner"):
            assert waits(0.25) == 0
        assert waits(0.25) == 0, "the outer permission goes on"
    with sanitizer.turns.turn():
        assert waits(0.0) == waits(0.1) == 0, "a look, and what a lock costs"
        other = threading.Thread(target=waits, args=(0.25,))  # another thread's time
        other.start()
        other.join()
        with sanitizer.turns.turn():
            pass
        with pytest.raises(OSError), sanitizer.turns.may_wait("result"):
            raise OSError
        assert waits(0.2) == 1, "a permission ends with its block, also with an error"
    with pytest.raises(OSError), sanitizer.turns.turn():
        raise OSError
    assert waits(0.25) == 1, "so does a turn"


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
    sanitizer.turns.balanced("ssd", {"free": 3})  # never opened
    (report,) = sanitizer.reports
    assert report.kind is Kind.ACCOUNTING
    assert report.sentence == (
        "the pool of device says that it has {'free': 7} at a step boundary, and its changes add up to "
        "{'free': 8}"
    )
