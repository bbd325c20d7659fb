"""The layout of a block's page: offsets, extents and what its fingerprint says."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.errors import ConfigError, InvariantBroken
from penstock.kv import memory as layout_module
from penstock.kv.memory import BlockLayout

SMOLLM = BlockLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_tokens=16, dtype="float32")
QWEN = BlockLayout(num_layers=36, num_kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16")


def test_a_block_has_the_bytes_of_all_layers():
    assert SMOLLM.block_bytes == 720 * 1024
    assert QWEN.block_bytes == int(2.25 * 1024 * 1024)


@pytest.mark.parametrize("layers", [(-1, 3), (3, 2), (0, 37)])
def test_layers_that_are_not_there_have_no_extent(layers):
    with pytest.raises(InvariantBroken):
        QWEN.extent(layers)


def test_every_dimension_counts_in_the_fingerprint(monkeypatch):
    """Swapping two dimensions keeps the size of a page, and still is another layout."""
    others = [
        dataclasses.replace(QWEN, num_kv_heads=16, head_dim=64),
        dataclasses.replace(QWEN, num_kv_heads=4, head_dim=256),
        dataclasses.replace(QWEN, num_layers=18, block_tokens=32),
        dataclasses.replace(QWEN, dtype="float16"),
    ]
    assert {other.block_bytes for other in others} == {QWEN.block_bytes}
    prints = {layout.fingerprint() for layout in [QWEN, *others]}
    assert len(prints) == 5
    monkeypatch.setattr(layout_module, "VERSION", 2)
    assert QWEN.fingerprint() not in prints


@pytest.mark.parametrize(
    "wrong",
    [{"num_layers": 0}, {"num_kv_heads": -1}, {"head_dim": 0}, {"block_tokens": 0}, {"dtype": "int8"}],
)
def test_an_impossible_layout_is_refused(wrong):
    with pytest.raises(ConfigError):
        dataclasses.replace(QWEN, **wrong)
