"""The door to KV storage: matches, opens, grows, seals and releases the tables of requests, over the device and what is colder. Owns
the device pool and what is on its way into it, no bytes.

A table's slots are active from the moment they are drawn: "active" says that a table holds them. That their content can be trusted
is said by the key, which `seal` gives after the block is computed and `settle` after it is promoted; without one nobody else ever sees it.

All calls come from the engine thread and none blocks but `drain` and `close`; `prefix_of` and `lease` may be called from anywhere.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from penstock import contract
from penstock.contract import Adapter, Fence, FetchedBlocks, Lease, Match, Prefix, Table
from penstock.errors import ConfigError, DeadlineExceeded, InvariantBroken
from penstock.figures import Traffic
from penstock.kv.blocks.eviction import PoolWant
from penstock.kv.blocks.handles import BlockTable, FetchedRun
from penstock.kv.blocks.key import Scope, Tokens, prefix_keys, private_scope
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.blocks.slots import SlotCounts
from penstock.kv.tiers.host import ABSENT, HOST, HostLease
from penstock.kv.tiers.loads import BlockLoad, Copy, Fetch, Loads, Reads, no_tiers
from penstock.kv.tiers.saves import Persisting, Resetting
from penstock.kv.tiers.store import PinningStore
from penstock.kv.transfer import Settling, Transfer
from penstock.lanes.lane import POLL_MOST_S
from penstock.observe import EngineObserver

__all__ = ["CacheStats", "KvCache", "Persisting", "Resetting", "Retention", "Settling"]

_CLOSE_S = 60.0  # for transfers in flight, where the caller names no time
_GRACE_S = 1.0  # for lanes that have nothing to do any more to end
_HOST_SPARE_SHARE = 8  # one in so many host slots is never promised to deep requests


@dataclasses.dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts at one moment, in blocks; the totals never fall."""

    slots: dict[str, SlotCounts]  # by tier
    cold: dict[str, dict[str, int]]  # by cold tier: used, and free where that is known
    num_tables: int
    num_keys: int
    hits_total: int  # blocks that tables were opened with
    misses_total: int  # prompt blocks with a key that tables were opened without
    evictions_total: int
    duplicate_seals_total: int
    promoted_total: int


class Retention:
    """What somebody who is not in line wants to stay, wherever in memory it is. Ends by `end`, which is idempotent."""

    def __init__(self, cache: KvCache, prefix: Prefix, rank: float) -> None:
        self._cache = cache
        self._keys = prefix.keys
        self._rank = rank
        self._on_device: PoolWant | None = None
        self._in_host: PoolWant | None = None
        self.look_again()

    def look_again(self) -> None:
        """Blocks move between device and host memory, and are wanted where they are."""
        cache = self._cache
        self._on_device = cache.want(self._keys, self._rank, self._on_device)
        self._in_host = cache.loads.host.want(self._keys, self._rank, self._in_host)

    def end(self) -> None:
        if self._on_device is not None:
            self._cache.end_want(self._on_device)
        if self._in_host is not None:
            self._cache.loads.host.end_want(self._in_host)


class KvCache:
    """Implements `contract.KvLedger`, which says what its calls mean, over one device pool and the tiers that `loads` loads from; without
    those the device is alone.

    `prefix_cache` off: device memory is not reused across requests, every prefix comes from a colder tier. Where there is none, nothing is
    reused.
    """

    def __init__(self, pool: BlockPool, scope: Scope, prefix_cache: bool = True, loads: Loads | None = None) -> None:
        if not pool.num_slots:
            raise ConfigError(f"pool {pool.name!r} needs at least one slot")
        self._pool = pool
        self._scope = scope
        self.block_tokens = scope.block_tokens
        self._prefix_cache = prefix_cache
        self.loads = no_tiers(pool, scope.block_tokens) if loads is None else loads
        self.saves = self.loads.saves
        self.submit_saves = self.saves.submit  # demotes what was sealed since the last call
        self.newest_save = self.saves.newest  # when that is settled, everything sealed so far is in the host tier or was skipped
        self.persist = self.saves.persist
        self.save = self.saves.save
        self._host = self.loads.host
        self.cold_tiers = self.saves.cold  # those colder than host memory, hottest first
        self.prefill = self.loads.prefill  # what computing prompts takes: loading is weighed against it, and chunks are sized by it
        self.num_blocks = pool.num_slots
        # Some of host memory stays for what others leave there.
        self.num_pageable = self._host.num_slots - self._host.num_slots // _HOST_SPARE_SHARE if prefix_cache else 0
        self._shares = prefix_cache or self._host.num_slots > 0  # blocks of one request are of use to another
        self._plain_digest = self.scope_of().digest()  # of requests without a salt and an adapter
        self._tables: set[BlockTable] = set()  # those that are open
        self._announcing: set[BlockTable] = set()  # those of them that are going to seal keys of their prompts
        self._kept: dict[bytes, Sequence[bytes]] = {}  # what was kept of tables with a scope of their own, by name
        self._num_hits = 0
        self._num_misses = 0
        self._num_promoted = 0
        self._closed = False

    # ------------------------------------------------------------------------------------------------------ questions

    @property
    def num_available(self) -> int:
        return self._pool.num_available

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def tiers(self) -> tuple[str, ...]:
        return ("device", *((HOST,) if self._host.num_slots else ()), *self.cold_tiers)

    @property
    def num_settling(self) -> int:
        """Without those of transfers that are late, or come behind one that is: nobody knows when they end."""
        if self.saves.mover.is_late():
            return self.loads.num_abandoned(late=False)
        return max(0, self._pool.counts.pinned - self.loads.num_abandoned(late=True))

    @property
    def num_in_flight(self) -> int:
        """Transfers between device and host memory that have not been seen to be over."""
        return len(self.loads.mover.flying) + len(self.saves.mover.flying)

    @property
    def num_cold_in_flight(self) -> int:
        """Reads, writes and questions of cold tiers that are not over, and what is yet to be handed to them. Whoever waits for them is
        woken."""
        num = sum(len(tier.readings) + len(tier.writings) + len(tier.findings) for tier in self.cold_tiers.values())
        return num + len(self.saves.persisting) + len(self.saves.later) + len(self.loads.fetches)

    @property
    def look_again_s(self) -> float:
        """How long nobody need look at what is in flight, unless told that some of it has got further. While a load from cold tiers is
        under way, looking more often would take the interpreter from their lanes."""
        if any(load.is_cold for load in self.loads.in_flight.values()):
            return POLL_MOST_S
        return min(self.loads.mover.look_again_s(), self.saves.mover.look_again_s())

    def prefix_of(self, tokens: Tokens, salt: str = "", adapter: Adapter | None = None) -> Prefix | None:
        """What KV of `tokens` may be shared under; None where nothing is shared."""
        if not self._shares:
            return None
        digest = self.scope_of(salt, adapter).digest() if salt or adapter is not None else self._plain_digest
        return Prefix(digest, prefix_keys(tokens, self.block_tokens, digest))

    def scope_of(self, salt: str = "", adapter: Adapter | None = None) -> Scope:
        """Of the blocks that such a request computes. For any thread."""
        scope = self._scope if adapter is None else dataclasses.replace(self._scope, adapter="lora", adapter_version=adapter.digest)
        return dataclasses.replace(scope, salt=salt)

    @property
    def last_evicting(self) -> tuple[str, PinningStore] | None:
        """The coldest tier whose evictions are ours: there blocks can be pinned for good. None: there is only the device, which requests
        need for themselves. A shared store forgets by rules of its own."""
        for name, tier in reversed(self.cold_tiers.items()):
            if isinstance(tier.calls.store, PinningStore):
                return name, tier.calls.store
        return (HOST, self._host) if self._host.num_slots else None

    def lease(self, owner: str, prefix: Prefix, earlier: Lease | None = None) -> Lease | None:
        """Behind what the device has, which is only looked at, and may be gone when the request is planned."""
        if not self._host.num_slots:
            return None
        num = len(self._pool.find(prefix.keys)) if self._prefix_cache else 0
        answered = earlier.parts if isinstance(earlier, HostLease) else ()
        return self.loads.lease(prefix.keys, owner, num, answered) if num < len(prefix.keys) else None

    @property
    def may_prefetch(self) -> bool:
        return self.loads.may_fetch

    def prefetch(self, prefix: Prefix, owner: str, lease: Lease | None = None) -> Fetch | None:
        """It ends when all has come, when something does not, by a reset, at its deadline."""
        if not self.may_prefetch:
            return None
        parts = lease.parts if isinstance(lease, HostLease) else ()
        if lease is not None and not lease.expired and not any(part.finding.num for part in parts):
            return None
        num = len(self._pool.find(prefix.keys)) if self._prefix_cache else 0
        return self.loads.prefetch(prefix.keys, owner, num, parts) if num < len(prefix.keys) else None

    def extend_prefix(self, prefix: Prefix, tokens: Sequence[int]) -> Prefix:
        keys = prefix.keys
        more = prefix_keys(tokens[len(keys) * self.block_tokens :], self.block_tokens, prefix.scope, keys[-1] if keys else None)
        return Prefix(prefix.scope, (*keys, *more))

    def match(self, keys: Sequence[bytes], lease: Lease | None = None, want: contract.Want | None = None) -> Match:
        """Holds nothing, so it is good until the next call that draws. What `lease` has may go at any time, until it is claimed."""
        slots = self._pool.find(keys, want if isinstance(want, PoolWant) else None) if self._prefix_cache else []
        num, pending, num_colder = len(slots), self.is_pending(keys, want), 0
        if isinstance(lease, HostLease) and not pending:
            self._host.refresh(lease)
            self._host.grow(lease)
            num_colder = self.loads.worth(lease, num)
        return Match(num, self._pool.num_idle_of(slots) if num else 0, pending, num_colder)

    def match_deep(self, keys: Sequence[bytes], most_resident: int) -> Match:
        """Its first blocks where they are in host memory, or on the device where that has more of them."""
        num, num_paged = len(slots := self._pool.find(keys)), self._host.num_leading(keys)
        if num > num_paged and num <= most_resident:
            return Match(num, self._pool.num_idle_of(slots), False)
        return Match(0, 0, False, num_paged=num_paged)

    def want(self, keys: Sequence[bytes], rank: float, earlier: contract.Want | None = None) -> PoolWant | None:
        if not self._prefix_cache:
            return None
        return self._pool.want_found(tuple(keys), rank, earlier if isinstance(earlier, PoolWant) else None)

    def end_want(self, want: contract.Want) -> None:
        if isinstance(want, PoolWant):
            self._pool.end_want(want)

    def start_s(self, num_tokens: int, match: Match) -> float | None:
        if not self._host.num_slots:
            return None
        num_colder = match.num_colder + match.num_paged  # what stays in host memory is read over the same link
        num_found = (match.num_blocks + num_colder) * self.block_tokens
        num_left = max(1, num_tokens - num_found)
        compute_s = self.loads.prefill.seconds(num_left, num_tokens - num_left / 2)
        load_s = self.loads.link.seconds(num_colder * self.saves.layout.block_bytes) if num_colder else 0.0
        return None if compute_s is None else compute_s + (load_s or 0.0)

    def claim(self, lease: Lease, first: int, num_blocks: int) -> bool:
        return isinstance(lease, HostLease) and self._host.claim(lease, first, num_blocks)

    def make_room(self, num_blocks: int, floor: int, num_more: int = 0) -> bool:
        return not self._prefix_cache or self.saves.make_room(num_blocks, floor, self._tables, num_more)

    def free_up(self, num_blocks: int) -> None:
        """As far as host memory has what is forgotten: what can be drawn now without losing anything can be drawn later, too."""
        num_short = num_blocks - self._pool.num_free
        if self._prefix_cache and num_short > 0:
            self._pool.evict(self.saves.num_safe(num_short))

    def is_pending(self, keys: Sequence[bytes], want: contract.Want | None = None) -> bool:
        """Costs no more for a long prefix that was asked for before than for a short one."""
        num = len(self._pool.find(keys, want if isinstance(want, PoolWant) else None)) if self._prefix_cache else len(keys)
        if num == len(keys):
            return False
        # It pays to wait where somebody computes the next key, or it is promoted and not late. A key covers all before it, so it has the
        # same number in whatever prefix it belongs to.
        if any(table.announces(num, keys[num]) for table in self._announcing):
            return True
        return bool(self.loads.in_flight) and self.loads.is_coming(num, keys[num])

    def stats(self) -> CacheStats:
        pool = self._pool
        return CacheStats(
            slots={"device": pool.counts, **({HOST: self._host.slots} if self._host.num_slots else {})},
            cold={name: tier.usage().as_dict() for name, tier in self.cold_tiers.items()},
            num_tables=len(self._tables),
            num_keys=pool.num_keys,
            hits_total=self._num_hits,
            misses_total=self._num_misses,
            evictions_total=pool.num_evicted,
            duplicate_seals_total=pool.num_duplicates,
            promoted_total=self._num_promoted,
        )

    def traffic(self) -> Traffic | None:
        """What moves between tiers; None where there is only the device. A snapshot; for any thread."""
        if not self._host.num_slots:
            return None
        counts = self.saves.counts
        traffic = Traffic(
            bytes=dict(counts.bytes),
            seconds={pair: histogram.copy() for pair, histogram in list(counts.seconds.items())},
            in_flight={(HOST, "device"): len(self.loads.mover.flying), ("device", HOST): len(self.saves.mover.flying)},
            failures=dict(counts.failures),
            skipped={"full": self._host.counts.skipped_full, "late": counts.saves_late},
            postponed=self._host.counts.postponed,
            leases_open=self._host.num_leases,
        )
        for tier in self.cold_tiers.values():
            tier.report(traffic)
        return traffic

    def call_when_launched(self, wake: Callable[[], None]) -> None:
        """`wake` is called, from another thread, when a transfer has got further."""
        self.loads.mover.wake = self.saves.mover.wake = wake
        for tier in self.cold_tiers.values():
            tier.wake = wake

    # ---------------------------------------------------------------------------------------------------------- tables

    def open(self, owner: str, prefix: Prefix | None, num_blocks: int) -> BlockTable:
        keys: Sequence[bytes] = () if prefix is None else prefix.keys
        slots = self._pool.find(keys)[:num_blocks]
        if len(slots) != num_blocks or (num_blocks and not self._prefix_cache):
            raise InvariantBroken(f"{owner!r} opens a table with {num_blocks} cached blocks, of which {len(slots)} are here")
        hold = self._pool.hold(owner, slots)
        return self._add(BlockTable(hold, self.block_tokens, prefix if self._shares else None, num_blocks), num_blocks, len(keys))

    def _add(self, table: BlockTable, num_hits: int, num_keys: int) -> BlockTable:
        """A new table, which has the first `num_hits` of its prompt's `num_keys` blocks."""
        if table.is_announcing:
            self._announcing.add(table)
        self._num_hits += num_hits
        self._num_misses += num_keys - num_hits
        self._tables.add(table)
        return table

    def open_deep(self, owner: str, prefix: Prefix, match: Match) -> BlockTable | None:
        table = self._open_paged(owner, prefix, match.num_paged) if match.num_paged else self.open(owner, prefix, match.num_blocks)
        if table is not None:
            table.is_deep = True
        return table

    def _open_paged(self, owner: str, prefix: Prefix, num_blocks: int) -> BlockTable | None:
        """A table whose first `num_blocks` blocks are in host memory; None where it does not have all of them any more."""
        pin = self._host.pin_run(prefix.keys[:num_blocks], owner)
        if pin is None or len(pin.run) < num_blocks:
            self._host.end_handles([pin])
            return None
        table = BlockTable(self._pool.hold(owner, (), num_blocks), self.block_tokens, prefix, num_blocks)
        table.add_paged(pin)
        return self._add(table, num_blocks, len(prefix.keys))

    def page_out(self, table: Table, num_blocks: int, fence: Fence | None) -> int:
        """Not those that a transfer uses. What host memory lacks is on its way there when this returns."""
        own = self._own(table)
        first = own.num_paged
        end = min(first + num_blocks, own.num_keyed, min((pin.first for pin in own.hold.run_pins), default=own.num_keyed))
        keys = own.sealed_keys[first:end]
        pin = self._host.pin_run(keys, own.owner) if keys else None
        num = 0 if pin is None else len(pin.run)
        if pin is not None:
            own.add_paged(pin)
            own.hold.drop_first(num, fence)
        if num < len(keys):  # its copy has failed, or was not made: once more
            absent = self._host.absent(keys[num:])
            missing = next((place for place, is_absent in enumerate(absent) if not is_absent), len(absent))
            if missing:
                self.saves.offer(own.hold, first + num, keys[num : num + missing], fence, due=True)
                self.saves.submit()  # there may be no step before it is needed
        return num

    def fetch(self, table: Table, firsts: Sequence[int], num_blocks: int) -> list[FetchedRun]:
        """In one copy: how long each takes to be launched and seen to be over counts more than its bytes. What comes has no key on the
        device: it is this table's alone."""
        own = self._own(table)
        if firsts and max(firsts) + num_blocks > own.num_paged:
            raise InvariantBroken(f"{own.owner!r} fetches blocks up to {max(firsts) + num_blocks}, of which {own.num_paged} were paged out")
        reservation = self._pool.try_reserve(len(firsts) * num_blocks, own.owner) if firsts else None
        if reservation is None:
            return []
        after, copied = reservation.after, []
        for number in range(len(firsts)):
            copied.append(BlockTable(self._pool.hold(own.owner), self.block_tokens, None, 0))
            (reservation if number == len(firsts) - 1 else reservation.split(num_blocks)).commit(copied[-1].hold)
        kept = self._host.pin(np.concatenate([own.paged_slots[first : first + num_blocks] for first in firsts]), own.owner)
        try:
            load = self.loads.begin_fetched(copied, kept, after)
        except BaseException:
            for one in copied:
                one.hold.end()
            raise
        fetched = [FetchedRun(one.hold, load) for one in copied]
        own.fetched.update(fetched)
        own.num_fetched += len(firsts) * num_blocks
        return fetched

    def drop_fetched(self, table: Table, fetched: FetchedBlocks, fence: Fence | None) -> None:
        own = self._own(table)
        if not isinstance(fetched, FetchedRun) or fetched not in own.fetched or not fetched.settled:
            raise InvariantBroken(f"{own.owner!r} drops blocks that it has not fetched, or that are still on their way")
        own.fetched.remove(fetched)
        own.num_fetched -= fetched.hold.num_slots
        fetched.hold.end(fence)

    def close_scope(self, table: Table, num_tokens: int) -> None:
        """Its blocks get keys of a scope that nobody else can have, and are forgotten with the table."""
        own = self._own(table)
        if own.own_scope is None:
            own.own_scope, own.num_shared = private_scope(), num_tokens // own.block_tokens

    def keep_closed(self, table: Table, name: bytes, first: int, end: int) -> None:
        own = self._own(table)
        own.num_kept, keys = end, own.sealed_keys[first:end]
        self._unname(keys)  # what this table went on from is now a part of it
        if keys:
            self._kept[name] = keys

    def forget_closed(self, keys: Sequence[bytes]) -> None:
        self.saves.end_unshared(keys)
        self._unname(keys)

    def _unname(self, keys: Sequence[bytes]) -> None:
        gone = set(keys)
        self._kept = {name: kept for name, kept in self._kept.items() if kept[-1] not in gone}

    def try_extend(self, table: Table, num_blocks: int) -> bool:
        own = self._own(table)
        reservation = self._pool.try_reserve(num_blocks, own.owner)
        if reservation is None:
            return False
        reservation.commit(own.hold)
        own.add_after(reservation.after)
        return True

    def promote(self, table: Table, lease: Lease, num_blocks: int, num_next: int) -> BlockLoad:
        own = self._own(table)
        if not isinstance(lease, HostLease):
            raise InvariantBroken(f"{own.owner!r} promotes, and there is no colder tier")
        first = own.num_slots
        reservation = self._pool.try_reserve(num_blocks, own.owner)
        if reservation is None:
            raise InvariantBroken(f"{own.owner!r} promotes {num_blocks} blocks without room for them")
        reservation.commit(own.hold)
        num_whole = min(first + num_blocks, lease.num_tokens // self.block_tokens)  # a tail that was saved half full gets no key
        keys = () if own.prefix is None else own.prefix.keys[first:num_whole]
        return self.loads.begin(own, first, lease, keys, reservation.after, num_next)

    def promote_ahead(self, owner: str, prefix: Prefix, first: int, num_blocks: int) -> BlockLoad | None:
        """They are idle blocks when they have landed, whatever has become of `owner`."""
        if not self._prefix_cache:
            return None
        keys = prefix.keys[first : first + min(num_blocks, self._pool.num_free)]
        kept = self._host.pin_run(keys, owner)
        if kept is None:
            return None
        num_blocks = len(kept.run)
        reservation = self._pool.try_reserve(num_blocks, owner)
        if reservation is None:
            raise InvariantBroken(f"{num_blocks} free slots of the device cannot be drawn")
        table = BlockTable(self._pool.hold(owner), self.block_tokens, None, 0)
        reservation.commit(table.hold)
        return self.loads.begin_ahead(table, first, kept, keys[:num_blocks], reservation.after)

    def seal(self, table: Table, tokens: Sequence[int], num_computed: int, fence: Fence | None) -> None:
        own = self._own(table)
        num_full = num_computed // own.block_tokens
        if own.prefix is None or num_full <= own.num_keyed:
            return
        if self.loads.in_flight and self.loads.is_loading(own):
            raise InvariantBroken(f"{own.owner!r} seals blocks while some before them are still on their way")
        first = own.num_keyed
        keys = own.next_keys(tokens, num_full)
        if own.own_scope is not None:
            self.saves.begin_unshared(keys[max(0, own.num_shared - first) :])
        self._give_keys(own, first, keys)
        self.saves.offer(own.hold, first, keys, fence, own.is_deep)

    def retract(self, table: Table, num_tokens: int, fence: Fence | None) -> Lease | None:
        own = self._own(table)
        lease: Lease | None = None
        num_tokens = max(num_tokens, own.num_keyed * own.block_tokens)  # a full match is there to its end, though its last token is due
        num_blocks = -(-num_tokens // own.block_tokens)
        # What is still being promoted into the table is in the colder tier, whose lease has ended: it is matched again. So is what a deep
        # request has there.
        if num_tokens and not own.is_deep and not self.loads.is_loading(own):
            lease = self.saves.retract(own.hold, num_blocks, own.sealed_keys, num_tokens, fence)
        self.release(table, fence)
        return lease

    def release(self, table: Table, fence: Fence | None) -> None:
        own = self._own(table)
        for fetched in own.fetched:
            fetched.hold.end(fence)
        if own.own_scope is not None:
            self._forget_own(own)
        own.hold.end(fence)
        if own.paged_pins:
            self._host.end_handles(own.paged_pins, fence)
        self._tables.remove(own)
        self._announcing.discard(own)

    def _forget_own(self, own: BlockTable) -> None:
        """Nobody could find what it has under a scope of its own. What is kept of it is in host memory, or on its way there."""
        first = max(own.num_shared, own.num_paged)
        self._pool.forget(own.hold.first(max(first, own.num_keyed))[first:].tolist())
        self.saves.end_unshared(own.sealed_keys[max(own.num_shared, own.num_kept) :])

    def _give_keys(self, own: BlockTable, first: int, keys: Sequence[bytes]) -> None:
        """Blocks `first..` of `own` are whole. In a cache that reuses nothing on the device the keys are only for colder tiers."""
        if self._prefix_cache:
            slots = own.hold.first(first + len(keys))[first:]
            self._pool.seal(slots, keys, range(first, first + len(keys)))
        own.sealed_keys += keys
        if not own.is_announcing:
            self._announcing.discard(own)

    # ------------------------------------------------------------------------------------------------------- colder tiers

    def settle(self) -> bool:
        """Take in transfers that are over; says whether there were any. Those between device and host memory come first: what has landed is
        written to cold tiers, and what was read from them is sent on."""
        if not self._host.num_slots:
            return False  # nothing is ever in flight
        before = self.num_in_flight
        self._host.expire()
        self.saves.settle()
        if self.loads.mover.flying:
            for copy in self.loads.settle():
                self._land(copy)
                self._num_promoted += copy.num_blocks
        cold_before = self.num_cold_in_flight
        self.saves.settle_writes()
        if self.loads.in_flight or self.loads.fetches:
            self.loads.advance()
        has_more = self.saves.hand_over()
        return has_more or self.num_cold_in_flight != cold_before or self.num_in_flight != before

    def _land(self, copy: Copy) -> None:
        """The bytes are there: they get their keys. The table may have ended meanwhile; then they stay as idle blocks. So they do where
        what belongs before them has not come: the table computes it, and goes on from there."""
        own = copy.load.table
        if own in self._tables and own.num_keyed == copy.first:
            self._give_keys(own, own.num_keyed, copy.keys)
        elif own not in self._tables and self._prefix_cache:
            slots = copy.pins[0].array[: len(copy.keys)]
            self._pool.seal(slots, copy.keys, range(copy.first, copy.first + len(slots)))

    # ----------------------------------------------------------------------------------------------------------- sessions

    def forget(self, keys: Sequence[bytes]) -> int:
        """Forget these blocks in device and host memory, but for those that a table holds; returns how many copies. What a lease or a
        transfer still reads stays until it is done."""
        num_closed = self.saves.end_unshared([key for name in keys for key in self._kept.pop(name, ())])
        placed = zip(keys, self._pool.find_each(keys), strict=True)
        unheld = [(key, slot) for key, slot in placed if slot == ABSENT or not self._pool.is_held(slot)]
        num_device = self._pool.forget([slot for _, slot in unheld if slot != ABSENT])
        return num_device + self._host.forget([key for key, _ in unheld]) + num_closed

    def retain(self, prefix: Prefix, rank: float) -> Retention:
        """Blocks of `prefix` in memory are forgotten after all that nobody wants, of wanted ones those of the greatest rank first."""
        return Retention(self, prefix, rank)

    # ------------------------------------------------------------------------------------------------------------- end

    def reset(self, tiers: Iterable[str] = ("device", HOST)) -> Resetting:
        """Forget every block in memory that nobody uses, and have disks and stores forget everything, in order with what is written to
        them."""
        forgotten, wanted = dict[str, int](), frozenset(tiers)
        if not wanted.isdisjoint((HOST, *self.cold_tiers)):
            self.loads.end_fetches(keeps=False)  # what is forgotten does not come back by itself
        if "device" in wanted:
            for load in self.loads.in_flight.values():
                if load.ended:  # nobody has its slots: what is forgotten does not come back by itself
                    load.forget_keys()
            forgotten["device"] = self._pool.evict(self._pool.num_slots)
        if HOST in wanted and HOST in self.tiers:
            forgotten[HOST] = self._host.reset()
        return Resetting(forgotten, {name: self.saves.reset(name) for name in self.cold_tiers if name in wanted})

    def check(self) -> None:
        """Recount; raises where the books do not add up."""
        self._pool.check()
        announcing = {table for table in self._tables if table.is_announcing}
        if announcing != self._announcing:
            raise InvariantBroken(f"{len(self._announcing)} tables are booked as announcing keys, and {len(announcing)} open ones do")
        known = self.loads.pins() | self.saves.pins()
        if unknown := [str(pin) for pin in self._pool.pins() if pin not in known]:
            raise InvariantBroken(f"nothing under way has these pins of the device: {', '.join(unknown)}")
        self._host.check()
        self.loads.check()

    def tell_balance(self, observer: EngineObserver) -> None:
        """How many slots of each pool are in each state, between two turns."""
        observer.balanced(self._pool.name, self._pool.counts._asdict())
        if self._host.num_slots:
            self._host.tell_balance(observer)

    def drain(self, timeout_s: float, slots: Sequence[int] | None = None) -> None:
        """Block until nothing that was taken on touches one of the device's `slots` any more, launched or not, and settle; without
        `slots` until nothing is under way in any tier. Raises DeadlineExceeded where that takes longer."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._wait_transfers(deadline_s, slots)
            self.settle()
            if not self._is_touched(slots) and (slots is not None or not self.num_cold_in_flight):
                return
            if time.monotonic() > deadline_s:  # what was read is sent on, and what has landed may have set off a write
                raise DeadlineExceeded(f"transfers are still under way after {timeout_s:g} s")

    def _wait_transfers(self, deadline_s: float, slots: Sequence[int] | None) -> None:
        """Block until every transfer under way that touches one of the device's `slots` (None: any) is over, and so is what loads into
        them are reading: the next `settle` sends that on. Without `slots` also until the lanes of cold tiers have nothing to do: fetches
        touch host memory alone."""
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
        """Whether anything that was taken on, launched or not, may still touch one of the device's `slots` (None: any)."""
        wanted = None if slots is None else frozenset(slots)
        flying: list[Transfer | Reads] = [*self.saves.mover.flying, *self.loads.mover.flying, *self.loads.reads]
        return any(one.touches(wanted) for one in flying)

    def close(self, timeout_s: float | None = None) -> None:
        """Idempotent. Transfers end first: raises DeadlineExceeded where they do not, and Leaked while a table, pin or lease is out."""
        if not self._closed:
            by_s = time.monotonic() + (_CLOSE_S if timeout_s is None else timeout_s)
            self.loads.end_fetches()
            self.drain(by_s - time.monotonic())
            closers = self.saves.mover.close, self.loads.mover.close, *(tier.close for tier in self.cold_tiers.values())
            for close in closers:  # those that come later have what is left
                close(max(_GRACE_S, by_s - time.monotonic()))
            self._host.close()
        self._closed = True
        self._pool.close()

    def _own(self, table: Table) -> BlockTable:
        if isinstance(table, BlockTable):
            if table in self._tables:
                return table
            table.hold.require_open()
        raise InvariantBroken(f"a {type(table).__name__} is no table of this cache")
