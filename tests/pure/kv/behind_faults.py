"""Defects in what is read up and written down behind the host tier, one function each, to show that the tests see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.kv.blocks.table import BlockTable
from penstock.kv.cache import KvCache
from penstock.kv.tiers.behind import Behind
from penstock.kv.tiers.cold import ColdTier, Reading, Writing
from penstock.kv.tiers.host import HostTier
from penstock.kv.tiers.ladder import Ladder
from penstock.kv.tiers.loads import Fetch, Haul, Promotion, Reads
from penstock.kv.tiers.store import Outcome

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]


def publishes_blocks_before_they_are_read(patch: Patch) -> None:
    patch.setattr(Reading, "over", True)


def publishes_blocks_that_did_not_come(patch: Patch) -> None:
    land_some = HostTier.land_some

    def faulty(self: HostTier, taken: Any, places: Any, owner: str) -> Any:
        return land_some(self, taken, range(len(taken.keys)), owner)

    patch.setattr(HostTier, "land_some", faulty)


def promotes_blocks_before_they_are_read(patch: Patch) -> None:
    stage = Behind._take_room

    def faulty(self: Behind, haul: Haul, wanted: Any) -> None:
        stage(self, haul, wanted)
        if haul.room.reservation is not None:
            for (block, _), slot in zip(wanted, haul.room.reservation.slots, strict=False):
                haul.came(block, slot)

    patch.setattr(Behind, "_take_room", faulty)


def goes_on_behind_a_block_that_is_missing(patch: Patch) -> None:
    """Its place in the table is filled with whatever follows."""
    take_in = Behind._take_in

    def faulty(self: Behind, haul: Reads) -> None:
        limit = haul.limit
        take_in(self, haul)
        if haul.limit < limit and isinstance(haul, Haul):
            for block in range(haul.limit, limit):
                if haul.sources[block] < 0:
                    haul.came(block, haul.sources[0] if haul.sources[0] >= 0 else 0)
            haul.limit = limit

    patch.setattr(Behind, "_take_in", faulty)


def gives_keys_behind_a_part_that_failed(patch: Patch) -> None:
    """To the next blocks of the table, which are others."""

    def faulty(self: KvCache, promotion: Promotion, own: BlockTable) -> None:
        if own in self._tables:
            self._give_keys(own, own.num_keyed, promotion.keys)

    patch.setattr(KvCache, "_land", faulty)


def counts_parts_behind_one_that_failed(patch: Patch) -> None:
    def num_landed(self: Haul) -> int:
        return sum(part.num_blocks for part in self.parts if part.settled and part.error() is None)

    patch.setattr(Haul, "num_landed", property(num_landed))


def forgets_that_it_ended_short(patch: Patch) -> None:
    patch.setattr(Haul, "error", lambda self: next((error for part in self.parts if (error := part.error()) is not None), None))


def takes_a_part_for_the_whole(patch: Patch) -> None:
    patch.setattr(Haul, "settled", property(lambda self: bool(self.parts) and self.parts[0].settled))


def lets_go_of_what_it_read_when_its_table_ends(patch: Patch) -> None:
    advance = Behind._advance

    def faulty(self: Behind, haul: Haul) -> None:
        if haul.hold.ended:
            self._host.end_handles(haul.kept)
            haul.kept.clear()
        advance(self, haul)

    patch.setattr(Behind, "_advance", faulty)


def reads_into_slots_that_it_gives_back_with_its_table(patch: Patch) -> None:
    advance = Behind._advance

    def faulty(self: Behind, haul: Haul) -> None:
        while haul.hold.ended and haul.staged:
            self._host.drop(haul.staged.popleft().taken)
        advance(self, haul)

    patch.setattr(Behind, "_advance", faulty)


def keeps_room_that_it_does_not_read_into(patch: Patch) -> None:
    def faulty(self: Behind, reads: Reads) -> None:
        if reads.ended:
            reads.unread.clear()

    patch.setattr(Behind, "_read_no_further", faulty)


def keeps_what_a_fetch_has_landed(patch: Patch) -> None:
    """A pin that nobody ends."""
    end_handles = HostTier.end_handles

    def faulty(self: HostTier, handles: Any) -> None:
        end_handles(self, [handle for handle in handles if not handle.owner.startswith("fetch")])

    patch.setattr(HostTier, "end_handles", faulty)


def gives_back_what_a_fetch_reads_into(patch: Patch) -> None:
    advance = Behind._advance_fetch

    def faulty(self: Behind, fetch: Fetch) -> None:
        while fetch.ended and fetch.staged:
            self._host.drop(fetch.staged.popleft().taken)
        advance(self, fetch)

    patch.setattr(Behind, "_advance_fetch", faulty)


def forgets_hauls_that_share_what_a_fetch_reads(patch: Patch) -> None:
    patch.setattr(Behind, "_share", lambda self, keys: None)


def fetches_more_than_its_share_of_host_memory(patch: Patch) -> None:
    patch.setattr(Behind, "_num_fetchable", property(lambda self: self._host.num_spare))


def forgets_what_protected_its_sources(patch: Patch) -> None:
    patch.setattr(HostTier, "take_lease", lambda self, lease: [] if self._leases.pop(lease, None) is not None else None)


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
            self._exchanges.__dict__.setdefault("kept", []).append(handle)
            handle._lender = type("Nobody", (), {"take_back": lambda self, handle, fence: None})()
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
    advance = Behind._advance_persisting

    def faulty(self: Behind, one: Any) -> None:
        advance(self, one)
        one.settled = one.sync is not None

    patch.setattr(Behind, "_advance_persisting", faulty)


def tells_nobody_of_a_store_that_was_emptied(patch: Patch) -> None:
    patch.setattr(Behind, "reset", lambda self, tier: self.tiers[tier].reset())


def waits_for_ever_for_a_part_that_could_not_be_read(patch: Patch) -> None:
    patch.setattr(Haul, "cut", lambda self, limit: None)


def promotes_into_slots_of_a_table_that_has_ended(patch: Patch) -> None:
    send = Ladder._send_part

    def faulty(self: Ladder, haul: Haul, first: int, end: int) -> Promotion | None:
        part = send(self, haul, first, end)
        if part is not None:
            haul.hold.run_pins.discard(part.pins[0])
        return part

    patch.setattr(Ladder, "_send_part", faulty)


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
    forgets_hauls_that_share_what_a_fetch_reads,
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
