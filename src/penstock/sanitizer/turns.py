"""The engine's loop under watch: where its thread blocks, and whether the books balance when a turn is over. Owns what is allowed there.

A wait is judged only inside a turn, on the thread that takes it: whoever drains or closes from outside may take as long as it likes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from penstock.sanitizer.arena import ArenaWatch
from penstock.sanitizer.findings import Findings
from penstock.sanitizer.report import Kind, Report

STALL_S = 1e-3  # a shorter wait is what a lock or a busy machine costs anyway


class _Here(threading.local):
    def __init__(self) -> None:
        self.in_turn = False
        self.allowed: list[str] = []  # places that may wait, innermost last


class Turns:
    """Implements `observe.EngineObserver`."""

    def __init__(self, findings: Findings, arenas: Mapping[str, ArenaWatch], stall_s: float = STALL_S) -> None:
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
        """The calling thread has waited so long for that fence."""
        if seconds <= self._stall_s or not self._here.in_turn or self._here.allowed:
            return
        stack = self._findings.stacks.here()
        sentence = f"the engine thread waited {seconds * 1e3:.1f} ms for item {fence} of lane {on_lane}, where it may not wait"
        self._findings.tell(Report(Kind.STALL, "", (), sentence, stack=stack), on_lane, stack[:3])
