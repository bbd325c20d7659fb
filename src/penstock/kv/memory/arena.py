"""The device memory that KV blocks live in. Owns the tensor; which slot is whose is the pool's business."""

from __future__ import annotations

import contextlib
import math
import mmap

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.kv.memory.layout import BlockLayout

_GIB = 1 << 30


class DeviceArena:
    """`tensor` is [num_slots + 1, layers, k|v, block_tokens, kv_heads, head_dim]; the last slot is the padding block.

    Rows of a step that stand for nothing read and write the padding block, so that they need no branch in a kernel. Everything starts as
    zero, hence finite: a masked weight of 0 times what an unused token holds stays 0. `poison` fills the usable slots with NaN instead,
    which turns any read of a token that was never written into a visible error.
    """

    def __init__(self, layout: BlockLayout, num_slots: int, device: torch.device | str, name: str = "device", poison: bool = False) -> None:
        if num_slots < 1:
            raise ConfigError(f"the {name} KV arena needs at least one block, got {num_slots}")
        self.name = name
        self.layout = layout
        self.num_slots = num_slots
        shape = (num_slots + 1, *layout.shape)
        self.tensor = _zeros(shape, getattr(torch, layout.dtype), torch.device(device), name)
        if poison:
            self.tensor[:num_slots].fill_(math.nan)

    @property
    def padding_slot(self) -> int:
        return self.num_slots

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    @property
    def num_bytes(self) -> int:
        return (self.num_slots + 1) * self.layout.block_bytes


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, name: str) -> Tensor:
    num_bytes = math.prod(shape) * dtype.itemsize
    available = free_bytes(device)
    if num_bytes > available:
        raise _does_not_fit(name, device, num_bytes, available)
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        # An anonymous mapping is page-aligned and zero without being touched: start-up does not pay for what is never used.
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        find_in_large_steps(memory)
        return torch.frombuffer(memory, dtype=dtype).view(shape)
    except (torch.OutOfMemoryError, MemoryError, OSError, OverflowError):
        raise _does_not_fit(name, device, num_bytes, available) from None


def find_in_large_steps(memory: mmap.mmap) -> None:
    """Found in large steps where the system can: half the faults' time on first use, and fewer addresses to look up in every gather."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without it: only slower
            memory.madvise(mmap.MADV_HUGEPAGE)


def free_bytes(device: torch.device) -> int:
    """What can be allocated on `device` now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps for later would otherwise count as taken
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def _does_not_fit(name: str, device: torch.device, num_bytes: int, available: int) -> ConfigError:
    free = f", of which {available / _GIB:.2f} GiB are free"
    return ConfigError(
        f"the {name} KV arena needs {num_bytes / _GIB:.2f} GiB on {device}{free}; lower --device-kv-gib or --device-kv-blocks"
    )
