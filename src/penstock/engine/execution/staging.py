"""Host buffers for copies to and from the device. Owns their reuse. They are pinned for CUDA and allocated
once: pinning takes milliseconds and stalls the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.contract import Access, Fence, Mode
from penstock.errors import InvariantBroken
from penstock.lanes.lane import Lane

_DEPTH = 3  # one step being read, one running, one being prepared
_PIECE_INTS = 16384
_NUM_PIECES = 64


class StagingRing:
    """A few equal buffers used in rotation. A buffer is reused only after the step that used it was read;
    this is checked, not awaited."""

    def __init__(self, num_ints: int, lane: Lane, name: str, pinned: bool) -> None:
        self._lane = lane
        self._name = name  # name of the buffers in declared accesses
        self._buffers = [torch.empty(num_ints, dtype=torch.int32, pin_memory=pinned) for _ in range(_DEPTH)]
        self._arrays: list[NDArray[np.int32]] = [b.numpy() for b in self._buffers]
        self._fences: list[Fence | None] = [None] * _DEPTH
        self._turn = 0

    def next(self) -> tuple[Tensor, NDArray[np.int32]]:
        self._turn = (self._turn + 1) % _DEPTH
        fence = self._fences[self._turn]
        if fence is not None and not fence.passed():
            raise InvariantBroken("a staging buffer was reused while its step was still running")
        self._lane.touch((self.access(Mode.WRITE),), label="refill")
        return self._buffers[self._turn], self._arrays[self._turn]

    def access(self, mode: Mode) -> Access:
        """An access to the buffer returned last."""
        return Access(self._name, (self._turn,), (0, 1), mode)

    def used_until(self, fence: Fence) -> None:
        """The device uses the buffer returned last until `fence` passes."""
        self._fences[self._turn] = fence


class Uploads:
    """Uploads of token lists for rare options. `send` is called by ops of the lane."""

    def __init__(self, device: torch.device, lane: Lane) -> None:
        self.device = device
        self._lane = lane
        pinned = device.type == "cuda"
        self._pieces = (
            [torch.empty(_PIECE_INTS, dtype=torch.int32, pin_memory=True) for _ in range(_NUM_PIECES)]
            if pinned
            else []
        )
        self._fences: list[Fence | None] = [None] * len(self._pieces)
        self._turn = 0

    def send(self, numbers: Sequence[int] | NDArray[np.int32]) -> Tensor:
        """The numbers as int64 on the device. Waits only if four megabytes of uploads are in flight."""
        array = np.asarray(numbers, np.int32)
        if not self._pieces:
            return torch.from_numpy(array.astype(np.int64))
        sent = torch.empty(len(array), dtype=torch.int64, device=self.device)
        for start in range(0, len(array), _PIECE_INTS):
            part = array[start : start + _PIECE_INTS]
            self._turn = (self._turn + 1) % len(self._pieces)
            if (fence := self._fences[self._turn]) is not None:
                fence.wait_passed()
            piece = self._pieces[self._turn][: len(part)]
            piece.numpy()[:] = part
            move(sent[start : start + len(part)], piece)
            self._fences[self._turn] = self._lane.record()
        return sent


def move(dest: Tensor, source: Tensor) -> Tensor:
    """Copy between host and device without waiting, on the current lane; returns `dest`."""
    if "cuda" not in (dest.device.type, source.device.type):
        return dest.copy_(source)
    from penstock.engine.execution import triton_steps

    triton_steps.move(dest, source)
    return dest
