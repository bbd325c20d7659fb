"""A reset between two looks of a scan: heads that were read before it stand for nothing when they are
published after it."""

from __future__ import annotations

import pytest

from penstock.kv.blocks.pool import BlockPool
from penstock.kv.tiers.ssd.index import SlotIndex
from penstock.kv.tiers.ssd.segments import SlotHead
from penstock.kv.tiers.store import Envelope
from tests.cpu.kv.ssd.ssd_rig import key_of

OLD, NEW = b"o" * 16, b"n" * 16
KEYS = [key_of(1), key_of(2)]


@pytest.mark.parametrize("reset", [False, True])
def test_what_was_read_before_a_reset_is_not_found_after_it(reset: bool) -> None:
    generations = [OLD]
    pool = BlockPool(2, "ssd")
    index = SlotIndex(pool, lambda slot: generations[-1])
    withheld = index.withhold(2)
    heads = {
        slot: SlotHead(Envelope(key, b"s" * 32, 100, slot, b"c" * 16), OLD, 0, slot, slot)
        for slot, key in enumerate(KEYS)
    }
    if reset:
        assert index.reset(lambda: generations.append(NEW)) == 0
    index.add_scanned(withheld, heads)
    assert index.find(KEYS) == (0 if reset else 2)
    assert pool.counts.free == (2 if reset else 0), "slots that hold nothing can be used"
    pool.check()
    index.close()
