"""The engine's door to KV storage: settles transfers, saves, forgets, drains and closes, over the device and
colder tiers. What the scheduler asks is in `kv/ledger.py`.

All calls come from the engine thread, and only `drain` and `close` block; `stats` may be called from any
thread.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from penstock.contract import Fence, Prefix
from penstock.errors import DeadlineExceeded, InvariantBroken
from penstock.figures import STATES, Traffic
from penstock.kv.blocks.eviction import PoolWant
from penstock.kv.blocks.handles import Pin
from penstock.kv.blocks.key import Scope
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.blocks.slots import SlotCounts
from penstock.kv.events import KvEvents
from penstock.kv.ledger import Ledger
from penstock.kv.rules import PrefixRule
from penstock.kv.tiers.cold import ColdTier, Writing
from penstock.kv.tiers.host import ABSENT, HOST
from penstock.kv.tiers.loads import Copy
from penstock.kv.tiers.reads import Reads
from penstock.kv.tiers.tiers import Tiers
from penstock.kv.tiers.writeback import Persisting
from penstock.kv.transfer import Settling, Transfer
from penstock.lanes.lane import POLL_MOST_S
from penstock.observe import EngineObserver

__all__ = ["CacheStats", "KvCache", "Persisting", "Resetting", "Retention", "Settling", "Storing"]

_CLOSE_S = 60.0  # for transfers in flight, if the caller gives no timeout
_GRACE_S = 1.0  # for idle lanes to end


@dataclasses.dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts at one moment, in blocks; the totals never fall."""

    slots: dict[str, SlotCounts]  # by tier
    cold: dict[str, dict[str, int]]  # by cold tier: used, and free if known
    states: dict[str, dict[str, int]]  # the same of states of recurrent layers, by tier
    num_tables: int
    num_keys: int
    hits_total: int  # blocks that tables were opened with
    misses_total: int  # prompt blocks with a key that tables were opened without
    evictions_total: int
    duplicate_seals_total: int
    promoted_total: int
    traffic: Traffic | None  # between tiers; None if there is only the device

    @property
    def by_tier(self) -> dict[str, dict[str, int]]:
        """Blocks, then states, by state of their slots."""
        return {**{tier: slots._asdict() for tier, slots in self.slots.items()}, **self.cold, **self.states}


@dataclasses.dataclass(slots=True)
class Resetting:
    """A reset in progress. Tiers in memory are empty from the start."""

    memory: dict[str, int]  # blocks forgotten, by tier
    stores: dict[str, Writing]  # by tier
    states: Sequence[Writing] = ()  # of states of recurrent layers, which are not counted

    @property
    def settled(self) -> bool:
        return all(reset.settled for reset in (*self.stores.values(), *self.states))

    @property
    def forgotten(self) -> dict[str, int]:
        """By tier."""
        return {**self.memory, **{name: reset.num_forgotten for name, reset in self.stores.items()}}

    @property
    def error(self) -> BaseException | None:
        resets = (*self.stores.values(), *self.states)
        return next((reset.error for reset in resets if reset.error is not None), None)


@dataclasses.dataclass(slots=True)
class Storing:
    """Blocks and states that are written to the first cold tier and made durable there."""

    parts: Sequence[Persisting]

    @property
    def settled(self) -> bool:
        return all(part.settled for part in self.parts)

    @property
    def error(self) -> BaseException | None:
        return next((part.error for part in self.parts if part.error is not None), None)


class Retention:
    """Blocks of a session that are to stay, in device or host memory. Ends by `end`, which is idempotent."""

    def __init__(self, cache: KvCache, prefix: Prefix, rank: float) -> None:
        self._cache = cache
        self._keys = prefix.keys
        self._rank = rank
        self._on_device: PoolWant | None = None
        self._in_host: PoolWant | None = None
        self._state: PoolWant | None = None
        self.look_again()

    def look_again(self) -> None:
        """Blocks move between device and host memory; want them where they are now."""
        self._on_device = self._cache.want(self._keys, self._rank, self._on_device)
        pool = self._cache.host.pool
        with pool.lock:
            here = np.array([slot for slot in pool.find_each(self._keys) if slot != ABSENT], np.intp)
            self._in_host = pool.want(here, self._rank, self._in_host)
        if (states := self._cache.states) is not None:
            self._state = states.want(self._keys, self._rank, self._state)

    def end(self) -> None:
        for want in (self._on_device, self._in_host, self._state):
            if want is not None:
                want.end()


class KvCache(Ledger):
    """A ledger, and the transfers between its tiers. `host` and `cold_tiers` are the tiers themselves, for
    snapshots, which store manifests there; `loads` and `saves` are for tests and measurements."""

    def __init__(
        self,
        pool: BlockPool,
        scope: Scope,
        prefix_cache: bool = True,
        tiers: Tiers | None = None,
        rule: PrefixRule | None = None,
        events: KvEvents | None = None,
    ) -> None:
        super().__init__(pool, scope, prefix_cache, tiers, rule, events)
        self._num_promoted = 0
        self._closed = False

    # ---------------------------------------------------------------------------------------------- questions

    @property
    def num_in_flight(self) -> int:
        """Transfers between device and host memory that are not settled; reads, writes and lookups of cold
        tiers that are not over, or not submitted yet. Their waiters are woken."""
        return self._num_flying + self._num_cold

    @property
    def _num_flying(self) -> int:
        return len(self.loads.mover.flying) + len(self.saves.mover.flying)

    @property
    def _num_cold(self) -> int:
        num = sum(
            len(tier.readings) + len(tier.writings) + len(tier.findings) for tier in self.cold_tiers.values()
        )
        writeback, states = self.writeback, 0 if self.states is None else self.states.cold.num_in_flight
        return (
            num + len(writeback.persisting) + len(writeback.later) + len(self.loads.reader.fetches) + states
        )

    @property
    def _all_cold(self) -> Sequence[ColdTier]:
        """Those of blocks, and those of states."""
        states = () if self.states is None else self.states.cold.tiers.values()
        return (*self.cold_tiers.values(), *states)

    @property
    def look_again_s(self) -> float:
        """How long transfers in flight need no look, unless one reports progress. More frequent looks would
        take the interpreter from the lanes of cold tiers."""
        if any(load.is_cold for load in self.loads.in_flight.values()):
            return POLL_MOST_S
        return min(self.loads.mover.look_again_s(), self.saves.mover.look_again_s())

    def call_when_launched(self, wake: Callable[[], None]) -> None:
        """`wake` is called, from another thread, when a transfer makes progress."""
        self.loads.mover.wake = self.saves.mover.wake = wake
        for tier in self._all_cold:
            tier.wake = wake

    def stats(self) -> CacheStats:
        """A snapshot; for any thread."""
        pool, slots = self._pool, {"device": self._pool.counts}
        if self.host.num_slots:
            slots[HOST] = self.host.pool.counts
        return CacheStats(
            slots=slots,
            cold={name: tier.usage().as_dict() for name, tier in self.cold_tiers.items()},
            states={} if self.states is None else self.states.stats(),
            num_tables=len(self._tables.open),
            num_keys=pool.num_keys,
            hits_total=self._tables.num_hits,
            misses_total=self._tables.num_misses,
            evictions_total=pool.num_evicted,
            duplicate_seals_total=pool.num_duplicates,
            promoted_total=self._num_promoted,
            traffic=self._traffic() if self.host.num_slots else None,
        )

    @property
    def _states_skipped(self) -> dict[str, int]:
        return {} if self.states is None else {STATES: self.states.num_skipped}

    def _traffic(self) -> Traffic:
        counts = self.host.counts
        traffic = Traffic(
            bytes={},
            seconds={},
            in_flight={},
            failures={},
            skipped={"full": counts.skipped_full, "late": self.saves.num_late, **self._states_skipped},
            postponed=counts.postponed,
            leases_open=len(self.host.leases),
        )
        for mover in (self.loads.mover, self.saves.mover):
            mover.report(HOST, self.saves.layout.block_bytes, traffic)
        for tier in self._all_cold:
            tier.report(traffic)
        return traffic

    # ---------------------------------------------------------------------------------------------- transfers

    def settle(self) -> bool:
        """Take in transfers that are over. Returns whether there were any. Transfers between device and host
        memory come first: landed blocks are then written to cold tiers, and blocks read from those are sent
        on."""
        if not self.host.num_slots:
            return False  # nothing is ever in flight
        before = self._num_flying
        self.host.expire()
        self.saves.settle()
        if self.loads.mover.flying:
            for copy in self.loads.settle():
                self._land(copy)
                self._num_promoted += copy.num_blocks
        cold_before = self._num_cold
        self.writeback.settle()
        if self.loads.in_flight or self.loads.reader.fetches:
            self.loads.advance()
        has_more = self.writeback.hand_over()
        if self.states is not None:
            has_more |= self.states.settle()
        return has_more or self._num_cold != cold_before or self._num_flying != before

    def _land(self, copy: Copy) -> None:
        """The bytes have landed: seal the blocks. If the table has ended, or an earlier block is missing,
        they stay as idle blocks; the table computes the missing one and goes on from there."""
        table = self._tables.open.get(copy.load.hold)
        if table is not None and table.num_keyed == copy.first:
            table.give_keys(copy.keys)
        elif table is None and self._tables.reuses:
            slots = copy.pins[0].run[: len(copy.keys)]
            self._pool.seal(slots, copy.keys, range(copy.first, copy.first + len(slots)))

    def submit_saves(self) -> Settling | None:
        """Demote blocks sealed since the last call. When the returned value has settled, every block sealed
        so far is in the host tier or was skipped. None: nothing is in flight."""
        return self.saves.submit()

    def save(self, keys: Sequence[bytes], fence: Fence | None) -> None:
        """Copy those of `keys` that only the device has to host memory, so that the next `persist` writes all
        that the first cold tier lacks. `fence` covers all launched work."""
        self.saves.save(keys, fence)
        if self.states is not None:
            self.states.cold.writeback.recheck(keys)

    def persist(self) -> Persisting | Storing | None:
        """Write every block and state sealed so far to the first cold tier, and make them durable there.
        None: there is no such tier."""
        blocks = self.writeback.persist(self.saves.submit())
        states = None if self.states is None else self.states.cold.writeback.persist(None)
        return blocks if blocks is None or states is None else Storing((blocks, states))

    # ----------------------------------------------------------------------------------------------- sessions

    def forget(self, keys: Sequence[bytes]) -> int:
        """Forget these blocks in device and host memory, except blocks that a table holds. Also forget what
        scored requests kept after them. Returns the number of copies. Blocks that a lease or transfer reads
        stay until it ends."""
        num_closed = self._tables.forget_unshared(self._tables.take_kept(keys))
        placed = zip(keys, self._pool.find_each(keys), strict=True)
        holds = self._pool.book.holds
        unheld = [(key, slot) for key, slot in placed if slot == ABSENT or not holds[slot]]
        if self.states is not None:
            self.states.cold.host.forget(keys)
        num_device = self._pool.forget([slot for _, slot in unheld if slot != ABSENT])
        return num_device + self.host.forget([key for key, _ in unheld]) + num_closed

    def retain(self, prefix: Prefix, rank: float) -> Retention:
        """Want the blocks of `prefix` in memory: they are evicted after unwanted ones. Of wanted blocks, the
        greatest rank goes first."""
        return Retention(self, prefix, rank)

    # ---------------------------------------------------------------------------------------------------- end

    def reset(self, tiers: Iterable[str] = ("device", HOST)) -> Resetting:
        """Forget every unused block in memory, and clear disks and stores, in order with the writes to
        them."""
        forgotten, wanted = dict[str, int](), frozenset(tiers)
        if not wanted.isdisjoint((HOST, *self.cold_tiers)):
            # forgotten blocks must not come back by a read in flight
            self.loads.reader.end_fetches(keeps=False)
        if "device" in wanted:
            for load in self.loads.in_flight.values():
                if load.ended:  # no table has its slots; forgotten blocks must not come back
                    load.forget_keys()
            forgotten["device"] = self._pool.evict(self._pool.num_slots)
        if HOST in wanted and self.host.num_slots:
            forgotten[HOST] = self.host.pool.evict(self.host.num_slots)
            if self.states is not None:
                self.states.forget()
        names = [name for name in self.cold_tiers if name in wanted]
        stores = {name: self.writeback.reset(name) for name in names}
        states = () if self.states is None else [self.states.cold.reset(name) for name in names]
        return Resetting(forgotten, stores, states)

    def check(self) -> None:
        """Recount; raises if the books do not add up."""
        self._pool.check()
        self._tables.check()
        known = self.loads.pins() | self.saves.pins()
        handles = () if self._closed else self._pool.handles
        pins = [handle for handle in handles if isinstance(handle, Pin)]
        if unknown := [str(pin) for pin in pins if pin not in known]:
            raise InvariantBroken(f"nothing under way has these pins of the device: {', '.join(unknown)}")
        self.host.pool.check()
        if self.states is not None:
            self.states.check()
        self.loads.reader.check()

    def tell_balance(self, observer: EngineObserver) -> None:
        """How many slots of each pool are in each state, between two turns."""
        pools = [self._pool, *([self.host.pool] if self.host.num_slots else [])]
        for pool in (*pools, *(() if self.states is None else (self.states.pool,))):
            with pool.lock:  # the observer's view and the counts belong to one moment
                observer.balanced(pool.name, pool.counts._asdict())

    def drain(self, timeout_s: float, slots: Sequence[int] | None = None) -> None:
        """Block until no accepted work, launched or not, touches one of the device's `slots` any more, and
        settle. Without `slots`: until every tier is idle. Raises DeadlineExceeded."""
        deadline_s = time.monotonic() + timeout_s
        wanted = None if slots is None else frozenset(slots)
        while True:
            self._wait_transfers(deadline_s, wanted)
            self.settle()
            flying: list[Transfer | Reads] = [
                *self.saves.mover.flying,
                *self.loads.mover.flying,
                *self.loads.reads,
            ]
            if not any(one.touches(wanted) for one in flying) and (wanted is not None or not self._num_cold):
                return
            # reads are sent on, and landed blocks may start a write
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(f"transfers are still under way after {timeout_s:g} s")

    def _wait_transfers(self, deadline_s: float, slots: frozenset[int] | None) -> None:
        """Block until every transfer in flight that touches one of the device's `slots` (None: any) is over,
        and so are the reads of loads into them; the next `settle` sends these on. Without `slots`, also until
        the lanes of cold tiers are idle: fetches touch host memory only."""
        self.saves.submit()
        for mover in (self.saves.mover, self.loads.mover):
            mover.drain(max(0.0, deadline_s - time.monotonic()), lambda transfer: transfer.touches(slots))
        for reads in self.loads.reads:
            if reads.touches(slots):
                reads.wait_reads(deadline_s)
        if slots is None:
            for tier in self._all_cold:
                tier.drain(max(0.0, deadline_s - time.monotonic()))

    def close(self, timeout_s: float | None = None) -> None:
        """Idempotent. Waits for transfers first: raises DeadlineExceeded if they do not end, and Leaked while
        a table, pin or lease is out."""
        if not self._closed:
            by_s = time.monotonic() + (_CLOSE_S if timeout_s is None else timeout_s)
            self.loads.reader.end_fetches()
            self.drain(by_s - time.monotonic())
            tiers = (tier.close for tier in self._all_cold)
            for close in (self.saves.mover.close, self.loads.mover.close, *tiers):
                close(max(_GRACE_S, by_s - time.monotonic()))  # each gets the time that is left
            self.host.close()
        self._closed = True
        self._pool.close()
        if self.states is not None:
            self.states.close()
