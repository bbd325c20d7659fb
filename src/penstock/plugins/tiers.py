"""A disk and a shared store under the host memory of another engine. Owns their lanes and the jobs in flight.
The engine owns its memory and its keys, and leaves the slots of a job alone until it is finished.

For any thread. Only `wait_x`, `drain` and `close` block.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from penstock.config import GIB
from penstock.errors import ConfigError, DeadlineExceeded, InvariantBroken
from penstock.figures import Traffic
from penstock.kv.blocks.key import KEY_BYTES
from penstock.kv.tiers.calls import StoreGroup
from penstock.kv.tiers.cold import ColdLimits, ColdTier, Writing, cpu_lanes
from penstock.kv.tiers.remote import FLAG, open_store
from penstock.kv.tiers.ssd.store import open_ssd
from penstock.kv.tiers.store import BlockStore, Outcome, Space
from penstock.observe import PoolObserver
from penstock.plugins.options import TierOptions

_STUCK = 1.5  # a call to a shared store that takes this many times its timeout counts as stuck
_SYNC = object()  # the job of a persist

View = Callable[[int], memoryview]  # a slot's bytes

_HASH = blake2b(digest_size=KEY_BYTES, person=b"penstock plugin")  # copied: half the time of a new one


def key_of(name: bytes) -> bytes:
    """The key of a block that the engine knows by `name`. The store's space covers everything else."""
    h = _HASH.copy()
    h.update(name)
    return h.digest()


@dataclass(frozen=True, slots=True)
class Finished:
    """A job that no longer touches its slots."""

    job: Hashable
    done: Sequence[bool]  # by key. Read: the slot has the block. Written: at least one tier has it
    seconds: float

    @property
    def whole(self) -> bool:
        return all(self.done)


@dataclass(slots=True, eq=False)
class _Job:
    """Blocks of one call of the engine."""

    id: Hashable
    keys: Sequence[bytes]
    slots: Sequence[int]
    began_s: float
    done: list[bool] = field(default_factory=list)
    reads: list[tuple[int, StoreGroup, Sequence[int]]] = field(default_factory=list)  # tier, call, places
    num_writes: int = 0  # in flight

    @property
    def over(self) -> bool:
        return not self.reads and not self.num_writes


class HostedTiers:
    """`tiers`, the nearest first."""

    def __init__(self, tiers: Sequence[ColdTier], persist_s: float = 10.0) -> None:
        self.tiers = tiers
        self._changed = threading.Condition(threading.RLock())
        self._jobs: dict[Hashable, _Job] = {}
        self._writings: dict[Writing, _Job] = {}
        self._finished: dict[Hashable, Finished] = {}  # not returned yet
        self._persist_s = persist_s
        self._unsynced_s: float | None = None  # time of the first write since the last persist
        for tier in tiers:
            tier.wake = self._wake

    # ------------------------------------------------------------------------------------------------- asking

    def touch(self, keys: Sequence[bytes]) -> None:
        """Before a read: blocks on the disk count as used again, up to the first that is not there."""
        for tier in self.tiers:
            if tier.local:
                tier.calls.store.find(keys)  # from memory

    def wait_leading(self, keys: Sequence[bytes], timeout_s: float) -> int:
        """How many leading `keys` some tier has, as far as they answer by then."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            self._advance()  # probes a broken store
        num = before = 0
        while num < len(keys):
            for tier in self.tiers:
                finding = tier.find(keys[num:], max(0.0, deadline_s - time.monotonic()))
                with self._changed:
                    while not finding.ready:  # at its deadline at the latest
                        self._changed.wait(_until(deadline_s))
                num += finding.num
            if num == before:
                break
            before = num
        return num

    # --------------------------------------------------------------------------------------------------- jobs

    def read(self, job: Hashable, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """Read each block into its slot, from the nearest tier that has it whole."""
        with self._changed:
            new = self._new_job(job, keys, slots)
            self._read_from(0, new, range(len(keys)))
            self._finish_if_over(new)

    def write(
        self, job: Hashable, keys: Sequence[bytes], slots: Sequence[int], depths: Sequence[int] | None = None
    ) -> None:
        """Write each block to every tier that lacks it. What a full queue or a broken tier does not take is
        skipped and counted. `depths`: positions in their prompts, for eviction."""
        with self._changed:
            new = self._new_job(job, keys, slots)
            for tier in self.tiers:
                writing = tier.try_write(keys, depths or range(len(keys)), slots, None)
                if writing is not None:
                    self._begin(new, writing)
            self._finish_if_over(new)

    def reset(self, job: Hashable) -> None:
        """Forget every block of this space in all tiers, also for engines that share them."""
        with self._changed:
            new = self._new_job(job, (b"",), ())
            new.done = [True]
            for tier in self.tiers:
                self._begin(new, tier.reset())

    def settle(self) -> list[Finished]:
        """Jobs that finished since the last call."""
        with self._changed:
            self._advance()
            finished, self._finished = list(self._finished.values()), {}
        return finished

    def wait_finished(self, job: Hashable, timeout_s: float) -> Finished:
        """Block until `job` is finished; `settle` does not return it then. Raises DeadlineExceeded: it goes
        on and keeps its slots."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._advance()
                if (finished := self._finished.pop(job, None)) is not None:
                    return finished
                if time.monotonic() >= deadline_s:
                    raise DeadlineExceeded(f"job {job} was not finished within {timeout_s:g} s")
                self._changed.wait(_until(deadline_s))

    @property
    def num_jobs(self) -> int:
        """Jobs that `settle` has not returned."""
        with self._changed:
            return len(self._jobs) + len(self._finished)

    def traffic(self) -> Traffic:
        """The figures of all tiers."""
        traffic = Traffic({}, {}, {}, {}, {}, 0)
        for tier in self.tiers:
            tier.report(traffic)
        return traffic

    # ---------------------------------------------------------------------------------------------------- end

    def drain(self, timeout_s: float) -> None:
        """Block until every job is over; `settle` returns them. Raises DeadlineExceeded."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            for tier in self.tiers:
                tier.drain(_until(deadline_s))
            with self._changed:
                self._advance()
                if not self._jobs:
                    return

    def close(self, timeout_s: float) -> None:
        """Finish what is queued, make it durable and close the stores; idempotent. Raises DeadlineExceeded:
        calls in flight keep their slots, the others are dropped, and `close` may be called again."""
        deadline_s = time.monotonic() + timeout_s
        late: DeadlineExceeded | None = None
        for tier in self.tiers:
            try:
                tier.close(_until(deadline_s))
            except DeadlineExceeded as error:
                late = error
        with self._changed:
            self._advance()
        if late is not None:
            raise late

    # ------------------------------------------------------------------------------------------------ private

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _new_job(self, job: Hashable, keys: Sequence[bytes], slots: Sequence[int]) -> _Job:
        if job in self._jobs or job in self._finished:
            raise InvariantBroken(f"job {job} is submitted again before it was returned")
        new = self._jobs[job] = _Job(job, keys, slots, time.monotonic(), [False] * len(keys))
        return new

    def _begin(self, job: _Job, writing: Writing) -> None:
        self._writings[writing] = job
        job.num_writes += 1

    def _read_from(self, number: int, job: _Job, places: Sequence[int]) -> None:
        """Submit `places` to tier `number`, and those that it does not have to the tiers after it."""
        if not places or number == len(self.tiers):
            return
        tier = self.tiers[number]
        here = list(places) if tier.usable else []
        if here and tier.local:
            there = tier.books.has_each([job.keys[place] for place in here])
            here = [place for place, has in zip(here, there, strict=True) if has]
        for first in range(0, len(here), tier.group_blocks):
            run = here[first : first + tier.group_blocks]
            keys, slots = [job.keys[place] for place in run], [job.slots[place] for place in run]
            job.reads.append((number, tier.read(keys, slots, (), f"job {job.id}"), run))
        self._read_from(number + 1, job, sorted(set(places).difference(here)))

    def _advance(self) -> None:
        """Take in what is over, and submit what follows from it."""
        for number, tier in enumerate(self.tiers):
            for writing in tier.settle():
                self._end_write(number, writing)
        for job in list(self._jobs.values()):
            if job.reads:
                self._advance_reads(job)
            self._finish_if_over(job)
        self._persist_if_due()

    def _advance_reads(self, job: _Job) -> None:
        for read in [read for read in job.reads if read[1].over()]:
            number, group, places = read
            outcomes = group.take_outcomes()  # if it raises, the job goes on at the next call
            job.reads.remove(read)
            failed = []
            for place, outcome in zip(places, outcomes, strict=True):
                job.done[place] = outcome is Outcome.DONE
                if not job.done[place]:
                    failed.append(place)
            self._read_from(number + 1, job, failed)

    def _end_write(self, number: int, writing: Writing) -> None:
        job = self._writings.pop(writing)
        job.num_writes -= 1
        if job.id is _SYNC:
            self._unsynced_s = self._unsynced_s if writing.error is None else time.monotonic()
            return
        if writing.is_reset:
            job.done[0] &= writing.error is None
            return
        for place, outcome in enumerate(writing.outcomes):
            job.done[place] |= outcome is Outcome.DONE
        if self.tiers[number].local and any(outcome is Outcome.DONE for outcome in writing.outcomes):
            self._unsynced_s = self._unsynced_s or time.monotonic()

    def _finish_if_over(self, job: _Job) -> None:
        if not job.over or job.id not in self._jobs:
            return
        del self._jobs[job.id]
        self._finished[job.id] = Finished(job.id, tuple(job.done), time.monotonic() - job.began_s)
        self._changed.notify_all()

    def _persist_if_due(self) -> None:
        if self._unsynced_s is None or time.monotonic() < self._unsynced_s + self._persist_s:
            return
        self._unsynced_s = None
        for tier in self.tiers:
            if tier.local and tier.usable:
                self._begin(_Job(_SYNC, (), (), 0.0), tier.persist())


def _until(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())


def open_tiers(
    options: TierOptions, space: Space, view: View, observer: PoolObserver | None = None
) -> HostedTiers:
    """The tiers that `options` name, under the slots that `view` shows. `observer`: of blocks on the disk.
    Raises ConfigError; then nothing is open."""
    limits = ColdLimits(queue_bytes=int(options.queue_mib * (1 << 20)))
    # not before a call is overdue
    shared = replace(limits, stuck_s=max(limits.stuck_s, _STUCK * options.remote_timeout_s))
    stores: list[BlockStore] = []
    with contextlib.ExitStack() as undo:  # a directory stays locked while its store is open
        if options.ssd_dir is not None:
            num_bytes = int(options.ssd_gib * GIB)
            stores.append(open_ssd(options.ssd_dir, num_bytes, space, options.eviction, None, observer))
            undo.callback(stores[-1].close)
        if options.remote is not None:
            try:
                stores.append(open_store(options.remote, space, options.remote_timeout_s))
            except ConfigError as error:
                raise ConfigError(str(error).replace(FLAG, "the option remote")) from None
            undo.callback(stores[-1].close)
        tiers = [
            ColdTier(store, cpu_lanes(store), view, ("host", 1), limits if store.local else shared)
            for store in stores
        ]
        undo.pop_all()
    return HostedTiers(tiers, options.persist_s)
