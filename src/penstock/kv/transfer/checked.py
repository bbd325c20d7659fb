"""Transfers in checked mode: destinations are spoiled first, and what leaves the device is compared with what comes back. Owns the extra
ops of a transfer, which declare what they touch like any other."""

from __future__ import annotations

from penstock.contract import Access, Mode
from penstock.kv.transfer.mover import Layers, Transfer
from penstock.lanes.lane import Lane
from penstock.observe import ByteGuard, ContentObserver


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
