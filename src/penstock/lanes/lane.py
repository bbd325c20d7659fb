"""What a lane is: an ordered queue of work with fences on it. Owns the words and rules that both backends keep.

Rules, the same on CPU threads and CUDA streams:

- `submit` returns at once; work on one lane runs in submission order, work on two lanes in any order unless a `wait` says otherwise.
- `record` marks a point; `wait` orders what is submitted afterwards behind such a point of another lane, on the device, without
  blocking the caller. Only `wait_*` and `drain` block a host thread.
- An exception raised by work is kept in its ticket and raised where the ticket is waited on; work given `after=` a failed ticket is
  skipped and fails with the same error. The lane itself goes on. Where it cannot (its thread could not be set up, a wait failed), all that
  is submitted from then on is skipped and fails with the reason: every ticket and every fence ends.
- `capture` records submissions instead of running them; `replay` runs the whole recording as one unit. Inside a recording no wait on
  an outside fence is honoured: it is reported to the observer and dropped, on both backends, since a captured graph cannot keep it.
  So whatever a replay must wait for is waited on before it is submitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from penstock.contract import Access, Fence

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


class Replay(Protocol):
    """Work recorded once, to be run as one unit any number of times."""

    label: str


class Capture(Protocol):
    """An open recording; `replay` is there once its `with` block has ended."""

    @property
    def replay(self) -> Replay: ...


class Lane(Protocol):
    """One ordered queue of work."""

    name: str

    def submit(self, op: Op, accesses: Sequence[Access] = (), *, label: str, after: Ticket | None = None) -> Ticket: ...

    def record(self) -> Fence: ...

    def wait(self, fence: Fence) -> None: ...

    def capture(self, label: str) -> AbstractContextManager[Capture]: ...

    def replay(self, replay: Replay, accesses: Sequence[Access] = (), *, after: Ticket | None = None) -> Ticket: ...

    def touch(self, accesses: Sequence[Access], *, label: str) -> None:
        """The calling thread itself reads or writes these bytes, here and now. Nothing is done; an observer is told."""

    def is_current(self) -> bool:
        """Whether the calling code is work of this lane: what only the lane's work may touch asks this."""

    def drain(self, timeout_s: float | None = None) -> None:
        """Block until everything submitted so far is over."""

    def close(self, timeout_s: float | None = None) -> None:
        """Drain and end; idempotent. Submitting afterwards raises LaneClosed."""
