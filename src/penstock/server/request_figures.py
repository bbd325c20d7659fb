"""Figures of HTTP exchanges since the start. Owns counting; names and labels are `metrics`'."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from penstock.figures import Histogram
from penstock.server.boundary import FiguresState

if TYPE_CHECKING:
    from penstock.server.access import Exchange

SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
QUEUE_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKENS = tuple(float(2**power) for power in range(0, 21, 2))  # 1 to a million
NAMED = {"/v1/models/": "/v1/models/{model}", "/v1/snapshots/": "/v1/snapshots/{name}"}  # paths with somebody's name behind them
OTHER = "other"  # a path that is not one of ours: what clients make up must not become labels


class RequestFigures:
    """Lives on the event loop's thread."""

    def __init__(self, paths: frozenset[str]) -> None:
        self._paths = paths
        self.by_status: Counter[tuple[str, str]] = Counter()  # path, status
        self.by_finish: Counter[str] = Counter()  # choices by finish reason
        self.e2e = Histogram(SECONDS)  # of generating requests: from the first byte of the request to the last of the answer
        self.queue = Histogram(QUEUE_SECONDS)
        self.prompt_tokens = Histogram(TOKENS)
        self.output_tokens = Histogram(TOKENS)

    def add(self, exchange: Exchange) -> None:
        """An exchange is over."""
        path = next((named for start, named in NAMED.items() if exchange.path.startswith(start)), exchange.path)
        self.by_status[path if path in self._paths else OTHER, str(exchange.status)] += 1
        if not exchange.generating:
            return
        self.by_finish.update(exchange.finish)
        self.e2e.add(exchange.ended_s - exchange.started_s)
        self.prompt_tokens.add(exchange.prompt_tokens)
        self.output_tokens.add(exchange.output_tokens)
        if exchange.queue_s is not None:
            self.queue.add(exchange.queue_s)

    @property
    def histograms(self) -> dict[str, Histogram]:
        return {"e2e": self.e2e, "queue": self.queue, "prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens}

    def take_in(self, state: FiguresState) -> None:
        """Those of another front process, or of one that is gone."""
        self.by_status.update(state.by_status)
        self.by_finish.update(state.by_finish)
        for name, histogram in self.histograms.items():
            histogram.take_in(state.histograms[name])

    def state(self) -> FiguresState:
        return FiguresState(dict(self.by_status), dict(self.by_finish), {name: one.copy() for name, one in self.histograms.items()})

    def with_others(self, others: Iterable[FiguresState]) -> RequestFigures:
        """A sum; these stay as they are."""
        total = RequestFigures(self._paths)
        for state in (self.state(), *others):
            total.take_in(state)
        return total
