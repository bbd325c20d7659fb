"""What a cold tier has done, and how fast: counts, times, what is queued, the rate of its reads. Owns those figures and their lock;
decides nothing."""

from __future__ import annotations

import enum
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.figures import Histogram, Traffic
from penstock.kv.tiers.store import Outcome
from penstock.kv.tiers.worth import LinkRate

SECONDS_BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)  # those of all transfers
_SAMPLE_S = 0.5  # of reading without a pause is one measurement of the rate,
_SAMPLE_ENDS = 4  # if for each exchange under way so many have ended in it


class Way(enum.Enum):
    READ = "read"
    WRITE = "write"


@dataclass(slots=True)
class ColdCounts:
    """Totals that never fall. Whoever looks while exchanges go on sees each one old or new."""

    num_read: int = 0  # blocks
    num_written: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    read_s: Histogram = field(default_factory=lambda: Histogram(SECONDS_BOUNDS))  # from submit to over, of those that brought something
    write_s: Histogram = field(default_factory=lambda: Histogram(SECONDS_BOUNDS))
    num_missing: int = 0  # blocks that were asked for and not there
    num_corrupt: int = 0  # blocks that were there, and not what was written
    failures: Counter[str] = field(default_factory=Counter)  # exchanges by reason; "block" counts single blocks
    skipped: Counter[str] = field(default_factory=Counter)  # blocks that were not written, by reason
    num_openings: int = 0  # of the breaker


@dataclass(slots=True)
class Span:
    """One reading or writing, of which groups are over one by one."""

    submitted_s: float
    num_left: int
    num_done: int = 0  # blocks


class Meter:
    """Bytes over the time in which any exchange was under way: two at once do not take twice as long. Its caller has a lock.

    A measurement ends when nothing is under way; or, where that does not come, when so many have ended that those cut off by it do not
    matter. A short rest behind such a one says nothing: most of its bytes came before."""

    def __init__(self, rate: LinkRate) -> None:
        self.rate = rate
        self._num = 0  # under way
        self._num_bytes = 0  # since `_since_s`
        self._num_ended = 0
        self._since_s = 0.0
        self._is_rest = False

    def begin(self, now_s: float) -> None:
        if self._num == 0:
            self._restart(now_s, is_rest=False)
        self._num += 1

    def end(self, now_s: float, num_bytes: int) -> None:
        self._num -= 1
        self._num_ended += 1
        self._num_bytes += num_bytes
        seconds = now_s - self._since_s
        is_long = seconds >= _SAMPLE_S and self._num_ended >= _SAMPLE_ENDS * self._num
        if self._num_bytes and (is_long or (self._num == 0 and not self._is_rest)):
            self.rate.add(self._num_bytes, seconds)
            self._restart(now_s, is_rest=True)

    def _restart(self, now_s: float, is_rest: bool) -> None:
        self._since_s, self._num_bytes, self._num_ended, self._is_rest = now_s, 0, 0, is_rest


class Tally:
    """The figures of one tier. For any thread."""

    def __init__(self, block_bytes: int, clock: Callable[[], float]) -> None:
        self.block_bytes = block_bytes
        self.counts = ColdCounts()
        self.rate = LinkRate(clock=clock)
        self.queued_bytes = dict.fromkeys(Way, 0)  # submitted, and not over
        self._clock = clock
        self._meter = Meter(self.rate)
        self._lock = threading.Lock()

    def submitted(self, way: Way, num_blocks: int) -> None:
        with self._lock:
            self.queued_bytes[way] += num_blocks * self.block_bytes
            if way is Way.READ:
                self.rate.note_try()

    def began(self, way: Way) -> None:
        if way is Way.READ:
            with self._lock:
                self._meter.begin(self._clock())

    def ended(self, way: Way, outcomes: Sequence[Outcome]) -> None:
        """What came of an exchange that was begun; nothing where the store did not answer."""
        num, counts = Counter(outcomes), self.counts
        num_bytes = num[Outcome.DONE] * self.block_bytes
        with self._lock:
            if way is Way.READ:
                self._meter.end(self._clock(), num_bytes)
                counts.num_read += num[Outcome.DONE]
                counts.read_bytes += num_bytes
            else:
                counts.num_written += num[Outcome.DONE]
                counts.written_bytes += num_bytes
            counts.num_missing += num[Outcome.MISSING]
            counts.num_corrupt += num[Outcome.CORRUPT]
            if num[Outcome.FULL]:
                counts.skipped["full"] += num[Outcome.FULL]
            if num[Outcome.FAILED]:
                counts.failures["block"] += num[Outcome.FAILED]

    def over(self, way: Way, span: Span, outcomes: Sequence[Outcome]) -> None:
        """A group of `span` is over, begun or not."""
        with self._lock:
            self.queued_bytes[way] -= len(outcomes) * self.block_bytes
            span.num_left -= 1
            span.num_done += sum(outcome is Outcome.DONE for outcome in outcomes)
            if not span.num_left and span.num_done:
                histogram = self.counts.read_s if way is Way.READ else self.counts.write_s
                histogram.add(self._clock() - span.submitted_s)

    def skip(self, reason: str, num_blocks: int) -> None:
        """So many blocks are not written."""
        if num_blocks:
            with self._lock:
                self.counts.skipped[reason] += num_blocks

    def fail(self, reason: str) -> None:
        with self._lock:
            self.counts.failures[reason] += 1

    def opened(self) -> None:
        with self._lock:
            self.counts.num_openings += 1

    def report(self, name: str, traffic: Traffic) -> None:
        """Add what the tier `name` has done."""
        with self._lock:
            counts = self.counts
            for pair, num_bytes, seconds in (
                ((name, "host"), counts.read_bytes, counts.read_s),
                (("host", name), counts.written_bytes, counts.write_s),
            ):
                traffic.bytes[pair] = num_bytes
                traffic.seconds[pair] = seconds.copy()
            for reason, num in (*counts.failures.items(), ("missing", counts.num_missing)):
                if num:
                    traffic.failures[name, reason] = num
            for reason, num in counts.skipped.items():
                traffic.skipped[reason] = traffic.skipped.get(reason, 0) + num
            traffic.checksum_failures[name] = counts.num_corrupt
