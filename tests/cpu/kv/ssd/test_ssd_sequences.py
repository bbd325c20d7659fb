"""The numbers that writes to a disk get: by them the newer of two copies is known after a restart."""

from __future__ import annotations

import pytest

from cpu.kv.ssd.ssd_rig import key_of
from penstock.kv.blocks.pool import BlockPool
from penstock.kv.tiers.ssd import index as index_module
from penstock.kv.tiers.ssd.index import SlotIndex
from penstock.kv.tiers.ssd.segments import SlotHead
from penstock.kv.tiers.store import Envelope


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


def test_what_is_written_now_is_newer_than_all_that_was_found_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was set back since an earlier life: a block that is given up and written anew has an old copy in the files."""
    monkeypatch.setattr(index_module.time, "time_ns", lambda: 1000)
    index = SlotIndex(BlockPool(4, "ssd"), lambda slot: b"g" * 16)
    withheld = [index.withhold(1), index.withhold(1)]
    for slot, (reservation, sequence) in enumerate(zip(withheld, (5000, 3000), strict=True)):
        head = SlotHead(Envelope(key_of(slot), b"s" * 32, 100, sequence, b"c" * 16), b"g" * 16, 0, slot, 0)
        index.add_scanned(reservation, {slot: head})
    index.end_scan()
    assert index.claim([key_of(2)]).sequence > 5000
