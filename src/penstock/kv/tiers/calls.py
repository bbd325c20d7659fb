"""Calls of one store, made on lanes. Owns the breaker, the outcomes and the figures. The cold tier chooses
slots, lanes and order.

Every exception of a store ends here: blocks fail, the breaker and a counter record it. Only a defect in
Penstock goes on, to the ticket. The breaker decides whether a store is called:

    CLOSED  -- it fails -->  OPEN  -- probe is due -->  HALF_OPEN  -- it answers -->  CLOSED
                              ^------------ it does not ----'
"""

from __future__ import annotations

import enum
import logging
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from penstock.contract import Fence
from penstock.errors import DeadlineExceeded, IllegalTransition, InvariantBroken, StoreFailed
from penstock.figures import SECONDS_BOUNDS, Histogram, Traffic
from penstock.kv.tiers.policy import LinkRate
from penstock.kv.tiers.store import BlockStore, Outcome
from penstock.lanes.lane import Ticket

log = logging.getLogger(__name__)

MAX_PROBE_S = 30.0
MAX_FAILED = 8  # failed single blocks in a row that open the breaker


class BreakerState(enum.Enum):
    CLOSED = "closed"  # in use
    OPEN = "open"  # left alone
    HALF_OPEN = "half-open"  # being probed, and left alone otherwise


class Event(enum.Enum):
    FAIL = "a failure"
    PROBE = "a probe"
    RECOVER = "an answer to a probe"


_MOVES = {
    (BreakerState.CLOSED, Event.FAIL): BreakerState.OPEN,
    (BreakerState.OPEN, Event.PROBE): BreakerState.HALF_OPEN,
    (BreakerState.HALF_OPEN, Event.FAIL): BreakerState.OPEN,
    (BreakerState.HALF_OPEN, Event.RECOVER): BreakerState.CLOSED,
}


class Breaker:
    """For any thread. A call that began before the breaker opened says nothing about the store after that; so
    a report passes on the number that `enter` returned."""

    def __init__(self, probe_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_openings = 0
        self._probe_s = probe_s
        self.clock = clock
        self._lock = threading.Lock()
        self.state = BreakerState.CLOSED
        self._num_failed = 0  # single blocks, in a row
        self._wait_s = probe_s  # before the next probe
        self._due_s = 0.0
        self._first_wait_s = probe_s  # the same at its last opening
        self._answered_s = -math.inf  # time of the last answered probe

    def enter(self) -> int | None:
        """A number to pass on with the report. None: leave the store alone."""
        with self._lock:
            return self.num_openings if self.state is BreakerState.CLOSED else None

    def fail(self, entered: int) -> bool:
        """The store as a whole did not answer. Returns whether that opened the breaker."""
        with self._lock:
            return self._open_if_current(entered)

    def note(self, entered: int, outcomes: Iterable[Outcome]) -> bool:
        """It answered, block by block. Returns whether that opened the breaker."""
        with self._lock:
            if not self._is_current(entered):
                return False
            for outcome in outcomes:
                self._num_failed = self._num_failed + 1 if outcome is Outcome.FAILED else 0
                if self._num_failed >= MAX_FAILED:
                    return self._open_if_current(entered)
            return False

    def try_probe(self) -> bool:
        """Whether a probe is due. If so, the caller probes and calls `probed`."""
        with self._lock:
            if self.state is not BreakerState.OPEN or self.clock() < self._due_s:
                return False
            self._move(Event.PROBE)
            return True

    def probed(self, answers: bool) -> None:
        with self._lock:
            if answers:
                self._move(Event.RECOVER)
                self._answered_s = self.clock()
            else:
                self._wait_s = self._longer(self._wait_s)
                self._open()

    def _is_current(self, entered: int) -> bool:
        return self.state is BreakerState.CLOSED and entered == self.num_openings

    def _open_if_current(self, entered: int) -> bool:
        if not self._is_current(entered):
            return False
        self.num_openings += 1
        # A store may answer probes and nothing else: a read-only disk, a replica.
        is_again = self.clock() - self._answered_s <= self._first_wait_s
        self._wait_s = self._first_wait_s = self._longer(self._first_wait_s) if is_again else self._probe_s
        self._open()
        return True

    def _longer(self, wait_s: float) -> float:
        return min(2.0 * wait_s, max(MAX_PROBE_S, self._probe_s))

    def _open(self) -> None:
        self._move(Event.FAIL)
        self._num_failed = 0
        self._due_s = self.clock() + self._wait_s

    def _move(self, event: Event) -> None:
        after = _MOVES.get((self.state, event))
        if after is None:
            raise IllegalTransition("the breaker of a store", self.state.value, event.value)
        self.state = after


_SAMPLE_S = 0.5  # length of one measurement of the rate, during continuous reading,
_SAMPLE_ENDS = 4  # if this many calls have ended for each one in flight


class Way(enum.Enum):
    READ = "read"
    WRITE = "write"


@dataclass(slots=True)
class Span:
    """One read or write whose groups end one by one."""

    submitted_s: float
    num_left: int
    num_done: int = 0  # blocks


@dataclass(slots=True)
class Meter:
    """Bytes over the time in which any call was in flight: two at once do not take twice as long. The caller
    holds a lock.

    A measurement ends when nothing is in flight, or when so many calls have ended that the unfinished ones do
    not matter. A short rest after such a measurement is ignored: most of its bytes were counted before.
    """

    rate: LinkRate
    _num: int = 0  # under way
    _num_bytes: int = 0  # since `_since_s`
    _num_ended: int = 0
    _since_s: float = 0.0
    _is_rest: bool = False

    def begin(self, now_s: float) -> None:
        if self._num == 0:
            self._since_s, self._num_bytes, self._num_ended, self._is_rest = now_s, 0, 0, False
        self._num += 1

    def end(self, now_s: float, num_bytes: int) -> None:
        self._num -= 1
        self._num_ended += 1
        self._num_bytes += num_bytes
        seconds = now_s - self._since_s
        is_long = seconds >= _SAMPLE_S and self._num_ended >= _SAMPLE_ENDS * self._num
        if self._num_bytes and (is_long or (self._num == 0 and not self._is_rest)):
            self.rate.add(self._num_bytes, seconds)
            self._since_s, self._num_bytes, self._num_ended, self._is_rest = now_s, 0, 0, True


class Tally:
    """The figures of one tier. For any thread. Totals never fall; a reader sees each one old or new while
    calls go on."""

    def __init__(self, block_bytes: int, clock: Callable[[], float]) -> None:
        self.block_bytes = block_bytes
        self.num_read = self.num_written = 0  # blocks
        # from submission to end, of calls that moved blocks
        self.read_s, self.write_s = Histogram(SECONDS_BOUNDS), Histogram(SECONDS_BOUNDS)
        self.num_missing = 0  # requested blocks that were not there
        self.num_corrupt = 0  # blocks whose content was damaged
        self.failures: Counter[str] = Counter()  # calls by reason; "block" counts single blocks
        self.skipped: Counter[str] = Counter()  # blocks not written, by reason
        self.rate = LinkRate(clock=clock)
        self.queued_bytes = dict.fromkeys(Way, 0)  # submitted and not over
        self._clock = clock
        self._meter = Meter(self.rate)
        self._lock = threading.Lock()

    def submitted(self, way: Way, num_blocks: int) -> None:
        with self._lock:
            self.queued_bytes[way] += num_blocks * self.block_bytes
            if way is Way.READ:
                self.rate.note_try()

    def began_read(self) -> None:
        with self._lock:
            self._meter.begin(self._clock())

    def ended(self, way: Way, outcomes: Sequence[Outcome]) -> None:
        """Outcomes of a call that was begun; empty if the store did not answer."""
        num = Counter(outcomes)
        with self._lock:
            if way is Way.READ:
                self._meter.end(self._clock(), num[Outcome.DONE] * self.block_bytes)
                self.num_read += num[Outcome.DONE]
            else:
                self.num_written += num[Outcome.DONE]
            self.num_missing += num[Outcome.MISSING]
            self.num_corrupt += num[Outcome.CORRUPT]
            if num[Outcome.FULL]:
                self.skipped["full"] += num[Outcome.FULL]
            if num[Outcome.FAILED]:
                self.failures["block"] += num[Outcome.FAILED]

    def over(self, way: Way, span: Span, outcomes: Sequence[Outcome]) -> None:
        """A group of `span` is over, begun or not."""
        with self._lock:
            self.queued_bytes[way] -= len(outcomes) * self.block_bytes
            span.num_left -= 1
            span.num_done += sum(outcome is Outcome.DONE for outcome in outcomes)
            if not span.num_left and span.num_done:
                histogram = self.read_s if way is Way.READ else self.write_s
                histogram.add(self._clock() - span.submitted_s)

    def skip(self, reason: str, num_blocks: int) -> None:
        """Count `num_blocks` that are not written."""
        with self._lock:
            self.skipped[reason] += num_blocks

    def fail(self, reason: str) -> None:
        with self._lock:
            self.failures[reason] += 1

    def report(self, name: str, traffic: Traffic) -> None:
        """Add the figures of tier `name`."""
        with self._lock:
            for pair, num, seconds in (
                ((name, "host"), self.num_read, self.read_s),
                (("host", name), self.num_written, self.write_s),
            ):
                traffic.bytes[pair] = num * self.block_bytes
                traffic.seconds[pair] = seconds.copy()
            for reason, num in (*self.failures.items(), ("missing", self.num_missing)):
                if num:
                    traffic.failures[name, reason] = num
            for reason, num in self.skipped.items():
                traffic.skipped[reason] = traffic.skipped.get(reason, 0) + num
            traffic.checksum_failures[name] = self.num_corrupt


MAX_KNOWN = 100_000  # keys; some 10 MB
_GONE = (Outcome.MISSING, Outcome.CORRUPT)

T = TypeVar("T")


class _Refused(StoreFailed):
    """The store was not asked."""


@dataclass(slots=True, eq=False)
class StoreGroup:
    """Blocks of one call. Its results are for threads that have seen its fence pass."""

    places: Sequence[int]  # indices into the caller's keys
    keys: Sequence[bytes]
    slots: Sequence[int]
    span: Span
    depths: Sequence[int] = ()
    outcomes: Sequence[Outcome] = ()  # FAILED until the store answers
    error: BaseException | None = None  # why the whole call failed
    ticket: Ticket | None = None
    fence: Fence | None = None
    told: bool = False  # its defect was raised
    num_forgotten: int = 0  # blocks, of a reset

    def over(self) -> bool:
        """It no longer touches its slots. Never blocks."""
        return self.fence is not None and self.fence.passed()

    def wait_over(self, deadline_s: float) -> None:
        """Block until it is over. Raises DeadlineExceeded."""
        if self.fence is not None:
            self.fence.wait_passed(max(0.0, deadline_s - time.monotonic()))

    def take_outcomes(self) -> Sequence[Outcome]:
        """The outcomes of its blocks, after it is over. Raises a defect in Penstock instead, once; after that
        the blocks count as failed."""
        if (defect := self.take_defect()) is not None:
            raise defect
        return self.outcomes

    def take_defect(self) -> BaseException | None:
        """An error that is not the store's, after the call is over. Returned once."""
        error = None if self.ticket is None else self.ticket.error()
        if error is None and isinstance(self.error, InvariantBroken):
            error = self.error
        told, self.told = self.told, True
        return None if told else error


class KnownKeys:
    """The newest keys that a remote store is known to have. For any thread."""

    def __init__(self, max_keys: int = MAX_KNOWN) -> None:
        self.num_cleared = 0  # number of `clear` calls
        self._max_keys = max_keys
        self._lock = threading.Lock()
        self._keys: OrderedDict[bytes, None] = OrderedDict()  # least recently seen first

    def has_each(self, keys: Iterable[bytes]) -> list[bool]:
        """Takes no lock: a key that comes or goes meanwhile may count as either."""
        return [key in self._keys for key in keys]

    def note(self, keys: Sequence[bytes], outcomes: Sequence[Outcome], num_cleared: int) -> None:
        """Outcomes of a call that began when `num_cleared` had this value."""
        told = list(zip(keys, outcomes, strict=True))
        self.add((key for key, outcome in told if outcome is Outcome.DONE), num_cleared)
        self.discard(key for key, outcome in told if outcome in _GONE)

    def add(self, keys: Iterable[bytes], num_cleared: int = 0) -> None:
        """The keys were seen when `num_cleared` had this value. If it has grown since, they are ignored."""
        with self._lock:
            for key in keys if num_cleared == self.num_cleared else ():
                self._keys[key] = None
                self._keys.move_to_end(key)
            while len(self._keys) > self._max_keys:
                self._keys.popitem(last=False)

    def discard(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._keys.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._keys.clear()
            self.num_cleared += 1


class StoreCalls:
    """The calls of one store. `read`, `write`, `find`, `persist`, `reset` and `probe` take as long as the
    store does."""

    def __init__(
        self,
        store: BlockStore,
        view: Callable[[int], memoryview],
        tally: Tally,
        breaker: Breaker,
        stuck_s: float,
    ) -> None:
        self.store = store
        self.tally = tally
        self.breaker = breaker
        self.known = KnownKeys()
        self.stopped = False  # calls that have not begun are refused
        self.num_losses = 0  # times that it was away and may have lost its blocks
        self._view = view
        self._stuck_s = stuck_s
        self._lock = threading.Lock()
        self._running: dict[object, float] = {}  # when each call began
        self._was_stuck = False

    @property
    def stuck(self) -> bool:
        """Whether a call takes too long."""
        with self._lock:
            return bool(self._running) and min(self._running.values()) + self._stuck_s < self.breaker.clock()

    def note_stuck(self) -> None:
        """Count and log it when a call gets stuck."""
        was_stuck, self._was_stuck = self._was_stuck, self.stuck
        if self._was_stuck and not was_stuck:
            self.tally.fail("stuck")
            log.warning(
                "the %s tier has been at one thing for %g s; it is left alone until that is over",
                self.store.name,
                self._stuck_s,
            )

    # ------------------------------------------------------------------------------------------- what is said

    def read(self, group: StoreGroup) -> None:
        self._move(Way.READ, group, lambda into: self.store.read(group.keys, into))

    def write(self, group: StoreGroup) -> None:
        self._move(Way.WRITE, group, lambda blocks: self.store.write(group.keys, group.depths, blocks))

    def find(self, keys: Sequence[bytes]) -> int:
        """0 if the store does not answer."""
        try:
            num, _ = self._call("find", lambda: self.store.find(keys))
        except StoreFailed:
            return 0
        if not 0 <= num <= len(keys):
            raise InvariantBroken(f"the {self.store.name} store found {num} of {len(keys)} blocks")
        if not self.store.local:
            self.known.discard(keys[num:])  # `keys[num]` is missing; nothing is known about the later ones
        return num

    def persist(self, group: StoreGroup, covered: Sequence[StoreGroup]) -> None:
        """`covered` are over."""
        num_lost = sum(outcome is not Outcome.DONE for other in covered for outcome in other.outcomes)
        try:
            if num_lost:
                raise StoreFailed(f"{num_lost} blocks could not be written to the {self.store.name} tier")
            self._call("persist", self.store.persist)
        except StoreFailed as error:
            group.error = error

    def reset(self, group: StoreGroup) -> None:
        """No write is in flight."""
        try:
            group.num_forgotten, _ = self._call("reset", self.store.reset, may_be_long=True)
        except StoreFailed as error:
            group.error = error
        finally:
            self.known.clear()  # also after a failure: the reset may have begun

    def say(self, what: str, call: Callable[[], T]) -> T:
        """Any other call of the store, on any thread. Raises StoreFailed."""
        return self._call(what, call)[0]

    def probe(self) -> None:
        """For the caller that got True from `Breaker.try_probe`."""
        answers = False
        try:
            self._timed(self.store.probe)
            answers = True
        except InvariantBroken:
            raise
        except Exception as error:
            self._count_failure("probe", error)
        finally:
            if answers:
                self.known.clear()  # The store may have come back empty. Clear before the next write.
                self.num_losses += 1
                log.info("the %s tier answers again", self.store.name)
            self.breaker.probed(answers)

    # ----------------------------------------------------------------------------------------------- the core

    def _move(
        self, way: Way, group: StoreGroup, call: Callable[[list[memoryview]], Sequence[Outcome]]
    ) -> None:
        """`call` gets the bytes of the group's slots."""
        outcomes: Sequence[Outcome] = ()
        num_cleared = self.known.num_cleared
        try:
            views = [self._view(slot) for slot in group.slots]
            if way is Way.READ:
                self.tally.began_read()
            try:
                outcomes, entered = self._call(way.value, lambda: call(views))
                if len(outcomes) != len(group.keys):
                    raise InvariantBroken(
                        f"the {self.store.name} store said {len(outcomes)} things about {len(group.keys)} "
                        "blocks"
                    )
            finally:
                self.tally.ended(way, outcomes)
            group.outcomes = outcomes
            if not self.store.local:
                self.known.note(group.keys, outcomes, num_cleared)
            if self.breaker.note(entered, outcomes):
                self._tell_opened(f"{way.value} fails block by block")
        except StoreFailed as error:
            group.error = error
            if isinstance(error, _Refused) and way is Way.READ:
                self.tally.fail("broken")
            elif isinstance(error, _Refused):
                self.tally.skip("broken", len(group.keys))
        finally:
            self.tally.over(way, group.span, group.outcomes)

    def _call(self, what: str, call: Callable[[], T], may_be_long: bool = False) -> tuple[T, int]:
        """The store's answer, and the number from the breaker. Raises StoreFailed if the breaker forbids the
        call, or if the store raises anything. `may_be_long`: the time grows with the number of blocks, so the
        call does not count as stuck."""
        entered = None if self.stopped else self.breaker.enter()
        if entered is None:
            raise _Refused(f"the {self.store.name} tier is fenced off")
        try:
            return call() if may_be_long else self._timed(call), entered
        except InvariantBroken:
            raise
        except Exception as error:
            told = self._count_failure(what, error)
            if self.breaker.fail(entered):
                self._tell_opened(told)
            raise StoreFailed(f"the {self.store.name} tier: {told}") from None

    def _timed(self, call: Callable[[], T]) -> T:
        this = object()
        with self._lock:
            self._running[this] = self.breaker.clock()
        try:
            return call()
        finally:
            with self._lock:
                del self._running[this]

    def _count_failure(self, what: str, error: Exception) -> str:
        """A description for the log. The text of foreign errors may contain secrets."""
        if isinstance(error, StoreFailed):
            self.tally.fail("store")
            return f"{what}: {error}"
        self.tally.fail("timeout" if isinstance(error, TimeoutError | DeadlineExceeded) else "error")
        return f"{what} raised {type(error).__name__}"

    def _tell_opened(self, why: str) -> None:
        log.warning("the %s tier is fenced off until it answers again: %s", self.store.name, why)
