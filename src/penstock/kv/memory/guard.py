"""Checked mode: slots are spoiled before they are written, and blocks get a number that tells their bytes. Owns neither arena nor order:
it is called inside ops, which have declared what they touch.

A slot is spoiled when its new owner is about to write it, on the owner's lane, and not when it is given back: only the owner knows, and
has waited for, the fences of those who had it before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class WatchedArena(Protocol):
    name: str
    tensor: Tensor  # the slot its first dimension


class ArenaGuard:
    """Implements `observe.ByteGuard` over several arenas. `digests` waits for the device, so it is for launchers and lanes' own threads."""

    def __init__(self, *arenas: WatchedArena) -> None:
        self._tensors = {arena.name: arena.tensor for arena in arenas}
        self._weights: dict[torch.device, Tensor] = {}

    def poison(self, arena: str, slots: Sequence[int]) -> None:
        tensor = self._tensors[arena]
        for slot in slots:  # one by one: a list of slots would have to be uploaded first
            tensor[int(slot)].fill_(math.nan)

    def digests(self, arena: str, slots: Sequence[int]) -> list[int]:
        """The words of a block, each times an odd number of its own, summed: no single change, and hardly any other, goes unseen."""
        tensor = self._tensors[arena]
        weights = self._weights_for(tensor)
        return [int((_words(tensor[int(slot)]) * weights).sum()) for slot in slots]

    def _weights_for(self, tensor: Tensor) -> Tensor:
        if tensor.device not in self._weights:
            self._weights[tensor.device] = 2 * torch.arange(_words(tensor[0]).numel(), device=tensor.device) + 1
        return self._weights[tensor.device]


def _words(block: Tensor) -> Tensor:
    return block.reshape(-1).view(torch.int16).to(torch.int64)
