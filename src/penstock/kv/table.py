"""The table of a request: the operations on its blocks while it is open, and how it ends. Owns the set of a
cache's open tables, and the kept blocks of ended ones. Slots belong to the pool, transfers to loads and
saves.

A table's slots are active from the moment they are drawn: "active" means that a table holds them. The key
says that the content can be trusted: `seal` gives it after the block is computed, `KvCache.settle` after it
is promoted. Without a key no other request sees the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.contract import Fence, Lease, Prefix
from penstock.errors import InvariantBroken
from penstock.kv.blocks.handles import Hold, Pin
from penstock.kv.blocks.key import block_key, private_scope, token_bytes
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.events import KvReports
from penstock.kv.rules import PrefixRule
from penstock.kv.tiers.host import HostLease
from penstock.kv.tiers.loads import BlockLoad
from penstock.kv.tiers.tiers import Tiers


class KeptClosed(NamedTuple):
    """Blocks of a closed scope that outlive their table."""

    keys: Sequence[bytes]
    # The key of the block before them, in the shared scope. Without that block they are useless.
    root: bytes | None


class OpenTables:
    """The open tables of one cache, and the pools that they draw from. `reuses`: blocks of the device are
    found by their keys."""

    def __init__(
        self,
        pool: BlockPool,
        tiers: Tiers,
        rule: PrefixRule,
        block_tokens: int,
        reuses: bool,
        reports: KvReports | None = None,
    ) -> None:
        self.pool = pool
        self.reports = reports
        self.rule = rule
        self.host, self.writeback = tiers.host, tiers.writeback
        self.saves, self.loads = tiers.saves, tiers.loads
        self.block_tokens = block_tokens
        self.reuses = reuses
        self.shares = reuses or self.host.num_slots > 0  # one request's blocks can serve another
        self.num_hits = 0  # blocks that tables were opened with
        self.num_misses = 0  # prompt blocks with a key that were missing at opening
        self.open: dict[Hold, BlockTable] = {}
        self.announcing: set[BlockTable] = set()  # tables that will still seal keys of their prompts
        self.kept: dict[bytes, KeptClosed] = {}  # kept blocks of tables with a closed scope, by name

    def add(
        self, hold: Hold, prefix: Prefix | None, num_matched: int, is_deep: bool, paged: Pin | None
    ) -> BlockTable:
        """A new table, which begins with the first `num_matched` blocks of its prompt, in slots of `hold` or,
        under the pin `paged`, in host memory."""
        self.num_hits += len(hold.run) + (0 if paged is None else len(paged.run))
        self.num_misses += 0 if prefix is None else len(prefix.keys) - num_matched
        table = self.open[hold] = BlockTable(
            self, hold, prefix if self.shares else None, num_matched, is_deep
        )
        if paged is not None:
            table.add_paged(paged)
        if table.is_announcing:
            self.announcing.add(table)
        return table

    def announces(self, number: int, key: bytes) -> bool:
        """Whether one of them will seal this block of its prompt."""
        return any(table.announces(number, key) for table in self.announcing)

    def unname(self, keys: Sequence[bytes]) -> None:
        """Drop the names of kept runs that end with one of `keys`."""
        gone = set(keys)
        self.kept = {name: kept for name, kept in self.kept.items() if kept.keys[-1] not in gone}

    def take_kept(self, keys: Sequence[bytes]) -> list[bytes]:
        """Keys of blocks kept under one of `keys`, or following one of them. They are kept no longer."""
        gone = set(keys)
        names = [name for name, kept in self.kept.items() if name in gone or kept.root in gone]
        return [key for name in names for key in self.kept.pop(name).keys]

    def forget_unshared(self, keys: Sequence[bytes]) -> int:
        """Forget what has these keys of closed scopes. Returns how many blocks are forgotten now; the others
        are forgotten when they land."""
        if (states := self.rule.states) is not None:
            states.forget_unshared(keys)
        return self.writeback.end_unshared(keys)

    def give_way(self, num_blocks: int) -> None:
        """Evict up to `num_blocks` blocks from host memory that tables hold on the device. They are saved
        again when they leave the device."""
        for table in self.open.values():
            if num_blocks <= 0:
                return
            if table.is_deep:
                continue
            first = max(table.num_alone, table.num_gone)  # the device may not have those before
            num = self.host.give_way(table.sealed_keys[first:], num_blocks)
            num_blocks -= num
            if num_blocks > 0:
                table.num_alone = table.num_keyed

    def check(self) -> None:
        """Raises if the books do not add up."""
        announcing = {table for table in self.open.values() if table.is_announcing}
        if announcing != self.announcing:
            raise InvariantBroken(
                f"{len(self.announcing)} tables are booked as announcing keys, and {len(announcing)} open "
                "ones do"
            )


class FetchedRun:
    """Implements `contract.FetchedBlocks`: slots that only this request reads, and the copy that fills
    them."""

    __slots__ = ("_table", "hold", "load")

    def __init__(self, table: BlockTable, hold: Hold, load: BlockLoad) -> None:
        self._table = table
        self.hold = hold
        self.load = load

    @property
    def slots(self) -> NDArray[np.int32]:
        return self.hold.first(self.hold.num_slots)

    @property
    def settled(self) -> bool:
        return self.load.settled

    @property
    def failed(self) -> bool:
        return self.load.error() is not None

    def end(self, fence: Fence | None) -> None:
        table = self._table
        table.hold.require_open()
        if self not in table.fetched or not self.settled:
            raise InvariantBroken(
                f"{table.owner!r} drops blocks that it has not fetched, or that are still on their way"
            )
        table.fetched.remove(self)
        table.num_fetched -= self.hold.num_slots
        self.hold.end(fence)


class BlockTable:
    """Implements `contract.Table`, which documents its calls. Grows while the request runs. Blocks
    `0..num_keyed` are sealed, by this request or by the one that computed them."""

    __slots__ = (
        *(
            "_tables",
            "block_tokens",
            "fetched",
            "hold",
            "is_deep",
            "num_alone",
            "num_fetched",
            "num_kept",
            "num_shared",
            "own_scope",
        ),
        *("owner", "paged_pins", "paged_slots", "prefix", "sealed_keys"),
    )

    def __init__(
        self, tables: OpenTables, hold: Hold, prefix: Prefix | None, num_matched: int, is_deep: bool
    ) -> None:
        self._tables = tables
        self.hold = hold
        self.owner = hold.owner
        self.block_tokens = tables.block_tokens
        self.prefix = prefix  # None: its blocks never get a key
        self.sealed_keys = [] if prefix is None else list(prefix.keys[:num_matched])
        self.num_alone = 0  # leading blocks that host memory was asked to evict
        self.is_deep = is_deep  # only its last blocks are on the device; earlier ones are in host memory
        self.paged_pins: list[Pin] = []  # of host memory, in token order
        self.fetched: set[FetchedRun] = set()
        self.num_fetched = 0  # blocks in those
        # scope of the keys from block `num_shared` on; None: the shared scope
        self.own_scope: bytes | None = None
        self.num_shared = 0
        # leading blocks that outlive the table though they are in its own scope
        self.num_kept = 0
        # Host slots of its leading blocks that are not on the device. Replaced as a whole, never changed.
        self.paged_slots: NDArray[np.int32] = np.empty(0, np.int32)

    # ---------------------------------------------------------------------------------------------- questions

    @property
    def num_slots(self) -> int:
        return self.hold.num_slots

    @property
    def num_paged(self) -> int:
        return self.paged_slots.size

    @property
    def num_gone(self) -> int:
        return self.hold.num_dropped - self.paged_slots.size

    @property
    def num_keyed(self) -> int:
        return len(self.sealed_keys)

    @property
    def is_announcing(self) -> bool:
        """Whether it will still seal keys of its prompt."""
        return self.prefix is not None and self.num_keyed < len(self.prefix.keys)

    def announces(self, number: int, key: bytes) -> bool:
        """Whether block `number` of its prompt has `key` and is not sealed yet."""
        return (
            self.prefix is not None
            and self.num_keyed <= number < len(self.prefix.keys)
            and self.prefix.keys[number] == key
        )

    def slots(self, num_tokens: int) -> NDArray[np.int32]:
        """Read-only; its content never changes."""
        self.hold.require_open()
        return self.hold.first(-(-num_tokens // self.block_tokens))[self.hold.num_dropped :]

    def take_after(self) -> tuple[Fence, ...]:
        hold = self.hold
        after, hold.after = hold.after, ()
        return after

    # --------------------------------------------------------------------------------------------------- grow

    def try_extend(self, num_blocks: int) -> bool:
        hold = self.hold
        hold.require_open()
        reservation = self._tables.pool.try_reserve(num_blocks, self.owner)
        if reservation is None:
            return False
        reservation.commit(hold)
        hold.add_after(reservation.after)
        return True

    def promote(self, lease: Lease, num_blocks: int, num_next: int) -> BlockLoad:
        hold = self.hold
        hold.require_open()
        if not isinstance(lease, HostLease):
            raise InvariantBroken(f"{self.owner!r} promotes, and there is no colder tier")
        first = hold.num_slots
        reservation = self._tables.pool.try_reserve(num_blocks, self.owner)
        if reservation is None:
            raise InvariantBroken(f"{self.owner!r} promotes {num_blocks} blocks without room for them")
        reservation.commit(hold)
        # an unfinished block that was saved gets no key
        num_whole = min(first + num_blocks, lease.num_tokens // self.block_tokens)
        keys = () if self.prefix is None else self.prefix.keys[first:num_whole]
        return self._tables.loads.begin(hold, first, lease, keys, reservation.after, num_next)

    def let_go(self, num_tokens: int, fence: Fence | None) -> int:
        end = self._tables.rule.first_block(num_tokens)
        if self.prefix is not None:
            end = min(end, self.num_keyed)  # blocks that are not sealed yet would be lost to later requests
        num = end - self.hold.num_dropped
        if num <= 0:
            return 0
        self.hold.drop_first(num, fence)
        return num

    # --------------------------------------------------------------------------------------------------- keys

    def seal(self, tokens: Sequence[int], num_computed: int, fence: Fence | None) -> None:
        hold, tables = self.hold, self._tables
        hold.require_open()
        num_full = num_computed // self.block_tokens
        if self.prefix is None or num_full <= self.num_keyed:
            return
        if tables.loads.in_flight and tables.loads.is_loading(hold):
            raise InvariantBroken(
                f"{self.owner!r} seals blocks while some before them are still on their way"
            )
        first = self.num_keyed
        keys = self.next_keys(tokens, num_full)
        if self.own_scope is not None:
            tables.writeback.begin_unshared(keys[max(0, self.num_shared - first) :])
        elif tables.reports is not None:
            self._tell_new(tables.reports, keys, tokens)
        self.give_keys(keys)
        tables.saves.offer(hold, first, keys, fence, self.is_deep)

    def _tell_new(self, reports: KvReports, keys: Sequence[bytes], tokens: Sequence[int]) -> None:
        """The next blocks have `keys`; those after its prompt hold tokens that only it knows."""
        assert self.prefix is not None
        first, size = self.num_keyed, self.block_tokens
        start = max(first, len(self.prefix.keys))
        new = keys[start - first :]
        if new:
            parent = keys[start - first - 1] if start > first else self.sealed_keys[-1] if first else None
            tokens = tokens[start * size : (start + len(new)) * size]
            reports.tell(self.prefix.scope, parent, new, token_bytes(tokens))

    def next_keys(self, tokens: Sequence[int], num_full: int) -> list[bytes]:
        """Keys of blocks `num_keyed..num_full`. The prompt's keys are known; generated tokens continue the
        chain."""
        if self.prefix is None or len(tokens) < num_full * self.block_tokens:
            raise InvariantBroken(
                f"table of {self.owner!r} has no keys for {num_full} blocks of {len(tokens)} tokens"
            )
        keys = list(self.prefix.keys[self.num_keyed : num_full])
        last = keys[-1] if keys else self.sealed_keys[-1] if self.sealed_keys else None
        for block in range(self.num_keyed + len(keys), num_full):
            scope = self.prefix.scope if self.own_scope is None or block < self.num_shared else self.own_scope
            last = block_key(last, tokens[block * self.block_tokens : (block + 1) * self.block_tokens], scope)
            keys.append(last)
        return keys

    def give_keys(self, keys: Sequence[bytes]) -> None:
        """Its next blocks are full. If the device reuses nothing, the keys serve colder tiers only."""
        first, end = self.num_keyed, self.num_keyed + len(keys)
        if self._tables.reuses:
            self._tables.pool.seal(self.hold.first(end)[first:], keys, range(first, end))
        self.sealed_keys += keys
        if not self.is_announcing:
            self._tables.announcing.discard(self)

    def close_scope(self, num_tokens: int) -> None:
        """Its later blocks get keys of a scope that no other request has, and are forgotten with the
        table."""
        self.hold.require_open()
        if self.own_scope is None:
            self.own_scope, self.num_shared = private_scope(), num_tokens // self.block_tokens

    def keep_closed(self, name: bytes, first: int, end: int) -> None:
        self.hold.require_open()
        self.num_kept, keys = end, self.sealed_keys[first:end]
        self._tables.unname(keys)  # the kept run that this table continued is now part of this one
        if keys:
            self._tables.kept[name] = KeptClosed(keys, self.sealed_keys[first - 1] if first else None)

    # ---------------------------------------------------------------------------------------------- paged out

    def add_paged(self, pin: Pin) -> None:
        """The next leading blocks are in host memory, under `pin`."""
        self.paged_pins.append(pin)
        self.paged_slots = np.concatenate((self.paged_slots, pin.run.astype(np.int32)))

    def page_out(self, num_blocks: int, fence: Fence | None, unit: int = 1) -> int:
        """Skips blocks that a transfer uses. Blocks that host memory lacks are being saved when this
        returns."""
        hold, host, saves = self.hold, self._tables.host, self._tables.saves
        hold.require_open()
        first = self.num_paged
        end = min(first + num_blocks, self.num_keyed)
        in_use = np.flatnonzero(self._tables.pool.book.pins[hold.first(end)[first:]])
        keys = self.sealed_keys[first : first + in_use[0] if in_use.size else end]
        pin = host.pin_run(keys, self.owner, unit) if keys else None
        num = 0 if pin is None else len(pin.run)
        if pin is not None:
            self.add_paged(pin)
            hold.drop_first(num, fence)
        if num < len(keys):  # a save failed or was not made; save again
            num_here = num + host.num_leading(keys[num:])
            absent = host.absent(keys[num_here:])
            missing = absent.index(False) if False in absent else len(absent)
            if missing:
                saves.offer(hold, first + num_here, keys[num_here : num_here + missing], fence, due=True)
                saves.submit()  # the next step may come too late
        return num

    def fetch(self, firsts: Sequence[int], num_blocks: int) -> list[FetchedRun]:
        """One copy for all runs: launch and completion cost more than the bytes. The blocks get no key on the
        device; only this table uses them."""
        self.hold.require_open()
        pool, owner = self._tables.pool, self.owner
        if firsts and max(firsts) + num_blocks > self.num_paged:
            raise InvariantBroken(
                f"{owner!r} fetches blocks up to {max(firsts) + num_blocks}, of which {self.num_paged} were "
                "paged out"
            )
        reservation = pool.try_reserve(len(firsts) * num_blocks, owner) if firsts else None
        if reservation is None:
            return []
        after, holds = reservation.after, []
        for number in range(len(firsts)):
            holds.append(pool.hold(owner))
            (reservation if number == len(firsts) - 1 else reservation.split(num_blocks)).commit(holds[-1])
        kept = self._tables.host.pool.pin(
            np.concatenate([self.paged_slots[first : first + num_blocks] for first in firsts]), owner
        )
        try:
            load = self._tables.loads.begin_whole(holds, kept, after)
        except BaseException:
            for hold in holds:
                hold.end()
            raise
        fetched = [FetchedRun(self, hold, load) for hold in holds]
        self.fetched.update(fetched)
        self.num_fetched += len(firsts) * num_blocks
        return fetched

    # ---------------------------------------------------------------------------------------------------- end

    def retract(self, num_tokens: int, fence: Fence | None) -> Lease | None:
        hold, tables = self.hold, self._tables
        hold.require_open()
        lease: Lease | None = None
        # after a full match all KV is there, though the last token is still due
        num_tokens = max(num_tokens, self.num_keyed * self.block_tokens)
        # Blocks still being promoted are in the colder tier, and their lease has ended: they are matched
        # again. So are a deep request's paged-out blocks.
        if num_tokens and not self.is_deep and not tables.loads.is_loading(hold):
            lease = tables.saves.retract(
                hold, -(-num_tokens // self.block_tokens), self.sealed_keys, num_tokens, fence
            )
        self.release(fence)
        return lease

    def release(self, fence: Fence | None) -> None:
        hold, tables = self.hold, self._tables
        hold.require_open()
        for fetched in self.fetched:
            fetched.hold.end(fence)
        if self.own_scope is not None:
            self._forget_own()
        hold.end(fence)
        for pin in self.paged_pins:
            pin.end(fence)
        del tables.open[hold]
        tables.announcing.discard(self)

    def _forget_own(self) -> None:
        """No request can find the blocks of its own scope. Kept ones are in host memory, or on their way
        there."""
        first = max(self.num_shared, self.num_paged)
        self._tables.pool.forget(self.hold.first(max(first, self.num_keyed))[first:].tolist())
        self._tables.forget_unshared(self.sealed_keys[max(self.num_shared, self.num_kept) :])
