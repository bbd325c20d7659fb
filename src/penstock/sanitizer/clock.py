"""Vector clocks: what a lane or a thread knows to be over. Owns happens-before; knows nothing of slots.

An actor is a lane or a host thread. Time on a lane is the number of the work submitted to it, so a clock maps lanes to numbers: "all work
on that lane up to this number happens before me". Clocks only grow, by three edges:

- a lane waits for a fence: it learns what the fence's lane knew when the fence was placed, and that lane's work up to it;
- a thread sees a fence pass, by blocking or by polling: it learns the same;
- a thread submits to a lane: the work happens after all that the thread knows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

Clock = dict[str, int]

_KEPT = 4096  # changes of one lane's knowledge that are remembered; fences older than that are taken to know a little more than they did


def join(clock: Clock, other: Clock) -> bool:
    """Grow `clock` by `other`; says whether it grew."""
    grew = False
    for lane, number in other.items():
        if clock.get(lane, 0) < number:
            clock[lane] = number
            grew = True
    return grew


class Clocks:
    """The clocks of all actors."""

    def __init__(self) -> None:
        self._lanes: dict[str, Clock] = {}
        self._threads: dict[int, Clock] = {}
        self._changes: dict[str, deque[tuple[int, Clock]]] = {}  # by lane: from this number on it knew so much
        self._newest: Clock = {}  # work submitted, by lane

    def submit(self, thread: int, lane: str, number: int) -> Clock:
        """Work `number` comes on `lane`, from `thread`. Returns what happens before it; not to be changed."""
        clock = self._lanes.setdefault(lane, {})
        if join(clock, self._threads.get(thread, {})):
            self._note(lane, number, clock)
        self._newest[lane] = number
        return clock

    def wait(self, lane: str, on_lane: str, fence: int) -> None:
        """A wait is an item of `lane` like any other, with the next number."""
        clock = self._lanes.setdefault(lane, {})
        self._newest[lane] = number = self._newest.get(lane, 0) + 1
        if join(clock, self._at(on_lane, fence)):
            self._note(lane, number, clock)

    def see(self, thread: int, on_lane: str, fence: int) -> None:
        join(self._threads.setdefault(thread, {}), self._at(on_lane, fence))

    def _note(self, lane: str, number: int, clock: Clock) -> None:
        changes = self._changes.setdefault(lane, deque(maxlen=_KEPT))
        if changes and changes[-1][0] == number:
            changes.pop()
        changes.append((number, dict(clock)))

    def _at(self, lane: str, fence: int) -> Clock:
        """What a fence of `lane` covers: the lane's work up to it, and what that work happened after."""
        changes = self._changes.get(lane, ())
        index = bisect_right(changes, fence, key=lambda change: change[0]) - 1
        known = changes[max(index, 0)][1] if index >= 0 or len(changes) == _KEPT else {}
        return {**known, lane: max(fence, known.get(lane, 0))}
