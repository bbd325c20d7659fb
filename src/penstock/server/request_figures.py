"""Figures of HTTP exchanges since the start. Owns counting; names and labels are `metrics`'."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from penstock.figures import Histogram

if TYPE_CHECKING:
    from penstock.server.access import Exchange

SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
QUEUE_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKENS = tuple(float(2**power) for power in range(0, 21, 2))  # 1 to a million
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
        path = "/v1/models/{model}" if exchange.path.startswith("/v1/models/") else exchange.path
        self.by_status[path if path in self._paths else OTHER, str(exchange.status)] += 1
        if not exchange.generating:
            return
        self.by_finish.update(exchange.finish)
        self.e2e.add(exchange.ended_s - exchange.started_s)
        self.prompt_tokens.add(exchange.prompt_tokens)
        self.output_tokens.add(exchange.output_tokens)
        if exchange.queue_s is not None:
            self.queue.add(exchange.queue_s)
