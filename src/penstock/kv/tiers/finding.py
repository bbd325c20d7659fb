"""What a cold tier is asked before anything is read: how many of some leading keys its store has. Owns the questions that are open and how
long anybody waits for an answer; what is said to the store is the business of its exchanges."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from penstock.errors import LaneClosed
from penstock.kv.tiers.exchange import Exchanges
from penstock.lanes.lane import Lane


class Finding:
    """How many of some leading keys a tier has. `num` is 0 until the answer is there, and stays so when that comes too late."""

    def __init__(self, deadline_s: float = float("inf"), clock: Callable[[], float] = time.monotonic) -> None:
        self.num = 0
        self.deadline_s = deadline_s
        self._clock = clock
        self._lock = threading.Lock()
        self._ready = False

    @property
    def ready(self) -> bool:
        """Answered, failed, or out of patience: it does not change any more. Never blocks."""
        if not self._ready and self._clock() >= self.deadline_s:
            self.answer(0)
        return self._ready

    def answer(self, num: int) -> None:
        """The first one counts, if it comes in time. For any thread."""
        with self._lock:
            if not self._ready:
                self.num = num if self._clock() < self.deadline_s else 0
                self._ready = True


class Questions:
    """What a store was asked for, and has not answered yet as far as the engine thread has seen."""

    def __init__(self, exchanges: Exchanges, lane: Lane | None, defects: list[BaseException], wake: Callable[[], None]) -> None:
        self._exchanges = exchanges
        self._lane = lane
        self._defects = defects
        self._wake = wake
        self._lock = threading.Lock()
        self._open: list[Finding] = []

    def __len__(self) -> int:
        return len(self._open)

    def ask(self, keys: Sequence[bytes], patience_s: float) -> Finding:
        clock, lane = self._exchanges.breaker.clock, self._lane
        finding = Finding(clock=clock)
        if not keys or not self._exchanges.usable:
            finding.answer(0)
        elif self._exchanges.store.local or lane is None:
            finding.answer(self._exchanges.find(keys))
        else:
            finding.deadline_s = clock() + patience_s
            with self._lock:
                self._open.append(finding)
            try:
                lane.submit(partial(self._answer, finding, keys), label=f"find in {self._exchanges.store.name}")
            except BaseException as error:
                finding.answer(0)  # nobody else will
                if not isinstance(error, LaneClosed):
                    raise
        return finding

    def settle(self) -> None:
        with self._lock:
            self._open = [finding for finding in self._open if not finding.ready]

    def _answer(self, finding: Finding, keys: Sequence[bytes]) -> None:
        try:
            if not finding.ready:  # else nobody waits for the answer any more
                finding.answer(self._exchanges.find(keys))
        except Exception as error:  # a store's own end in the exchanges: this is a defect
            self._defects.append(error)
        finally:
            finding.answer(0)
            self._wake()
