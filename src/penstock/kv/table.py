"""The table of a request: what is done to its blocks while it is open, and how it ends. Owns which tables of
a cache are open, and what is kept of those that have ended; the slots are the pool's, and what is under way
belongs to loads and saves.

A table's slots are active from the moment they are drawn: "active" says that a table holds them. That their
content can be trusted is said by the key, which `seal` gives after the block is computed and `KvCache.settle`
after it is promoted; without one no other request ever sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.contract import Fence, Lease, Prefix
from penstock.errors import InvariantBroken
from penstock.kv.blocks.handles import Hold, Pin
from penstock.kv.blocks.key import block_key, private_scope
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.tiers.host import HostLease
from penstock.kv.tiers.loads import BlockLoad, Loads


class KeptClosed(NamedTuple):
    """Blocks of a closed scope that outlive their table."""

    keys: Sequence[bytes]
    # the key of the block before them, which anybody may find: without it they are of no use
    root: bytes | None


class OpenTables:
    """Those of one cache, with what they all draw from. `reuses`: blocks of the device are found under their
    keys."""

    def __init__(self, pool: BlockPool, loads: Loads, block_tokens: int, reuses: bool) -> None:
        self.pool = pool
        self.loads = loads
        self.saves = loads.saves
        self.host = loads.host
        self.block_tokens = block_tokens
        self.reuses = reuses
        self.shares = reuses or self.host.num_slots > 0  # blocks of one request are of use to another
        self.num_hits = 0  # blocks that tables were opened with
        self.num_misses = 0  # prompt blocks with a key that they were opened without
        self.open: dict[Hold, BlockTable] = {}
        self.announcing: set[BlockTable] = set()  # those of them that are going to seal keys of their prompts
        self.kept: dict[bytes, KeptClosed] = {}  # what was kept of tables with a scope of their own, by name

    def add(self, hold: Hold, prefix: Prefix | None, num_matched: int) -> BlockTable:
        """A new one, which begins with the first `num_matched` blocks of its prompt."""
        self.num_hits += num_matched
        self.num_misses += 0 if prefix is None else len(prefix.keys) - num_matched
        table = self.open[hold] = BlockTable(self, hold, prefix if self.shares else None, num_matched)
        if table.is_announcing:
            self.announcing.add(table)
        return table

    def unname(self, keys: Sequence[bytes]) -> None:
        """Nothing that ends with one of `keys` is kept under its name any more."""
        gone = set(keys)
        self.kept = {name: kept for name, kept in self.kept.items() if kept.keys[-1] not in gone}

    def take_kept(self, keys: Sequence[bytes]) -> list[bytes]:
        """Of what was kept under one of `keys`, or goes on from one of them: its keys. It is kept no more."""
        gone = set(keys)
        names = [name for name, kept in self.kept.items() if name in gone or kept.root in gone]
        return [key for name in names for key in self.kept.pop(name).keys]

    def give_way(self, num_blocks: int) -> None:
        """Have host memory forget up to `num_blocks` that requests hold on the device: they are saved again
        when they have to leave it."""
        for table in self.open.values():
            if num_blocks <= 0:
                return
            if table.is_deep:
                continue
            num = self.host.give_way(table.sealed_keys[table.num_alone :], num_blocks)
            num_blocks -= num
            if num_blocks > 0:
                table.num_alone = table.num_keyed

    def check(self) -> None:
        """Raises where the books do not add up."""
        announcing = {table for table in self.open.values() if table.is_announcing}
        if announcing != self.announcing:
            raise InvariantBroken(
                f"{len(self.announcing)} tables are "
                f"booked "
                f"as "
                f"announcing "
                f"keys, "
                f"and "
                f"{len(announcing)} open ones do"
            )


class FetchedRun:
    """Implements `contract.FetchedBlocks`: slots of its own, which no other request sees, and the copy that
    fills them."""

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
    """Implements `contract.Table`, which says what its calls mean. Grows while the request runs; blocks
    `0..num_keyed` have been sealed, by this request or by the one that computed them first."""

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

    def __init__(self, tables: OpenTables, hold: Hold, prefix: Prefix | None, num_matched: int) -> None:
        self._tables = tables
        self.hold = hold
        self.owner = hold.owner
        self.block_tokens = tables.block_tokens
        self.prefix = prefix  # None: its blocks never get a key
        self.sealed_keys = [] if prefix is None else list(prefix.keys[:num_matched])
        self.num_alone = 0  # of its first blocks, those that host memory was told to forget
        self.is_deep = False  # only its last blocks are on the device, and those before them in host memory
        self.paged_pins: list[Pin] = []  # of host memory, in token order
        self.fetched: set[FetchedRun] = set()
        self.num_fetched = 0  # blocks in those
        # under which its blocks from number `num_shared` on get their keys; None: there are none
        self.own_scope: bytes | None = None
        self.num_shared = 0
        # of its first blocks, those that are not forgotten with it though they are under that scope
        self.num_kept = 0
        # Where in host memory its first blocks are, which it does not have on the device. Replaced as a
        # whole, never changed.
        self.paged_slots: NDArray[np.int32] = np.empty(0, np.int32)

    # ---------------------------------------------------------------------------------------------- questions

    @property
    def num_slots(self) -> int:
        return self.hold.num_slots

    @property
    def num_paged(self) -> int:
        return self.hold.num_dropped

    @property
    def num_keyed(self) -> int:
        return len(self.sealed_keys)

    @property
    def is_announcing(self) -> bool:
        """Whether it is going to seal keys of its prompt."""
        return self.prefix is not None and self.num_keyed < len(self.prefix.keys)

    def announces(self, number: int, key: bytes) -> bool:
        """Whether block `number` of its prompt has `key`, and is yet to be sealed."""
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
        # a tail that was saved half full gets no key
        num_whole = min(first + num_blocks, lease.num_tokens // self.block_tokens)
        keys = () if self.prefix is None else self.prefix.keys[first:num_whole]
        return self._tables.loads.begin(hold, first, lease, keys, reservation.after, num_next)

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
            tables.saves.begin_unshared(keys[max(0, self.num_shared - first) :])
        self.give_keys(keys)
        tables.saves.offer(hold, first, keys, fence, self.is_deep)

    def next_keys(self, tokens: Sequence[int], num_full: int) -> list[bytes]:
        """Keys of blocks `num_keyed..num_full`: the prompt's are known, those of generated tokens continue
        the chain."""
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
        """Its next blocks are whole. In a cache that reuses nothing on the device the keys are only for
        colder tiers."""
        first, end = self.num_keyed, self.num_keyed + len(keys)
        if self._tables.reuses:
            self._tables.pool.seal(self.hold.first(end)[first:], keys, range(first, end))
        self.sealed_keys += keys
        if not self.is_announcing:
            self._tables.announcing.discard(self)

    def close_scope(self, num_tokens: int) -> None:
        """Its blocks get keys of a scope that no other request can have, and are forgotten with the table."""
        self.hold.require_open()
        if self.own_scope is None:
            self.own_scope, self.num_shared = private_scope(), num_tokens // self.block_tokens

    def keep_closed(self, name: bytes, first: int, end: int) -> None:
        self.hold.require_open()
        self.num_kept, keys = end, self.sealed_keys[first:end]
        self._tables.unname(keys)  # what this table went on from is now a part of it
        if keys:
            self._tables.kept[name] = KeptClosed(keys, self.sealed_keys[first - 1] if first else None)

    # ---------------------------------------------------------------------------------------------- paged out

    def add_paged(self, pin: Pin) -> None:
        """The next of its first blocks are in host memory, under `pin`."""
        self.paged_pins.append(pin)
        self.paged_slots = np.concatenate((self.paged_slots, pin.array))

    def page_out(self, num_blocks: int, fence: Fence | None, unit: int = 1) -> int:
        """Not those that a transfer uses. What host memory lacks is on its way there when this returns."""
        hold, host, saves = self.hold, self._tables.host, self._tables.saves
        hold.require_open()
        first = self.num_paged
        end = min(
            first + num_blocks,
            self.num_keyed,
            min((pin.first for pin in hold.run_pins), default=self.num_keyed),
        )
        keys = self.sealed_keys[first:end]
        pin = host.pin_run(keys, self.owner, unit) if keys else None
        num = 0 if pin is None else len(pin.run)
        if pin is not None:
            self.add_paged(pin)
            hold.drop_first(num, fence)
        if num < len(keys):  # its copy has failed, or was not made: once more
            num_here = num + host.num_leading(keys[num:])
            absent = host.absent(keys[num_here:])
            missing = next((place for place, is_absent in enumerate(absent) if not is_absent), len(absent))
            if missing:
                saves.offer(hold, first + num_here, keys[num_here : num_here + missing], fence, due=True)
                saves.submit()  # there may be no step before it is needed
        return num

    def fetch(self, firsts: Sequence[int], num_blocks: int) -> list[FetchedRun]:
        """In one copy: how long each takes to be launched and seen to be over counts more than its bytes.
        What comes has no key on the device: it is this table's alone."""
        self.hold.require_open()
        pool, owner = self._tables.pool, self.owner
        if firsts and max(firsts) + num_blocks > self.num_paged:
            raise InvariantBroken(
                f"{owner!r} fetches blocks "
                f"up "
                f"to "
                f"{max(firsts) + num_blocks}, "
                f"of "
                f"which "
                f"{self.num_paged} were paged out"
            )
        reservation = pool.try_reserve(len(firsts) * num_blocks, owner) if firsts else None
        if reservation is None:
            return []
        after, holds = reservation.after, []
        for number in range(len(firsts)):
            holds.append(pool.hold(owner))
            (reservation if number == len(firsts) - 1 else reservation.split(num_blocks)).commit(holds[-1])
        kept = self._tables.host.pin(
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
        # a full match is there to its end, though its last token is due
        num_tokens = max(num_tokens, self.num_keyed * self.block_tokens)
        # What is still being promoted into the table is in the colder tier, whose lease has ended: it is
        # matched again. So is what a deep request has there.
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
        if self.paged_pins:
            tables.host.end_handles(self.paged_pins, fence)
        del tables.open[hold]
        tables.announcing.discard(self)

    def _forget_own(self) -> None:
        """No request could find what it has under a scope of its own. What is kept of it is in host memory,
        or on its way there."""
        first = max(self.num_shared, self.num_paged)
        self._tables.pool.forget(self.hold.first(max(first, self.num_keyed))[first:].tolist())
        self._tables.saves.end_unshared(self.sealed_keys[max(self.num_shared, self.num_kept) :])
