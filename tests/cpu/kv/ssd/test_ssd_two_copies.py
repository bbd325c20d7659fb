"""Two copies of one block in the files of an earlier life: the newer one counts, unless somebody has used the
other since the start."""

from __future__ import annotations

import pytest

from penstock.kv.blocks.pool import BlockPool
from penstock.kv.tiers.ssd.index import SlotIndex
from penstock.kv.tiers.ssd.segments import SlotHead
from penstock.kv.tiers.store import Envelope, Outcome
from tests.cpu.kv.ssd.ssd_rig import key_of

GENERATION = b"g" * 16
KEY = key_of(1)


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("newer_first", [False, True])
def test_the_newer_copy_counts_unless_the_other_was_used_since_the_start(
    used: bool, newer_first: bool
) -> None:
    pool = BlockPool(2, "ssd")
    index = SlotIndex(pool, lambda slot: GENERATION)
    withheld = [index.withhold(1) for _ in range(2)]
    for slot, sequence in enumerate((20, 10) if newer_first else (10, 20)):
        head = SlotHead(Envelope(KEY, b"s" * 32, 100, sequence, b"c" * 16), GENERATION, 0, slot, 0)
        index.add_scanned(withheld[slot], {slot: head})
        if used and slot == 0:
            _, pin = index.pin_each([KEY])
            assert pin is not None
            index.unpin(pin)
    index.end_scan()
    assert pool.find_each([KEY]) == [0 if used or newer_first else 1]
    assert pool.counts.free == 1 and pool.counts.idle == 1
    pool.check()
    index.close()


def test_an_older_copy_in_a_piece_of_a_file_keeps_nothing_behind_it_from_being_found() -> None:
    """Heads of one piece are looked through from the newest on: the copy that does not count is in the
    middle."""
    pool = BlockPool(4, "ssd")
    index = SlotIndex(pool, lambda slot: GENERATION)
    withheld = index.withhold(4)
    keys, sequences = [KEY, key_of(2), KEY, key_of(3)], [40, 20, 30, 10]
    heads = {
        slot: SlotHead(Envelope(key, b"s" * 32, 100, sequence, b"c" * 16), GENERATION, 0, slot, 0)
        for slot, (key, sequence) in enumerate(zip(keys, sequences, strict=True))
    }
    assert index.add_scanned(withheld, heads) == 3, "blocks, not copies"
    assert pool.find_each([KEY, key_of(2), key_of(3)]) == [0, 1, 3]
    assert index._found == {KEY: 40, key_of(2): 20, key_of(3): 10}
    index.end_scan()
    index.close()


def test_a_slot_that_is_written_anew_is_doubted_no_longer() -> None:
    """Of a block that this life has written nobody needs to read first whether it is whole."""
    pool = BlockPool(1, "ssd")
    index = SlotIndex(pool, lambda slot: GENERATION)
    withheld = index.withhold(1)
    head = SlotHead(Envelope(KEY, b"s" * 32, 100, 1, b"c" * 16), GENERATION, 0, 0, 0)
    index.add_scanned(withheld, {0: head})
    assert index._unverified == {0} and index.claim([KEY]).unverified == [0]
    claim = index.claim([key_of(2)])
    assert claim.slots == [0], "the only one there is"
    index.land(claim, [key_of(2)], [0], {0: GENERATION})
    assert index._unverified == set() and index.claim([key_of(2)]).unverified == []
    index.end_scan()
    index.close()


def test_what_is_written_counts_though_the_scan_finds_an_older_copy_meanwhile() -> None:
    """Nobody knows whether the older copy is whole; whoever persists the write is to be right that the block
    is there."""
    pool = BlockPool(2, "ssd")
    index = SlotIndex(pool, lambda slot: GENERATION)
    withheld = [index.withhold(1) for _ in range(2)]
    index.add_scanned(withheld[0], {})
    claim = index.claim([KEY])
    assert claim is not None and claim.slots == [0]
    head = SlotHead(Envelope(KEY, b"s" * 32, 100, 1, b"c" * 16), GENERATION, 0, 1, 0)
    index.add_scanned(withheld[1], {1: head})
    index.land(claim, [KEY], [0], {0: GENERATION})
    assert claim.outcomes == [Outcome.DONE] and pool.find_each([KEY]) == [0], "the one that was written now"
    again = index.claim([KEY])
    assert again is not None and again.unverified == [], "and nobody doubts it"
    index.end_scan()
    assert pool.counts.free == 1 and pool.counts.idle == 1
    pool.check()
    index.close()
