"""The lives of recent requests: when each was in which state, and where the KV of its prompt came from. Owns
a bounded number of them; no text of prompts and answers, no names of sessions or tenants."""

from __future__ import annotations

import time
from collections import deque

import msgspec

from penstock.contract import KvSource, Request, Totals

MOST_ENDED = 1000
MOST_STATES = 64  # of one request
MOST_CHANGED = 256  # told at once


class RequestLife(msgspec.Struct):
    """Of one request. Times without a note are seconds since its arrival."""

    id: str
    route: str
    prompt_tokens: int
    arrived_s: float  # time.time()
    matched_s: float
    states: list[tuple[str, float]]  # with the time since which it is in each
    number: int  # of its last change, among those of all requests
    num_omitted: int = 0  # states beyond the first MOST_STATES
    source: KvSource | None = None
    loaded_s: float = 0.0  # a duration
    first_s: float | None = None
    ended_s: float | None = None
    finish: str | None = None
    totals: Totals | None = None


class LivesChange(msgspec.Struct):
    """Lives that changed since an earlier number; or the newest of all (`is_all`), if too many did."""

    number: int
    lives: list[RequestLife]
    is_all: bool


class Lives:
    """Implements `RequestObserver`: the engine's thread writes, any thread reads, and neither waits for the
    other. A reader copies a container in one call, which the interpreter does not interrupt."""

    def __init__(self) -> None:
        self._open: dict[str, RequestLife] = {}
        self._ended: deque[RequestLife] = deque(maxlen=MOST_ENDED)
        self._num_changes = 0
        self._epoch_s = time.time() - time.monotonic()

    # ------------------------------------------------------------------------------------ the engine's thread

    def request_arrived(self, request: Request, matched_s: float) -> None:
        self._open[request.id] = RequestLife(
            request.id,
            request.route,
            len(request.prompt),
            request.arrival_s + self._epoch_s,
            matched_s,
            [("waiting", matched_s)],
            self._num_changes + 1,
        )
        self._num_changes += 1

    def request_moved(self, request_id: str, state: str, at_s: float) -> None:
        life = self._open[request_id]
        if len(life.states) < MOST_STATES:
            life.states.append((state, self._since_arrival(life, at_s)))
        else:
            life.num_omitted += 1
        self._note_change(life)

    def request_answered(self, request_id: str, source: KvSource, loaded_s: float, at_s: float) -> None:
        life = self._open[request_id]
        life.source, life.loaded_s, life.first_s = source, loaded_s, self._since_arrival(life, at_s)
        self._note_change(life)

    def request_ended(self, request_id: str, finish: str, totals: Totals, at_s: float) -> None:
        """In both containers for a moment, never in none."""
        life = self._open[request_id]
        life.finish, life.totals, life.ended_s = finish, totals, self._since_arrival(life, at_s)
        life.number = self._num_changes + 1  # those that ended are in the order of their numbers
        self._ended.append(life)
        del self._open[request_id]
        self._note_change(life)

    def _note_change(self, life: RequestLife) -> None:
        """Last of all: a reader that knows the number of a change has seen the whole change."""
        life.number = self._num_changes + 1
        self._num_changes += 1

    def _since_arrival(self, life: RequestLife, at_s: float) -> float:
        return at_s + self._epoch_s - life.arrived_s

    # ---------------------------------------------------------------------------------------- from any thread

    def changed(self, since: int) -> LivesChange:
        """What changes meanwhile is told now or the next time."""
        number = self._num_changes
        found = {life.id: life for life in list(self._open.values()) if life.number > since}
        for life in reversed(self._ended.copy()):  # in the order of their last changes
            if life.number <= since:
                break
            found[life.id] = life
        newest = sorted(found.values(), key=lambda life: life.number)[-MOST_CHANGED:]
        return LivesChange(number, newest, is_all=len(newest) < len(found) or not since)

    def find(self, request_id: str) -> RequestLife | None:
        found = self._open.get(request_id)
        return found or next((one for one in self._ended.copy() if one.id == request_id), None)
