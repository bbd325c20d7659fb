"""Figures that both halves report. Owns how they are kept; each part counts its own."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

STATES = "states"  # kept states of recurrent layers, beside tiers of blocks


@dataclass(slots=True)
class Histogram:
    """Counts by upper bound; the last count is for values above all bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def take_in(self, other: Histogram) -> None:
        """With the same bounds."""
        self.counts = [one + more for one, more in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def copy(self) -> Histogram:
        return Histogram(self.bounds, list(self.counts), self.total)


# of the seconds that any transfer of blocks takes
SECONDS_BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


@dataclass(frozen=True, slots=True)
class Traffic:
    """A snapshot of what moves between tiers. Pairs are (from, to)."""

    bytes: dict[tuple[str, str], int]
    seconds: dict[tuple[str, str], Histogram]
    in_flight: dict[tuple[str, str], int]
    failures: dict[tuple[str, str], int]  # by (tier, reason)
    skipped: dict[str, int]  # saves that were not made, by reason
    leases_open: int
    postponed: int = 0  # saves of blocks that only the device has, while host memory is full
    checksum_failures: dict[str, int] = field(default_factory=dict)  # by tier
    usable: dict[str, bool] = field(default_factory=dict)  # by cold tier: False while it is fenced off


RECALL_BOUNDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class ResidencyFigures:
    """A snapshot of the work for requests that attend to a part of their context."""

    parts_fetched: int = 0  # of 64 tokens, from host memory to the device
    scorings: int = 0
    scoring_s: float = 0.0  # extra time of steps
    # share of attention that went to that part, in exact steps
    recall: Histogram = field(default_factory=lambda: Histogram(RECALL_BOUNDS))


@dataclass(slots=True)
class ExpertFigures:
    """Of experts that come and go. Totals that never fall, but for the first two."""

    num_slots: int = 0
    num_experts: int = 0  # of all layers
    hit: int = 0  # that a layer wanted and that were on the device, or on their way
    missed: int = 0  # that a layer wanted and that were not
    guessed: int = 0  # that were copied before a layer wanted them
    guesses_used: int = 0  # of these, wanted before they left
    foreseen: int = 0  # that a layer wanted and that the router saw one layer before
    foreseeable: int = 0  # that a layer wanted where the router was applied before
    copied_bytes: int = 0
    waited_s: float = 0.0  # of steps, for copies of what they missed


@dataclass(frozen=True, slots=True)
class SessionFigures:
    """A snapshot of the known conversations. Numbers only: names may be secrets."""

    known: int = 0
    known_blocks: int = 0  # in their last requests
    tenants: int = 0  # that have sessions or prefetches
    retained: int = 0
    retained_blocks: int = 0
    retained_blocks_max: int = 0
    retaining_tenants: int = 0
    retentions_cut: int = 0  # ended early for lack of memory
    releases: int = 0
    released_blocks: int = 0  # copies in memory that were forgotten
    prefetches_under_way: int = 0
    prefetches_started: int = 0
    prefetches_finished: int = 0
    prefetches_refused: int = 0


@dataclass(frozen=True, slots=True)
class SnapshotFigures:
    """A snapshot of the known snapshots of all tenants. Numbers only: names may be secrets."""

    known: int = 0
    pinned_blocks: int = 0  # each once, even if several snapshots have it
    pinned_blocks_max: int = 0
    damaged: int = 0  # manifests that could not be read at start
    taken: int = 0
    continued: int = 0
    deleted: int = 0
    expired: int = 0
    refused: int = 0  # for lack of space
    waiting: int = 0  # calls about them that have not begun


@dataclass(frozen=True, slots=True)
class KvEventFigures:
    """Of events about blocks. Totals that never fall."""

    made: dict[str, int]  # events, by type
    dropped: int  # changes for which there was no room
