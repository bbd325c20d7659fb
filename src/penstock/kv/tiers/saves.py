"""Blocks on their way from the device to host memory: those that were sealed, and all that a retracted request has. Owns which host slots
they take; when they are sent and what becomes of their pins is the ladder's business."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from penstock.contract import Fence
from penstock.kv.blocks.handles import Handle, Pin, Reservation, RunPin
from penstock.kv.tiers.host import Displaces, HostLease, HostTier, Taken
from penstock.kv.transfer.mover import Group, Slots, Transfer

_PART_BLOCKS = 64  # that a demotion lands with in one turn


class Offer(NamedTuple):
    """Blocks to be demoted."""

    pin: Pin
    keys: Sequence[bytes]
    depths: Sequence[int]
    after: Sequence[Fence]  # behind whoever wrote them


class Demotion(Transfer):
    """Sealed blocks on their way to the host, those that are not there yet. It lands in parts: no turn of the engine pays for all.

    `moves`: the device's room is wanted. Its blocks are forgotten there when it is over, whatever has become of them.
    """

    def __init__(self, host: HostTier, offers: Sequence[Offer], num_layers: int, displaces: Displaces, moves: bool = False) -> None:
        fences = {id(fence): fence for offer in offers for fence in offer.after}
        super().__init__(f"demote of {offers[0].pin.owner}", (), tuple(fences.values()))
        self.pins = [offer.pin for offer in offers]
        self.parts: deque[Taken] = deque()  # by group, those that have not landed
        self.moves = moves
        self.num_offered = sum(len(offer.keys) for offer in offers)
        self._host = host
        self._offers = offers
        self._layers = (0, num_layers)
        self._displaces = displaces

    def prepare(self) -> bool:
        keys = [key for offer in self._offers for key in offer.keys]
        depths = [depth for offer in self._offers for depth in offer.depths]
        slots = np.concatenate([offer.pin.array for offer in self._offers]).astype(np.int64)
        for first in range(0, len(keys), _PART_BLOCKS):
            part = slice(first, first + _PART_BLOCKS)
            self._take(keys[part], depths[part], slots[part])
        return bool(self.parts)

    def _take(self, keys: Sequence[bytes], depths: Sequence[int], slots: Slots) -> None:
        taken = self._host.take(keys, depths, self.label, self._displaces)
        if taken.reservation is not None:
            self.parts.append(taken)
            self.keys = (*self.keys, *taken.keys)
            self.groups = (*self.groups, Group(self._layers, slice(self.num_blocks, self.num_blocks + len(taken.keys))))
            self.source_slots = np.concatenate((self.source_slots, slots[taken.places]))
            self.dest_slots = np.concatenate((self.dest_slots, np.array(taken.reservation.slots, np.int64)))
            self.after = (*self.after, *taken.reservation.after)

    def land_arrived(self) -> Iterator[Taken]:
        """What has come is found from now on, and given out here; what has come to nothing is not."""
        for error in self.take_arrived():
            taken = self.parts.popleft()
            (self._host.land if error is None else self._host.drop)(taken)
            if error is None:
                yield taken


class SavedLease(HostLease):
    """What a retracted request comes back with: its blocks with a key, and the unfinished rest for itself alone."""

    def __init__(self, tier: HostTier, owner: str, num_tokens: int) -> None:
        super().__init__(tier, owner, [], num_tokens)
        self.saving = True
        self.given_up = False
        self.wait_until_s = float("inf")  # whoever has waited so long for it goes on with nothing of it

    @property
    def ready(self) -> bool:
        return super().ready or time.monotonic() > self.wait_until_s

    def end(self) -> None:
        self.given_up = True  # while it is being saved the transfer has its slots; they are given back when that is over
        super().end()


class Retraction(Transfer):
    """All of a request's KV on its way to the host, as far as it is not there."""

    def __init__(self, host: HostTier, pin: RunPin, keys: Sequence[bytes], lease: SavedLease, groups: Sequence[Group]) -> None:
        super().__init__(f"retract of {pin.owner}", groups)
        self.pins = [pin]
        self.lease = lease
        self.wanted = keys  # of its first blocks
        self.private: Reservation | None = None
        self.taken = Taken([], [], [])
        self.kept: Handle | None = None  # pin on what was there already
        self._host = host

    def prepare(self) -> bool:
        slots = self.pins[0].array.astype(np.int64)
        num_keyed = len(self.wanted)
        _, self.kept = self._host.pin_each(self.wanted, self.label)
        self.taken = taken = self._host.take(self.wanted, range(num_keyed), self.label)
        self.private = self._host.take_private(len(slots) - num_keyed, self.label) if len(slots) > num_keyed else None
        places, dests = list(taken.places), list(taken.reservation.slots if taken.reservation else ())
        after = list(taken.reservation.after if taken.reservation else ())
        if self.private is not None:
            places += range(num_keyed, len(slots))
            dests += self.private.slots
            after += self.private.after
        self.source_slots, self.dest_slots = slots[places], np.array(dests, np.int64)
        self.keys = taken.keys
        self.after = (*self.after, *after)
        return bool(places)
