"""The listeners of open requests, and token times. Owns delivery and the latency histograms; decides
nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.contract import FinishReason, Listener, Request, Start, TokenEvent, Totals
from penstock.engine.scheduling.stages import State
from penstock.engine.stats import INTER_TOKEN_BOUNDS_S, TTFT_BOUNDS_S
from penstock.figures import Histogram
from penstock.observe import RequestObserver

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Open:
    listener: Listener
    arrival_s: float
    matched_s: float = 0.0  # a duration; the others are points in time
    loading_s: float = 0.0
    started_s: float = 0.0
    last_token_s: float = 0.0
    retracted_s: float = 0.0
    expert_wait_s: float = 0.0  # of all steps so far, at its first step or its last event


class Outbox:
    """Listeners of open requests. Used by the engine thread; other threads read only its size."""

    def __init__(
        self, observer: RequestObserver | None = None, expert_wait_s: Callable[[], float] | None = None
    ) -> None:
        """`expert_wait_s`: how long all steps have waited for experts so far; None: they never do."""
        self._observer, self._expert_wait_s = observer, expert_wait_s
        self._open: dict[str, _Open] = {}
        self.after: list[Callable[[], None]] = []  # called when all events of a step are delivered
        self.ttft = Histogram(TTFT_BOUNDS_S)
        self.inter_token = Histogram(INTER_TOKEN_BOUNDS_S)
        self.resume = Histogram(TTFT_BOUNDS_S)  # seconds from a retraction to the first step after it

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def open_ids(self) -> list[str]:
        return list(self._open)

    def open(self, request: Request, listener: Listener, matched_s: float = 0.0) -> None:
        self._open[request.id] = _Open(listener, request.arrival_s, matched_s)
        if self._observer is not None:
            self._observer.request_arrived(request, matched_s)

    def note_starts(self, starts: Iterable[Start]) -> None:
        """A step with these requests was launched. A retracted request keeps its first start."""
        now = time.monotonic()
        for start in starts:
            entry = self._open.get(start.request_id)
            if entry is not None and not entry.started_s:
                entry.started_s = now
                entry.expert_wait_s = 0.0 if self._expert_wait_s is None else self._expert_wait_s()

    def note_moves(self, moves: Iterable[tuple[str, State]]) -> None:
        """The new states of requests since the last call."""
        now = time.monotonic()
        for request_id, state in moves:
            if (entry := self._open.get(request_id)) is None:
                continue
            if state is State.LOADING:
                entry.loading_s = entry.loading_s or now
            elif state is State.RETRACTED:
                entry.retracted_s = entry.retracted_s or now
            elif state is State.RUNNING and entry.retracted_s:
                self.resume.add(now - entry.retracted_s)
                entry.retracted_s = 0.0
            if self._observer is not None:
                self._observer.request_moved(request_id, state.value, now)

    def publish(self, events: Iterable[TokenEvent | None]) -> None:
        """Deliver events to their listeners; an event with `finish` set is a request's last. If a listener
        raises, that is only logged."""
        now = time.monotonic()
        for event in events:
            if event is None:
                continue
            entry = self._open[event.request_id]
            if event.tokens:
                if entry.last_token_s:
                    self.inter_token.add((now - entry.last_token_s) / len(event.tokens), len(event.tokens))
                else:
                    self.ttft.add(now - entry.arrival_s)
                entry.last_token_s = now
            if event.source is not None:
                loaded_s = max(0.0, entry.started_s - entry.loading_s) if entry.loading_s else 0.0
                event = event._replace(
                    waited_s=entry.started_s - entry.arrival_s, matched_s=entry.matched_s, loaded_s=loaded_s
                )
                if self._observer is not None and event.source is not None:
                    self._observer.request_answered(event.request_id, event.source, loaded_s, now)
            if self._expert_wait_s is not None and entry.started_s:
                before_s, entry.expert_wait_s = entry.expert_wait_s, self._expert_wait_s()
                if event.source is not None or entry.expert_wait_s > before_s:
                    event = event._replace(expert_wait_s=entry.expert_wait_s - before_s)
            if event.finish is not None:
                del self._open[event.request_id]
                if self._observer is not None:
                    self._observer.request_ended(
                        event.request_id, event.finish.value, event.totals or Totals(), now
                    )
            try:
                entry.listener(event)
            except Exception:
                log.exception("the listener of request %s raised; the request continues", event.request_id)
        if self.after:
            self._tell_over()

    def end_all(self, why: str) -> None:
        """End every open request with an error event. Never raises: a failing listener does not keep events
        from the others."""
        for request_id in self.open_ids():
            listener = self._open.pop(request_id).listener
            if self._observer is not None:
                self._observer.request_ended(request_id, FinishReason.ERROR.value, Totals(), time.monotonic())
            self.refuse(request_id, listener, why)

    def refuse(self, request_id: str, listener: Listener, why: str) -> None:
        """Send an error event to a request that was not opened, or is open no more. Never raises."""
        try:
            listener(TokenEvent(request_id, finish=FinishReason.ERROR, error=why))
        except BaseException:
            log.exception("the listener of request %s raised on the event: %s", request_id, why)
        self._tell_over()

    def _tell_over(self) -> None:
        for callback in self.after:
            try:
                callback()
            except BaseException:
                log.exception("a callback after a step's events raised")
