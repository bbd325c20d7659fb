"""The arena on a CPU: its shape is the layout's, its padding block is clean, and a size that does not fit is
a clear error."""

from __future__ import annotations

import errno
import mmap

import pytest
import torch

from penstock.errors import ConfigError
from penstock.kv import memory as arena_module
from penstock.kv.memory import BlockLayout, DeviceArena

LAYOUT = BlockLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_tokens=8, dtype="float32")


def test_an_arena_has_one_page_per_slot_and_one_for_padding():
    arena = DeviceArena(LAYOUT, 5, "cpu")
    assert arena.tensor.shape == (6, 3, 2, 8, 2, 4)
    assert arena.tensor.dtype is torch.float32
    assert arena.padding_slot == 5
    assert arena.num_bytes == arena.tensor.nbytes == 6 * LAYOUT.block_bytes
    assert arena.tensor.is_contiguous()
    assert not arena.tensor.any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_bytes_lie_where_the_layout_says(dtype):
    layout = BlockLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_tokens=8, dtype=dtype)
    arena = DeviceArena(layout, 4, torch.device("cpu"))
    arena.tensor[2, 1] = 7.0
    page = arena.tensor.view(torch.uint8).reshape(5, layout.block_bytes)[2]
    first, num_bytes = layout.extent((1, 2))
    assert page[first : first + num_bytes].view(getattr(torch, dtype)).eq(7.0).all()
    assert page.count_nonzero() == page[first : first + num_bytes].count_nonzero()


def test_an_arena_that_does_not_fit_says_how_large_it_would_be_and_what_to_lower():
    with pytest.raises(
        ConfigError,
        match=r"needs \d+\.\d\d GiB on cpu, of which .* are free; lower --device-kv-gib",
    ):
        DeviceArena(LAYOUT, 1 << 40, "cpu")


def test_memory_that_is_gone_by_the_time_it_is_taken_is_the_same_error(monkeypatch):
    def refuse(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(arena_module.mmap, "mmap", refuse)
    with pytest.raises(ConfigError, match="lower --device-kv-gib"):
        DeviceArena(LAYOUT, 4, "cpu")


def test_a_kernel_without_large_pages_gives_the_same_memory(monkeypatch):
    class Old(mmap.mmap):
        def madvise(self, *args):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Old)
    arena = DeviceArena(LAYOUT, num_slots=2, device="cpu")
    assert arena.tensor.count_nonzero() == 0
    arena.tensor.fill_(1)
    assert arena.tensor.min() == 1
