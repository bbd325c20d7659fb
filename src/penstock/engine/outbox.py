"""Who listens to which open request, and when tokens came. Owns delivery and the latency histograms; decides
nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.contract import FinishReason, Listener, Start, TokenEvent
from penstock.engine.scheduling.track import State
from penstock.engine.stats import INTER_TOKEN_BOUNDS_S, TTFT_BOUNDS_S
from penstock.figures import Histogram

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Open:
    listener: Listener
    arrival_s: float
    matched_s: float = 0.0  # seconds; the others are instants
    loading_s: float = 0.0
    started_s: float = 0.0
    last_token_s: float = 0.0
    retracted_s: float = 0.0


class Outbox:
    """Listeners of requests that have not ended. Used by the engine thread; only its size is read by
    others."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self.after: list[Callable[[], None]] = []  # called when all listeners of a step have heard its events
        self.ttft = Histogram(TTFT_BOUNDS_S)
        self.inter_token = Histogram(INTER_TOKEN_BOUNDS_S)
        self.resume = Histogram(TTFT_BOUNDS_S)  # seconds from a retraction to the first step after it

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def open_ids(self) -> list[str]:
        return list(self._open)

    def open(self, request_id: str, listener: Listener, arrival_s: float, matched_s: float = 0.0) -> None:
        self._open[request_id] = _Open(listener, arrival_s, matched_s)

    def note_starts(self, starts: Iterable[Start]) -> None:
        """A step that these take part in has been launched. A request that was retracted has started
        before."""
        now = time.monotonic()
        for start in starts:
            entry = self._open.get(start.request_id)
            if entry is not None and not entry.started_s:
                entry.started_s = now

    def note_lives(self, lives: list[tuple[str, State]]) -> None:
        """Requests that began to load, were retracted or came back since the last call; takes them out of the
        list."""
        now = time.monotonic()
        for request_id, state in lives:
            entry = self._open.get(request_id)
            if entry is not None and state is State.LOADING:
                entry.loading_s = entry.loading_s or now
            elif entry is not None and state is State.RETRACTED:
                entry.retracted_s = now
            elif entry is not None:
                self.resume.add(now - entry.retracted_s)
        lives.clear()

    def publish(self, events: Iterable[TokenEvent | None]) -> None:
        """Hand events to their listeners; the one with `finish` set is a request's last. A listener that
        raises is logged, no more."""
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
            if event.finish is not None:
                del self._open[event.request_id]
            try:
                entry.listener(event)
            except Exception:
                log.exception("the listener of request %s raised; the request goes on", event.request_id)
        if self.after:
            self._tell_over()

    def end_all(self, why: str) -> None:
        """The last event of every open request: it ends with an error. Never raises: whatever one listener
        does, the others are told."""
        for request_id in self.open_ids():
            self.refuse(request_id, self._open.pop(request_id).listener, why)

    def refuse(self, request_id: str, listener: Listener, why: str) -> None:
        """The only event of a request that was not opened, or the last of one that is no longer. Never
        raises."""
        try:
            listener(TokenEvent(request_id, finish=FinishReason.ERROR, error=why))
        except BaseException:
            log.exception("the listener of request %s raised when it was told: %s", request_id, why)
        self._tell_over()

    def _tell_over(self) -> None:
        for callback in self.after:
            try:
                callback()
            except BaseException:
                log.exception("a callback after a step's events raised")
