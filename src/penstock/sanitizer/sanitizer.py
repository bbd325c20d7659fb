"""The observer: takes in what lanes and pools report and has every declared access and every change of hands judged. Owns the parts that
judge, changes nothing.

Sound for what is declared: two accesses to the same bytes, at least one a write, are reported unless a path of submissions, waits, host
waits and changes of hands orders them. A captured replay is one access with the union of its ops', and a wait placed inside a capture is
no edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from penstock.contract import Access, Fence, Mode
from penstock.sanitizer.arena import Arenas
from penstock.sanitizer.checksums import Checksums
from penstock.sanitizer.clock import Clocks
from penstock.sanitizer.findings import Findings
from penstock.sanitizer.report import Deed
from penstock.sanitizer.turns import STALL_S, Turns


class Sanitizer:
    """Implements `LaneObserver` and `PoolObserver`; `turns` and `checksums` listen to the engine's loop and to transfers. Any thread may
    report; `reports` are in the order of discovery."""

    def __init__(self, strict: bool = False, json_file: Path | None = None, stall_s: float = STALL_S) -> None:
        """`strict`: the thread whose doing was found gets SanitizerStop. `json_file` holds all findings so far, from the start."""
        findings = Findings(strict, json_file)
        self.reports = findings.reports
        self.num_by_kind = findings.num_by_kind
        self._findings = findings
        self._lock = findings.lock
        self._clocks = Clocks()
        self._arenas = Arenas(findings)
        self.turns = Turns(findings, self._arenas, stall_s)
        self.checksums = Checksums(findings)

    # ------------------------------------------------------------------------------------------------------------ lanes

    def submitted(self, lane: str, ticket: int, label: str, accesses: Sequence[Access]) -> None:
        with self._lock:
            clock = self._clocks.submit(lane, ticket)
            if not accesses:
                return
            stack = self._findings.stacks.here()
            for access in accesses:
                deed = Deed(lane, ticket, label, access.mode is Mode.WRITE, access.layers, stack)
                self._arenas[access.arena].touch(deed, _slots_of(access), clock)

    def recorded(self, lane: str, fence: int) -> None:
        """A fence is its lane and number; what it covers is worked out when somebody waits for it."""

    def waited(self, lane: str, on_lane: str, fence: int) -> None:
        with self._lock:
            self._clocks.wait(lane, on_lane, fence)

    def wait_ignored(self, lane: str, on_lane: str, fence: int) -> None:
        """Inside a capture: no edge."""

    def host_waited(self, on_lane: str, fence: int, seconds: float) -> None:
        with self._lock:
            self._clocks.see(on_lane, fence)
            if seconds > 0:
                self.turns.blocked(on_lane, fence, seconds)

    def touched(self, label: str, accesses: Sequence[Access]) -> None:
        with self._lock:
            thread, number, clock = self._clocks.act()
            stack = self._findings.stacks.here()
            for access in accesses:
                deed = Deed(thread, number, label, access.mode is Mode.WRITE, access.layers, stack)
                self._arenas[access.arena].touch(deed, _slots_of(access), clock)

    def started(self, lane: str, ticket: int) -> None:
        with self._lock:
            self._clocks.start(lane, ticket)

    def finished(self, lane: str, ticket: int, error: BaseException | None) -> None:
        """That work is over orders nothing by itself: whoever acts on it has waited or polled. But the thread acts as itself again."""
        with self._lock:
            self._clocks.finish(lane, ticket)

    # ------------------------------------------------------------------------------------------------------------ pools

    def opened(self, pool: str, num_slots: int) -> None:
        with self._lock:
            self._arenas[pool].open(num_slots)

    def moved(self, pool: str, slots: Sequence[int], old: str, new: str, owner: str) -> None:
        with self._lock:
            self._arenas[pool].move(self._clocks.actor, slots, (old, new), owner)
            if new == "free":
                self.checksums.forget(pool, slots)

    def lent(self, pool: str, slots: Sequence[int], owner: str) -> None:
        with self._lock:
            self._arenas[pool].hand_over(self._clocks.actor, slots, owner)

    def returned(self, pool: str, slots: Sequence[int], owner: str, fence: Fence | None) -> None:
        with self._lock:
            fenced = None if fence is None else self._clocks.covered(fence.lane, getattr(fence, "number", None))
            self._arenas[pool].hand_over(self._clocks.actor, slots, owner, fenced)

    def sealed(self, pool: str, slot: int, key: bytes) -> None:
        with self._lock:
            self._arenas[pool].seal(self._clocks.actor, slot, key)

    def evicted(self, pool: str, slot: int, key: bytes) -> None:
        """Forgetting touches no bytes; the next writer's order is what counts."""
        with self._lock:
            self._arenas[pool].evict(slot)

    def closed(self, pool: str, left: Sequence[str]) -> None:
        with self._lock:
            self._arenas[pool].close(left)


def _slots_of(access: Access) -> set[int]:
    slots = access.slots
    return set(slots.tolist() if isinstance(slots, np.ndarray) else map(int, slots))
