"""Host buffers through which a step's inputs go up and its results come back. Owns their reuse; pinned where the device is CUDA."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.contract import Fence
from penstock.errors import InvariantBroken

_DEPTH = 3  # one step being read, one running, one being prepared


class StagingRing:
    """A few equal buffers used in turn. A buffer comes round only after the step that used it was read, which is checked, not awaited."""

    def __init__(self, num_ints: int, pinned: bool) -> None:
        self._buffers = [torch.empty(num_ints, dtype=torch.int32, pin_memory=pinned) for _ in range(_DEPTH)]
        self._arrays: list[NDArray[np.int32]] = [b.numpy() for b in self._buffers]
        self._fences: list[Fence | None] = [None] * _DEPTH
        self._turn = 0

    def next(self) -> tuple[Tensor, NDArray[np.int32]]:
        self._turn = (self._turn + 1) % _DEPTH
        fence = self._fences[self._turn]
        if fence is not None and not fence.passed():
            raise InvariantBroken("a staging buffer came round while its step was still running")
        return self._buffers[self._turn], self._arrays[self._turn]

    def used_until(self, fence: Fence) -> None:
        """The buffer handed out last is read or written by the device until `fence` passes."""
        self._fences[self._turn] = fence


def move(dest: Tensor, source: Tensor) -> Tensor:
    """Copy between host and device without waiting, on the current lane; returns `dest`."""
    if "cuda" not in (dest.device.type, source.device.type):
        return dest.copy_(source)
    from penstock.engine.execution import triton_moves

    triton_moves.move(dest, source)
    return dest


def to_host(source: Tensor) -> Tensor:
    """A copy that can be read once the lane has passed. Pinned memory comes from torch's cache: for results that few requests ask for."""
    if source.device.type != "cuda":
        return source.clone()
    return move(torch.empty(source.shape, dtype=source.dtype, pin_memory=True), source.contiguous())
