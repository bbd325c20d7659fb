"""The observer: takes in what lanes and pools report and has every declared access and every change of hands
judged. Owns the parts that judge, changes nothing. Two of them are here: the turns of the engine's loop, and
digests of blocks that leave and come back.

Sound for what is declared: two accesses to the same bytes, at least one a write, are reported unless a path
of submissions, waits, host waits and changes of hands orders them. A captured replay is one access with the
union of its ops', and a wait placed inside a capture is no edge.

A wait is judged only inside a turn, on the thread that takes it: a drain or close from outside may take as
long as it likes.

A digest belongs to a copy, not to its key: the same tokens computed twice, in other chunks, give bytes that
differ in their last bits and may stand for each other. So only what one copy held at two moments is compared.
There is one digest a slot.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import numpy as np

from penstock.contract import Access, Fence, Mode
from penstock.observe import Observers
from penstock.sanitizer.arena import Arenas, ArenaWatch
from penstock.sanitizer.clock import Clocks, Known
from penstock.sanitizer.report import Deed, Findings, Kind, Report

STALL_S = 1e-3  # a lock or a busy machine causes shorter waits anyway


class _Here(threading.local):
    def __init__(self) -> None:
        self.in_turn = False
        self.allowed: list[str] = []  # places that may wait, innermost last


class Turns:
    """Implements `observe.EngineObserver`."""

    def __init__(
        self, findings: Findings, arenas: Mapping[str, ArenaWatch], stall_s: float = STALL_S
    ) -> None:
        self._findings = findings
        self._arenas = arenas
        self._stall_s = stall_s
        self._here = _Here()

    @contextmanager
    def turn(self) -> Iterator[None]:
        before, self._here.in_turn = self._here.in_turn, True
        try:
            yield
        finally:
            self._here.in_turn = before

    def part(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def may_wait(self, where: str) -> Iterator[None]:
        self._here.allowed.append(where)
        try:
            yield
        finally:
            self._here.allowed.pop()

    def balanced(self, pool: str, counts: Mapping[str, int]) -> None:
        with self._findings.lock:
            if (arena := self._arenas.get(pool)) is not None:
                arena.balance(counts)

    def blocked(self, on_lane: str, fence: int, seconds: float) -> None:
        """The calling thread has waited `seconds` for that fence."""
        if seconds <= self._stall_s or not self._here.in_turn or self._here.allowed:
            return
        stack = self._findings.stacks.here()
        sentence = (
            f"the engine thread waited {seconds * 1e3:.1f} ms for item {fence} of lane {on_lane}, where it "
            "may not wait"
        )
        self._findings.tell(Report(Kind.STALL, "", (), sentence, stack=stack), on_lane, stack[:3])


class Checksums:
    """Implements `observe.ContentObserver`. Any thread may call."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._copies: dict[str, dict[int, tuple[bytes, int]]] = {}  # by tier and slot: key and digest

    def __len__(self) -> int:
        return sum(map(len, self._copies.values()))

    def demoted(self, tier: str, slot: int, key: bytes, digest: int) -> None:
        with self._findings.lock:
            copies = self._copies.setdefault(tier, {})
            known = copies.get(slot)
            copies[slot] = key, digest
            if known is not None and known[0] == key and known[1] != digest:
                self._tell(
                    tier,
                    slot,
                    key,
                    "key published over different bytes",
                    f"its slot held {known[1]:x} and now holds {digest:x}",
                )

    def promoted(self, tier: str, slot: int, key: bytes, digest: int) -> None:
        with self._findings.lock:
            known = self._copies.get(tier, {}).get(slot)
            if known is None:
                return  # it was made before the sanitizer watched, or has been forgotten
            if known[0] != key:
                self._tell(
                    tier,
                    slot,
                    key,
                    "bytes of another key promoted",
                    f"they were demoted under {known[0].hex()[:16]}",
                )
            elif known[1] != digest:
                changed = f"{known[1]:x} was demoted, {digest:x} came back"
                self._tell(tier, slot, key, "bytes changed between demote and promote", changed)

    def forget(self, tier: str, slots: Iterable[int]) -> None:
        """`slots` are empty now."""
        copies = self._copies.get(tier)
        if copies:
            for slot in slots:
                copies.pop(slot, None)

    def _tell(self, tier: str, slot: int, key: bytes, what: str, how: str) -> None:
        sentence = f"{what}: slot {slot} of {tier}, key {key.hex()[:16]}: {how}"
        self._findings.tell(
            Report(Kind.LIFETIME, tier, (slot,), sentence, stack=self._findings.stacks.here()), tier, what
        )


class Sanitizer:
    """Implements `LaneObserver` and `PoolObserver`; `turns` and `checksums` observe the engine's loop and
    transfers. Any thread may report; `reports` are in the order of discovery."""

    def __init__(self, strict: bool = False, json_file: Path | None = None, stall_s: float = STALL_S) -> None:
        """`strict`: the thread that caused a finding gets SanitizerStop. `json_file` holds all findings so
        far."""
        findings = Findings(strict, json_file)
        self.reports = findings.reports
        self.num_by_kind = findings.num_by_kind
        self._findings = findings
        self._lock = findings.lock
        self._clocks = Clocks()
        self._arenas = Arenas(findings)
        self.turns = Turns(findings, self._arenas, stall_s)
        self.checksums = Checksums(findings)
        self.observers = Observers(
            lanes=(self,), pools=(self,), turns=(self.turns,), contents=(self.checksums,)
        )

    # -------------------------------------------------------------------------------------------------- lanes

    def submitted(self, lane: str, ticket: int, label: str, accesses: Sequence[Access]) -> None:
        with self._lock:
            self._judge(lane, ticket, label, accesses, self._clocks.submit(lane, ticket))

    def waited(self, lane: str, on_lane: str, fence: int) -> None:
        with self._lock:
            self._clocks.wait(lane, on_lane, fence)

    def host_waited(self, on_lane: str, fence: int, seconds: float) -> None:
        with self._lock:
            self._clocks.see(on_lane, fence)
            if seconds > 0:
                self.turns.blocked(on_lane, fence, seconds)

    def touched(self, label: str, accesses: Sequence[Access]) -> None:
        with self._lock:
            thread, number, clock = self._clocks.act()
            self._judge(thread, number, label, accesses, clock)

    def started(self, lane: str, ticket: int) -> None:
        with self._lock:
            self._clocks.start(lane, ticket)

    def finished(self, lane: str, ticket: int, error: BaseException | None) -> None:
        """The end of work orders nothing by itself: a thread that acts on it has waited or polled. But the
        thread acts as itself again."""
        with self._lock:
            self._clocks.finish(lane, ticket)

    def _judge(self, lane: str, number: int, label: str, accesses: Sequence[Access], clock: Known) -> None:
        stack = self._findings.stacks.here() if accesses else ()
        for access in accesses:
            deed = Deed(lane, number, label, access.mode is Mode.WRITE, access.layers, stack)
            self._arenas[access.arena].touch(deed, _slots_of(access), clock)

    # -------------------------------------------------------------------------------------------------- pools

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
            fenced = (
                None if fence is None else self._clocks.covered(fence.lane, getattr(fence, "number", None))
            )
            self._arenas[pool].hand_over(self._clocks.actor, slots, owner, fenced)

    def sealed(self, pool: str, slot: int, key: bytes) -> None:
        with self._lock:
            self._arenas[pool].seal(self._clocks.actor, slot, key)

    def evicted(self, pool: str, slot: int, key: bytes) -> None:
        """An eviction touches no bytes; the order of the next write counts."""
        with self._lock:
            self._arenas[pool].evict(slot)

    def closed(self, pool: str, left: Sequence[str]) -> None:
        with self._lock:
            self._arenas[pool].close(left)


def _slots_of(access: Access) -> set[int]:
    slots = access.slots
    return set(slots.tolist() if isinstance(slots, np.ndarray) else map(int, slots))
