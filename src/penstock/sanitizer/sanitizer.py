"""The observer: takes in what lanes and pools report and checks every declared access against it. Owns the findings, changes nothing.

Sound for what is declared: two accesses to the same bytes, at least one a write, are reported unless a path of submissions, waits and
host waits orders them. A captured replay is one access with the union of its ops', and a wait placed inside a capture is no edge.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from penstock.contract import Access, Mode
from penstock.errors import ConfigError, SanitizerStop
from penstock.sanitizer.clock import Clock, Clocks
from penstock.sanitizer.history import SlotHistory
from penstock.sanitizer.report import Deed, Frame, Kind, Report

log = logging.getLogger(__name__)

MAX_REPORTS = 1000  # kept in full; further ones are only counted
_STACK = 12  # frames of a call stack that a report shows
_OWN = ("penstock/sanitizer/", "penstock/lanes/", "penstock/testing/sequencer.py")


class Sanitizer:
    """Implements `LaneObserver` and `PoolObserver`. Any thread may report; `reports` are in the order of discovery."""

    def __init__(self, strict: bool = False, json_file: Path | None = None) -> None:
        """`strict`: the thread whose doing was found gets SanitizerStop. `json_file` holds all findings so far, from the start."""
        self.reports: list[Report] = []
        self.num_by_kind: dict[Kind, int] = dict.fromkeys(Kind, 0)
        self._strict = strict
        self._json_file = json_file
        self._write_json()
        self._lock = threading.RLock()
        self._clocks = Clocks()
        self._histories: dict[str, dict[int, SlotHistory]] = {}
        self._states: dict[str, list[str]] = {}  # by pool: the state of each slot
        self._told: set[tuple[object, ...]] = set()  # one report per pair of labels and lanes, however many slots it concerns

    # ------------------------------------------------------------------------------------------------------------ lanes

    def submitted(self, lane: str, ticket: int, label: str, accesses: Sequence[Access]) -> None:
        with self._lock:
            clock = self._clocks.submit(threading.get_ident(), lane, ticket)
            if not accesses:
                return
            stack = _stack()
            for access in accesses:
                deed = Deed(lane, ticket, label, access.mode is Mode.WRITE, access.layers, stack)
                slots = set(map(int, access.slots))
                self._check_owned(access.arena, slots, deed)
                self._check_ordered(access.arena, slots, deed, clock)

    def recorded(self, lane: str, fence: int) -> None:
        """A fence is its lane and number; what it covers is worked out when somebody waits for it."""

    def waited(self, lane: str, on_lane: str, fence: int) -> None:
        with self._lock:
            self._clocks.wait(lane, on_lane, fence)

    def wait_ignored(self, lane: str, on_lane: str, fence: int) -> None:
        """Inside a capture: no edge."""

    def host_waited(self, on_lane: str, fence: int, seconds: float) -> None:
        with self._lock:
            self._clocks.see(threading.get_ident(), on_lane, fence)

    def finished(self, lane: str, ticket: int, error: BaseException | None) -> None:
        """That work is over orders nothing by itself; whoever acts on it has waited or polled."""

    # ------------------------------------------------------------------------------------------------------------ pools

    def opened(self, pool: str, num_slots: int) -> None:
        with self._lock:
            self._states[pool] = ["free"] * num_slots
            self._histories.pop(pool, None)

    def moved(self, pool: str, slots: Sequence[int], old: str, new: str, owner: str) -> None:
        with self._lock:
            states = self._states.get(pool)
            if states is None:
                return
            for slot in slots:
                if states[slot] != old:
                    sentence = f"slot {slot} of {pool} went from {old} to {new} for {owner!r}, but it was {states[slot]}"
                    self._tell(Report(Kind.ACCOUNTING, pool, (slot,), sentence), (pool, old, new))
                states[slot] = new

    def sealed(self, pool: str, slot: int, key: bytes) -> None:
        """Sealing gives a key and touches no bytes."""

    def evicted(self, pool: str, slot: int, key: bytes) -> None:
        """Forgetting touches no bytes either; the next writer's order is what counts."""

    # --------------------------------------------------------------------------------------------------------- findings

    def _check_owned(self, arena: str, slots: set[int], deed: Deed) -> None:
        """Work may touch only slots that somebody holds. Slots behind the pool's, the padding block, belong to everybody."""
        states = self._states.get(arena)
        if states is None:
            return
        num_slots = len(states)
        free = sorted(slot for slot in slots if slot < num_slots and states[slot] == "free")
        if free:
            sentence = f"{deed.told()} touches {_listed(free)} of {arena}, which nobody holds"
            self._tell(Report(Kind.LIFETIME, arena, tuple(free), sentence, (deed,)), (deed.lane, deed.label, arena))

    def _check_ordered(self, arena: str, slots: set[int], deed: Deed, clock: Clock) -> None:
        histories = self._histories.setdefault(arena, {})
        races: dict[tuple[str, str], list[tuple[int, Deed]]] = {}
        for slot in slots:
            history = histories.get(slot)
            if history is None:
                history = histories[slot] = SlotHistory()
            for earlier in history.take(deed, clock):
                races.setdefault((earlier.lane, earlier.label), []).append((slot, earlier))
        for found in races.values():
            self._race(arena, deed, found)

    def _race(self, arena: str, deed: Deed, found: list[tuple[int, Deed]]) -> None:
        slots, earlier = tuple(sorted({slot for slot, _ in found})), found[-1][1]
        sentence = (
            f"{deed.told()} is not ordered after {earlier.told()} in {_listed(slots)} of {arena}: "
            f"nothing on lane {deed.lane}, and nothing that its submitter saw, waits for item {earlier.number} of lane {earlier.lane}"
        )
        key = (arena, deed.lane, deed.label, deed.writes, earlier.lane, earlier.label, earlier.writes)
        self._tell(Report(Kind.RACE, arena, slots, sentence, (earlier, deed)), key)

    def _tell(self, report: Report, key: tuple[object, ...]) -> None:
        self.num_by_kind[report.kind] += 1
        if (report.kind, *key) in self._told or len(self.reports) >= MAX_REPORTS:
            return
        self._told.add((report.kind, *key))
        self.reports.append(report)
        log.error("%s", report)
        self._write_json()
        if self._strict:
            raise SanitizerStop(f"{report.kind}: {report.sentence}")

    def _write_json(self) -> None:
        if self._json_file is None:
            return
        try:
            self._json_file.write_text(json.dumps([report.as_dict() for report in self.reports], indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"--sanitize-json {self._json_file}: {error.strerror or error}") from None


def _listed(slots: Sequence[int]) -> str:
    named = ", ".join(map(str, slots[:8]))
    more = f" and {len(slots) - 8} more" if len(slots) > 8 else ""
    return f"slot{'s' if len(slots) > 1 else ''} {named}{more}"


def _stack() -> tuple[Frame, ...]:
    """Where the work was submitted, innermost frame first, without the lane's own and ours."""
    frames: list[Frame] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < _STACK:
        name = frame.f_code.co_filename
        if not any(own in name for own in _OWN):
            frames.append(Frame(name, frame.f_lineno, frame.f_code.co_qualname))
        frame = frame.f_back
    return tuple(frames)
