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

from penstock import contract
from penstock.contract import Adapter, Fence, Lease, Match, Prefix, Table
from penstock.errors import DeadlineExceeded, InvariantBroken
from penstock.figures import Traffic
from penstock.kv.blocks.eviction import PoolWant
from penstock.kv.blocks.handles import Pin
from penstock.kv.blocks.key import Scope, Tokens, prefix_keys
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.blocks.slots import SlotCounts
from penstock.kv.blocks.table import BlockTable
from penstock.kv.tiers.behind import Persisting, Resetting
from penstock.kv.tiers.cold import ColdTier
from penstock.kv.tiers.host import ABSENT, HOST, HostLease
from penstock.kv.tiers.ladder import Ladder
from penstock.kv.tiers.loads import Fetch, Haul, Promotion
from penstock.kv.tiers.policy import PrefillRate
from penstock.kv.transfer.mover import Settling
from penstock.lanes.polling import POLL_MOST_S
from penstock.observe import EngineObserver

__all__ = ["CacheStats", "KvCache", "Persisting", "Resetting", "Retention", "Settling"]

_CLOSE_S = 60.0  # for transfers in flight, where the caller names no time
_GRACE_S = 1.0  # for lanes that have nothing to do any more to end


@dataclasses.dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts at one moment, in blocks; the totals never fall."""

    slots: dict[str, SlotCounts]  # by tier
    behind: dict[str, dict[str, int]]  # by tier behind host memory: used, and free where that is known
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
        if cache.ladder is not None:
            self._in_host = cache.ladder.host.want(self._keys, self._rank, self._in_host)

    def end(self) -> None:
        if self._on_device is not None:
            self._cache.end_want(self._on_device)
        if self._in_host is not None and self._cache.ladder is not None:
            self._cache.ladder.host.end_want(self._in_host)


class KvCache:
    """Implements `contract.KvLedger` over one device pool and, where there is a ladder, colder tiers.

    `prefix_cache` off without a ladder: nothing is reused. With one: device memory is not reused across requests, every prefix comes from
    a colder tier.
    """

    def __init__(self, pool: BlockPool, scope: Scope, prefix_cache: bool = True, ladder: Ladder | None = None) -> None:
        self._pool = pool
        self._scope = scope
        self._prefix_cache = prefix_cache
        self.ladder = ladder
        self._prefill = PrefillRate()
        self._tables: set[BlockTable] = set()  # those that are open
        self._announcing: set[BlockTable] = set()  # those of them that are going to seal keys of their prompts
        self._promoting: dict[Promotion, BlockTable] = {}  # in flight
        self._hauls: dict[Haul, BlockTable] = {}  # not over
        self._num_hits = 0
        self._num_misses = 0
        self._num_promoted = 0
        self._closed = False

    # ------------------------------------------------------------------------------------------------------ questions

    @property
    def block_tokens(self) -> int:
        return self._scope.block_tokens

    @property
    def num_blocks(self) -> int:
        return self._pool.num_slots

    @property
    def num_available(self) -> int:
        return self._pool.num_available

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def tiers(self) -> tuple[str, ...]:
        return ("device",) if self.ladder is None else ("device", "host", *self.cold_tiers)

    @property
    def cold_tiers(self) -> dict[str, ColdTier]:
        """Those behind the host tier, hottest first."""
        return {} if self.ladder is None else self.ladder.cold_tiers

    @property
    def prefill(self) -> PrefillRate:
        """What computing prompts takes: loading is weighed against it, and chunks are sized by it."""
        return self._prefill if self.ladder is None else self.ladder.prefill

    @property
    def num_settling(self) -> int:
        """Without those of transfers that are late, or come behind one that is: nobody knows when they end."""
        abandoned = [promotion for promotion, own in self._promoting.items() if own not in self._tables]
        if self.ladder is not None and self.ladder.demoter.is_late():
            return sum(promotion.num_blocks for promotion in abandoned if not promotion.overdue)
        late = sum(promotion.num_blocks for promotion in abandoned if promotion.overdue)
        return max(0, self._pool.counts.pinned - late)

    @property
    def num_in_flight(self) -> int:
        """Transfers between device and host memory that have not been seen to be over."""
        return 0 if self.ladder is None else self.ladder.num_in_flight

    @property
    def look_again_s(self) -> float:
        """How long nobody need look at those, unless told that one was launched."""
        return POLL_MOST_S if self.ladder is None else self.ladder.look_again_s

    @property
    def num_behind(self) -> int:
        """Reads, writes and questions of tiers behind the host tier that are not over. Whoever waits for them is woken."""
        return 0 if self.ladder is None or self.ladder.behind is None else self.ladder.behind.num_in_flight

    @property
    def is_hauling(self) -> bool:
        """Whether blocks are being read from behind host memory for somebody."""
        return bool(self._hauls)

    def prefix_of(self, tokens: Tokens, salt: str = "", adapter: Adapter | None = None) -> Prefix | None:
        """What KV of `tokens` may be shared under; None where nothing is shared."""
        if not self._prefix_cache and self.ladder is None:
            return None
        scope = self._scope if adapter is None else dataclasses.replace(self._scope, adapter="lora", adapter_version=adapter.digest)
        digest = dataclasses.replace(scope, salt=salt).digest()
        return Prefix(digest, prefix_keys(tokens, self.block_tokens, digest))

    def lease(self, owner: str, prefix: Prefix, earlier: Lease | None = None) -> Lease | None:
        """Find, and want, what colder tiers have of `prefix` behind what the device has; None where that is nothing. For any thread: what
        the device has is only looked at, and may be gone when the request is planned."""
        if self.ladder is None:
            return None
        num = len(self._pool.find(prefix.keys)) if self._prefix_cache else 0
        answered = earlier.parts if isinstance(earlier, HostLease) else ()
        return self.ladder.lease(prefix.keys, owner, num, answered) if num < len(prefix.keys) else None

    @property
    def may_prefetch(self) -> bool:
        """Whether `prefetch` would look: not while as much is being fetched as may be."""
        return self.ladder is not None and self.ladder.behind is not None and self.ladder.behind.may_fetch

    def prefetch(self, prefix: Prefix, owner: str, lease: Lease | None = None) -> Fetch | None:
        """Have what tiers behind host memory have of `prefix` read into host memory, before anybody has a table for it; None where nothing
        is to be read, or as much is under way as may be. `lease`: what they have answered about the same prefix before. It ends by itself:
        when all has come, when something does not, by a reset, at its deadline."""
        if self.ladder is None or not self.may_prefetch:
            return None
        parts = lease.parts if isinstance(lease, HostLease) else ()
        if lease is not None and not lease.expired and not any(part.finding.num for part in parts):
            return None
        num = len(self._pool.find(prefix.keys)) if self._prefix_cache else 0
        return self.ladder.prefetch(prefix.keys, owner, num, parts) if num < len(prefix.keys) else None

    def extend_prefix(self, prefix: Prefix, tokens: Sequence[int]) -> Prefix:
        """The same scope, with the keys of all full blocks of `tokens`, generated ones included. They begin with those that it covers."""
        keys = prefix.keys
        more = prefix_keys(tokens[len(keys) * self.block_tokens :], self.block_tokens, prefix.scope, keys[-1] if keys else None)
        return Prefix(prefix.scope, (*keys, *more))

    def match(self, keys: Sequence[bytes], lease: Lease | None = None, want: contract.Want | None = None) -> Match:
        """The longest run of leading `keys` on the device, and what of `lease` is worth promoting behind it; holds nothing, so it is good
        until the next call that draws. What `lease` has may go at any time, until it is claimed."""
        slots = self._pool.find(keys, want if isinstance(want, PoolWant) else None) if self._prefix_cache else []
        num, pending, num_colder = len(slots), self.is_pending(keys, want), 0
        if self.ladder is not None and lease is not None and not pending:
            if isinstance(lease, HostLease):
                self.ladder.host.refresh(lease)
                self.ladder.host.grow(lease)
            num_colder = self.ladder.worth(lease, num)
        return Match(num, self._pool.num_idle_of(slots), pending, num_colder)

    def want(self, keys: Sequence[bytes], rank: float, earlier: contract.Want | None = None) -> PoolWant | None:
        """What the device has of the leading `keys` is forgotten after all that nobody wants, in place of `earlier`."""
        if not self._prefix_cache:
            return None
        return self._pool.want_found(tuple(keys), rank, earlier if isinstance(earlier, PoolWant) else None)

    def end_want(self, want: contract.Want) -> None:
        """Idempotent."""
        if isinstance(want, PoolWant):
            self._pool.end_want(want)

    def start_s(self, num_tokens: int, match: Match) -> float | None:
        """How long a prompt of `num_tokens` takes to its first token when nothing else runs; None where nothing was measured."""
        if self.ladder is None:
            return None
        num_found = (match.num_blocks + match.num_colder) * self.block_tokens
        num_left = max(1, num_tokens - num_found)
        compute_s = self.prefill.seconds(num_left, num_tokens - num_left / 2)
        load_s = self.ladder.link.seconds(match.num_colder * self.ladder.block_bytes) if match.num_colder else 0.0
        return None if compute_s is None else compute_s + (load_s or 0.0)

    def claim(self, lease: Lease, first: int, num_blocks: int) -> bool:
        """What `lease` has of these blocks stays from now on. False: some of it has gone since the last match."""
        return self.ladder is not None and isinstance(lease, HostLease) and self.ladder.host.claim(lease, first, num_blocks)

    def make_room(self, num_blocks: int, floor: int, num_more: int = 0) -> bool:
        """Whether so many slots can be drawn without losing what only the device has. Where not, it is on its way to host memory, with
        `num_more` that would be next, and `floor` slots stay available meanwhile."""
        if self.ladder is None or not self._prefix_cache:
            return True
        return self.ladder.make_room(num_blocks, floor, self._tables, num_more)

    def free_up(self, num_blocks: int) -> None:
        """Up to so many slots are free from now on, as far as host memory has what is forgotten for it: what can be drawn now without
        losing anything can be drawn later, too."""
        num_short = num_blocks - self._pool.num_free
        if self.ladder is not None and self._prefix_cache and num_short > 0:
            self._pool.evict(self.ladder.num_safe(num_short))

    def is_pending(self, keys: Sequence[bytes], want: contract.Want | None = None) -> bool:
        """Whether the first of `keys` that the device does not have is on its way there: `match` would say so. Costs no more for a long
        prefix that was asked for before than for a short one."""
        num = len(self._pool.find(keys, want if isinstance(want, PoolWant) else None)) if self._prefix_cache else len(keys)
        return num < len(keys) and self._is_coming(num, keys[num])

    def _is_coming(self, number: int, key: bytes) -> bool:
        """Whether it pays to wait for `key`: somebody computes it, or it is promoted and not late. A key covers all before it, so it has
        the same number in whatever prefix it belongs to."""
        if any(table.announces(number, key) for table in self._announcing):
            return True
        loads: list[Promotion | Haul] = [*self._promoting, *self._hauls]
        found = (load for load in loads if 0 <= number - load.first < len(load.keys) and load.keys[number - load.first] == key)
        return any(not load.overdue for load in found)

    def stats(self) -> CacheStats:
        pool = self._pool
        return CacheStats(
            slots={"device": pool.counts, **({} if self.ladder is None else {"host": self.ladder.host.slots})},
            behind={name: tier.usage().as_dict() for name, tier in self.cold_tiers.items()},
            num_tables=len(self._tables),
            num_keys=pool.num_keys,
            hits_total=self._num_hits,
            misses_total=self._num_misses,
            evictions_total=pool.num_evicted,
            duplicate_seals_total=pool.num_duplicates,
            promoted_total=self._num_promoted,
        )

    def traffic(self) -> Traffic | None:
        """What moves between tiers; None where there is only the device."""
        return None if self.ladder is None else self.ladder.traffic()

    def newest_save(self) -> Settling | None:
        """When it is settled, everything sealed so far is in the host tier or was skipped; None: it is so already."""
        if self.ladder is None:
            return None
        self.ladder.submit_saves()
        return self.ladder.newest_save()

    def persist(self) -> Persisting | None:
        """Have everything sealed so far written to the first tier behind host memory, and made safe there; None: there is no such tier."""
        if self.ladder is None or self.ladder.behind is None:
            return None
        return self.ladder.behind.persist(self.newest_save())

    def call_when_launched(self, wake: Callable[[], None]) -> None:
        """`wake` is called, from another thread, when a transfer has got further."""
        if self.ladder is not None:
            self.ladder.call_when_launched(wake)

    # ---------------------------------------------------------------------------------------------------------- tables

    def open(self, owner: str, prefix: Prefix | None, num_blocks: int) -> BlockTable:
        """A table that starts with the first `num_blocks` cached blocks of `prefix`; its other keys are announced as pending."""
        keys: Sequence[bytes] = () if prefix is None else prefix.keys
        slots = self._pool.find(keys)[:num_blocks]
        if len(slots) != num_blocks or (num_blocks and not self._prefix_cache):
            raise InvariantBroken(f"{owner!r} opens a table with {num_blocks} cached blocks, of which {len(slots)} are here")
        hold = self._pool.hold(owner, slots)
        shared = prefix if self._prefix_cache or self.ladder is not None else None
        table = BlockTable(hold, self.block_tokens, shared, num_blocks)
        if table.is_announcing:
            self._announcing.add(table)
        self._num_hits += num_blocks
        self._num_misses += len(keys) - num_blocks
        self._tables.add(table)
        return table

    def try_extend(self, table: Table, num_blocks: int) -> bool:
        """Draw `num_blocks` more slots, or change nothing and say False."""
        own = self._own(table)
        reservation = self._pool.try_reserve(num_blocks, own.owner)
        if reservation is None:
            return False
        reservation.commit(own.hold)
        own.add_after(reservation.after)
        return True

    def promote(self, table: Table, lease: Lease, num_blocks: int, num_next: int) -> Promotion | Haul:
        """Draw slots for the next `num_blocks` blocks of `table` and have them filled from `lease`, which ends with the load."""
        own = self._own(table)
        if self.ladder is None or not isinstance(lease, HostLease):
            raise InvariantBroken(f"{own.owner!r} promotes, and there is no colder tier")
        first = own.num_slots
        reservation = self._pool.try_reserve(num_blocks, own.owner)
        if reservation is None:
            raise InvariantBroken(f"{own.owner!r} promotes {num_blocks} blocks without room for them")
        reservation.commit(own.hold)
        num_whole = min(first + num_blocks, lease.num_tokens // self.block_tokens)  # a tail that was saved half full gets no key
        keys = () if own.prefix is None else own.prefix.keys[first:num_whole]
        tier, num_same = lease.runs_from(first)[0]
        if tier != HOST or num_same < num_blocks:
            return self._haul(own, first, lease, keys, reservation.after)
        pin = self._pool.pin_run(own.hold, first, num_blocks, own.owner)
        promotion = self.ladder.promote(pin, reservation.after, lease, keys, num_next)
        self._promoting[promotion] = own
        return promotion

    def promote_ahead(self, owner: str, prefix: Prefix, first: int, num_blocks: int) -> Promotion | None:
        """Have up to `num_blocks` blocks of `prefix` from number `first` on copied from host memory into free slots, before `owner` has a
        table for them; None where host memory has none of them, or there is nothing to leave them in. They are idle blocks when they have
        landed, whatever has become of `owner`."""
        if self.ladder is None or not self._prefix_cache:
            return None
        keys = prefix.keys[first : first + min(num_blocks, self._pool.num_free)]
        kept = self.ladder.host.pin_run(keys, owner)
        if kept is None:
            return None
        num_blocks = len(kept.run)
        reservation = self._pool.try_reserve(num_blocks, owner)
        if reservation is None:
            raise InvariantBroken(f"{num_blocks} free slots of the device cannot be drawn")
        table = BlockTable(self._pool.hold(owner), self.block_tokens, None, 0)
        reservation.commit(table.hold)
        pin = self._pool.pin_run(table.hold, 0, num_blocks, owner)
        table.hold.end()  # from here on the transfer alone has the slots
        promotion = self.ladder.promote_ahead(pin, reservation.after, kept, keys[:num_blocks], first)
        self._promoting[promotion] = table
        return promotion

    def _haul(self, own: BlockTable, first: int, lease: HostLease, keys: Sequence[bytes], after: tuple[Fence, ...]) -> Haul:
        if self.ladder is None:
            raise InvariantBroken(f"{own.owner!r} promotes, and there is no colder tier")
        haul = self.ladder.haul(own.hold, first, lease, keys, after)
        self._hauls[haul] = own
        self._note_parts(haul, own)
        return haul

    def _is_loading(self, own: BlockTable) -> bool:
        return own in self._promoting.values() or any(one is own and not haul.settled for haul, one in self._hauls.items())

    def seal(self, table: Table, tokens: Sequence[int], num_computed: int, fence: Fence | None) -> None:
        """Every block that lies fully inside the first `num_computed` of `tokens` is computed: give it its key, and demote it."""
        own = self._own(table)
        num_full = num_computed // own.block_tokens
        if own.prefix is None or num_full <= own.num_keyed:
            return
        if self._is_loading(own):
            raise InvariantBroken(f"{own.owner!r} seals blocks while some before them are still on their way")
        first = own.num_keyed
        keys = own.next_keys(tokens, num_full)
        self._give_keys(own, first, keys)
        if self.ladder is not None:
            self.ladder.offer(own.hold, first, keys, fence)

    def retract(self, table: Table, num_tokens: int, fence: Fence | None) -> Lease | None:
        """End the table, saving the KV of its first `num_tokens` tokens to a colder tier where there is one."""
        own = self._own(table)
        lease: Lease | None = None
        num_tokens = max(num_tokens, own.num_keyed * own.block_tokens)  # a full match is there to its end, though its last token is due
        num_blocks = -(-num_tokens // own.block_tokens)
        # What is still being promoted into the table is in the colder tier, whose lease has ended: it is matched again.
        if self.ladder is not None and num_tokens and not self._is_loading(own):
            lease = self.ladder.save(own.hold, num_blocks, own.sealed_keys, num_tokens, fence)
        self.release(table, fence)
        return lease

    def release(self, table: Table, fence: Fence | None) -> None:
        """End the table. `fence` covers the last use of its slots and travels with them."""
        own = self._own(table)
        own.hold.end(fence)
        self._tables.remove(own)
        self._announcing.discard(own)

    def _give_keys(self, own: BlockTable, first: int, keys: Sequence[bytes]) -> None:
        """Blocks `first..` of `own` are whole. In a cache that reuses nothing on the device the keys are only for colder tiers."""
        if self._prefix_cache:
            slots = own.hold.first(first + len(keys))[first:]
            self._pool.seal(slots, keys, range(first, first + len(keys)))
        own.advance(keys)
        if not own.is_announcing:
            self._announcing.discard(own)

    # ------------------------------------------------------------------------------------------------------- colder tiers

    def submit_saves(self) -> None:
        """Demote what was sealed since the last call."""
        if self.ladder is not None:
            self.ladder.submit_saves()

    def settle(self) -> bool:
        """Take in transfers that are over; says whether there were any."""
        if self.ladder is None:
            return False
        before = self.ladder.num_in_flight
        for promotion in self.ladder.settle():
            own = self._promoting.pop(promotion)
            if promotion.error() is None:
                self._land(promotion, own)
                self._num_promoted += promotion.num_blocks
            else:  # the slots are computed instead: by whoever has the table, after those whom the copy was to wait for
                own.add_after(tuple(promotion.after))
            for pin in promotion.pins:
                pin.end()
        changed = self.ladder.settle_behind()
        for haul, own in list(self._hauls.items()):
            self._note_parts(haul, own)
        return changed or self.ladder.num_in_flight != before

    def _note_parts(self, haul: Haul, own: BlockTable) -> None:
        """What it has sent is under way; where it has ended short, the slots behind are computed, after their earlier users."""
        for part in haul.parts:
            if not part.settled:
                self._promoting[part] = own
        if haul.settled and not haul.told:
            haul.told = True
            if own in self._tables and haul.limit < len(haul.keys):
                own.add_after(haul.after)
        if haul.over:
            del self._hauls[haul]

    def _land(self, promotion: Promotion, own: BlockTable) -> None:
        """The bytes are there: they get their keys. The table may have ended meanwhile; then they stay as idle blocks. So they do where
        what belongs before them has not come: the table computes it, and goes on from there."""
        if own in self._tables and own.num_keyed == promotion.first:
            self._give_keys(own, own.num_keyed, promotion.keys)
        elif own not in self._tables and self._prefix_cache:
            slots = promotion.pins[0].array[: len(promotion.keys)]
            self._pool.seal(slots, promotion.keys, range(promotion.first, promotion.first + len(slots)))

    # ----------------------------------------------------------------------------------------------------------- sessions

    def forget(self, keys: Sequence[bytes]) -> int:
        """Forget these blocks in device and host memory, but for those that a table holds; returns how many copies. What a lease or a
        transfer still reads stays until it is done."""
        placed = zip(keys, self._pool.find_each(keys), strict=True)
        unheld = [(key, slot) for key, slot in placed if slot == ABSENT or not self._pool.is_held(slot)]
        num_copies = self._pool.forget([slot for _, slot in unheld if slot != ABSENT])
        return num_copies if self.ladder is None else num_copies + self.ladder.host.forget([key for key, _ in unheld])

    def retain(self, prefix: Prefix, rank: float) -> Retention:
        """Blocks of `prefix` in memory are forgotten after all that nobody wants, of wanted ones those of the greatest rank first."""
        return Retention(self, prefix, rank)

    def pin(self, slots: Sequence[int], owner: str) -> Pin:
        """Protect `slots` for a transfer, whatever becomes of the tables that hold them."""
        return self._pool.pin(slots, owner)

    # ------------------------------------------------------------------------------------------------------------- end

    def reset(self, tiers: Iterable[str] = ("device", "host")) -> dict[str, int]:
        """Forget every block in memory that nobody uses; returns how many, by tier."""
        forgotten, wanted = {}, frozenset(tiers)
        if self.ladder is not None and self.ladder.behind is not None and not wanted.isdisjoint(("host", *self.cold_tiers)):
            self.ladder.behind.end_fetches(keeps=False)  # what is forgotten does not come back by itself
        if "device" in wanted:
            for promotion, own in self._promoting.items():
                if own not in self._tables:  # nobody has them: what is forgotten does not come back by itself
                    promotion.keys = ()
            forgotten["device"] = self._pool.evict(self._pool.num_slots)
        if "host" in wanted and self.ladder is not None:
            forgotten["host"] = self.ladder.host.reset()
        return forgotten

    def begin_reset(self, tiers: Iterable[str]) -> Resetting:
        """As `reset`, and have disks and stores forget everything, in order with what is written to them."""
        wanted, behind = frozenset(tiers), None if self.ladder is None else self.ladder.behind
        memory = self.reset(wanted)
        return Resetting(memory, {} if behind is None else {name: behind.reset(name) for name in behind.tiers if name in wanted})

    def check(self) -> None:
        """Recount; raises where the books do not add up."""
        self._pool.check()
        announcing = {table for table in self._tables if table.is_announcing}
        if announcing != self._announcing:
            raise InvariantBroken(f"{len(self._announcing)} tables are booked as announcing keys, and {len(announcing)} open ones do")
        if self.ladder is not None:
            self.ladder.check()

    def tell_balance(self, observer: EngineObserver) -> None:
        """How many slots of each pool are in each state, between two turns."""
        observer.balanced(self._pool.name, self._pool.counts._asdict())
        if self.ladder is not None:
            self.ladder.host.tell_balance(observer)

    def drain(self, timeout_s: float, slots: Sequence[int] | None = None) -> None:
        """Block until nothing that was taken on touches one of the device's `slots` any more, launched or not, and settle; without
        `slots` until nothing is under way in any tier. Raises DeadlineExceeded where that takes longer."""
        if self.ladder is None:
            return
        deadline_s = time.monotonic() + timeout_s
        while True:
            self.ladder.drain(max(0.0, deadline_s - time.monotonic()), slots)
            self.settle()
            if not self.ladder.is_touched(slots) and (slots is not None or not self.num_behind):
                return
            if time.monotonic() > deadline_s:  # what was read is sent on, and what has landed may have set off a write
                raise DeadlineExceeded(f"transfers are still under way after {timeout_s:g} s")

    def close(self, timeout_s: float | None = None) -> None:
        """Idempotent. Transfers end first: raises DeadlineExceeded where they do not, and Leaked while a table, pin or lease is out."""
        if self.ladder is not None and not self._closed:
            by_s = time.monotonic() + (_CLOSE_S if timeout_s is None else timeout_s)
            if self.ladder.behind is not None:
                self.ladder.behind.end_fetches()
            self.drain(by_s - time.monotonic())
            self.ladder.close(max(_GRACE_S, by_s - time.monotonic()))
        self._closed = True
        self._pool.close()

    def _own(self, table: Table) -> BlockTable:
        if isinstance(table, BlockTable):
            if table in self._tables:
                return table
            table.hold.require_open()
        raise InvariantBroken(f"a {type(table).__name__} is no table of this cache")
