"""Figures of HTTP exchanges since the start. Owns counting; names and labels are `metrics`'."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.figures import Histogram

if TYPE_CHECKING:
    from penstock.server.access import Exchange

SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
QUEUE_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKENS = tuple(float(2**power) for power in range(0, 21, 2))  # 1 to a million


@dataclass(slots=True)
class RequestFigures:
    """Lives on the event loop's thread. Plain data: fronts send theirs to each other."""

    by_status: dict[tuple[str, str], int] = field(default_factory=Counter)  # path, status
    by_finish: dict[str, int] = field(default_factory=Counter)  # choices by finish reason
    e2e: Histogram = field(default_factory=lambda: Histogram(SECONDS))  # of generating requests: from their first byte to the answer's last
    queue: Histogram = field(default_factory=lambda: Histogram(QUEUE_SECONDS))
    prompt_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    output_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))

    def add(self, exchange: Exchange) -> None:
        """An exchange is over."""
        self.by_status[exchange.route, str(exchange.status)] += 1
        if not exchange.generating:
            return
        for finish in exchange.finish:
            self.by_finish[finish] += 1
        self.e2e.add(exchange.ended_s - exchange.started_s)
        self.prompt_tokens.add(exchange.prompt_tokens)
        self.output_tokens.add(exchange.output_tokens)
        if exchange.queue_s is not None:
            self.queue.add(exchange.queue_s)

    def with_others(self, others: Iterable[RequestFigures]) -> RequestFigures:
        """A sum; these stay as they are."""
        total = RequestFigures()
        for one in (self, *others):
            for key, num in one.by_status.items():
                total.by_status[key] += num
            for finish, num in one.by_finish.items():
                total.by_finish[finish] += num
            for name in ("e2e", "queue", "prompt_tokens", "output_tokens"):
                getattr(total, name).take_in(getattr(one, name))
        return total
