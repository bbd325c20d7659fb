"""Blocks that are written in slices while others ask for the same: each is written once, and not again once
it is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from penstock.kv.tiers import writeback
from penstock.kv.tiers.store import Outcome
from tests.pure.kv.stacked_rig import Stacked

SIX = 6


def count_writes(rig: Stacked, tier: str) -> Counter[bytes]:
    """How often the store is given each key from now on."""
    counted: Counter[bytes] = Counter()
    write = rig.stores[tier].write

    def counting(keys: Sequence[bytes], depths: Sequence[int], blocks: Sequence[memoryview]) -> list[Outcome]:
        counted.update(keys)
        return write(keys, depths, blocks)

    rig.stores[tier].write = counting  # type: ignore[method-assign]
    return counted


def promoted(rig: Stacked) -> None:
    """A request comes for the prefix, gets it from host memory and goes."""
    table, _ = rig.promote_all(SIX)
    rig.copy()
    table.release(None)
    rig.forget_device()


@pytest.mark.parametrize("tier", ["ssd", "remote"])
def test_what_two_ask_for_while_it_is_written_in_slices_is_written_once(
    tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Stacked(tier, admission="reuse")
    rig.remembered(SIX)
    counted = count_writes(rig, tier)
    monkeypatch.setattr(writeback, "_WRITE_AT_ONCE", 1)
    # the second comes when some are written, some are on their way and some wait for their turn
    for _ in range(2):
        promoted(rig)
    rig.flow()
    assert counted == dict.fromkeys(rig.keys(SIX), 1) and rig.store_has(rig.keys(SIX), tier) == [True] * SIX
    promoted(rig)
    rig.flow()
    assert sum(counted.values()) == SIX, "it is there"
    rig.end()
