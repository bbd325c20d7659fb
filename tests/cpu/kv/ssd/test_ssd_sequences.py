"""The numbers that writes to a disk get: by them the newer of two copies is known after a restart."""

from __future__ import annotations

import pytest

from cpu.kv.ssd.ssd_rig import key_of
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.tiers.ssd import index as index_module
from penstock.kv.tiers.ssd.index import SlotIndex


@pytest.mark.parametrize("step_ns", [0, 1, -1000])
def test_no_two_blocks_have_the_same_number_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch, step_ns: int) -> None:
    """Clocks are coarse, and are set back."""
    now_ns = 10_000

    def clock() -> int:
        nonlocal now_ns
        now_ns += step_ns
        return now_ns

    monkeypatch.setattr(index_module.time, "time_ns", clock)
    index = SlotIndex(BlockPool(8, "ssd"), lambda slot: b"g" * 16)
    given: list[int] = []
    for num in (3, 1, 2, 2):
        first = index.claim([key_of(len(given) + place) for place in range(num)]).sequence
        given += range(first, first + num)
    assert given == sorted(set(given))
