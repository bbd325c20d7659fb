"""With `reuse` a block is written when it is asked for again: once, however often it is asked for while that
is under way."""

from __future__ import annotations

from tests.pure.kv.stacked_rig import Stacked


def test_a_block_that_is_being_written_is_not_written_again_for_the_next_who_asks() -> None:
    rig = Stacked("ssd", admission="reuse")
    rig.remembered(2)
    for _ in range(3):
        table, _ = rig.promote_all(2)
        rig.copy()
        table.release(None)
        rig.forget_device()
    assert rig.first.calls.count("write") == 0, "the lane has not come to it"
    rig.flow()
    assert rig.first.calls.count("write") == 1 and rig.store_has(rig.keys(2)) == [True, True]
    rig.end()
