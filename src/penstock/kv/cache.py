"""The door to KV storage: matches, opens, grows, seals and releases the tables of requests. Owns a pool and pending keys, no bytes.

A table's slots are active from the moment they are drawn: "active" says that a table holds them. That their content can be trusted
is said by the key, which `seal` gives after the block is computed; without one nobody else ever sees the block.

All calls come from the engine thread and none blocks; `prefix_of` alone reads nothing that changes and may be called from anywhere.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

from penstock.contract import Fence, Match, Prefix, Table
from penstock.errors import InvariantBroken
from penstock.kv.blocks.handles import Pin
from penstock.kv.blocks.key import Scope, prefix_keys
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.blocks.slots import SlotCounts
from penstock.kv.blocks.table import BlockTable

_NO_MATCH = Match(num_blocks=0, num_idle=0, pending=False)


@dataclasses.dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts at one moment, in blocks; the totals never fall."""

    slots: SlotCounts
    num_tables: int
    num_keys: int
    num_pending: int  # keys that open tables have announced and not sealed
    hits_total: int  # blocks that tables were opened with
    misses_total: int  # prompt blocks with a key that tables were opened without
    evictions_total: int
    duplicate_seals_total: int


class KvCache:
    """Implements `contract.KvLedger` over one pool."""

    def __init__(self, pool: BlockPool, scope: Scope, prefix_cache: bool = True) -> None:
        self._pool = pool
        self._scope = scope
        self._prefix_cache = prefix_cache
        self._pending: dict[bytes, int] = {}  # how many open tables announce the key
        self._tables: set[BlockTable] = set()  # those that are open
        self._num_hits = 0
        self._num_misses = 0

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

    def prefix_of(self, tokens: Sequence[int], salt: str = "") -> Prefix | None:
        """What KV of `tokens` may be shared under; None where nothing is shared."""
        if not self._prefix_cache:
            return None
        scope = dataclasses.replace(self._scope, salt=salt).digest()
        return Prefix(scope, prefix_keys(tokens, self.block_tokens, scope))

    def extend_prefix(self, prefix: Prefix, tokens: Sequence[int]) -> Prefix:
        """The same scope, with the keys of all full blocks of `tokens`, generated ones included."""
        return Prefix(prefix.scope, prefix_keys(tokens, self.block_tokens, prefix.scope))

    def match(self, keys: Sequence[bytes]) -> Match:
        """The longest run of leading `keys` that are here; holds nothing, so it is good until the next call that draws."""
        if not self._prefix_cache or not keys:
            return _NO_MATCH
        slots = self._pool.find(keys)
        pending = len(slots) < len(keys) and keys[len(slots)] in self._pending
        return Match(len(slots), self._pool.num_idle_of(slots), pending)

    def stats(self) -> CacheStats:
        pool = self._pool
        return CacheStats(
            slots=pool.counts,
            num_tables=len(self._tables),
            num_keys=pool.num_keys,
            num_pending=len(self._pending),
            hits_total=self._num_hits,
            misses_total=self._num_misses,
            evictions_total=pool.num_evicted,
            duplicate_seals_total=pool.num_duplicates,
        )

    # ---------------------------------------------------------------------------------------------------------- tables

    def open(self, owner: str, prefix: Prefix | None, num_blocks: int) -> BlockTable:
        """A table that starts with the first `num_blocks` cached blocks of `prefix`; its other keys are announced as pending."""
        shared = prefix if self._prefix_cache else None
        keys: Sequence[bytes] = () if shared is None else shared.keys
        slots = self._pool.find(keys[:num_blocks])
        if len(slots) != num_blocks:
            raise InvariantBroken(f"{owner!r} opens a table with {num_blocks} cached blocks, of which {len(slots)} are here")
        hold = self._pool.hold(owner, slots)
        self._announce(keys[num_blocks:])
        self._num_hits += num_blocks
        self._num_misses += len(keys) - num_blocks
        table = BlockTable(hold, self.block_tokens, shared, num_blocks)
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

    def seal(self, table: Table, tokens: Sequence[int], num_computed: int) -> None:
        """Every block that lies fully inside the first `num_computed` of `tokens` is computed: give it its key."""
        own = self._own(table)
        num_full = num_computed // own.block_tokens
        if own.prefix is None or num_full <= own.num_keyed:
            return
        first = own.num_keyed
        slots = own.hold.first(num_full)[first:].tolist()
        keys = own.next_keys(tokens, num_full)
        self._pool.seal(slots, keys)
        self._withdraw(own.prefix.keys[first:num_full])
        own.advance(keys)

    def release(self, table: Table, fence: Fence | None) -> None:
        """End the table. `fence` covers the last use of its slots and travels with them."""
        own = self._own(table)
        own.hold.end(fence)
        self._tables.remove(own)
        self._withdraw(own.announced)

    def pin(self, slots: Sequence[int], owner: str) -> Pin:
        """Protect `slots` for a transfer, whatever becomes of the tables that hold them."""
        return self._pool.pin(slots, owner)

    # ------------------------------------------------------------------------------------------------------------- end

    def reset(self) -> int:
        """Forget every block that nobody uses; returns how many."""
        return self._pool.evict(self._pool.num_slots)

    def check(self) -> None:
        """Recount; raises where the books do not add up."""
        self._pool.check()
        announced = Counter(key for table in self._tables for key in table.announced)
        if announced != self._pending:
            raise InvariantBroken(f"{len(self._pending)} keys are booked as pending, and {len(announced)} are announced by open tables")

    def close(self) -> None:
        """Idempotent. Raises Leaked while a table or pin is out."""
        self._pool.close()

    def _announce(self, keys: Iterable[bytes]) -> None:
        pending = self._pending
        for key in keys:
            pending[key] = pending.get(key, 0) + 1

    def _withdraw(self, keys: Iterable[bytes]) -> None:
        pending = self._pending
        for key in keys:
            num = pending.pop(key)
            if num > 1:
                pending[key] = num - 1

    def _own(self, table: Table) -> BlockTable:
        if isinstance(table, BlockTable):
            if table in self._tables:
                return table
            table.hold.require_open()
        raise InvariantBroken(f"a {type(table).__name__} is no table of this cache")
