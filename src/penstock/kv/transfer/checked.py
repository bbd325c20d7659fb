"""Checked mode: destinations are spoiled before they are written, blocks get a number that tells their bytes, and what leaves the device is
compared with what comes back. Owns the extra ops of a transfer, which declare what they touch like any other; neither arena nor order.

A slot is spoiled when its new owner is about to write it, on the owner's lane, and not when it is given back: only the owner knows, and
has waited for, the fences of those who had it before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.contract import Access, Mode
from penstock.kv.transfer.mover import Layers, Transfer
from penstock.lanes.lane import Lane
from penstock.observe import ByteGuard, ContentObserver


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


class ByteChecks:
    """For the movers between the device and one colder tier."""

    def __init__(self, guard: ByteGuard, contents: ContentObserver, layers: Layers, tier: str = "host", device: str = "device") -> None:
        self._guard = guard
        self._contents = contents
        self._layers = layers
        self._tier = tier
        self._device = device

    def before(self, transfer: Transfer, lane: Lane, dest: str) -> None:
        """Behind the transfer's waits, before its first copy."""
        slots = transfer.dest_slots
        access = Access(dest, slots, self._layers, Mode.WRITE)
        lane.submit(lambda: self._guard.poison(dest, slots.tolist()), [access], label=f"poison for {transfer.label}")
        if dest == self._tier:  # told before the copy can be found
            self._compare(transfer, lane, demotes=True)

    def after(self, transfer: Transfer, lane: Lane, dest: str) -> None:
        """Behind its last copy."""
        if dest == self._device:
            self._compare(transfer, lane, demotes=False)

    def _compare(self, transfer: Transfer, lane: Lane, demotes: bool) -> None:
        on_device, in_tier = (transfer.source_slots, transfer.dest_slots) if demotes else (transfer.dest_slots, transfer.source_slots)
        keys = tuple(transfer.keys)

        def compare() -> None:
            if transfer.error() is None:
                tell = self._contents.demoted if demotes else self._contents.promoted
                digests = self._guard.digests(self._device, on_device[: len(keys)].tolist())
                for slot, key, digest in zip(in_tier.tolist(), keys, digests, strict=False):
                    tell(self._tier, slot, key, digest)

        # Not the rest: in a block without a key its request may be writing again, layer by layer as they come.
        access = Access(self._device, on_device[: len(keys)], self._layers, Mode.READ)
        lane.submit(compare, [access], label=f"digests of {transfer.label}")
