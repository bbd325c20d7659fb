"""The door to KV storage: matches prefixes, opens tables, and settles transfers, over the device and colder
tiers. Owns the device pool and the transfers into it, no bytes. Operations on an open table are in
`kv/table.py`.

All calls come from the engine thread, and only `drain` and `close` block; `prefix_of`, `lease` and `stats`
may be called from any thread.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence

from penstock import contract
from penstock.contract import Adapter, Fence, Lease, Match, Prefix
from penstock.errors import ConfigError, DeadlineExceeded, InvariantBroken
from penstock.figures import Traffic
from penstock.kv.blocks.eviction import PoolWant
from penstock.kv.blocks.key import Scope, Tokens, prefix_keys
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.blocks.slots import SlotCounts
from penstock.kv.table import BlockTable, OpenTables
from penstock.kv.tiers.host import ABSENT, HOST, HostLease, Part
from penstock.kv.tiers.loads import Copy, Fetch, Loads, Reads, no_tiers
from penstock.kv.tiers.saves import Persisting, Resetting
from penstock.kv.transfer import Settling, Transfer
from penstock.lanes.lane import POLL_MOST_S
from penstock.observe import EngineObserver

__all__ = ["CacheStats", "KvCache", "Persisting", "Resetting", "Retention", "Settling"]

_CLOSE_S = 60.0  # for transfers in flight, if the caller gives no timeout
_GRACE_S = 1.0  # for idle lanes to end
_HOST_SPARE_SHARE = 8  # 1 / this of the host slots is never promised to deep requests


@dataclasses.dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts at one moment, in blocks; the totals never fall."""

    slots: dict[str, SlotCounts]  # by tier
    cold: dict[str, dict[str, int]]  # by cold tier: used, and free if known
    num_tables: int
    num_keys: int
    hits_total: int  # blocks that tables were opened with
    misses_total: int  # prompt blocks with a key that tables were opened without
    evictions_total: int
    duplicate_seals_total: int
    promoted_total: int
    traffic: Traffic | None  # between tiers; None if there is only the device


class Retention:
    """Blocks of a session that are to stay, in device or host memory. Ends by `end`, which is idempotent."""

    def __init__(self, cache: KvCache, prefix: Prefix, rank: float) -> None:
        self._cache = cache
        self._keys = prefix.keys
        self._rank = rank
        self._on_device: PoolWant | None = None
        self._in_host: PoolWant | None = None
        self.look_again()

    def look_again(self) -> None:
        """Blocks move between device and host memory; want them where they are now."""
        cache = self._cache
        self._on_device = cache.want(self._keys, self._rank, self._on_device)
        self._in_host = cache.host.want(self._keys, self._rank, self._in_host)

    def end(self) -> None:
        if self._on_device is not None:
            self._on_device.end()
        if self._in_host is not None:
            self._cache.host.end_want(self._in_host)


class KvCache:
    """Implements `contract.KvLedger`, which documents its calls, over one device pool and the tiers that
    `loads` loads from, if any. `host` and `cold_tiers` are the tiers themselves, for snapshots, which store
    manifests there; `loads` and `saves` are for tests and measurements.

    `prefix_cache` off: no device block gets a key, so none is found there, and every prefix comes from a
    colder tier. Without one, nothing is reused.
    """

    def __init__(
        self, pool: BlockPool, scope: Scope, prefix_cache: bool = True, loads: Loads | None = None
    ) -> None:
        if not pool.num_slots:
            raise ConfigError(f"pool {pool.name!r} needs at least one slot")
        self._pool = pool
        self.scope = scope
        self.block_tokens = scope.block_tokens
        self.loads = no_tiers(pool, scope.block_tokens) if loads is None else loads
        self.saves = self.loads.saves
        self.host = self.loads.host
        self.cold_tiers = self.saves.cold  # tiers colder than host memory, hottest first
        # speed of prompt computation: loading is weighed against it, and chunks are sized by it
        self.prefill = self.loads.prefill
        self.num_blocks = pool.num_slots
        # The rest of host memory is left to other requests.
        self.num_pageable = (
            self.host.num_slots - self.host.num_slots // _HOST_SPARE_SHARE if prefix_cache else 0
        )
        self._plain_digest = scope.of().digest()  # of requests without salt and adapter
        self._tables = OpenTables(pool, self.loads, scope.block_tokens, prefix_cache)
        self._num_promoted = 0
        self._closed = False

    # ---------------------------------------------------------------------------------------------- questions

    @property
    def num_available(self) -> int:
        return self._pool.num_available

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_settling(self) -> int:
        """Slots that will be free soon. Excludes late transfers and those queued after one."""
        if self.saves.mover.is_late():
            return self.loads.num_abandoned(late=False)
        return max(0, self._pool.counts.pinned - self.loads.num_abandoned(late=True))

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
        return num + len(self.saves.persisting) + len(self.saves.later) + len(self.loads.fetches)

    @property
    def look_again_s(self) -> float:
        """How long transfers in flight need no look, unless one reports progress. More frequent looks would
        take the interpreter from the lanes of cold tiers."""
        if any(load.is_cold for load in self.loads.in_flight.values()):
            return POLL_MOST_S
        return min(self.loads.mover.look_again_s(), self.saves.mover.look_again_s())

    def prefix_of(self, tokens: Tokens, salt: str = "", adapter: Adapter | None = None) -> Prefix | None:
        """The identity under which the KV of `tokens` is shared. None if nothing is shared."""
        if not self._tables.shares:
            return None
        digest = self.scope.of(salt, adapter).digest() if salt or adapter is not None else self._plain_digest
        return Prefix(digest, prefix_keys(tokens, self.block_tokens, digest))

    def lease(
        self, owner: str, prefix: Prefix, earlier: Lease | None = None, whole: bool = False
    ) -> Lease | None:
        """Only looks at the device; its blocks may be evicted before the request is planned."""
        if not self.host.num_slots:
            return None
        num = 0 if whole else len(self._pool.find(prefix.keys))
        return (
            self.loads.lease(prefix.keys, owner, num, _parts_of(earlier)) if num < len(prefix.keys) else None
        )

    @property
    def may_prefetch(self) -> bool:
        return self.loads.may_fetch

    def prefetch(
        self,
        prefix: Prefix,
        owner: str,
        lease: Lease | None = None,
        whole: bool = False,
        is_next: bool = False,
    ) -> Fetch | None:
        """It ends when all blocks have landed, when one fails, by a reset, or at its deadline."""
        if _has_nothing_cold(lease) or not (is_next or self.may_prefetch):
            return None
        num = 0 if whole else len(self._pool.find(prefix.keys))
        if num == len(prefix.keys):
            return None
        return self.loads.prefetch(prefix.keys, owner, num, _parts_of(lease), is_next)

    def extend_prefix(self, prefix: Prefix, tokens: Sequence[int]) -> Prefix:
        keys = prefix.keys
        more = prefix_keys(
            tokens[len(keys) * self.block_tokens :],
            self.block_tokens,
            prefix.scope,
            keys[-1] if keys else None,
        )
        return Prefix(prefix.scope, (*keys, *more))

    def match(
        self,
        keys: Sequence[bytes],
        lease: Lease | None = None,
        want: contract.Want | None = None,
        most_resident: int | None = None,
    ) -> Match:
        """Holds nothing, so it is valid until the next call that draws slots. Blocks of `lease` may be
        evicted until they are claimed."""
        slots = self._pool.find(keys, want if isinstance(want, PoolWant) else None)
        num = len(slots)
        if most_resident is not None:
            num_paged = self.host.num_leading(keys)
            if num_paged < num <= most_resident:
                return Match(num, self._pool.num_idle_of(slots), False)
            return Match(0, 0, False, num_paged=num_paged)
        pending, num_colder = self.is_pending(keys, want), 0
        if isinstance(lease, HostLease) and not pending:
            self.host.refresh(lease)
            self.host.grow(lease)
            num_colder = self.loads.worth(lease, num)
        return Match(num, self._pool.num_idle_of(slots) if num else 0, pending, num_colder)

    def want(
        self, keys: Sequence[bytes], rank: float, earlier: contract.Want | None = None
    ) -> PoolWant | None:
        if not self._tables.reuses:
            return None
        return self._pool.want_found(tuple(keys), rank, earlier if isinstance(earlier, PoolWant) else None)

    def start_s(self, num_tokens: int, match: Match) -> float | None:
        if not self.host.num_slots:
            return None
        # paged-out blocks are read over the same link
        num_colder = match.num_colder + match.num_paged
        num_found = (match.num_blocks + num_colder) * self.block_tokens
        num_left = max(1, num_tokens - num_found)
        compute_s = self.loads.prefill.seconds(num_left, num_tokens - num_left / 2)
        load_s = self.loads.link.seconds(num_colder * self.saves.layout.block_bytes) if num_colder else 0.0
        return None if compute_s is None else compute_s + (load_s or 0.0)

    def make_room(self, num_blocks: int, floor: int, num_more: int = 0) -> bool:
        return self.saves.make_room(num_blocks, floor, self._tables.give_way, num_more)

    def free_up(self, num_blocks: int) -> None:
        """Evicts only blocks that host memory has."""
        num_short = num_blocks - self._pool.num_free
        if num_short > 0:
            self._pool.evict(self.saves.num_safe(num_short))

    def is_pending(self, keys: Sequence[bytes], want: contract.Want | None = None) -> bool:
        """Cheap also for a long prefix that was asked for before."""
        num = (
            len(self._pool.find(keys, want if isinstance(want, PoolWant) else None))
            if self._tables.reuses
            else len(keys)
        )
        if num == len(keys):
            return False
        # Waiting pays if another request computes the next key, or if it is being promoted and is not late. A
        # key covers all tokens before it, so its block number is the same in every prefix.
        if any(table.announces(num, keys[num]) for table in self._tables.announcing):
            return True
        return bool(self.loads.in_flight) and self.loads.is_coming(num, keys[num])

    def stats(self) -> CacheStats:
        """A snapshot; for any thread."""
        pool = self._pool
        return CacheStats(
            slots={"device": pool.counts, **({HOST: self.host.slots} if self.host.num_slots else {})},
            cold={name: tier.usage().as_dict() for name, tier in self.cold_tiers.items()},
            num_tables=len(self._tables.open),
            num_keys=pool.num_keys,
            hits_total=self._tables.num_hits,
            misses_total=self._tables.num_misses,
            evictions_total=pool.num_evicted,
            duplicate_seals_total=pool.num_duplicates,
            promoted_total=self._num_promoted,
            traffic=self._traffic(),
        )

    def _traffic(self) -> Traffic | None:
        if not self.host.num_slots:
            return None
        counts = self.saves.counts
        traffic = Traffic(
            bytes=dict(counts.bytes),
            seconds={pair: histogram.copy() for pair, histogram in list(counts.seconds.items())},
            in_flight={
                (HOST, "device"): len(self.loads.mover.flying),
                ("device", HOST): len(self.saves.mover.flying),
            },
            failures=dict(counts.failures),
            skipped={"full": self.host.counts.skipped_full, "late": counts.saves_late},
            postponed=self.host.counts.postponed,
            leases_open=self.host.num_leases,
        )
        for tier in self.cold_tiers.values():
            tier.report(traffic)
        return traffic

    def call_when_launched(self, wake: Callable[[], None]) -> None:
        """`wake` is called, from another thread, when a transfer makes progress."""
        self.loads.mover.wake = self.saves.mover.wake = wake
        for tier in self.cold_tiers.values():
            tier.wake = wake

    # ------------------------------------------------------------------------------------------------- tables

    def open(
        self, owner: str, prefix: Prefix | None, num_blocks: int, num_paged: int | None = None
    ) -> BlockTable | None:
        keys: Sequence[bytes] = () if prefix is None else prefix.keys
        slots, pin = self._pool.find(keys)[:num_blocks], None
        if len(slots) != num_blocks:
            raise InvariantBroken(
                f"{owner!r} opens a table with {num_blocks} cached blocks, of which {len(slots)} are here"
            )
        if num_paged:
            pin = self.host.pin_run(keys[:num_paged], owner)
            if pin is None or len(pin.run) < num_paged:
                self.host.end_handles([pin])
                return None
        hold = self._pool.hold(owner, slots, num_paged or 0)
        return self._tables.add(hold, prefix, num_blocks or num_paged or 0, num_paged is not None, pin)

    def forget_closed(self, keys: Sequence[bytes]) -> None:
        self.saves.end_unshared(keys)
        self._tables.unname(keys)

    # ------------------------------------------------------------------------------------------- colder tiers

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
        self.saves.settle_writes()
        if self.loads.in_flight or self.loads.fetches:
            self.loads.advance()
        has_more = self.saves.hand_over()
        return has_more or self._num_cold != cold_before or self._num_flying != before

    def _land(self, copy: Copy) -> None:
        """The bytes have landed: seal the blocks. If the table has ended, or an earlier block is missing,
        they stay as idle blocks; the table computes the missing one and goes on from there."""
        table = self._tables.open.get(copy.load.hold)
        if table is not None and table.num_keyed == copy.first:
            table.give_keys(copy.keys)
        elif table is None and self._tables.reuses:
            slots = copy.pins[0].array[: len(copy.keys)]
            self._pool.seal(slots, copy.keys, range(copy.first, copy.first + len(slots)))

    def submit_saves(self) -> Settling | None:
        """Demote blocks sealed since the last call. When the returned value has settled, every block sealed
        so far is in the host tier or was skipped. None: nothing is in flight."""
        return self.saves.submit()

    def save(self, keys: Sequence[bytes], fence: Fence | None) -> None:
        """Copy those of `keys` that only the device has to host memory, so that the next `persist` writes all
        that the first cold tier lacks. `fence` covers all launched work."""
        self.saves.save(keys, fence)

    def persist(self) -> Persisting | None:
        """Write every block sealed so far to the first cold tier, and make it durable there. None: there is
        no such tier."""
        return self.saves.persist()

    # ----------------------------------------------------------------------------------------------- sessions

    def forget(self, keys: Sequence[bytes]) -> int:
        """Forget these blocks in device and host memory, except blocks that a table holds. Also forget what
        scored requests kept after them. Returns the number of copies. Blocks that a lease or transfer reads
        stay until it ends."""
        num_closed = self.saves.end_unshared(self._tables.take_kept(keys))
        placed = zip(keys, self._pool.find_each(keys), strict=True)
        unheld = [(key, slot) for key, slot in placed if slot == ABSENT or not self._pool.is_held(slot)]
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
            self.loads.end_fetches(keeps=False)  # forgotten blocks must not come back by a read in flight
        if "device" in wanted:
            for load in self.loads.in_flight.values():
                if load.ended:  # no table has its slots; forgotten blocks must not come back
                    load.forget_keys()
            forgotten["device"] = self._pool.evict(self._pool.num_slots)
        if HOST in wanted and self.host.num_slots:
            forgotten[HOST] = self.host.reset()
        return Resetting(
            forgotten, {name: self.saves.reset(name) for name in self.cold_tiers if name in wanted}
        )

    def check(self) -> None:
        """Recount; raises if the books do not add up."""
        self._pool.check()
        self._tables.check()
        known = self.loads.pins() | self.saves.pins()
        if unknown := [str(pin) for pin in self._pool.pins() if pin not in known]:
            raise InvariantBroken(f"nothing under way has these pins of the device: {', '.join(unknown)}")
        self.host.check()
        self.loads.check()

    def tell_balance(self, observer: EngineObserver) -> None:
        """How many slots of each pool are in each state, between two turns."""
        observer.balanced(self._pool.name, self._pool.counts._asdict())
        if self.host.num_slots:
            self.host.tell_balance(observer)

    def drain(self, timeout_s: float, slots: Sequence[int] | None = None) -> None:
        """Block until no accepted work, launched or not, touches one of the device's `slots` any more, and
        settle. Without `slots`: until every tier is idle. Raises DeadlineExceeded."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._wait_transfers(deadline_s, slots)
            self.settle()
            if not self._is_touched(slots) and (slots is not None or not self._num_cold):
                return
            # reads are sent on, and landed blocks may start a write
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(f"transfers are still under way after {timeout_s:g} s")

    def _wait_transfers(self, deadline_s: float, slots: Sequence[int] | None) -> None:
        """Block until every transfer in flight that touches one of the device's `slots` (None: any) is over,
        and so are the reads of loads into them; the next `settle` sends these on. Without `slots`, also until
        the lanes of cold tiers are idle: fetches touch host memory only."""
        wanted = None if slots is None else frozenset(slots)
        self.saves.submit()
        for mover in (self.saves.mover, self.loads.mover):
            mover.drain(max(0.0, deadline_s - time.monotonic()), lambda transfer: transfer.touches(wanted))
        for reads in self.loads.reads:
            if reads.touches(wanted):
                reads.wait_reads(deadline_s)
        if slots is None:
            for tier in self.cold_tiers.values():
                tier.drain(max(0.0, deadline_s - time.monotonic()))

    def _is_touched(self, slots: Sequence[int] | None = None) -> bool:
        """Whether accepted work, launched or not, may still touch one of the device's `slots` (None: any)."""
        wanted = None if slots is None else frozenset(slots)
        flying: list[Transfer | Reads] = [
            *self.saves.mover.flying,
            *self.loads.mover.flying,
            *self.loads.reads,
        ]
        return any(one.touches(wanted) for one in flying)

    def close(self, timeout_s: float | None = None) -> None:
        """Idempotent. Waits for transfers first: raises DeadlineExceeded if they do not end, and Leaked while
        a table, pin or lease is out."""
        if not self._closed:
            by_s = time.monotonic() + (_CLOSE_S if timeout_s is None else timeout_s)
            self.loads.end_fetches()
            self.drain(by_s - time.monotonic())
            closers = (
                self.saves.mover.close,
                self.loads.mover.close,
                *(tier.close for tier in self.cold_tiers.values()),
            )
            for close in closers:  # each gets the time that is left
                close(max(_GRACE_S, by_s - time.monotonic()))
            self.host.close()
        self._closed = True
        self._pool.close()


def _parts_of(lease: Lease | None) -> Sequence[Part]:
    """The findings of cold tiers about its blocks."""
    return lease.parts if isinstance(lease, HostLease) else ()


def _has_nothing_cold(lease: Lease | None) -> bool:
    """Whether cold tiers answered recently that they have none of its blocks."""
    return lease is not None and not lease.expired and not any(part.finding.num for part in _parts_of(lease))
