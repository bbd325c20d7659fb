"""Exchanges with one store, as they happen on lanes. Owns whether a store is talked to, and what came of it; which slots, on which lane
and in which order is the cold tier's business.

Whatever a store raises ends here: blocks fail, the breaker hears of it, a counter tells. Only a defect of ours goes on, to the ticket.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from penstock.contract import Fence
from penstock.errors import DeadlineExceeded, InvariantBroken, StoreFailed
from penstock.kv.tiers.breaker import Breaker, BreakerState
from penstock.kv.tiers.store import BlockStore, Outcome
from penstock.kv.tiers.tally import Span, Tally, Way
from penstock.lanes.lane import Ticket

log = logging.getLogger(__name__)

MAX_KNOWN = 100_000  # keys; some 10 MB
_GONE = (Outcome.MISSING, Outcome.CORRUPT)

T = TypeVar("T")


class _Refused(StoreFailed):
    """The store was not asked."""


@dataclass(slots=True, eq=False)
class StoreGroup:
    """Blocks of one exchange. What it says about them is for whoever has seen its fence pass."""

    places: Sequence[int]  # among the keys that the caller gave
    keys: Sequence[bytes]
    slots: Sequence[int]
    span: Span
    depths: Sequence[int] = ()
    outcomes: Sequence[Outcome] = ()
    error: BaseException | None = None  # why none of it was done
    ticket: Ticket | None = None
    fence: Fence | None = None
    told: bool = False  # its defect was raised
    num_forgotten: int = 0  # blocks, of a reset

    def __post_init__(self) -> None:
        self.outcomes = [Outcome.FAILED] * len(self.keys)

    def over(self) -> bool:
        """Nothing of it touches its slots any more. Never blocks."""
        return self.fence is not None and self.fence.passed()

    def take_defect(self) -> BaseException | None:
        """What went wrong that no store can be blamed for; told once. It is over."""
        error = None if self.ticket is None else self.ticket.error()
        if error is None and isinstance(self.error, InvariantBroken):
            error = self.error
        told, self.told = self.told, True
        return None if told else error


class KnownKeys:
    """Keys that a store far away was seen to have, the newest of them. For any thread."""

    def __init__(self, max_keys: int = MAX_KNOWN) -> None:
        self.num_cleared = 0  # times
        self._max_keys = max_keys
        self._lock = threading.Lock()
        self._keys: OrderedDict[bytes, None] = OrderedDict()  # least recently seen first

    def has_each(self, keys: Iterable[bytes]) -> list[bool]:
        with self._lock:
            return [key in self._keys for key in keys]

    def add(self, keys: Iterable[bytes], num_cleared: int = 0) -> None:
        """They were seen when `num_cleared` was so much; where it has grown since, that says nothing any more."""
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


class Exchanges:
    """One store and what is said to it: `read`, `write`, `find`, `persist`, `reset` and `probe` take as long as the store does."""

    def __init__(self, store: BlockStore, view: Callable[[int], memoryview], tally: Tally, breaker: Breaker, stuck_s: float) -> None:
        self.store = store
        self.tally = tally
        self.breaker = breaker
        self.known = KnownKeys()
        self.stopped = False  # nothing that has not begun is said any more
        self.num_losses = 0  # times that it was away, and may have come back without its blocks
        self._view = view
        self._stuck_s = stuck_s
        self._lock = threading.Lock()
        self._running: dict[object, float] = {}  # when each exchange began

    @property
    def stuck(self) -> bool:
        """Whether some exchange takes longer than it should."""
        with self._lock:
            return bool(self._running) and min(self._running.values()) + self._stuck_s < self.breaker.clock()

    @property
    def usable(self) -> bool:
        return not self.stopped and self.breaker.state is BreakerState.CLOSED and not self.stuck

    def stored(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of `keys` need not be written, as far as that is known without asking. A store that answers from memory finds out when it
        writes: it alone knows whether what it has under a key was ever read whole."""
        return [False] * len(keys) if self.store.local else self.known.has_each(keys)

    # ------------------------------------------------------------------------------------------------------- what is said

    def read(self, group: StoreGroup) -> None:
        try:
            into = [self._view(slot) for slot in group.slots]
            self._exchange(Way.READ, group, lambda: self.store.read(group.keys, into))
        except _Refused:
            self.tally.fail("broken")
        finally:
            self.tally.over(Way.READ, group.span, group.outcomes)

    def write(self, group: StoreGroup) -> None:
        try:
            blocks = [self._view(slot) for slot in group.slots]
            self._exchange(Way.WRITE, group, lambda: self.store.write(group.keys, group.depths, blocks))
        except _Refused as error:
            group.error = error
            self.tally.skip("broken", len(group.keys))
        finally:
            self.tally.over(Way.WRITE, group.span, group.outcomes)

    def find(self, keys: Sequence[bytes]) -> int:
        """0 where the store does not answer."""
        try:
            num, _ = self._call("find", lambda: self.store.find(keys))
        except StoreFailed:
            return 0
        if not 0 <= num <= len(keys):
            raise InvariantBroken(f"the {self.store.name} store found {num} of {len(keys)} blocks")
        if not self.store.local:
            self.known.discard(keys[num:])  # one is missing; about those behind it nothing was said
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
        """No write is under way."""
        try:
            group.num_forgotten, _ = self._call("reset", self.store.reset)
        except StoreFailed as error:
            group.error = error
        finally:
            self.known.clear()  # also where it did not answer: it may have begun

    def _may_be_empty(self) -> None:
        self.known.clear()
        self.num_losses += 1

    def probe(self) -> None:
        """For whom `Breaker.try_probe` told to."""
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
                self._may_be_empty()  # before anything can be written to it again
                log.info("the %s tier answers again", self.store.name)
            self.breaker.probed(answers)

    # ------------------------------------------------------------------------------------------------------------- the core

    def _exchange(self, way: Way, group: StoreGroup, call: Callable[[], Sequence[Outcome]]) -> None:
        outcomes: Sequence[Outcome] = ()
        num_cleared = self.known.num_cleared
        self.tally.began(way)
        try:
            outcomes, entered = self._call(way.value, call)
            if len(outcomes) != len(group.keys):
                raise InvariantBroken(f"the {self.store.name} store said {len(outcomes)} things about {len(group.keys)} blocks")
        except _Refused:
            raise
        except StoreFailed as error:
            group.error = error
            return
        finally:
            self.tally.ended(way, outcomes)
        group.outcomes = outcomes
        if not self.store.local:
            self.known.add((key for key, outcome in zip(group.keys, outcomes, strict=True) if outcome is Outcome.DONE), num_cleared)
            self.known.discard(key for key, outcome in zip(group.keys, outcomes, strict=True) if outcome in _GONE)
        if self.breaker.note(entered, outcomes):
            self._tell_opened(f"{way.value} fails block by block")

    def _call(self, what: str, call: Callable[[], T]) -> tuple[T, int]:
        """What the store says, and what the breaker gave for it. Raises StoreFailed where it may not be talked to or does not answer,
        whatever it is that it raises."""
        entered = None if self.stopped else self.breaker.enter()
        if entered is None:
            raise _Refused(f"the {self.store.name} tier is fenced off")
        try:
            return self._timed(call), entered
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
        """Says it in words. Those of other people's errors may hold what is not for a log."""
        if isinstance(error, StoreFailed):
            self.tally.fail("store")
            return f"{what}: {error}"
        self.tally.fail("timeout" if isinstance(error, TimeoutError | DeadlineExceeded) else "error")
        return f"{what} raised {type(error).__name__}"

    def _tell_opened(self, why: str) -> None:
        self.tally.opened()
        log.warning("the %s tier is fenced off until it answers again: %s", self.store.name, why)
