"""A lane: an ordered queue of work with fences on it. Owns the rules that both backends keep, and how long a
host thread sleeps between two polls.

Rules, the same on CPU threads and CUDA streams:

- `submit` returns at once. Work on one lane runs in submission order; work on two lanes in any order, unless
  a `wait` orders it.
- `record` marks a point. `wait` orders later submissions behind such a point of another lane, on the device,
  without blocking the caller. Only `wait_*` and `drain` block a host thread.
- The ticket keeps an exception raised by its work, and raises it where the ticket is waited on. Work given
  `after=` a failed ticket is skipped and fails with the same error. The lane itself goes on. If it cannot
  (its thread could not be set up, a wait failed), all later work is skipped and fails with the reason: every
  ticket and every fence ends.
- `capture` records submissions instead of running them; `replay` runs the whole recording as one unit. Inside
  a recording no wait on an outside fence is honoured: it is dropped, on both backends, since a captured graph
  cannot keep it. So the lane must wait for such fences before a replay is submitted.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from penstock.contract import Access, Fence
from penstock.errors import InvariantBroken

Op = Callable[[], object]  # what it returns is dropped


class Ticket(Protocol):
    """Handle of submitted work. Dropping it abandons the observer, not the work."""

    label: str

    def done(self) -> bool:
        """Poll; never blocks."""

    def error(self) -> BaseException | None:
        """What the work raised, once it is done."""

    def wait_done(self, timeout_s: float | None = None) -> None:
        """Block until the work is over; raises its error, or DeadlineExceeded."""


@dataclass(slots=True)
class Replay:
    """Work recorded once, to be run as one unit any number of times, by lanes of one backend."""

    label: str
    run: Op


class Capture:
    """A recording, open to one thread; `replay` is there once its `with` block has ended."""

    def __init__(self, lane: str, label: str) -> None:
        self.label = label
        self.thread = threading.get_ident()
        self.ops: list[Op] = []  # submitted meanwhile, where that runs nothing
        self.error: BaseException | None = None  # of what was submitted meanwhile, where that runs it
        self.made: Replay | None = None
        self._lane = lane

    @property
    def replay(self) -> Replay:
        if self.made is None:
            raise InvariantBroken(f"capture {self.label!r} has no replay: it is still open, or it failed")
        return self.made

    def check_thread(self, label: str) -> None:
        """`label` is submitted."""
        if self.thread != threading.get_ident():
            raise InvariantBroken(
                f"lane {self._lane}: {label!r} came from another thread during capture {self.label!r}"
            )


class Lane(Protocol):
    """One ordered queue of work."""

    name: str

    def submit(
        self, op: Op, accesses: Sequence[Access] = (), *, label: str, after: Ticket | None = None
    ) -> Ticket: ...

    def record(self) -> Fence: ...

    def wait(self, fence: Fence) -> None: ...

    def capture(self, label: str) -> AbstractContextManager[Capture]: ...

    def replay(
        self, replay: Replay, accesses: Sequence[Access] = (), *, after: Ticket | None = None
    ) -> Ticket: ...

    def touch(self, accesses: Sequence[Access], *, label: str) -> None:
        """The calling thread itself reads or writes these bytes now. Does nothing but notify an observer."""

    def is_current(self) -> bool:
        """Whether the calling code is work of this lane: what only the lane's work may touch asks this."""

    def drain(self, timeout_s: float | None = None) -> None:
        """Block until everything submitted so far is over."""

    def close(self, timeout_s: float | None = None) -> None:
        """Drain and end; idempotent. Submitting afterwards raises LaneClosed."""


@runtime_checkable
class LateFence(Protocol):
    """A fence behind work that may not be launched yet."""

    def wait_launched(self) -> Fence:
        """Block until there is such a point on a lane that the device knows."""


def launched_fence(fence: Fence) -> Fence:
    """One that any lane can wait for on the device. Blocks until the work before it is launched."""
    return fence.wait_launched() if isinstance(fence, LateFence) else fence


# ---------------------------------------------------------------------------------------------------- polling

POLL_S = 20e-6  # at least this, while there is nothing else to do
POLL_MOST_S = 0.5e-3
_LATE_SHARE = 1 / 256  # of what has been waited already: as much is added to it by looking too late
_SET_TIMER_SLACK = 29  # PR_SET_TIMERSLACK of linux/prctl.h
_TIMER_SLACK_NS = 1000


def look_again_s(waited_s: float) -> float:
    """How long to sleep after waiting so long already: what takes milliseconds is looked at often, what takes
    longer costs no core."""
    return min(max(POLL_S, waited_s * _LATE_SHARE), POLL_MOST_S)


def sharpen_timers() -> bool:
    """Let sleeps of the calling thread end when they should: Linux adds up to 50 us to each, to wake less
    often. False: they stay as they are, which makes waits longer and nothing wrong."""
    if sys.platform != "linux":
        return False
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return False
    nothing = (ctypes.c_ulong(0),) * 3
    return bool(prctl(ctypes.c_int(_SET_TIMER_SLACK), ctypes.c_ulong(_TIMER_SLACK_NS), *nothing) == 0)
