"""Whether a store is worth talking to. Owns that state and the time of the next look; who looks, and what is done meanwhile, is elsewhere.

CLOSED  -- it fails -->  OPEN  -- time to look -->  HALF_OPEN  -- it answers -->  CLOSED
                          ^------------ it does not ----'
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterable

from penstock.errors import IllegalTransition
from penstock.kv.tiers.store import Outcome

MAX_PROBE_S = 30.0
MAX_FAILED = 8  # blocks in a row that fail singly; more are no accident


class BreakerState(enum.Enum):
    CLOSED = "closed"  # in use
    OPEN = "open"  # left alone
    HALF_OPEN = "half-open"  # being probed, and left alone otherwise


class Event(enum.Enum):
    FAIL = "a failure"
    PROBE = "a probe"
    RECOVER = "an answer to a probe"


_MOVES = {
    (BreakerState.CLOSED, Event.FAIL): BreakerState.OPEN,
    (BreakerState.OPEN, Event.PROBE): BreakerState.HALF_OPEN,
    (BreakerState.HALF_OPEN, Event.FAIL): BreakerState.OPEN,
    (BreakerState.HALF_OPEN, Event.RECOVER): BreakerState.CLOSED,
}


class Breaker:
    """For any thread. What was begun before it opened has nothing to say about the store as it is after that, so that whoever reports
    shows what `enter` gave it."""

    def __init__(self, probe_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_openings = 0
        self._probe_s = probe_s
        self.clock = clock
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._num_failed = 0  # single blocks, in a row
        self._wait_s = probe_s  # before the next probe
        self._due_s = 0.0

    @property
    def state(self) -> BreakerState:
        return self._state

    def enter(self) -> int | None:
        """Leave to talk to the store, to be shown when that is over; None: leave it alone."""
        with self._lock:
            return self.num_openings if self._state is BreakerState.CLOSED else None

    def fail(self, entered: int) -> bool:
        """The place as a whole did not answer. Says whether that opened it."""
        with self._lock:
            return self._open_if_current(entered)

    def note(self, entered: int, outcomes: Iterable[Outcome]) -> bool:
        """It answered, block by block. Says whether that opened it."""
        with self._lock:
            if not self._is_current(entered):
                return False
            for outcome in outcomes:
                self._num_failed = self._num_failed + 1 if outcome is Outcome.FAILED else 0
                if self._num_failed >= MAX_FAILED:
                    return self._open_if_current(entered)
            return False

    def try_probe(self) -> bool:
        """Whether it is time to look. Then whoever asked does, and says `probed`."""
        with self._lock:
            if self._state is not BreakerState.OPEN or self.clock() < self._due_s:
                return False
            self._move(Event.PROBE)
            return True

    def probed(self, answers: bool) -> None:
        with self._lock:
            if answers:
                self._move(Event.RECOVER)
                self._wait_s = self._probe_s
            else:
                self._wait_s = min(2.0 * self._wait_s, max(MAX_PROBE_S, self._probe_s))
                self._open()

    def _is_current(self, entered: int) -> bool:
        return self._state is BreakerState.CLOSED and entered == self.num_openings

    def _open_if_current(self, entered: int) -> bool:
        if not self._is_current(entered):
            return False
        self.num_openings += 1
        self._open()
        return True

    def _open(self) -> None:
        self._move(Event.FAIL)
        self._num_failed = 0
        self._due_s = self.clock() + self._wait_s

    def _move(self, event: Event) -> None:
        after = _MOVES.get((self._state, event))
        if after is None:
            raise IllegalTransition("the breaker of a store", self._state.value, event.value)
        self._state = after
