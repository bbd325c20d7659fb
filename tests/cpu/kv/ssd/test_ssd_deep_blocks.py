"""Blocks far behind the beginning of their prompts: their depths are kept as they are, however long contexts
become."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.kv.tiers.ssd.segments import SegmentHead, pack_slot, unpack_slot
from penstock.kv.tiers.store import Outcome, pack
from tests.cpu.kv.ssd.ssd_rig import SPACE, bytes_of, key_of, open_at, read

DEPTHS = [0, 255, 2**16 - 1, 2**16, 2**24, 2**32 - 1]


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_head_keeps_the_depth_of_its_block(depth: int) -> None:
    head = SegmentHead(3, 8, SPACE.block_bytes, SPACE.digest, b"g" * 16)
    found = unpack_slot(pack_slot(pack(key_of(1), SPACE.digest, bytes_of(1)), head, 5, depth))
    assert found is not None
    assert (found.depth, found.slot, found.number) == (depth, 5, 3)


def test_blocks_of_any_depth_are_written_and_found_after_a_restart(tmp_path: Path) -> None:
    numbers = range(len(DEPTHS))
    store = open_at(tmp_path / "cache")
    assert store.write([key_of(n) for n in numbers], DEPTHS, [memoryview(bytes_of(n)) for n in numbers]) == [
        Outcome.DONE
    ] * len(DEPTHS)
    store.close()
    again = open_at(tmp_path / "cache")
    assert read(again, *numbers) == [Outcome.DONE] * len(DEPTHS)
    again.close()
