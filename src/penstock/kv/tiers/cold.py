"""A cold tier: reads and writes blocks of a store on its own lanes, into and out of host slots. Owns these
lanes, the work in flight on them and the breaker. Loads and saves choose the slots, and decide what becomes
of them.

Only `drain` and `close` block. A block is read into a host slot and promoted from there; it is written from a
host slot that the caller protects until the write is over. A deadline ends a wait, never the protection.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import cycle

from penstock.contract import Access, Fence, Mode
from penstock.errors import DeadlineExceeded, InvariantBroken, LaneClosed, StoreFailed
from penstock.figures import Traffic
from penstock.kv.blocks.handles import Handle
from penstock.kv.tiers.calls import Breaker, BreakerState, Span, StoreCalls, StoreGroup, Tally, Way
from penstock.kv.tiers.store import BlockStore, Outcome, PinningStore, StoreUsage
from penstock.lanes.cpu import CpuLane
from penstock.lanes.lane import Lane, Ticket
from penstock.observe import LaneObserver, TransferObserver

log = logging.getLogger(__name__)


_Run = Callable[[StoreGroup], None]


@dataclass(frozen=True, slots=True)
class Watch:
    """Tells an observer of calls that move blocks between two tiers."""

    observer: TransferObserver
    ends: tuple[str, str]

    def submitted(self, group: StoreGroup, label: str) -> None:
        self.observer.transfer_submitted(group, self.ends, label)

    def run(self, call: _Run, group: StoreGroup) -> None:
        try:
            call(group)
        finally:
            self.over(group)

    def over(self, group: StoreGroup) -> None:
        num_blocks = sum(outcome is Outcome.DONE for outcome in group.outcomes)
        self.observer.transfer_over(group, num_blocks, group.error)


class StoreLanes:
    """Deals calls of one kind out to lanes in turn. Each `wake` comes after its fence, so that a woken thread
    sees the fence passed."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        arena: tuple[str, int],
        way: Way,
        tally: Tally,
        wake: Callable[[], None],
        watch: Watch | None = None,
    ) -> None:
        self._watch = watch
        self._lanes = lanes
        self._next = cycle(lanes)
        self._arena, num_layers = arena
        self._layers = (0, num_layers)
        self._way = way
        self._tally = tally
        self._wake = wake

    def deal(self, group: StoreGroup, after: Sequence[Fence], run: _Run, label: str) -> None:
        """Submit to the next lane, after `after`. Never raises: a group that cannot be submitted fails."""
        lane = next(self._next)
        self._tally.submitted(self._way, len(group.keys))
        if self._watch is not None:
            self._watch.submitted(group, label)
            run = partial(self._watch.run, run)
        # a read of the store writes into host memory
        mode = Mode.WRITE if self._way is Way.READ else Mode.READ
        try:
            for fence in after:
                lane.wait(fence)
            access = Access(self._arena, group.slots, self._layers, mode)
            group.ticket = lane.submit(partial(run, group), (access,), label=label)
        except Exception as error:
            group.error = error
            self._tally.over(self._way, group.span, group.outcomes)
            if self._watch is not None:
                self._watch.over(group)
        self._close_group(group, lane)

    def after_all(self, group: StoreGroup, run: Callable[[], None], label: str) -> None:
        """Run `run` when everything dealt out so far is over."""
        lane, *others = self._lanes
        try:
            for other in others:
                lane.wait(other.record())
            group.ticket = lane.submit(run, label=label)
        except LaneClosed as error:
            group.error = error
        self._close_group(group, lane)

    def between(self, group: StoreGroup, run: Callable[[], None], label: str) -> None:
        """Like `after_all`, and everything dealt out later comes after it."""
        self.after_all(group, run, label)
        if group.fence is not None:
            for other in self._lanes[1:]:
                with contextlib.suppress(LaneClosed):  # then nothing comes later
                    other.wait(group.fence)

    def _close_group(self, group: StoreGroup, lane: Lane) -> None:
        group.fence = lane.record()
        with contextlib.suppress(LaneClosed):
            lane.submit(self._wake, label="wake")


def close_lane(lane: Lane, deadline_s: float) -> DeadlineExceeded | None:
    """Close it by then. Returns the error if it is late."""
    try:
        lane.close(None if deadline_s == float("inf") else max(0.0, deadline_s - time.monotonic()))
    except DeadlineExceeded as late:
        return late
    return None


class Finding:
    """How many of some leading keys a tier has. `num` is 0 until the answer comes, and stays 0 if that is too
    late."""

    def __init__(
        self,
        deadline_s: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
        num: int | None = None,
    ) -> None:
        """`num`: the answer, if it is known already."""
        self.num = num or 0
        self.deadline_s = deadline_s
        self._clock = clock
        self._lock = threading.Lock()
        self._ready = num is not None

    @property
    def ready(self) -> bool:
        """Answered, failed or timed out; it does not change any more. Never blocks."""
        if not self._ready and self._clock() >= self.deadline_s:
            self.answer(0)
        return self._ready

    def answer(self, num: int) -> None:
        """The first answer counts, if it is in time. For any thread."""
        with self._lock:
            if not self._ready:
                self.num = num if self._clock() < self.deadline_s else 0
                self._ready = True


@dataclass(frozen=True, slots=True)
class ColdLanes:
    """Reads do not queue behind writes, and lookups do not queue behind either."""

    readers: Sequence[Lane]
    writers: Sequence[Lane]
    asker: Lane | None  # None: the store answers from memory
    observer: TransferObserver | None = None


# Of one tier: a disk needs several requests in its queue, also while some lanes compute checksums.
COLD_LANES = 6  # for reads, and as many for writes


def cpu_lanes(
    store: BlockStore,
    observer: LaneObserver | None = None,
    transfers: TransferObserver | None = None,
    num: int = COLD_LANES,
) -> ColdLanes:
    """New lanes for `store`: `num` for reads, and as many for writes."""

    def lanes(what: str, num: int) -> list[Lane]:
        return [CpuLane(f"{store.name}-{what}-{number}", observer) for number in range(num)]

    asker = None if store.local else lanes("ask", 1)[0]
    return ColdLanes(lanes("read", num), lanes("write", num), asker, transfers)


@dataclass(frozen=True, slots=True)
class ColdLimits:
    # Size of one operation: enough to use the disk or network, little enough to begin soon.
    group_bytes: int = 8 << 20
    queue_bytes: int = 512 << 20  # limit of writes in flight; further ones are dropped and counted
    stuck_s: float = 10.0  # an operation that takes longer makes the tier unusable until it is over
    probe_s: float = 1.0  # between two probes of a broken store; doubles up to 30


# ------------------------------------------------------------------------------------------ what is under way


@dataclass(slots=True, eq=False)
class Writing:
    """Blocks on their way from host slots into a store. Its owner ends the handle after `ColdTier.settle` has
    returned the writing."""

    handle: Handle | None  # protects the slots; None: the caller does, or there are none
    keys: Sequence[bytes]  # all offered keys
    outcomes: list[Outcome]  # by key, once it is settled; FULL also if the queue had no room
    groups: Sequence[StoreGroup]
    is_reset: bool = False
    settled: bool = False  # seen to be over, by `settle`
    error: BaseException | None = None  # why some blocks were not tried or failed

    @property
    def tried_keys(self) -> list[bytes]:
        """Keys that were submitted: the queue had no room for the others, or the store has them."""
        return [key for group in self.groups for key in group.keys]

    @property
    def done_keys(self) -> list[bytes]:
        """Keys that the store has: written now, or there before."""
        return [
            key
            for key, outcome in zip(self.keys, self.outcomes, strict=True)
            if self.settled and outcome is Outcome.DONE
        ]

    def over(self) -> bool:
        return all(group.over() for group in self.groups)

    @property
    def num_forgotten(self) -> int:
        """Blocks forgotten by a reset, if the store knows."""
        return sum(group.num_forgotten for group in self.groups)

    def settle(self) -> list[BaseException]:
        """It is over. Returns defects in Penstock."""
        for group in self.groups:
            for place, outcome in zip(group.places, group.outcomes, strict=True):
                self.outcomes[place] = outcome
        defects = [defect for group in self.groups if (defect := group.take_defect()) is not None]
        self.error = next(
            (error for error in (*defects, *(group.error for group in self.groups)) if error is not None),
            None,
        )
        self.settled = True
        return defects


# ------------------------------------------------------------------------------------------------------- tier


class ColdTier:
    """One store with its lanes. Only `find` and the figures may be called from other threads than the
    engine's."""

    def __init__(
        self,
        store: BlockStore,
        lanes: ColdLanes,
        view: Callable[[int], memoryview],  # a host slot's bytes
        # the host arena's name and its number of layers, to declare accesses
        arena: tuple[str, int],
        limits: ColdLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = tally = Tally(view(0).nbytes, clock)  # its figures
        self.wake: Callable[[], None] = lambda: None  # called on a lane when something is over or answered
        self.name = store.name
        # A test may replace the store before the first call, to make it fail.
        self.calls = StoreCalls(store, view, tally, Breaker(limits.probe_s, clock), limits.stuck_s)
        self._lanes = lanes
        self._limits = limits
        reads = writes = None
        if lanes.observer is not None:
            reads = Watch(lanes.observer, (self.name, arena[0]))
            writes = Watch(lanes.observer, (arena[0], self.name))
        self._readers = StoreLanes(lanes.readers, arena, Way.READ, tally, lambda: self.wake(), reads)
        self._writers = StoreLanes(lanes.writers, arena, Way.WRITE, tally, lambda: self.wake(), writes)
        self._asking = threading.Lock()
        self.findings: list[Finding] = []  # that `settle` has not seen ready
        self.readings: deque[StoreGroup] = deque()  # that `settle` has not seen end
        self.writings: deque[Writing] = deque()  # that `settle` has not returned
        self._settled: list[Writing] = []  # to be returned
        self._defects: list[BaseException] = []  # in Penstock, found on lanes
        self._closing: Ticket | None = None

    # -------------------------------------------------------------------------------- figures, for any thread

    @property
    def local(self) -> bool:
        """It answers from memory."""
        return self.calls.store.local

    @property
    def group_blocks(self) -> int:
        """Blocks best read or written together."""
        return max(1, self._limits.group_bytes // self.counts.block_bytes)

    @property
    def usable(self) -> bool:
        """Whether it pays to ask: the breaker is closed, and no call is stuck."""
        calls = self.calls
        return not calls.stopped and calls.breaker.state is BreakerState.CLOSED and not calls.stuck

    def read_s(self, num_bytes: int = 0) -> float | None:
        """Time until that many more bytes are read, after those that are queued. None: nothing was
        measured."""
        return self.counts.rate.seconds(num_bytes + self.counts.queued_bytes[Way.READ])

    def usage(self) -> StoreUsage:
        return self.calls.store.usage()

    def report(self, traffic: Traffic) -> None:
        """Add the figures of this tier to `traffic`."""
        self.counts.report(self.name, traffic)
        traffic.in_flight[self.name, "host"] = len(self.readings)
        traffic.in_flight["host", self.name] = len(self.writings)
        traffic.usable[self.name] = self.usable

    # ------------------------------------------------------------------------------------------------- blocks

    def find(self, keys: Sequence[bytes], patience_s: float) -> Finding:
        """For any thread. Ready at once if the store answers from memory or is not usable."""
        clock, lane = self.calls.breaker.clock, self._lanes.asker
        if not keys or not self.usable:
            return Finding(num=0)
        if self.local or lane is None:
            return Finding(num=self.calls.find(keys))
        finding = Finding(clock() + patience_s, clock)
        with self._asking:
            self.findings.append(finding)
        try:
            lane.submit(partial(self._answer, finding, keys), label=f"find in {self.name}")
        except BaseException as error:
            finding.answer(0)  # no other answer will come
            if not isinstance(error, LaneClosed):
                raise
        return finding

    @cached_property
    def books(self) -> PinningStore:
        """Of a local store that knows its keys. A question to them costs a fraction of `find`, and blocks do
        not count as used."""
        store = self.calls.store
        if not isinstance(store, PinningStore):
            raise InvariantBroken(f"the {self.name} store cannot say which keys it has")
        return store

    def _answer(self, finding: Finding, keys: Sequence[bytes]) -> None:
        try:
            if not finding.ready:  # else the waiter has given up
                finding.answer(self.calls.find(keys))
        except Exception as error:  # errors of the store end in its calls; this is a defect
            self._defects.append(error)
        finally:
            finding.answer(0)
            self.wake()

    def read(
        self, keys: Sequence[bytes], slots: Sequence[int], after: Sequence[Fence], owner: str
    ) -> StoreGroup:
        """One operation on the next reader lane; slots are written after `after`. Never raises."""
        (reading,) = self._groups([range(len(keys))], keys, slots)
        self._readers.deal(reading, after, self.calls.read, f"read of {owner}")
        self.readings.append(reading)
        return reading

    def try_write(
        self,
        keys: Sequence[bytes],
        depths: Sequence[int],
        slots: Sequence[int],
        handle: Handle | None,
        must: bool = False,
    ) -> Writing | None:
        """Write those of `keys` that the store is not known to have, in order, as many as the queue has room
        for. `must` ignores that limit.

        None: the store is not usable, or there is no room; counted, and nothing is kept. Otherwise `settle`
        returns the writing exactly once, even if nothing was left to write, and `handle` protects the slots
        until then. Without a handle the caller protects them by other means.
        """
        if not self.usable:
            self.counts.skip("broken", len(keys))
            return None
        tally = self.counts
        # During a reset, blocks known now are gone before this write. A local store finds duplicates when it
        # writes: only it knows whether a stored block was ever read whole.
        stored = [False] * len(keys) if self.local or self.is_resetting else self.calls.known.has_each(keys)
        new = [place for place, there in enumerate(stored) if not there]
        limit = max(self._limits.queue_bytes, tally.block_bytes)  # one block can always be tried
        room = (limit - tally.queued_bytes[Way.WRITE]) // tally.block_bytes
        places = new if must else new[: max(0, room)]
        if len(places) < len(new):
            tally.skip("queue", len(new) - len(places))
            if not places:
                return None
        outcomes = [Outcome.DONE if there else Outcome.FULL for there in stored]
        runs = [
            places[start : start + self.group_blocks] for start in range(0, len(places), self.group_blocks)
        ]
        writing = Writing(handle, keys, outcomes, self._groups(runs, keys, slots, depths))
        for group in writing.groups:
            self._writers.deal(group, (), self.calls.write, f"write to {self.name}")
        self.writings.append(writing)
        return writing

    def settle(self) -> list[Writing]:
        """Writes that ended since the last call. Also probes a broken store, on a lane, when due. Raises a
        defect in Penstock, once; the next call returns the rest."""
        self.calls.note_stuck()
        if self.calls.breaker.try_probe():
            self._begin_probe()
        with self._asking:
            self.findings = [finding for finding in self.findings if not finding.ready]
        # they end roughly in order, so only the first are checked
        while self.readings and self.readings[0].over():
            self.readings.popleft()
        while self.writings and self.writings[0].over():
            writing = self.writings.popleft()
            self._defects += writing.settle()
            self._settled.append(writing)
        if self._defects:
            raise self._defects.pop(0)
        settled, self._settled = self._settled, []
        return settled

    def persist(self) -> Writing:
        """Settled when everything written so far is durable; `error` says why it is not. Its handle is None.
        It covers all writes not yet returned: a lost block of theirs is an error, too."""
        group = StoreGroup((), (), (), Span(0.0, 1))
        writing = Writing(None, (), [], (group,))
        groups: list[StoreGroup] = []
        for one in self.writings:  # blocks that a reset removes do not count as lost
            groups = [] if one.is_reset else [*groups, *one.groups]
        self._writers.after_all(group, partial(self.calls.persist, group, groups), f"persist {self.name}")
        self.writings.append(writing)
        return writing

    def reset(self) -> Writing:
        """Clear the store: every block submitted for writing before this call, and none submitted later.
        Settled when that is over; `error` says why it failed. Reads are not ordered with it: a block that
        they find may be gone when they end."""
        group = StoreGroup((), (), (), Span(0.0, 1))
        writing = Writing(None, (), [], (group,), is_reset=True)
        self._writers.between(group, partial(self.calls.reset, group), f"reset {self.name}")
        self.writings.append(writing)
        return writing

    @property
    def is_resetting(self) -> bool:
        """Whether a reset is in flight."""
        return any(writing.is_reset for writing in self.writings)

    def drain(self, timeout_s: float) -> None:
        """Block until everything submitted so far is over; the next `settle` finds it. Raises
        DeadlineExceeded."""
        deadline_s = time.monotonic() + timeout_s
        for lane in self._all_lanes:
            lane.drain(max(0.0, deadline_s - time.monotonic()))

    def close(self, timeout_s: float | None) -> None:
        """Finish queued work, then close the store; idempotent. Raises DeadlineExceeded if that takes longer.
        Then work in flight keeps its slots, work not begun is dropped, and `close` may be called again."""
        deadline_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        first, *others = self._all_lanes
        late: DeadlineExceeded | None = None
        for lane in others:
            late = close_lane(lane, deadline_s) or late
        if late is None:
            if self._closing is None:
                self._closing = first.submit(self._close_store, label=f"close {self.name}")
            late = close_lane(first, deadline_s)
        self.calls.stopped = True
        if late is not None:
            raise late
        if self._closing is not None:
            self._closing.wait_done(0.0)

    # ------------------------------------------------------------------------------------------------ private

    @property
    def _all_lanes(self) -> list[Lane]:
        asker = self._lanes.asker
        return [*self._lanes.readers, *self._lanes.writers, *(() if asker is None else (asker,))]

    def _groups(
        self,
        runs: Sequence[Sequence[int]],
        keys: Sequence[bytes],
        slots: Sequence[int],
        depths: Sequence[int] = (),
    ) -> list[StoreGroup]:
        """One group per run of places."""
        span = Span(self.calls.breaker.clock(), len(runs))
        return [
            StoreGroup(
                places=run,
                keys=[keys[place] for place in run],
                slots=[slots[place] for place in run],
                span=span,
                depths=[depths[place] for place in run if depths],
                outcomes=[Outcome.FAILED] * len(run),
            )
            for run in runs
        ]

    def _begin_probe(self) -> None:
        try:
            (self._lanes.asker or self._lanes.readers[0]).submit(self._probe, label=f"probe {self.name}")
        except BaseException as error:
            self.calls.breaker.probed(False)  # no probe will report
            if not isinstance(error, LaneClosed):
                raise

    def _probe(self) -> None:
        try:
            self.calls.probe()
        except BaseException as error:
            # Errors of the store end in its calls; this is a defect. The ticket of a probe is not read, so
            # record it here.
            self._defects.append(error)
        finally:
            self.wake()

    def _close_store(self) -> None:
        self.calls.stopped = True
        try:
            self.calls.store.close()
        except StoreFailed as error:  # the store is no longer needed
            log.warning("the %s tier was closed without an answer: %s", self.name, error)
