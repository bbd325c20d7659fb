"""Blocks are written with their places in their prompts, which the order of eviction goes by: also what is written anew after a reset."""

from __future__ import annotations

import pytest
from stacked_rig import Stacked


@pytest.mark.parametrize("reset", [False, True])
def test_a_block_is_written_with_its_depth(reset: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Stacked("ssd", admission="reuse")
    written: dict[bytes, int] = {}
    write = rig.first.write
    monkeypatch.setattr(
        rig.first, "write", lambda keys, depths, blocks: written.update(zip(keys, depths, strict=True)) or write(keys, depths, blocks)
    )
    rig.cache.release(rig.ran(3), None)
    rig.flow()
    assert not written
    if reset:
        rig.cache.reset(["ssd"])
    assert rig.persisted().error is None
    assert written == {key: depth for depth, key in enumerate(rig.keys(3))}
    rig.end()
