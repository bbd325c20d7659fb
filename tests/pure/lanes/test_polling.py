"""Between two looks: short enough to be a small part of what is waited for, long enough to leave the core to
others; and timers that keep their word, on the thread that asked for it and on no other."""

from __future__ import annotations

import ctypes
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import penstock
from penstock.engine.inbox import Inbox
from penstock.lanes.lane import POLL_MOST_S, POLL_S, look_again_s, sharpen_timers

GET_TIMER_SLACK = 30  # PR_GET_TIMERSLACK of linux/prctl.h
PATIENCE_S = 10.0
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="timers have no slack that could be asked for")


def slack_ns() -> int:
    """Of the calling thread."""
    return int(ctypes.CDLL(None).prctl(GET_TIMER_SLACK, 0, 0, 0, 0))


def slack_on_a_thread(before: Callable[[], object]) -> tuple[int, int]:
    """Of a thread of its own, before and after it has done that."""
    seen: list[int] = []

    def run() -> None:
        seen.append(slack_ns())
        before()
        seen.append(slack_ns())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PATIENCE_S)
    return seen[0], seen[1]


@given(waited_s=st.floats(0.0, 1e6))
@example(waited_s=0.0)
@example(waited_s=POLL_S * 256)
@example(waited_s=POLL_MOST_S * 256)
@example(waited_s=1e6)
def test_looking_late_adds_little_and_looking_often_ends(waited_s: float) -> None:
    again_s = look_again_s(waited_s)
    assert POLL_S <= again_s <= POLL_MOST_S
    assert again_s == POLL_S or again_s <= waited_s / 100
    assert look_again_s(2 * waited_s) >= again_s


@ON_LINUX
def test_timers_are_sharp_on_the_thread_that_asks_and_on_no_other() -> None:
    here = slack_ns()
    before, after = slack_on_a_thread(sharpen_timers)
    assert after == 1000 < before and slack_ns() == here


@ON_LINUX
def test_whoever_waits_at_a_sharp_inbox_has_sharp_timers_and_at_another_has_not() -> None:
    inbox = Inbox(sharp=True)
    assert [slack_on_a_thread(lambda: inbox.wait(0.0))[1] for _ in range(2)] == [1000, 1000]
    before, after = slack_on_a_thread(lambda: Inbox().wait(0.0))
    assert before == after


def test_a_wake_ends_a_wait_also_when_it_came_first() -> None:
    inbox, over = Inbox(sharp=True), threading.Event()
    inbox.wake()

    def wait() -> None:
        inbox.wait(PATIENCE_S)
        over.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert over.wait(PATIENCE_S / 2)
    thread.join(PATIENCE_S)


def test_nobody_waits_for_a_simple_queue_with_a_time_out() -> None:
    """On CPython 3.11 and 3.12 such a wait lasts for ever where its thread is held up for longer than the
    time-out at the wrong moment: the rest of the time is then less than nothing, which stands for no limit.
    With waits of microseconds that takes a busy machine minutes.
    """
    package = Path(penstock.__file__).parent
    queues = {file for file in package.rglob("*.py") if "SimpleQueue" in file.read_text()}
    assert queues, "those of lanes have no time-out"
    assert not [file.name for file in queues if re.search(r"\.get\((timeout|block|True)", file.read_text())]
