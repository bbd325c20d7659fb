"""Defects in what is read up from cold tiers and written down to them, one function each, to show that the
tests see them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.kv.cache import KvCache
from penstock.kv.tiers.cold import ColdTier, Writing
from penstock.kv.tiers.host import HostLease, HostTier
from penstock.kv.tiers.loads import BlockLoad, Copy, Loads
from penstock.kv.tiers.reads import ColdReader, Fetch, Reads
from penstock.kv.tiers.store import Outcome
from penstock.kv.tiers.writeback import Writeback

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]


def publishes_blocks_before_they_are_read(patch: Patch) -> None:
    read = ColdTier.read

    def faulty(self: ColdTier, *given: Any) -> Any:
        reading = read(self, *given)
        reading.fence = SimpleNamespace(passed=lambda: True)  # type: ignore[assignment]
        return reading

    patch.setattr(ColdTier, "read", faulty)


def publishes_blocks_that_did_not_come(patch: Patch) -> None:
    land = HostTier.land

    def faulty(self: HostTier, taken: Any, places: Any = None, owner: str = "") -> Any:
        return land(self, taken, None, owner)

    patch.setattr(HostTier, "land", faulty)


def promotes_blocks_before_they_are_read(patch: Patch) -> None:
    stage = Loads._take_room

    def faulty(self: Loads, load: BlockLoad, wanted: Any) -> None:
        stage(self, load, wanted)
        if load.room.reservation is not None:
            for (block, _), slot in zip(wanted, load.room.reservation.slots, strict=False):
                load.came(block, slot)

    patch.setattr(Loads, "_take_room", faulty)


def goes_on_behind_a_block_that_is_missing(patch: Patch) -> None:
    """Its place in the table is filled with whatever follows."""
    take_in = ColdReader._take_in

    def faulty(self: ColdReader, load: Reads) -> None:
        limit = load.limit
        take_in(self, load)
        if load.limit < limit and isinstance(load, BlockLoad):
            for block in range(load.limit, limit):
                if load.sources[block] < 0:
                    load.came(block, load.sources[0] if load.sources[0] >= 0 else 0)
            load.limit = limit

    patch.setattr(ColdReader, "_take_in", faulty)


def gives_keys_behind_a_part_that_failed(patch: Patch) -> None:
    """To the next blocks of the table, which are others."""

    def faulty(self: KvCache, copy: Copy) -> None:
        table = self._tables.open.get(copy.load.hold)
        if table is not None:
            table.give_keys(copy.keys)

    patch.setattr(KvCache, "_land", faulty)


def counts_parts_behind_one_that_failed(patch: Patch) -> None:
    def num_landed(self: BlockLoad) -> int:
        return sum(copy.num_blocks for copy in self.copies if copy.settled and copy.error() is None)

    patch.setattr(BlockLoad, "num_landed", property(num_landed))


def forgets_that_it_ended_short(patch: Patch) -> None:
    patch.setattr(
        BlockLoad,
        "error",
        lambda self: next((error for copy in self.copies if (error := copy.error()) is not None), None),
    )


def takes_a_part_for_the_whole(patch: Patch) -> None:
    patch.setattr(BlockLoad, "settled", property(lambda self: bool(self.copies) and self.copies[0].settled))


def reads_into_slots_that_it_gives_back_with_its_table(patch: Patch) -> None:
    advance = Loads._advance

    def faulty(self: Loads, load: BlockLoad) -> None:
        while load.hold.ended and load.staged:
            self._host.drop(load.staged.popleft().taken)
        advance(self, load)

    patch.setattr(Loads, "_advance", faulty)


def keeps_room_that_it_does_not_read_into(patch: Patch) -> None:
    def faulty(self: ColdReader, reads: Reads) -> None:
        if reads.ended:
            reads.unread.clear()

    patch.setattr(ColdReader, "read_no_further", faulty)


def keeps_what_a_fetch_has_landed(patch: Patch) -> None:
    """A pin that nobody ends."""
    end_kept = Reads.end_kept
    patch.setattr(Reads, "end_kept", lambda self: None if isinstance(self, Fetch) else end_kept(self))


def gives_back_what_a_fetch_reads_into(patch: Patch) -> None:
    advance = ColdReader._advance

    def faulty(self: ColdReader, fetch: Fetch) -> None:
        while fetch.ended and fetch.staged:
            self._host.drop(fetch.staged.popleft().taken)
        advance(self, fetch)

    patch.setattr(ColdReader, "_advance", faulty)


def forgets_loads_that_share_what_a_fetch_reads(patch: Patch) -> None:
    patch.setattr(Loads, "_share", lambda self, keys: None)


def fetches_more_than_its_share_of_host_memory(patch: Patch) -> None:
    patch.setattr(ColdReader, "_num_fetchable", lambda self, is_next=False: self._host.pool.num_unwanted)


def forgets_what_protected_its_sources(patch: Patch) -> None:
    patch.setattr(HostLease, "take", lambda self: [] if self._tier.leases.pop(self, 0) is None else None)


def ends_the_pin_of_a_write_when_it_is_submitted(patch: Patch) -> None:
    try_write = ColdTier.try_write

    def faulty(self: ColdTier, keys: Any, depths: Any, slots: Any, handle: Any, *rest: Any) -> Writing | None:
        writing = try_write(self, keys, depths, slots, handle, *rest)
        if writing is not None:
            writing.handle = None
            handle.end()
        return writing

    patch.setattr(ColdTier, "try_write", faulty)


def forgets_the_pin_of_a_write_that_was_refused(patch: Patch) -> None:
    try_write = ColdTier.try_write

    def faulty(self: ColdTier, keys: Any, depths: Any, slots: Any, handle: Any, *rest: Any) -> Writing | None:
        writing = try_write(self, keys, depths, slots, handle, *rest)
        if writing is None:
            self.calls.__dict__.setdefault("kept", []).append(handle)
            handle.end = lambda fence=None: None
        return writing

    patch.setattr(ColdTier, "try_write", faulty)


def writes_other_blocks_than_it_says(patch: Patch) -> None:
    try_write = ColdTier.try_write

    def faulty(self: ColdTier, keys: Any, depths: Any, slots: Any, *rest: Any) -> Writing | None:
        return try_write(self, keys, depths, list(reversed(slots)), *rest)

    patch.setattr(ColdTier, "try_write", faulty)


def takes_every_write_for_done(patch: Patch) -> None:
    patch.setattr(Writing, "done_keys", property(lambda self: list(self.keys)))


def acknowledges_before_anything_is_written(patch: Patch) -> None:
    advance = Writeback._advance_persisting

    def faulty(self: Writeback, one: Any) -> None:
        advance(self, one)
        one.settled = one.sync is not None

    patch.setattr(Writeback, "_advance_persisting", faulty)


def tells_nobody_of_a_store_that_was_emptied(patch: Patch) -> None:
    patch.setattr(Writeback, "reset", lambda self, tier: self.cold[tier].reset())


def waits_for_ever_for_a_part_that_could_not_be_read(patch: Patch) -> None:
    patch.setattr(BlockLoad, "cut", lambda self, limit: None)


def promotes_into_slots_of_a_table_that_has_ended(patch: Patch) -> None:
    submit = Loads._submit

    def faulty(self: Loads, copy: Copy) -> None:
        submit(self, copy)
        copy.pins[0].end()

    patch.setattr(Loads, "_submit", faulty)


def believes_whatever_a_store_returns(patch: Patch) -> None:
    from penstock.testing.stores import MemoryStore

    read = MemoryStore._read

    def faulty(self: MemoryStore, key: bytes, buffer: memoryview) -> Outcome:
        return Outcome.DONE if read(self, key, buffer) is Outcome.CORRUPT else read(self, key, buffer)

    patch.setattr(MemoryStore, "_read", faulty)


# Those that any walk brings to light sooner or later; the others need a story of their own.
FAULTS: list[Fault] = [
    publishes_blocks_before_they_are_read,
    publishes_blocks_that_did_not_come,
    promotes_blocks_before_they_are_read,
    goes_on_behind_a_block_that_is_missing,
    gives_keys_behind_a_part_that_failed,
    counts_parts_behind_one_that_failed,
    forgets_that_it_ended_short,
    takes_a_part_for_the_whole,
    reads_into_slots_that_it_gives_back_with_its_table,
    keeps_room_that_it_does_not_read_into,
    keeps_what_a_fetch_has_landed,
    gives_back_what_a_fetch_reads_into,
    forgets_loads_that_share_what_a_fetch_reads,
    fetches_more_than_its_share_of_host_memory,
    forgets_what_protected_its_sources,
    ends_the_pin_of_a_write_when_it_is_submitted,
    forgets_the_pin_of_a_write_that_was_refused,
    writes_other_blocks_than_it_says,
    takes_every_write_for_done,
    acknowledges_before_anything_is_written,
    tells_nobody_of_a_store_that_was_emptied,
    waits_for_ever_for_a_part_that_could_not_be_read,
    promotes_into_slots_of_a_table_that_has_ended,
    believes_whatever_a_store_returns,
]
