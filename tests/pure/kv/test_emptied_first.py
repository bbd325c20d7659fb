"""A cold tier is emptied, or comes back without its blocks: what counts as lacking there, and what is written
to it after that."""

from __future__ import annotations

import pytest

from penstock.contract import Access, Mode
from tests.pure.kv.stacked_rig import ALL, Stacked
from tests.pure.kv.storage_rig import BLOCK, LAYERS


@pytest.mark.parametrize("lost", [False, True])
def test_blocks_that_nobody_else_can_know_are_not_written_by_the_next_flush(lost: bool) -> None:
    rig = Stacked("ssd")
    table = rig.cache.open("closed", rig.prefix(2), 0)
    table.close_scope(2 * BLOCK)
    tokens = [ord("a")] * (4 * BLOCK)
    keys = table.next_keys(tokens, 4)
    assert table.try_extend(4)
    slots = table.hold.slots[:4]
    rig.lanes.touch(Access("device", slots, ALL, Mode.WRITE), table.owner)
    rig.device.write(slots, ALL, [[key] * LAYERS for key in keys])
    table.seal(tokens, 4 * BLOCK, None)
    rig.cache.submit_saves()
    rig.flow()
    assert all(rig.host_has(keys)) and rig.store_has(keys) == [True, True, False, False]
    if lost:
        rig.first.lose()
        rig.tiers["ssd"].calls.num_losses += 1  # as a probe does
    else:
        rig.cache.reset(["ssd"])
    rig.flow()
    assert rig.persisted().error is None
    assert rig.store_has(keys) == [True, True, False, False]
    rig.end(table)
