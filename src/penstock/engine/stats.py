"""Numbers about a running engine. Owns counting and nothing else; exposition is the front's work."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

TTFT_BOUNDS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
INTER_TOKEN_BOUNDS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


@dataclass(slots=True)
class Histogram:
    """Counts by upper bound; the last count is for what lies above all bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def copy(self) -> Histogram:
        return Histogram(self.bounds, list(self.counts), self.total)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot."""

    requests: dict[str, int]  # by state
    prompt_tokens: dict[str, int]  # by source; they sum to all prompt tokens
    generated_tokens: int
    kv_blocks: dict[str, int]  # by state; they sum to all blocks of the device
    retractions: int
    blocked_s: dict[str, float]  # seconds the engine thread spent waiting, by where
    ttft: Histogram
    inter_token: Histogram
    steps: int
    sanitizer: dict[str, int]  # findings by kind; empty where it does not listen
    cache: dict[str, int]  # hits, misses, evictions, duplicate seals, in blocks
