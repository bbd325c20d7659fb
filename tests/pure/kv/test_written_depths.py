"""Blocks are written with their places in their prompts, which the order of eviction goes by: also what is
written anew after a reset."""

from __future__ import annotations

import pytest

from tests.pure.kv.stacked_rig import Stacked


@pytest.mark.parametrize("reset", [False, True])
def test_a_block_is_written_with_its_depth(reset: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Stacked("ssd", admission="reuse")
    written: dict[bytes, int] = {}
    write = rig.first.write
    monkeypatch.setattr(
        rig.first,
        "write",
        lambda keys, depths, blocks: (
            written.update(zip(keys, depths, strict=True)) or write(keys, depths, blocks)
        ),
    )
    rig.ran(3).release(None)
    rig.flow()
    assert not written
    if reset:
        rig.cache.reset(["ssd"])
    assert rig.persisted().error is None
    assert written == {key: depth for depth, key in enumerate(rig.keys(3))}
    rig.end()


def test_what_a_store_has_behind_a_prefix_on_the_device_is_written_to_the_disk_with_its_depth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Stacked("ssd", "remote")
    rig.remembered(6, tiers=("remote",))
    first = rig.ran(2)
    rig.flow()
    written: dict[bytes, int] = {}
    write = rig.first.write
    monkeypatch.setattr(
        rig.first,
        "write",
        lambda keys, depths, blocks: (
            written.update(zip(keys, depths, strict=True)) or write(keys, depths, blocks)
        ),
    )
    prefix = rig.prefix(6)
    lease = rig.cache.lease("request", prefix)
    assert lease is not None
    rig.run("ask remote")
    table = rig.cache.open("request", prefix, 2)
    table.promote(lease, 4, 1)
    rig.flow()
    assert written == {key: depth for depth, key in enumerate(prefix.keys) if depth >= 2}
    rig.end(first, table)
