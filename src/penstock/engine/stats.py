"""Numbers about a running engine. Owns counting and nothing else; exposition is the front's work."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.figures import (
    ExpertFigures,
    Histogram,
    KvEventFigures,
    ResidencyFigures,
    SessionFigures,
    SnapshotFigures,
    Traffic,
)

TTFT_BOUNDS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
INTER_TOKEN_BOUNDS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot."""

    requests: dict[str, int]  # by state
    prompt_tokens: dict[str, int]  # by source; they sum to all prompt tokens
    generated_tokens: int
    kv_blocks: dict[str, dict[str, int]]  # by tier and state; they sum to all blocks of the tier
    retractions: int
    blocked_s: dict[str, float]  # seconds the engine thread spent waiting, by where
    ttft: Histogram
    inter_token: Histogram
    steps: int
    sanitizer: dict[str, int]  # findings by kind; empty if it is off
    cache: dict[str, int]  # hits, misses, evictions, duplicate seals, in blocks
    traffic: Traffic | None  # between tiers; None if there is only the device
    resume: Histogram
    # seconds that requests waited for a promotion while nothing else could be computed for them
    load_exposed_s: float
    sessions: SessionFigures = field(default_factory=SessionFigures)
    # verified drafts by position in a step: first, second, ...; empty without speculation
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()  # of these, accepted
    residency: ResidencyFigures = field(default_factory=ResidencyFigures)
    host_steps: int = 0  # steps that read KV of deep requests in host memory
    expected_tokens: dict[str, int] = field(default_factory=dict)  # by route: expected length of an answer
    snapshots: SnapshotFigures = field(default_factory=SnapshotFigures)
    kv_events: KvEventFigures | None = None  # None: nothing is told
    experts: ExpertFigures | None = None  # None: all are on the device
